// Rung 06: persistent CTAs. A CTA lives as long as the launch and takes one tile of queries after the other.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head at a time.
// Tiles:    Q [BLOCK_M, HEAD_DIM] and STAGES places for K and V [BLOCK_N, HEAD_DIM], all XOR-swizzled.
// Roles:    producer warp p fills place p with every STAGES-th tile of keys; a consumer warp owns 16 queries.
// Pipeline: 1. a scheduler gives producers and consumers the same tiles of queries in the same order
//           2. producers and consumers as on rung 05, but places go on from one tile of queries to the next: its first
//              K and V are copied while the last one's output is written
// Bound by: as rung 05 where there are no more tiles than CTAs; with more, by the tensor cores and exp2.
#include "../common/async_tile.cuh"
#include "../common/mma_rows.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../common/tile_scheduler.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::ladder::rung_06 {

constexpr int STAGES = 2;
constexpr int WARP_ROWS = 16;

// Named barriers, one for each place; barrier 0 is __syncthreads'.
enum Event { FULL = 1, EMPTY = FULL + STAGES };

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  SwizzledTile<T, BLOCK_M, HEAD_DIM> query;  // and the output, on its way out
  SwizzledTile<T, BLOCK_N, HEAD_DIM> key[STAGES];
  SwizzledTile<T, BLOCK_N, HEAD_DIM> value[STAGES];
};

template <bool CAUSAL, int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ int key_tiles(const AttentionParams& params, int first_row) {
  return (max(keys_seen<CAUSAL>(params, first_row, BLOCK_M), 0) + BLOCK_N - 1) / BLOCK_N;
}

// Fills one place with every STAGES-th of the tiles of keys that the CTA needs, counted through its tiles of queries.
template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES, int PARTNERS,
          typename Shared>
__device__ __forceinline__ void produce(Shared& shared, const AttentionParams& params, int stage) {
  const int64 key_stride = params.key_strides.row, value_stride = params.value_strides.row;
  int next = stage;  // tile of keys to be copied next, from the first one of the current tile of queries
  bool used = false;
  for (TileScheduler<CAUSAL, BLOCK_M> work(params); work.valid(); work.advance()) {
    const Head<T> head(params, work.head());
    const int tiles = key_tiles<CAUSAL, BLOCK_M, BLOCK_N>(params, work.first_row());
    for (; next < tiles; next += STAGES) {
      const int first_key = next * BLOCK_N;
      const int valid_keys = params.seqlen_k - first_key;
      if (used) named_barrier_sync(EMPTY + stage, PARTNERS);
      used = true;
      start_rows<BLOCK_N, HEAD_DIM, 32, LOAD_BYTES>(shared.key[stage], 0, head.key + first_key * key_stride, key_stride,
                                                    valid_keys, lane_index());
      start_rows<BLOCK_N, HEAD_DIM, 32, LOAD_BYTES>(shared.value[stage], 0, head.value + first_key * value_stride,
                                                    value_stride, valid_keys, lane_index());
      cp_async_commit();
      cp_async_wait<0>();
      named_barrier_arrive(FULL + stage, PARTNERS);
    }
    next -= tiles;
  }
  if (used) named_barrier_sync(EMPTY + stage, PARTNERS);  // consumers say so after every tile, the last one too
}

// Computes 16 queries of every tile, which the warp fetches itself.
template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES, int PARTNERS,
          typename Shared>
__device__ __forceinline__ void consume(Shared& shared, const AttentionParams& params, int warp_row) {
  const int64 query_stride = params.query_strides.row;
  int stage = 0;
  for (TileScheduler<CAUSAL, BLOCK_M> work(params); work.valid(); work.advance()) {
    const Head<T> head(params, work.head());
    const int first_row = work.first_row() + warp_row;
    const int tiles = key_tiles<CAUSAL, BLOCK_M, BLOCK_N>(params, work.first_row());
    start_rows<WARP_ROWS, HEAD_DIM, 32, LOAD_BYTES>(shared.query, warp_row, head.query + first_row * query_stride,
                                                    query_stride, params.seqlen_q - first_row, lane_index());
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    const QueryOperand<decltype(shared.query), 1, HEAD_DIM, 0> query(shared.query, warp_row);
    MmaRows<T, HEAD_DIM, BLOCK_N> rows;
    for (int tile = 0; tile < tiles; ++tile, stage = (stage + 1) % STAGES) {
      named_barrier_sync(FULL + stage, PARTNERS);
      rows.template attend<CAUSAL>(query, shared.key[stage], shared.value[stage], params, first_row + lane_index() / 4,
                                   tile * BLOCK_N);
      named_barrier_arrive(EMPTY + stage, PARTNERS);
    }
    rows.template store<LOAD_BYTES>(shared.query, warp_row, head, params, first_row);
    __syncwarp();  // the next queries overwrite what slower lanes still read
  }
}

// CTAS of an SM are what the launch counts on: registers are held down to let them in.
template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int CTAS, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__((BLOCK_M / WARP_ROWS + STAGES) * 32, CTAS)
    attention(const __grid_constant__ AttentionParams params) {
  constexpr int CONSUMERS = BLOCK_M / WARP_ROWS;
  constexpr int PARTNERS = (CONSUMERS + 1) * 32;  // threads that meet at a place: all consumers, one producer
  auto& shared = dynamic_shared<SharedStorage<T, HEAD_DIM, BLOCK_M, BLOCK_N>>();
  const int warp = threadIdx.x / 32;
  if (warp < CONSUMERS) {
    consume<T, HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, LOAD_BYTES, PARTNERS>(shared, params, warp * WARP_ROWS);
  } else {
    produce<T, HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, LOAD_BYTES, PARTNERS>(shared, params, warp - CONSUMERS);
  }
}

}  // namespace microsdpa::ladder::rung_06
