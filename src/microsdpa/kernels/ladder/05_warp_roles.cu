// Rung 05: warp specialization. Some warps only copy, the others only compute.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] and STAGES places for K and V [BLOCK_N, HEAD_DIM], all XOR-swizzled.
// Roles:    producer warp p fills place p with every STAGES-th tile; a consumer warp owns 16 queries.
// Pipeline: 1. producer: wait until its place is empty, copy K and V (cp.async), say that it is full
//           2. consumer: wait until a place is full, S, softmax and P V as on rung 04, say that it is empty
//           Consumers wait for no copy and for no other consumer: they may be a tile apart.
// Bound by: latency, as rung 04, of which the copies were no part any more.
#include "../common/async_tile.cuh"
#include "../common/mma_rows.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::ladder::rung_05 {

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

// Fills one place with the tiles stage, stage + STAGES, ... of `tiles`.
template <int HEAD_DIM, int BLOCK_N, int LOAD_BYTES, int PARTNERS, typename Shared, typename T>
__device__ __forceinline__ void produce(Shared& shared, const Head<T>& head, const AttentionParams& params, int tiles,
                                        int stage) {
  const int64 key_stride = params.key_strides.row, value_stride = params.value_strides.row;
  for (int tile = stage; tile < tiles; tile += STAGES) {
    const int first_key = tile * BLOCK_N;
    const int valid_keys = params.seqlen_k - first_key;
    if (tile >= STAGES) named_barrier_sync(EMPTY + stage, PARTNERS);
    start_rows<BLOCK_N, HEAD_DIM, 32, LOAD_BYTES>(shared.key[stage], 0, head.key + first_key * key_stride, key_stride,
                                                  valid_keys, lane_index());
    start_rows<BLOCK_N, HEAD_DIM, 32, LOAD_BYTES>(shared.value[stage], 0, head.value + first_key * value_stride,
                                                  value_stride, valid_keys, lane_index());
    cp_async_commit();
    cp_async_wait<0>();
    named_barrier_arrive(FULL + stage, PARTNERS);
  }
}

// Computes the warp's 16 queries, which it fetches itself.
template <int HEAD_DIM, int BLOCK_N, bool CAUSAL, int LOAD_BYTES, int PARTNERS, typename Shared, typename T>
__device__ __forceinline__ void consume(Shared& shared, const Head<T>& head, const AttentionParams& params, int tiles,
                                        int first_row, int warp_row) {
  const int64 query_stride = params.query_strides.row;
  start_rows<WARP_ROWS, HEAD_DIM, 32, LOAD_BYTES>(shared.query, warp_row, head.query + first_row * query_stride,
                                                  query_stride, params.seqlen_q - first_row, lane_index());
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();

  const QueryOperand<decltype(shared.query), 1, HEAD_DIM, 0> query(shared.query, warp_row);
  MmaRows<T, HEAD_DIM, BLOCK_N> rows;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % STAGES;
    named_barrier_sync(FULL + stage, PARTNERS);
    rows.template attend<CAUSAL>(query, shared.key[stage], shared.value[stage], params, first_row + lane_index() / 4,
                                 tile * BLOCK_N);
    if (tile + STAGES < tiles) named_barrier_arrive(EMPTY + stage, PARTNERS);
  }
  rows.template store<LOAD_BYTES>(shared.query, warp_row, head, params, first_row);
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__((BLOCK_M / WARP_ROWS + STAGES) * 32, 1)
    attention(const __grid_constant__ AttentionParams params) {
  constexpr int CONSUMERS = BLOCK_M / WARP_ROWS;
  constexpr int PARTNERS = (CONSUMERS + 1) * 32;  // threads that meet at a place: all consumers, one producer
  auto& shared = dynamic_shared<SharedStorage<T, HEAD_DIM, BLOCK_M, BLOCK_N>>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const Head<T> head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int tiles = (max(keys_seen<CAUSAL>(params, first_row, BLOCK_M), 0) + BLOCK_N - 1) / BLOCK_N;
  const int warp = threadIdx.x / 32;

  if (warp < CONSUMERS) {
    const int warp_row = warp * WARP_ROWS;
    consume<HEAD_DIM, BLOCK_N, CAUSAL, LOAD_BYTES, PARTNERS>(shared, head, params, tiles, first_row + warp_row,
                                                             warp_row);
  } else {
    produce<HEAD_DIM, BLOCK_N, LOAD_BYTES, PARTNERS>(shared, head, params, tiles, warp - CONSUMERS);
  }
}

}  // namespace microsdpa::ladder::rung_05
