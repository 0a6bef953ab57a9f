// Rung 11: rung 10 with two places for K and V, one of which is being filled while the other is used; and with INT8.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA. Q and K are
// quantized values with scales, E4M3 or INT8; V is E4M3 values with scales, and P is then rounded to E4M3, or V and P
// have 16 bits. A query may have a residual term (TERMS 2), for the rounding error of the first.
// Tiles:    Q [BLOCK_M, TERMS * HEAD_DIM], two places for K and V [BLOCK_N, HEAD_DIM] and K's scales, XOR-swizzled.
// Roles:    every warp copies; a warp owns 16 queries, of which four lanes share two rows.
// Pipeline: 1. start copying tile i + 1 (cp.async)     2. wait for tile i, of which the copy was started a tile ago
//           3. S by m16n8k32, scales, softmax and P V of tile i in registers     4. barrier: tile i may be overwritten
// Bound by: latency: one warp in each quarter of an SM runs products, softmax and products one after the other.
#include "../common/async_tile.cuh"
#include "../common/eight_bit_rows.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/address.cuh"

namespace microsdpa::ladder::rung_11 {

constexpr int STAGES = 2;
constexpr int WARP_ROWS = 16;

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

template <typename Value, int HEAD_DIM, int TERMS, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  SwizzledTile<Unit, BLOCK_M, TERMS * HEAD_DIM / 2> query;
  SwizzledTile<Unit, BLOCK_N, HEAD_DIM / 2> key[STAGES];
  typename ValueTile<Value, BLOCK_N, HEAD_DIM>::Type value[STAGES];
  alignas(16) float key_scale[STAGES][BLOCK_N];
};

template <typename T, typename Format, typename Value, int HEAD_DIM, int TERMS, int BLOCK_M, int BLOCK_N, bool CAUSAL>
__global__ void __launch_bounds__(BLOCK_M / WARP_ROWS * 32, 1)
    attention(const __grid_constant__ EightBitParams params) {
  constexpr int THREADS = BLOCK_M / WARP_ROWS * 32;
  using Element = typename ValueTile<Value, BLOCK_N, HEAD_DIM>::Element;
  auto& shared = dynamic_shared<SharedStorage<Value, HEAD_DIM, TERMS, BLOCK_M, BLOCK_N>>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const EightBitHead head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp_first = first_row + threadIdx.x / 32 * WARP_ROWS;
  const int row = warp_first + lane_index() / 4;

  // The copies of one tile, as one group.
  const auto start_keys = [&](int first_key, int stage) {
    const int valid_keys = params.seqlen_k - first_key;
    shared.key[stage].template copy_async<THREADS>(head.key<Unit>(params, first_key), params.key_strides.row_in<Unit>(),
                                                   valid_keys, threadIdx.x);
    shared.value[stage].template copy_async<THREADS>(head.value<Element>(params, first_key),
                                                     params.value_strides.row_in<Element>(), valid_keys, threadIdx.x);
    for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {
      const bool valid = i < valid_keys;
      cp_async<4>(&shared.key_scale[stage][i], head.key_scale(params, first_key + (valid ? i : 0)), valid ? 4 : 0);
    }
  };

  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  shared.query.template copy_async<THREADS>(head.query<Unit>(params, first_row), params.query_strides.row_in<Unit>(),
                                            params.seqlen_q - first_row, threadIdx.x);
  cp_async_commit();
  if (keys > 0) start_keys(0, 0);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  constexpr int STEPS = TERMS * HEAD_DIM / 32, KEPT = STEPS > 4 ? 4 : STEPS;  // in registers; eight would spill
  const QueryOperand<decltype(shared.query), 1, TERMS * HEAD_DIM / 2, KEPT> query(shared.query, warp_first - first_row);
  using Probability = Value;  // P and V are the operands of one product
  EightBitRows<Format, Value, Probability, HEAD_DIM, TERMS, BLOCK_N> rows(params, head, warp_first);

  for (int first_key = 0, stage = 0; first_key < keys; first_key += BLOCK_N, stage ^= 1) {
    if (first_key + BLOCK_N < keys) start_keys(first_key + BLOCK_N, stage ^ 1);
    cp_async_commit();   // an empty group after the last tile, so that the wait means the same for every tile
    cp_async_wait<1>();  // all but the newest group: this tile has arrived
    __syncthreads();
    rows.template attend<CAUSAL>(query, shared.key[stage], shared.value[stage], shared.key_scale[stage], params, row,
                                 first_key);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }
  rows.template store<T>(params, head, warp_first);
}

}  // namespace microsdpa::ladder::rung_11
