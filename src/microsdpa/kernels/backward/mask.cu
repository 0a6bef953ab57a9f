// The gradient of a mask of numbers, summed over the dimensions that it is broadcast along, in an order that is always
// the same.
//
// A CTA owns BLOCK queries and BLOCK keys of one head of the mask, and walks over every head, and along a dimension
// that is broadcast over every tile, that the elements are added to: of each it makes dS = P (dP - delta), and adds it
// up. Tiles:    Q, dO, K and V [BLOCK, D]; each warp has 16 rows of the sum in registers. Bound by: a masked training
// step's least product; nothing is ahead of the tile that is waited for.
#include "../common/dropout.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"
#include "rows.cuh"
#include "scoring.cuh"

namespace microsdpa::backward {

template <typename T_, int HEAD_DIM_, int WARPS, int LOAD_BYTES_>
struct MaskTiles {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, LOAD_BYTES = LOAD_BYTES_, THREADS = 32 * WARPS, BLOCK = 16 * WARPS;
  static constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  using Tile = SwizzledTile<T, BLOCK, COLUMNS>;
};

template <typename C>
struct MaskShared {
  typename C::Tile query, grad_out, key, value;
  float sums[C::BLOCK][C::BLOCK + 1];  // one column more, that threads of a column use all banks
};

template <typename T, int HEAD_DIM, int WARPS, int LOAD_BYTES, typename MASK, bool LEFT, bool RIGHT, bool SOFTCAP,
          bool ALIBI, bool PROGRAMMATIC, typename DROPOUT>
__global__ void __launch_bounds__(32 * WARPS, 1)
    mask_gradient(const __grid_constant__ typename DROPOUT::template Params<BackwardParams> given) {
  const BackwardParams& params = DROPOUT::call(given);
  using C = MaskTiles<T, HEAD_DIM, WARPS, LOAD_BYTES>;
  using M = Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>;
  constexpr int BLOCK = C::BLOCK;
  const AttentionParams& call = params.forward.call;
  auto& shared = dynamic_shared<MaskShared<C>>();
  if (PROGRAMMATIC) grid_dependency_wait();
  if (PROGRAMMATIC) grid_dependency_launch();

  // The mask's head, and the tile of it.
  const auto tiles_of = [](int rows) { return (rows + BLOCK - 1) / BLOCK; };
  const int query_tiles = tiles_of(call.seqlen_q), key_tiles = tiles_of(call.seqlen_k);
  const int row_tiles = tiles_of(params.mask_rows), column_tiles = tiles_of(params.mask_columns);
  int index = blockIdx.x;
  const int column_tile = index % column_tiles;
  index /= column_tiles;
  const int row_tile = index % row_tiles;
  index /= row_tiles;
  const int mask_head = index % params.mask_heads, mask_batch = index / params.mask_heads;

  // What its elements are added to: heads, and tiles.
  const bool all_rows = params.mask_rows == 1, all_columns = params.mask_columns == 1;
  const int first_batch = params.mask_batch > 1 ? mask_batch : 0;
  const int last_batch = params.mask_batch > 1 ? mask_batch + 1 : call.batch;
  const int first_head = params.mask_heads > 1 ? mask_head : 0;
  const int last_head = params.mask_heads > 1 ? mask_head + 1 : call.heads;
  const int first_query = all_rows ? 0 : row_tile, last_query = all_rows ? query_tiles : row_tile + 1;
  const int first_key = all_columns ? 0 : column_tile, last_key = all_columns ? key_tiles : column_tile + 1;

  const int warp_row = threadIdx.x / 32 * 16, lane_row = lane_index() / 4, lane_column = lane_index() % 4 * 2;
  float sums[BLOCK / 8][4] = {};
  const DropoutOf<DROPOUT> philox(given);
  for (int64 batch = first_batch; batch < last_batch; ++batch) {
    for (int head = first_head; head < last_head; ++head) {
      const HeadScores<M> scores(params.forward, batch, head);
      const int head_kv = head / (call.heads / call.heads_kv);
      const auto rows_of = [&](const void* tensor, const Strides& strides, int head, int row) {
        return static_cast<const T*>(tensor) + batch * strides.batch + head * strides.head + row * strides.row;
      };
      const auto* terms =
          static_cast<const RowTerms<true>*>(call.workspace) + (batch * call.heads + head) * call.seqlen_q;
      for (int query_tile = first_query; query_tile < last_query; ++query_tile) {
        const int query = query_tile * BLOCK;
        for (int key_tile = first_key; key_tile < last_key; ++key_tile) {
          const int key = key_tile * BLOCK;
          if (scores.sees_none(query, query + BLOCK - 1, key, key + BLOCK - 1)) continue;
          __syncthreads();  // nobody reads the tiles before any more
          load_rows<C>(shared.query, rows_of(call.query, call.query_strides, head, query), call.query_strides.row,
                       call.seqlen_q - query);
          load_rows<C>(shared.grad_out, rows_of(params.grad_out, params.grad_out_strides, head, query),
                       params.grad_out_strides.row, call.seqlen_q - query);
          load_rows<C>(shared.key, rows_of(call.key, call.key_strides, head_kv, key), call.key_strides.row,
                       call.seqlen_k - key);
          load_rows<C>(shared.value, rows_of(call.value, call.value_strides, head_kv, key), call.value_strides.row,
                       call.seqlen_k - key);
          cp_async_commit();
          cp_async_wait<0>();
          __syncthreads();
          float s[1][BLOCK / 8][4], dp[1][BLOCK / 8][4];
          const QueryOperand<typename C::Tile, 1, C::COLUMNS, 0> x(shared.query, warp_row);
          const QueryOperand<typename C::Tile, 1, C::COLUMNS, 0> y(shared.grad_out, warp_row);
          multiply_query_key<T, 1, C::COLUMNS, BLOCK>(s, x, shared.key, 0);
          multiply_query_key<T, 1, C::COLUMNS, BLOCK>(dp, y, shared.value, 0);
          const int own_head = static_cast<int>(batch) * call.heads + head;
          const KeptOf<DROPOUT, false, 1, BLOCK> kept(philox, given, own_head, query + warp_row, key);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = query + warp_row + 8 * half + lane_row;
            const RowTerms<true> of_row = terms[min(i, call.seqlen_q - 1)];
#pragma unroll
            for (int n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
              for (int e = 2 * half; e < 2 * half + 2; ++e) {
                const int j = key + 8 * n + lane_column + e % 2;
                float bend;
                const float exponent = scores.exponent(s[0][n][e], scores.element(i, j), i, j, of_row.lse, bend);
                const float p = ex2_approx(exponent) * of_row.weight();
                if constexpr (DROPOUT::ANY) dp[0][n][e] = kept.has(0, n, e) ? dp[0][n][e] * given.dropout.scale : 0.0f;
                if (scores.is_within(i, j)) sums[n][e] += p * (dp[0][n][e] - of_row.delta);
              }
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (int n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      shared.sums[warp_row + 8 * (e / 2) + lane_row][8 * n + lane_column + e % 2] = sums[n][e];
  }
  __syncthreads();
  const int rows = all_rows ? 1 : min(BLOCK, params.mask_rows - row_tile * BLOCK);
  const int columns = all_columns ? 1 : min(BLOCK, params.mask_columns - column_tile * BLOCK);
  auto* out = static_cast<MASK*>(params.grad_mask) + mask_batch * params.grad_mask_strides.batch +
              mask_head * params.grad_mask_strides.head;
  for (int i = threadIdx.x; i < rows * columns; i += C::THREADS) {
    const int row = i / columns, column = i % columns;
    float sum = 0.0f;
    for (int r = all_rows ? 0 : row; r < (all_rows ? BLOCK : row + 1); ++r) {
      for (int c = all_columns ? 0 : column; c < (all_columns ? BLOCK : column + 1); ++c) sum += shared.sums[r][c];
    }
    store_as(out + (row_tile * BLOCK + row) * params.grad_mask_strides.row +
                 (column_tile * BLOCK + column) * params.grad_mask_column_stride,
             sum);
  }
}

}  // namespace microsdpa::backward
