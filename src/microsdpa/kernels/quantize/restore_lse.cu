// Gives the LSE back what smoothing took off the scores: adds scale * q . mean(K) to every row's.
//
// HEAD_DIM / 8 threads have a row, of which each reads 16 bytes; THREADS / (HEAD_DIM / 8) rows per CTA.
// Bound by: the launch.
#include "../common/eight_bit_params.cuh"
#include "../common/element.cuh"
#include "../common/softmax.cuh"

namespace microsdpa::quantize {

struct RestoreLseParams {
  const void* query;      // [B, H, S_q, D] FP16 or BF16
  const float* key_mean;  // [B, H_kv, D], contiguous
  float* lse;             // [B, H, S_q], contiguous
  ByteStrides query_strides;
  int32 batch;
  int32 heads;
  int32 heads_kv;
  int32 seqlen_q;
  float scale;  // of the softmax
};

template <typename T, int HEAD_DIM, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) restore_lse(const __grid_constant__ RestoreLseParams params) {
  constexpr int CHUNK = 8, LANES = HEAD_DIM / CHUNK, ROWS = THREADS / LANES;
  using Chunk = Vector<T, CHUNK>;
  using Means = Vector<float, 4>;
  const int64 rows = static_cast<int64>(params.batch) * params.heads * params.seqlen_q;
  const int64 index = blockIdx.x * static_cast<int64>(ROWS) + threadIdx.x / LANES;
  const int64 row = min(index, rows - 1);  // a lane past the end takes part in the shuffles
  const int column = threadIdx.x % LANES * CHUNK;
  const int64 head = row / params.seqlen_q, batch = head / params.heads;
  const int h = static_cast<int>(head % params.heads);

  const T* query = params.query_strides.at<T>(params.query, batch, h, static_cast<int>(row % params.seqlen_q)) + column;
  const Chunk q = *reinterpret_cast<const Chunk*>(query);
  const int head_kv = h / (params.heads / params.heads_kv);
  const float* mean = params.key_mean + (batch * params.heads_kv + head_kv) * HEAD_DIM + column;
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Means four = *reinterpret_cast<const Means*>(mean + 4 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += to_float(q.data[4 * half + i]) * four.data[i];
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  if (index < rows && column == 0) params.lse[row] += params.scale * sum;
}

}  // namespace microsdpa::quantize
