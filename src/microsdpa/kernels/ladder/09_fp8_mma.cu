// Rung 09: Q K^T of E4M3 values on the tensor cores. P is rounded to FP16, and V's values become FP16 on their way in.
//
// Computes O = softmax(scale Q K^T + mask) V of Q, K and V that are quantized, with scales, and optionally LSE, for
// BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM], K and V [BLOCK_N, HEAD_DIM] quantized, XOR-swizzled; the scales of BLOCK_N keys.
// Roles:    every warp copies; a warp owns 16 queries, of which four lanes share two rows.
// Pipeline: 1. all warps copy K, V and K's scales, then wait     2. S by m16n8k32 (QMMA on sm_89), scales, softmax
//           3. V's values to FP16, two at a time, O += P V by m16n8k16
// Bound by: latency: nothing hides the copies. P V runs at FP16's rate, and its conversions take issue slots.
#include "../common/eight_bit_rows.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/address.cuh"

namespace microsdpa::ladder::rung_09 {

constexpr int WARP_ROWS = 16;

template <int HEAD_DIM, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  SwizzledTile<Unit, BLOCK_M, HEAD_DIM / 2> query;
  SwizzledTile<Unit, BLOCK_N, HEAD_DIM / 2> key;
  SwizzledTile<Unit, BLOCK_N, HEAD_DIM / 2> value;
  alignas(8) float key_scale[BLOCK_N];
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL>
__global__ void __launch_bounds__(BLOCK_M / WARP_ROWS * 32, 1)
    attention(const __grid_constant__ EightBitParams params) {
  constexpr int THREADS = BLOCK_M / WARP_ROWS * 32;
  auto& shared = dynamic_shared<SharedStorage<HEAD_DIM, BLOCK_M, BLOCK_N>>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const EightBitHead head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp_first = first_row + threadIdx.x / 32 * WARP_ROWS;
  const int row = warp_first + lane_index() / 4;

  copy_rows<THREADS>(shared.query, head.query<Unit>(params, first_row), params.query_strides.row_in<Unit>(),
                     params.seqlen_q - first_row);
  __syncthreads();
  const QueryOperand<decltype(shared.query), 1, HEAD_DIM / 2, HEAD_DIM / 32> query(shared.query,
                                                                                   warp_first - first_row);
  EightBitRows<E4m3, E4m3, __half, HEAD_DIM, 1, BLOCK_N> rows(params, head, warp_first);

  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  for (int first_key = 0; first_key < keys; first_key += BLOCK_N) {
    const int valid_keys = params.seqlen_k - first_key;
    copy_rows<THREADS>(shared.key, head.key<Unit>(params, first_key), params.key_strides.row_in<Unit>(), valid_keys);
    copy_rows<THREADS>(shared.value, head.value<Unit>(params, first_key), params.value_strides.row_in<Unit>(),
                       valid_keys);
    for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {
      shared.key_scale[i] = i < valid_keys ? *head.key_scale(params, first_key + i) : 0.0f;
    }
    __syncthreads();
    rows.template attend<CAUSAL>(query, shared.key, shared.value, shared.key_scale, params, row, first_key);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }
  rows.template store<T>(params, head, warp_first);
}

}  // namespace microsdpa::ladder::rung_09
