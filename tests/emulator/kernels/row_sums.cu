// A small kernel with all that asynchronous Ampere kernels are made of: two-stage cp.async, XOR swizzle, ldmatrix, mma,
// an online softmax. For 64 queries and any number of keys it gives each row's maximum score and the sum of 2^(score -
// max).
#include "../ptx/arithmetic.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"

namespace test {

using microsdpa::uint32;

struct Params {
  const __half* query;  // [64, 64]
  const __half* key;    // [keys, 64]
  float* out;           // [2, 64]: maxima, sums
  int keys;
};

constexpr int ROWS = 64, DIM = 64, KEYS = 32, THREADS = 128;

struct alignas(128) Shared {
  __half query[ROWS * DIM];
  __half key[2][KEYS * DIM];
};

// Element offset of an 8-element chunk: eight rows of one chunk column lie in eight different bank groups.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * DIM + (chunk ^ (row % 8)) * 8; }

template <int TILE_ROWS>
__device__ __forceinline__ void copy_tile(__half* tile, const __half* source, int valid_rows) {
  for (int i = threadIdx.x; i < TILE_ROWS * DIM / 8; i += THREADS) {
    const int row = i / 8, chunk = i % 8;
    const bool valid = row < valid_rows;
    microsdpa::cp_async<16>(tile + swizzled(row, chunk), source + (valid ? row * DIM + chunk * 8 : 0), valid ? 16 : 0);
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int UNUSED>
__global__ void __launch_bounds__(THREADS) row_sums(const __grid_constant__ Params params) {
  __shared__ Shared shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles = (params.keys + KEYS - 1) / KEYS;
  copy_tile<ROWS>(shared.query, params.query, ROWS);
  copy_tile<KEYS>(shared.key[0], params.key, params.keys);
  microsdpa::cp_async_commit();

  float maximum[2] = {__uint_as_float(0xff800000u), __uint_as_float(0xff800000u)}, sum[2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      const int first = (tile + 1) * KEYS;
      copy_tile<KEYS>(shared.key[(tile + 1) % 2], params.key + first * DIM, params.keys - first);
    }
    microsdpa::cp_async_commit();
    microsdpa::cp_async_wait<1>();
    __syncthreads();

    const __half* keys = shared.key[tile % 2];
    float score[KEYS / 8][4] = {};
    for (int step = 0; step < DIM / 16; ++step) {
      uint32 a[4];
      microsdpa::ldmatrix<4>(a, shared.query + swizzled(warp * 16 + lane % 16, step * 2 + lane / 16));
      for (int n = 0; n < KEYS / 8; ++n) {
        uint32 b[2];
        microsdpa::ldmatrix<2>(b, keys + swizzled(n * 8 + lane % 8, step * 2 + lane / 8 % 2));
        microsdpa::mma_m16n8k16<__half>(score[n], a, b);
      }
    }
    __syncthreads();  // the next tile's copy overwrites what slower warps still read

    for (int half = 0; half < 2; ++half) {
      float largest = maximum[half];
      for (int n = 0; n < KEYS / 8; ++n) {
        for (int e = 0; e < 2; ++e) {
          const int key = tile * KEYS + n * 8 + lane % 4 * 2 + e;
          if (key >= params.keys) score[n][half * 2 + e] = __uint_as_float(0xff800000u);
          largest = fmaxf(largest, score[n][half * 2 + e]);
        }
      }
      largest = quad_max(largest);
      float part = 0.0f;
      for (int n = 0; n < KEYS / 8; ++n) {
        for (int e = 0; e < 2; ++e) part += microsdpa::ex2_approx(score[n][half * 2 + e] - largest);
      }
      sum[half] = sum[half] * microsdpa::ex2_approx(maximum[half] - largest) + quad_sum(part);
      maximum[half] = largest;
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4;
    if (lane % 4 == 0) params.out[row] = maximum[half], params.out[ROWS + row] = sum[half];
  }
}

}  // namespace test
