// What hopper/backward/kernel.cu needs ahead: LSE in base 2 and delta = rowsum(dO * O), less the gradient of the LSE,
// of every query, the ranges of keys that it sees, and sums of dQ that are zero.
//
// A CTA has a tile of queries. Rows past the last query get an LSE of +inf, which makes their probabilities zero.
// Bound by: memory; dO and O are read once, and the sums written.
#include "../../common/element.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/control.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

// What hopper/backward/kernel.cu needs to know of the ranges of keys that a tile's queries see; all threads.
template <int BLOCK_M, int THREADS>
__device__ __forceinline__ void note_ranges(const MaskedParams& params, int64 batch, int64 head, int tile, int32* to) {
  static_assert(BLOCK_M <= THREADS, "a thread has a query");
  constexpr int FAR = 1 << 30;
  const MaskParams& masks = params.masks;
  const int row = tile * BLOCK_M + threadIdx.x;
  KeyRange found = {FAR, -1}, common = {-1, FAR};  // from the first begin to the last end, and what all have in common
  if (threadIdx.x < BLOCK_M) {
    KeyRange own = {0, 0};
    if (row < params.call.seqlen_q) {
      const auto* ends = static_cast<const int32*>(masks.mask) + batch * masks.mask_strides.batch +
                         head * masks.mask_strides.head + row * masks.mask_strides.row;
      own = {ends[0], ends[masks.mask_column_stride]}, common = own;
      if (own.first < own.last) found = own;
    }
    to[threadIdx.x] = own.first, to[BLOCK_M + threadIdx.x] = own.last;
  }
  __shared__ int32 of_warp[THREADS / 32][4];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    found.first = min(found.first, __shfl_xor_sync(FULL_WARP, found.first, distance));
    found.last = max(found.last, __shfl_xor_sync(FULL_WARP, found.last, distance));
    common.first = max(common.first, __shfl_xor_sync(FULL_WARP, common.first, distance));
    common.last = min(common.last, __shfl_xor_sync(FULL_WARP, common.last, distance));
  }
  int32(&own)[4] = of_warp[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) own[0] = found.first, own[1] = found.last, own[2] = common.first, own[3] = common.last;
  __syncthreads();
  if (threadIdx.x < 4) {
    int number = of_warp[0][threadIdx.x];
    for (int warp = 1; warp < THREADS / 32; ++warp) {
      const int other = of_warp[warp][threadIdx.x];
      number = threadIdx.x == 0 || threadIdx.x == 3 ? min(number, other) : max(number, other);
    }
    to[2 * BLOCK_M + threadIdx.x] = number;
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int SUMS, int THREADS, bool RANGED = false>
__global__ void __launch_bounds__(THREADS) prepare(const __grid_constant__ BackwardParams params) {
  constexpr float LOG2_E = 1.44269504088896340736f;
  constexpr int WIDTH = 16 / sizeof(T), LANES = HEAD_DIM > 128 ? 32 : HEAD_DIM > 64 ? 16 : 8;
  constexpr int ROWS_AT_A_TIME = THREADS / LANES;
  static_assert(HEAD_DIM % WIDTH == 0 && HEAD_DIM <= LANES * WIDTH && BLOCK_M % ROWS_AT_A_TIME == 0, "whole rows");
  const AttentionParams& call = params.forward.call;
  grid_dependency_wait();
  grid_dependency_launch();
  constexpr int PARTS = PARTS_OF<HEAD_DIM>;
  const Workspace<BLOCK_M, PARTS, SUMS / PARTS, RANGED> workspace(call);
  const int index = blockIdx.x / workspace.tiles, tile = blockIdx.x % workspace.tiles;  // the head of all, and its tile
  const int64 batch = index / call.heads, head = index % call.heads;
  const int lane = threadIdx.x % LANES, column = lane * WIDTH;
  const T* out = static_cast<const T*>(call.out) + batch * call.out_strides.batch + head * call.out_strides.head;
  const T* grad_out = static_cast<const T*>(params.grad_out) + batch * params.grad_out_strides.batch +
                      head * params.grad_out_strides.head;
#pragma unroll
  for (int first = 0; first < BLOCK_M; first += ROWS_AT_A_TIME) {
    const int row_of_tile = first + threadIdx.x / LANES, row = tile * BLOCK_M + row_of_tile;
    float delta = 0.0f;
    if (row < call.seqlen_q && column < HEAD_DIM) {
      const auto a = *reinterpret_cast<const Vector<T, WIDTH>*>(out + row * call.out_strides.row + column);
      const auto b = *reinterpret_cast<const Vector<T, WIDTH>*>(grad_out + row * params.grad_out_strides.row + column);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) delta += to_float(a.data[e]) * to_float(b.data[e]);
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) delta += __shfl_xor_sync(FULL_WARP, delta, offset);
    if (lane == 0) {
      float lse = negative_infinity();
      if (row < call.seqlen_q) {
        const int64 at = static_cast<int64>(index) * call.seqlen_q + row;
        lse = LOG2_E * call.lse[at];
        if (params.grad_lse != nullptr) delta -= params.grad_lse[at];
      }
      workspace.lse(index, tile)[row_of_tile] = lse == negative_infinity() ? -negative_infinity() : lse;
      workspace.delta(index, tile)[row_of_tile] = delta;
    }
  }
  if constexpr (RANGED) {
    note_ranges<BLOCK_M, THREADS>(params.forward, batch, head, tile, workspace.range(index, tile));
  }
  if constexpr (SUMS > 0) {
    if (threadIdx.x < PARTS) workspace.turn(index, tile)[threadIdx.x] = 0;
    auto* sums = reinterpret_cast<float4*>(workspace.sum(index, tile));
#pragma unroll
    for (int i = 0; i < SUMS / 4; i += THREADS) {
      if constexpr (HEAD_DIM % BOX != 0 && BLOCK_M % BOX == 0) {  // columns that products fill up are in no dQ
        const int four = i + threadIdx.x, of_part = four / WARPGROUP_THREADS % 8 * 8;
        if (of_part + (BLOCK_M > BOX ? 0 : four / (SUMS / PARTS / 4) * BOX) >= HEAD_DIM) continue;
      }
      sums[i + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

}  // namespace microsdpa::hopper::backward
