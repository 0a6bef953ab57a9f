// Rung 04: mma.sync with ldmatrix. Its fragments have a layout that is specified, so S and P never leave registers.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] and two places for K and V [BLOCK_N, HEAD_DIM], all XOR-swizzled, without padding.
// Roles:    every warp copies; a warp owns 16 queries, of which four lanes share two rows.
// Pipeline: 1. start copying tile i + 1 (cp.async)     2. wait for tile i, of which the copy was started a tile ago
//           3. S, softmax and P V of tile i in registers     4. barrier: tile i's place may be overwritten
// Bound by: latency: one warp in each quarter of an SM runs products, softmax and products one after the other.
#include "../common/async_tile.cuh"
#include "../common/mma_rows.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/address.cuh"

namespace microsdpa::ladder::rung_04 {

constexpr int STAGES = 2;
constexpr int WARP_ROWS = 16;

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  SwizzledTile<T, BLOCK_M, HEAD_DIM> query;  // and the output, on its way out
  SwizzledTile<T, BLOCK_N, HEAD_DIM> key[STAGES];
  SwizzledTile<T, BLOCK_N, HEAD_DIM> value[STAGES];
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__(BLOCK_M / WARP_ROWS * 32, 1)
    attention(const __grid_constant__ AttentionParams params) {
  constexpr int THREADS = BLOCK_M / WARP_ROWS * 32;
  auto& shared = dynamic_shared<SharedStorage<T, HEAD_DIM, BLOCK_M, BLOCK_N>>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const Head<T> head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp_row = threadIdx.x / 32 * WARP_ROWS;
  const int row = first_row + warp_row + lane_index() / 4;

  // The copies of K and V of one tile, as one group.
  const auto start_keys = [&](int first_key, int stage) {
    const int64 key_stride = params.key_strides.row, value_stride = params.value_strides.row;
    const int valid_keys = params.seqlen_k - first_key;
    start_rows<BLOCK_N, HEAD_DIM, THREADS, LOAD_BYTES>(shared.key[stage], 0, head.key + first_key * key_stride,
                                                       key_stride, valid_keys, threadIdx.x);
    start_rows<BLOCK_N, HEAD_DIM, THREADS, LOAD_BYTES>(shared.value[stage], 0, head.value + first_key * value_stride,
                                                       value_stride, valid_keys, threadIdx.x);
  };

  start_rows<BLOCK_M, HEAD_DIM, THREADS, LOAD_BYTES>(shared.query, 0, head.query + first_row * params.query_strides.row,
                                                     params.query_strides.row, params.seqlen_q - first_row,
                                                     threadIdx.x);

  MmaRows<T, HEAD_DIM, BLOCK_N> rows;
  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  if (keys > 0) start_keys(0, 0);
  cp_async_commit();
  for (int first_key = 0, stage = 0; first_key < keys; first_key += BLOCK_N, stage ^= 1) {
    if (first_key + BLOCK_N < keys) start_keys(first_key + BLOCK_N, stage ^ 1);
    cp_async_commit();   // an empty group after the last tile, so that the wait means the same for every tile
    cp_async_wait<1>();  // all but the newest group: this tile has arrived
    __syncthreads();

    const QueryOperand<decltype(shared.query), 1, HEAD_DIM, 0> query(shared.query, warp_row);
    rows.template attend<CAUSAL>(query, shared.key[stage], shared.value[stage], params, row, first_key);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }
  cp_async_wait<0>();
  __syncthreads();  // rows that see no key: their queries are still on the way, and the output takes their place
  rows.template store<LOAD_BYTES>(shared.query, warp_row, head, params, first_row + warp_row);
}

}  // namespace microsdpa::ladder::rung_04
