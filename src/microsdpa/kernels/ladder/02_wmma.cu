// Rung 02: tensor cores through C++ wmma, for Q K^T and for P V.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] stays in shared memory, K and V [BLOCK_N, HEAD_DIM] stream through it.
// Roles:    every warp copies; a warp owns 16 queries, and in the softmax two lanes own a query.
// Pipeline: 1. all warps copy K and V, then wait     2. S = Q K^T by wmma, to shared memory
//           3. online softmax by rows, P to shared memory     4. P V by wmma, through shared memory into registers
// Bound by: latency. Nothing overlaps the copies, and S, P and P V cross shared memory because a fragment's layout
//           is not specified.
#include "../common/params.cuh"
#include "../common/tile.cuh"
#include "../common/wmma_tile.cuh"
#include "../ptx/address.cuh"

namespace microsdpa::ladder::rung_02 {

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N>
struct SharedStorage {
  // 16 bytes of padding: eight rows of a fragment then lie in different banks.
  static constexpr int PITCH = HEAD_DIM + 16 / sizeof(T);
  using Rows = WmmaRows<T, HEAD_DIM, BLOCK_N, PITCH>;
  alignas(32) T query[BLOCK_M * PITCH];
  alignas(32) T key[BLOCK_N * PITCH];
  alignas(32) T value[BLOCK_N * PITCH];
  typename Rows::Scratch scratch[BLOCK_M / WMMA];
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__(BLOCK_M / WMMA * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  constexpr int THREADS = BLOCK_M / WMMA * 32;
  using Shared = SharedStorage<T, HEAD_DIM, BLOCK_M, BLOCK_N>;
  constexpr int PITCH = Shared::PITCH;
  Shared& shared = dynamic_shared<Shared>();

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const Head<T> head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp = threadIdx.x / 32;
  const int row = first_row + warp * WMMA + threadIdx.x % WMMA;
  typename Shared::Rows::Scratch& scratch = shared.scratch[warp];

  load_tile<BLOCK_M, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.query,
                                                           head.query + first_row * params.query_strides.row,
                                                           params.query_strides.row, params.seqlen_q - first_row);

  typename Shared::Rows rows;
  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  for (int first_key = 0; first_key < keys; first_key += BLOCK_N) {
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.key, head.key + first_key * params.key_strides.row,
                                                             params.key_strides.row, params.seqlen_k - first_key);
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.value,
                                                             head.value + first_key * params.value_strides.row,
                                                             params.value_strides.row, params.seqlen_k - first_key);
    __syncthreads();

    rows.score(scratch, shared.query + warp * WMMA * PITCH, shared.key);
    rows.template softmax<CAUSAL>(scratch, params, row, first_key);
    rows.accumulate(scratch, shared.value);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }
  rows.template store<LOAD_BYTES>(head, params, row);
}

}  // namespace microsdpa::ladder::rung_02
