// What the gradients need of every query's row: LSE in base 2, and delta = rowsum(dO * O) less the gradient of the LSE.
//
// As many lanes have a row as read it at once; with a mask of numbers a warp has it. Where such a mask made an LSE so
// large that the logarithm of the sum is rounded away, the row's maximum and sum are made again from its scores.
// Bound by: memory; dO and O are read once.
#include "../common/softmax.cuh"
#include "../ptx/control.cuh"
#include "scoring.cuh"

namespace microsdpa::backward {

// LSE in base 2 from which on its rounding would show in probabilities.
constexpr float LARGE_LSE = 16384.0f;

// Lanes that read a row of so many chunks at once: a power of two.
template <int CHUNKS>
constexpr int LANES_OF = CHUNKS > 16  ? 32
                         : CHUNKS > 8 ? 16
                         : CHUNKS > 4 ? 8
                                      : 4;

template <typename T, int HEAD_DIM, int WARPS, int LOAD_BYTES, typename MASK, bool LEFT, bool RIGHT, bool SOFTCAP,
          bool ALIBI, typename SINK, bool PROGRAMMATIC>
__global__ void __launch_bounds__(32 * WARPS) row_terms(const __grid_constant__ BackwardParams params) {
  using M = Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>;
  constexpr float LOG2_E = 1.44269504088896340736f;
  constexpr int WIDTH = LOAD_BYTES / sizeof(T);
  constexpr int LANES = M::WEIGHTED ? 32 : LANES_OF<(HEAD_DIM + WIDTH - 1) / WIDTH>, ROWS = 32 * WARPS / LANES;
  const AttentionParams& call = params.forward.call;
  if (PROGRAMMATIC) grid_dependency_wait();
  if (PROGRAMMATIC) grid_dependency_launch();
  // Lanes past the last row have it too: they take part in the shuffles.
  const int64 last = static_cast<int64>(call.batch) * call.heads * call.seqlen_q - 1;
  const int64 index = min(static_cast<int64>(blockIdx.x) * ROWS + threadIdx.x / LANES, last);
  const int lane = threadIdx.x % LANES, row = static_cast<int>(index % call.seqlen_q);
  const int64 batch_head = index / call.seqlen_q, batch = batch_head / call.heads, head = batch_head % call.heads;

  const T* out = static_cast<const T*>(call.out) + batch * call.out_strides.batch + head * call.out_strides.head +
                 row * call.out_strides.row;
  const T* grad_out = static_cast<const T*>(params.grad_out) + batch * params.grad_out_strides.batch +
                      head * params.grad_out_strides.head + row * params.grad_out_strides.row;
  float sum = 0.0f;
  for (int column = lane * WIDTH; column < HEAD_DIM; column += LANES * WIDTH) {
    const auto a = *reinterpret_cast<const Vector<T, WIDTH>*>(out + column);
    const auto b = *reinterpret_cast<const Vector<T, WIDTH>*>(grad_out + column);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum += to_float(a.data[e]) * to_float(b.data[e]);
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  RowTerms<M::WEIGHTED> terms;
  terms.delta = sum - (params.grad_lse == nullptr ? 0.0f : params.grad_lse[index]);
  const float lse = LOG2_E * call.lse[index];
  terms.lse = lse == negative_infinity() ? -negative_infinity() : lse;
  if constexpr (M::WEIGHTED) {
    terms.factor = 1.0f, terms.unused = 0.0f;
    if (fabsf(lse) >= LARGE_LSE && lse != negative_infinity()) {
      const HeadScores<M> scores(params.forward, batch, head);
      const T* query = static_cast<const T*>(call.query) + batch * call.query_strides.batch +
                       head * call.query_strides.head + row * call.query_strides.row;
      const T* key = static_cast<const T*>(call.key) + batch * call.key_strides.batch +
                     head / (call.heads / call.heads_kv) * call.key_strides.head;
      RowState state;
      if constexpr (PRESENT<SINK>) {
        const SINK* sinks = static_cast<const SINK*>(params.forward.masks.sinks);
        const float logit = LOG2_E * to_float(sinks[head * params.forward.masks.sink_head_stride]);
        if (logit > negative_infinity()) state.max = logit, state.sum = 1.0f;
      }
      for (int first = 0; first < call.seqlen_k; first += 32) {
        const int j = first + lane;
        float score = negative_infinity();
        if (scores.is_within(row, j)) {
          float product = 0.0f, bend;
          for (int e = 0; e < HEAD_DIM; ++e) {
            product += to_float(query[e]) * to_float(key[j * call.key_strides.row + e]);
          }
          score = scores.exponent(product, scores.element(row, j), row, j, 0.0f, bend);
        }
        float rescale;
        state.update(score, rescale);
      }
      terms.lse = state.max;
      terms.factor = state.normalizer();
    }
  }
  if (lane == 0) static_cast<RowTerms<M::WEIGHTED>*>(call.workspace)[index] = terms;
}

}  // namespace microsdpa::backward
