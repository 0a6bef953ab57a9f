// Rung 12: rung 11 with the warp roles of rung 05 and the persistent CTAs of rung 06.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head at a time; operands
// are those of rung 11, but a query has no residual term: the registers of one are those of the second CTA of an SM.
// Tiles:    Q [BLOCK_M, HEAD_DIM], STAGES places for K and V [BLOCK_N, HEAD_DIM] and K's scales, XOR-swizzled.
// Roles:    producer warp p fills place p with every STAGES-th tile of keys; a consumer warp owns 16 queries.
// Pipeline: 1. a scheduler gives producers and consumers the same tiles of queries in the same order
//           2. producer: wait until its place is empty, copy K, V and K's scales (cp.async), say that it is full
//           3. consumer: wait until a place is full, S, softmax and P V as on rung 11, say that it is empty
//           Places go on from one tile of queries to the next: its first keys come while the last output is written.
// Bound by: as rung 11 where there are no more tiles than CTAs; with more, by exp2 and the tensor cores.
#include "../common/async_tile.cuh"
#include "../common/eight_bit_rows.cuh"
#include "../common/swizzle.cuh"
#include "../common/tile_scheduler.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::ladder::rung_12 {

constexpr int STAGES = 2;
constexpr int WARP_ROWS = 16;

// Named barriers, one for each place; barrier 0 is __syncthreads'.
enum Event { FULL = 1, EMPTY = FULL + STAGES };

// V as it lies in shared memory: units of two values, or elements.
template <typename Value, int BLOCK_N, int HEAD_DIM>
struct ValueTile {
  using Element = Value;
  using Type = SwizzledTile<Value, BLOCK_N, HEAD_DIM>;
};
template <int BLOCK_N, int HEAD_DIM>
struct ValueTile<E4m3, BLOCK_N, HEAD_DIM> {
  using Element = Unit;
  using Type = SwizzledTile<Unit, BLOCK_N, HEAD_DIM / 2>;
};

template <typename Format_, typename Value_, int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_>
struct Shape {
  using Format = Format_;
  using Value = Value_;
  using Element = typename ValueTile<Value_, BLOCK_N_, HEAD_DIM_>::Element;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_;
  static constexpr int UNITS = HEAD_DIM / 2;  // of a row of 8-bit values
  static constexpr int CONSUMERS = BLOCK_M / WARP_ROWS;
  static constexpr int PARTNERS = 32 * (CONSUMERS + 1);  // threads that meet at a place: all consumers, one producer
};

template <typename Shape>
struct SharedStorage {
  SwizzledTile<Unit, Shape::BLOCK_M, Shape::UNITS> query;
  SwizzledTile<Unit, Shape::BLOCK_N, Shape::UNITS> key[STAGES];
  typename ValueTile<typename Shape::Value, Shape::BLOCK_N, Shape::HEAD_DIM>::Type value[STAGES];
  alignas(16) float key_scale[STAGES][Shape::BLOCK_N];
};

template <typename Shape, bool CAUSAL>
__device__ __forceinline__ int key_tiles(const EightBitParams& params, int first_row) {
  return (max(keys_seen<CAUSAL>(params, first_row, Shape::BLOCK_M), 0) + Shape::BLOCK_N - 1) / Shape::BLOCK_N;
}

// Fills one place with every STAGES-th of the tiles of keys that the CTA needs, counted through its tiles of queries.
template <typename Shape, bool CAUSAL>
__device__ __forceinline__ void produce(SharedStorage<Shape>& shared, const EightBitParams& params, int stage) {
  using Element = typename Shape::Element;
  int next = stage;  // tile of keys to be copied next, from the first one of the current tile of queries
  bool used = false;
  for (TileScheduler<CAUSAL, Shape::BLOCK_M> work(params); work.valid(); work.advance()) {
    const EightBitHead head(params, work.head());
    const int tiles = key_tiles<Shape, CAUSAL>(params, work.first_row());
    for (; next < tiles; next += STAGES) {
      const int first_key = next * Shape::BLOCK_N;
      const int valid_keys = params.seqlen_k - first_key;
      if (used) named_barrier_sync(EMPTY + stage, Shape::PARTNERS);
      used = true;
      shared.key[stage].template copy_async<32>(head.key<Unit>(params, first_key), params.key_strides.row_in<Unit>(),
                                                valid_keys, lane_index());
      shared.value[stage].template copy_async<32>(head.value<Element>(params, first_key),
                                                  params.value_strides.row_in<Element>(), valid_keys, lane_index());
#pragma unroll
      for (int i = lane_index(); i < Shape::BLOCK_N; i += 32) {
        const bool valid = i < valid_keys;
        cp_async<4>(&shared.key_scale[stage][i], head.key_scale(params, first_key + (valid ? i : 0)), valid ? 4 : 0);
      }
      cp_async_commit();
      cp_async_wait<0>();
      named_barrier_arrive(FULL + stage, Shape::PARTNERS);
    }
    next -= tiles;
  }
  if (used) named_barrier_sync(EMPTY + stage, Shape::PARTNERS);  // consumers say so after the last tile too
}

// Computes 16 queries of every tile, which the warp fetches itself.
template <typename T, typename Shape, bool CAUSAL>
__device__ __forceinline__ void consume(SharedStorage<Shape>& shared, const EightBitParams& params, int warp_row) {
  using Value = typename Shape::Value;
  int stage = 0;
  for (TileScheduler<CAUSAL, Shape::BLOCK_M> work(params); work.valid(); work.advance()) {
    const EightBitHead head(params, work.head());
    const int first_row = work.first_row() + warp_row;
    const int tiles = key_tiles<Shape, CAUSAL>(params, work.first_row());
    start_rows<WARP_ROWS, Shape::UNITS, 32, 16>(shared.query, warp_row, head.query<Unit>(params, first_row),
                                                params.query_strides.row_in<Unit>(), params.seqlen_q - first_row,
                                                lane_index());
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    const QueryOperand<decltype(shared.query), 1, Shape::UNITS, Shape::UNITS / 16> query(shared.query, warp_row);
    EightBitRows<typename Shape::Format, Value, Value, Shape::HEAD_DIM, 1, Shape::BLOCK_N> rows(params, head,
                                                                                                first_row);
    for (int tile = 0; tile < tiles; ++tile, stage = (stage + 1) % STAGES) {
      named_barrier_sync(FULL + stage, Shape::PARTNERS);
      rows.template attend<CAUSAL>(query, shared.key[stage], shared.value[stage], shared.key_scale[stage], params,
                                   first_row + lane_index() / 4, tile * Shape::BLOCK_N);
      named_barrier_arrive(EMPTY + stage, Shape::PARTNERS);
    }
    rows.template store<T>(params, head, first_row);
    __syncwarp();  // the next queries overwrite what slower lanes still read
  }
}

// CTAS of an SM are what the launch counts on: registers are held down to let them in.
template <typename T, typename Format, typename Value, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int CTAS, bool CAUSAL>
__global__ void __launch_bounds__((BLOCK_M / WARP_ROWS + STAGES) * 32, CTAS)
    attention(const __grid_constant__ EightBitParams params) {
  using S = Shape<Format, Value, HEAD_DIM, BLOCK_M, BLOCK_N>;
  auto& shared = dynamic_shared<SharedStorage<S>>();
  const int warp = threadIdx.x / 32;
  if (warp < S::CONSUMERS) {
    consume<T, S, CAUSAL>(shared, params, warp * WARP_ROWS);
  } else {
    produce<S, CAUSAL>(shared, params, warp - S::CONSUMERS);
  }
}

}  // namespace microsdpa::ladder::rung_12
