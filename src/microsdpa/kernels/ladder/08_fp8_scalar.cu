// Rung 08: E4M3 operands, dequantized on load. FP32 arithmetic on the CUDA cores, the baseline of the 8-bit rungs.
//
// Computes O = softmax(scale Q K^T + mask) V of Q, K and V that are quantized, with scales, and optionally LSE, for
// BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM] stays in shared memory as FP32, K and V [BLOCK_N, HEAD_DIM] stream through it.
// Roles:    a warp owns BLOCK_M / WARPS queries; in Q K^T a lane owns one key, in P V it owns HEAD_DIM / 32 channels.
// Pipeline: 1. all warps load values, multiply them with their scales and store FP32     2. each lane scores its key
//           3. online softmax by warp reductions     4. probabilities are shuffled to the lanes that own V's channels
// Bound by: shared-memory bandwidth and FP32 issue: 8 bits save memory traffic here, and nothing else.
#include "../common/eight_bit_params.cuh"
#include "../common/element.cuh"
#include "../common/softmax.cuh"
#include "../ptx/arithmetic.cuh"

namespace microsdpa::ladder::rung_08 {

constexpr int BLOCK_N = 32;  // one key a lane

template <int HEAD_DIM, int BLOCK_M>
struct SharedStorage {
  static constexpr int PITCH = HEAD_DIM + 4;  // 16 bytes of padding: eight lanes read 16 bytes of eight rows at once
  alignas(16) float query[BLOCK_M * PITCH];
  alignas(16) float key[BLOCK_N * PITCH];
  alignas(16) float value[BLOCK_N * PITCH];
};

// Four values, times a scale for each, in FP32.
template <typename Scale>
__device__ __forceinline__ Vector<float, 4> dequantize(uint32 quantized, Scale scale) {
  Vector<float, 4> four;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32 halves = halves_from_e4m3x2(quantized >> 16 * i & 0xffff);
    const __half2 pair = *reinterpret_cast<const __half2*>(&halves);
    four.data[2 * i] = __low2float(pair) * scale(2 * i);
    four.data[2 * i + 1] = __high2float(pair) * scale(2 * i + 1);
  }
  return four;
}

// Loads ROWS rows of quantized values; rows from `valid_rows` on become zeros.
//   rows(row) gives the address of a row's values   scale(row, channel) its scale
template <int ROWS, int HEAD_DIM, int PITCH, int THREADS, typename Rows, typename Scale>
__device__ __forceinline__ void load_tile(float* shared, int valid_rows, Rows rows, Scale scale) {
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / 4; i += THREADS) {
    const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
    Vector<float, 4> four{};
    if (row < valid_rows) {
      const uint32 quantized = *reinterpret_cast<const uint32*>(rows(row) + column);
      four = dequantize(quantized, [&](int c) { return scale(row, column + c); });
    }
    *reinterpret_cast<Vector<float, 4>*>(shared + row * PITCH + column) = four;
  }
}

// score[r] = q[row r] . k[this lane's key], for the ROWS query rows of the warp.
template <int ROWS, int HEAD_DIM, int PITCH>
__device__ __forceinline__ void score_rows(float (&score)[ROWS], const float* query, const float* key) {
  using Chunk = Vector<float, 4>;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) score[r] = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 4) {
    const Chunk k = *reinterpret_cast<const Chunk*>(key + d);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Chunk q = *reinterpret_cast<const Chunk*>(query + r * PITCH + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) score[r] += q.data[i] * k.data[i];
    }
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int WARPS, bool CAUSAL>
__global__ void __launch_bounds__(WARPS * 32, 1) attention(const __grid_constant__ EightBitParams params) {
  constexpr int THREADS = WARPS * 32, ROWS = BLOCK_M / WARPS, CHANNELS = HEAD_DIM / 32;
  using Shared = SharedStorage<HEAD_DIM, BLOCK_M>;
  using Byte = unsigned char;
  constexpr int PITCH = Shared::PITCH;
  __shared__ Shared shared;

  const int q_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const EightBitHead head(params, blockIdx.x / q_tiles);
  const int first_row = blockIdx.x % q_tiles * BLOCK_M;
  const int warp_row = threadIdx.x / 32 * ROWS;
  const int lane = threadIdx.x % 32;

  load_tile<BLOCK_M, HEAD_DIM, PITCH, THREADS>(
      shared.query, params.seqlen_q - first_row, [&](int r) { return head.query<Byte>(params, first_row + r); },
      [&](int r, int) { return *head.query_scale(params, first_row + r); });

  RowState state[ROWS];
  float acc[ROWS][CHANNELS] = {};
  const int keys = keys_seen<CAUSAL>(params, first_row, BLOCK_M);
  for (int first_key = 0; first_key < keys; first_key += BLOCK_N) {
    const int valid_keys = params.seqlen_k - first_key;
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS>(
        shared.key, valid_keys, [&](int r) { return head.key<Byte>(params, first_key + r); },
        [&](int r, int) { return *head.key_scale(params, first_key + r); });
    load_tile<BLOCK_N, HEAD_DIM, PITCH, THREADS>(
        shared.value, valid_keys, [&](int r) { return head.value<Byte>(params, first_key + r); },
        [&](int, int c) { return head.value_scale(params, c); });
    __syncthreads();

    float score[ROWS];
    score_rows<ROWS, HEAD_DIM, PITCH>(score, shared.query + warp_row * PITCH, shared.key + lane * PITCH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool visible = first_key + lane < keys_seen<CAUSAL>(params, first_row + warp_row + r, 1);
      float rescale;
      score[r] = state[r].update(visible ? score[r] * params.scale_log2 : negative_infinity(), rescale);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) acc[r][c] *= rescale;
    }
#pragma unroll 8
    for (int j = 0; j < BLOCK_N; ++j) {
      using Channels = Vector<float, CHANNELS>;
      const Channels v = *reinterpret_cast<const Channels*>(shared.value + j * PITCH + lane * CHANNELS);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float p = __shfl_sync(FULL_WARP, score[r], j);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) acc[r][c] += p * v.data[c];
      }
    }
    __syncthreads();  // the next load overwrites what slower warps still read
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first_row + warp_row + r;
    if (row >= params.seqlen_q) break;
    T* out = head.out<T>(params, row) + lane * CHANNELS;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) out[c] = from_float<T>(acc[r][c] * state[r].normalizer());
    if (params.lse != nullptr && lane == 0) *head.lse(params, row) = state[r].log_sum_exp();
  }
}

}  // namespace microsdpa::ladder::rung_08
