// Rung 01: scalar. Exact attention with FP32 arithmetic on the CUDA cores, the baseline of the ladder.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for one tile of BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] stays in shared memory, K and V [BLOCK_N, HEAD_DIM] stream through it.
// Roles:    a warp owns BLOCK_M / WARPS queries; in Q K^T a lane owns one key, in P V HEAD_DIM / 32 channels.
// Pipeline: 1. all warps copy K and V, then wait     2. each lane scores its key against the warp's rows
//           3. online softmax by warp reductions     4. probabilities are shuffled to the lanes that hold V's channels
// Bound by: shared-memory bandwidth and FP32 issue. Every product reads its operands from shared memory, nothing
//           overlaps the copies, and the tensor cores idle.
#include "../common/element.cuh"
#include "../common/params.cuh"
#include "../common/softmax.cuh"
#include "../common/tile.cuh"

namespace microsdpa::ladder::rung_01 {

constexpr int BLOCK_N = 32;  // one key a lane

template <typename T, int HEAD_DIM, int BLOCK_M>
struct SharedStorage {
  // 16 bytes of padding: eight lanes that read 16 bytes of eight rows then touch all 32 banks once.
  static constexpr int PITCH = HEAD_DIM + 16 / sizeof(T);
  alignas(16) T query[BLOCK_M * PITCH];
  alignas(16) T key[BLOCK_N * PITCH];
  alignas(16) T value[BLOCK_N * PITCH];
};

// score[r] = q[row r] . k[this lane's key], for the ROWS query rows of the warp.
template <int ROWS, int HEAD_DIM, int PITCH, typename T>
__device__ __forceinline__ void score_rows(float (&score)[ROWS], const T* query, const T* key) {
  constexpr int CHUNK = 16 / sizeof(T);
  using Chunk = Vector<T, CHUNK>;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) score[r] = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += CHUNK) {
    const Chunk k = *reinterpret_cast<const Chunk*>(key + d);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Chunk q = *reinterpret_cast<const Chunk*>(query + r * PITCH + d);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) score[r] += to_float(q.data[i]) * to_float(k.data[i]);
    }
  }
}

// acc[r][c] += sum over keys j of P[r][j] V[j][channel c of this lane]; lane j holds P[r][j].
template <int ROWS, int CHANNELS, int PITCH, typename T>
__device__ __forceinline__ void accumulate_values(float (&acc)[ROWS][CHANNELS], const float (&probability)[ROWS],
                                                  const T* value) {
  using Channels = Vector<T, CHANNELS>;
#pragma unroll 8
  for (int j = 0; j < BLOCK_N; ++j) {
    const Channels v = *reinterpret_cast<const Channels*>(value + j * PITCH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float p = __shfl_sync(FULL_WARP, probability[r], j);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) acc[r][c] += p * to_float(v.data[c]);
    }
  }
}

// At least one CTA per SM: left to guess, ptxas aims at a higher occupancy and spills.
template <typename T, int HEAD_DIM, int BLOCK_M, int WARPS, bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__(WARPS * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  constexpr int THREADS = WARPS * 32;
  constexpr int ROWS = BLOCK_M / WARPS;
  constexpr int CHANNELS = HEAD_DIM / 32;
  using Shared = SharedStorage<T, HEAD_DIM, BLOCK_M>;
  constexpr int PITCH = Shared::PITCH;
  static_assert(BLOCK_M % WARPS == 0 && HEAD_DIM % 32 == 0, "rows go to warps, channels to lanes");
  __shared__ Shared shared;

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const int tile = blockIdx.x % q_tiles;
  const int head = blockIdx.x / q_tiles % params.heads;
  const int64 batch = blockIdx.x / q_tiles / params.heads;
  const int head_kv = head / (params.heads / params.heads_kv);
  const int first_row = tile * BLOCK_M;
  const int warp_row = threadIdx.x / 32 * ROWS;
  const int lane = threadIdx.x % 32;

  const Strides& qs = params.query_strides;
  const Strides& ks = params.key_strides;
  const Strides& vs = params.value_strides;
  const Strides& os = params.out_strides;
  const T* query = static_cast<const T*>(params.query) + batch * qs.batch + head * qs.head + first_row * qs.row;
  const T* key = static_cast<const T*>(params.key) + batch * ks.batch + head_kv * ks.head;
  const T* value = static_cast<const T*>(params.value) + batch * vs.batch + head_kv * vs.head;
  T* out = static_cast<T*>(params.out) + batch * os.batch + head * os.head;

  load_tile<BLOCK_M, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.query, query, qs.row, params.seqlen_q - first_row);

  RowState state[ROWS];
  float acc[ROWS][CHANNELS] = {};

  // Keys past the last one that the tile's last row sees are never loaded.
  int keys = params.seqlen_k;
  if (CAUSAL) keys = min(keys, first_row + BLOCK_M + params.diagonal);

  for (int first_key = 0; first_key < keys; first_key += BLOCK_N) {
    const int valid_keys = params.seqlen_k - first_key;
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.key, key + first_key * ks.row, ks.row, valid_keys);
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS, LOAD_BYTES>(shared.value, value + first_key * vs.row, vs.row,
                                                             valid_keys);
    __syncthreads();

    float score[ROWS];
    score_rows<ROWS, HEAD_DIM, PITCH>(score, shared.query + warp_row * PITCH, shared.key + lane * PITCH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool visible =
          lane < valid_keys && (!CAUSAL || first_key + lane <= first_row + warp_row + r + params.diagonal);
      float rescale;
      score[r] = state[r].update(visible ? score[r] * params.scale_log2 : negative_infinity(), rescale);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) acc[r][c] *= rescale;
    }
    accumulate_values<ROWS, CHANNELS, PITCH>(acc, score, shared.value + lane * CHANNELS);
    __syncthreads();  // the next copy overwrites what slower warps still read
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + warp_row + r;
    if (row >= params.seqlen_q) break;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      out[row * os.row + lane * CHANNELS + c] = from_float<T>(acc[r][c] * state[r].normalizer());
    }
    if (params.lse != nullptr && lane == 0) {
      params.lse[(batch * params.heads + head) * params.seqlen_q + row] = state[r].log_sum_exp();
    }
  }
}

}  // namespace microsdpa::ladder::rung_01
