// The gradients of the sinks and of ALiBi's slopes, a CTA for each: sums over rows, in an order that is always the
// same.
//
// A sink's probability is 2^(sink - LSE), and its value is zero: the gradient is minus the sum of that times delta.
// That of a slope is minus the sum of dS times the distance, of which the CTAs that own queries have left their parts.
// Bound by: the launch, and memory for many rows.
#include "../ptx/control.cuh"
#include "scoring.cuh"

namespace microsdpa::backward {

// The sum over the CTA's threads, in thread 0.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[THREADS / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  }
  return total;
}

// The rows of a query head, `head` counting through the batch, as terms.cu leaves them.
template <typename TERMS>
struct RowsOf {
  const TERMS* terms;
  __device__ __forceinline__ RowsOf(const AttentionParams& call, int64 head)
      : terms(static_cast<const TERMS*>(call.workspace) + head * call.seqlen_q) {}
  __device__ __forceinline__ TERMS operator[](int row) const { return terms[row]; }
};

// The same as hopper/backward/prepare.cu leaves them: for each tile of TILE_ROWS the LSE and then delta.
template <int TILE_ROWS>
struct TiledTerms {};
template <int TILE_ROWS>
struct RowsOf<TiledTerms<TILE_ROWS>> {
  const float* terms;
  __device__ __forceinline__ RowsOf(const AttentionParams& call, int64 head)
      : terms(static_cast<const float*>(call.workspace) +
              head * ((call.seqlen_q + TILE_ROWS - 1) / TILE_ROWS) * 2 * TILE_ROWS) {}
  __device__ __forceinline__ RowTerms<false> operator[](int row) const {
    const float* lse = terms + static_cast<int64>(row / TILE_ROWS) * 2 * TILE_ROWS + row % TILE_ROWS;
    return {lse[0], lse[TILE_ROWS]};
  }
};

template <typename SINK, typename ROWS, int THREADS, bool PROGRAMMATIC>
__global__ void __launch_bounds__(THREADS) sink_gradients(const __grid_constant__ BackwardParams params) {
  constexpr float LOG2_E = 1.44269504088896340736f;
  const AttentionParams& call = params.forward.call;
  if (PROGRAMMATIC) grid_dependency_wait();
  if (PROGRAMMATIC) grid_dependency_launch();
  const int64 head = blockIdx.x;
  const auto* sinks = static_cast<const SINK*>(params.forward.masks.sinks);
  const float logit = LOG2_E * to_float(sinks[head * params.forward.masks.sink_head_stride]);
  float sum = 0.0f;
  for (int64 batch = 0; batch < call.batch; ++batch) {
    const RowsOf<ROWS> rows(call, batch * call.heads + head);
    for (int row = threadIdx.x; row < call.seqlen_q; row += THREADS) {
      const auto terms = rows[row];
      sum -= ex2_approx(logit - terms.lse) * terms.weight() * terms.delta;
    }
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) store_as(static_cast<SINK*>(params.grad_sinks) + head, sum);
}

template <int THREADS, bool PROGRAMMATIC>
__global__ void __launch_bounds__(THREADS) slope_gradients(const __grid_constant__ BackwardParams params) {
  const AttentionParams& call = params.forward.call;
  if (PROGRAMMATIC) grid_dependency_wait();
  if (PROGRAMMATIC) grid_dependency_launch();
  const int64 head = blockIdx.x % call.heads, first = blockIdx.x / call.heads;
  const int64 batches = params.slope_batch > 1 ? 1 : call.batch;
  float sum = 0.0f;
  for (int64 batch = first; batch < first + batches; ++batch) {
    const float* parts = params.slope_parts + (batch * call.heads + head) * params.parts_of_slope;
    for (int i = threadIdx.x; i < params.parts_of_slope; i += THREADS) sum -= parts[i];
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) params.grad_slopes[blockIdx.x] = sum;
}

}  // namespace microsdpa::backward
