// Rung 03: asynchronous copies. The next tile of K and V is on its way while this one is computed with.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] stays in shared memory, K and V [BLOCK_N, HEAD_DIM] take turns in STAGES places.
// Roles:    every warp copies; a warp owns 16 queries, and in the softmax two lanes own a query.
// Pipeline: 1. start copying tile i + 1 (cp.async)     2. wait for tile i, of which the copy was started a tile ago
//           3. S, softmax and P V of tile i, as on rung 02     4. barrier: tile i's place may be overwritten
// Bound by: the way of S, P and P V through shared memory, and its bank conflicts; the copies are hidden.
#include "../common/async_tile.cuh"
#include "../common/params.cuh"
#include "../common/wmma_tile.cuh"
#include "../ptx/address.cuh"

namespace microsdpa::ladder::rung_03 {

constexpr int STAGES = 2;

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  using KeyTile = PaddedTile<T, BLOCK_N, HEAD_DIM>;
  using Rows = WmmaRows<T, HEAD_DIM, BLOCK_N, KeyTile::PITCH>;
  PaddedTile<T, BLOCK_M, HEAD_DIM> query;
  KeyTile key[STAGES];
  KeyTile value[STAGES];
  typename Rows::Scratch scratch[BLOCK_M / WMMA];
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__(BLOCK_M / WMMA * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  constexpr int THREADS = BLOCK_M / WMMA * 32;
  using Shared = SharedStorage<T, HEAD_DIM, BLOCK_M, BLOCK_N>;
  Shared& shared = dynamic_shared<Shared>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const Head<T> head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp = threadIdx.x / 32;
  const int row = first_row + warp * WMMA + threadIdx.x % WMMA;
  typename Shared::Rows::Scratch& scratch = shared.scratch[warp];

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

  typename Shared::Rows rows;
  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  if (keys > 0) start_keys(0, 0);
  cp_async_commit();
  for (int first_key = 0, stage = 0; first_key < keys; first_key += BLOCK_N, stage ^= 1) {
    if (first_key + BLOCK_N < keys) start_keys(first_key + BLOCK_N, stage ^ 1);
    cp_async_commit();   // an empty group after the last tile, so that the wait means the same for every tile
    cp_async_wait<1>();  // all but the newest group: this tile has arrived
    __syncthreads();

    rows.score(scratch, shared.query.at(warp * WMMA, 0), shared.key[stage].data);
    rows.template softmax<CAUSAL>(scratch, params, row, first_key);
    rows.accumulate(scratch, shared.value[stage].data);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }
  rows.template store<LOAD_BYTES>(head, params, row);
}

}  // namespace microsdpa::ladder::rung_03
