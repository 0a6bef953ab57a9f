// The two products of 8-bit attention by themselves, of any size, ragged, and with rows on any byte.
//
// fp8_gemm:   C = a_scale b_scale A B of E4M3 values, A [M, K] and B [K, N] row-major, FP32 sums, C [M, N] in FP16.
// fp8_scores: S = scale Q K^T of E4M3 values, Q [M, K] and K [N, K] row-major, for each of `batch` heads, S in FP16.
// Tiles:    64 x 64 of the result a CTA, 64 of the common dimension at a time; a warp owns 16 rows.
// Sums of one tile are made by the tensor cores and added up in FP32: they may keep fewer bits than it.
#include "../common/eight_bit_tile.cuh"

namespace microsdpa {

struct ProductParams {
  const unsigned char* a;  // [batch, M, K]
  const unsigned char* b;  // [batch, K, N], or [batch, N, K] for scores
  __half* c;               // [batch, M, N]
  int32 m;
  int32 n;
  int32 k;
  float scale;
};

constexpr int TILE = 64, WARP_ROWS = 16;
constexpr int THREADS = TILE / WARP_ROWS * 32;

using QuantizedTile = SwizzledTile<Unit, TILE, TILE / 2>;

// Copies a tile byte by byte, since rows may start on any; what lies outside the tensor is zero.
__device__ __forceinline__ void copy_bytes(QuantizedTile& tile, const unsigned char* from, int64 pitch, int rows,
                                           int columns) {
  for (int i = threadIdx.x; i < TILE * TILE / 2; i += THREADS) {
    const int row = i / (TILE / 2), column = i % (TILE / 2) * 2;
    const bool first = row < rows && column < columns, second = row < rows && column + 1 < columns;
    const unsigned char* at = from + row * pitch + column;
    *tile.at(row, column / 2) = static_cast<Unit>((first ? at[0] : 0) | (second ? at[1] : 0) << 8);
  }
}

// B of 32 rows from `row` on and 16 columns from 2 * `unit` on, as load_quantized_value gives it, but with the rows in
// the order of a left operand in memory: lane t has rows 4 t to 4 t + 3 of each 16.
__device__ __forceinline__ void load_quantized_b(uint32 (&loaded)[4], const QuantizedTile& tile, unsigned row,
                                                 unsigned unit) {
  const unsigned matrix = lane_index() / 8, r = lane_index() % 8;
  ldmatrix<4, true>(loaded, tile.at(row + matrix / 2 * 16 + r / 2 * 4 + matrix % 2 * 2 + r % 2, unit));
}

// Writes 64 x 64 results; `column(n, e)` is the column of element e of accumulator n.
template <typename Column>
__device__ __forceinline__ void store(const ProductParams& params, const float (&sum)[TILE / 8][4], int first_row,
                                      int first_column, Column column) {
  __half* c = params.c + static_cast<int64>(blockIdx.y) * params.m * params.n;
#pragma unroll
  for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = first_row + threadIdx.x / 32 * WARP_ROWS + lane_index() / 4 + e / 2 * 8;
      const int at = first_column + column(n, e);
      if (row < params.m && at < params.n) {
        c[static_cast<int64>(row) * params.n + at] = __float2half_rn(sum[n][e] * params.scale);
      }
    }
  }
}

template <bool SCORES>
__global__ void __launch_bounds__(THREADS, 1) fp8_product(const __grid_constant__ ProductParams params) {
  __shared__ QuantizedTile a_tile;
  __shared__ QuantizedTile b_tile;
  const int columns = (params.n + TILE - 1) / TILE;
  const int first_row = blockIdx.x / columns * TILE, first_column = blockIdx.x % columns * TILE;
  const int64 batch = blockIdx.y;
  const unsigned char* a = params.a + (batch * params.m + first_row) * params.k;
  const unsigned char* b = params.b + batch * params.n * params.k;
  const int warp_row = threadIdx.x / 32 * WARP_ROWS;
  float sum[TILE / 8][4] = {};

  for (int first = 0; first < params.k; first += TILE) {
    copy_bytes(a_tile, a + first, params.k, params.m - first_row, params.k - first);
    if constexpr (SCORES) {
      copy_bytes(b_tile, b + static_cast<int64>(first_column) * params.k + first, params.k, params.n - first_column,
                 params.k - first);
    } else {
      copy_bytes(b_tile, b + static_cast<int64>(first) * params.n + first_column, params.n, params.k - first,
                 params.n - first_column);
    }
    __syncthreads();
    const QueryOperand<QuantizedTile, 1, TILE / 2, TILE / 32> operand(a_tile, warp_row);
    if constexpr (SCORES) {
      float part[TILE / 8][4];
      multiply_quantized<E4m3, TILE, 1, TILE>(part, operand, b_tile);
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] += part[n][e];
      }
    } else {
#pragma unroll
      for (int n = 0; n < TILE / 16; ++n) {
        float part[2][4] = {};
#pragma unroll
        for (int k = 0; k < TILE / 32; ++k) {
          uint32 loaded[4];
          load_quantized_b(loaded, b_tile, 32 * k, 8 * n);
          const uint32 even[2] = {permute_bytes<EVEN_BYTES>(loaded[0], loaded[1]),
                                  permute_bytes<EVEN_BYTES>(loaded[2], loaded[3])};
          const uint32 odd[2] = {permute_bytes<ODD_BYTES>(loaded[0], loaded[1]),
                                 permute_bytes<ODD_BYTES>(loaded[2], loaded[3])};
          mma_m16n8k32_e4m3(part[0], operand.kept[0][k], even);
          mma_m16n8k32_e4m3(part[1], operand.kept[0][k], odd);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[2 * n][e] += part[0][e];
          sum[2 * n + 1][e] += part[1][e];
        }
      }
    }
    __syncthreads();  // the next copy overwrites what slower warps still read
  }

  const int t = lane_index() % 4;
  store(params, sum, first_row, first_column, [&](int n, int e) {
    // Of the GEMM's 16 columns, the first accumulator has the even ones, the second the odd ones.
    return SCORES ? 8 * n + 2 * t + e % 2 : n / 2 * 16 + 4 * t + e % 2 * 2 + n % 2;
  });
}

}  // namespace microsdpa
