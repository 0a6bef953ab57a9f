// Masks of packed and paged calls: a window, which is what a causal mask is too, soft cap, ALiBi and sinks.
#pragma once

#include "../../common/element.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../common/sequence.cuh"

namespace microsdpa::ampere::varlen {

using namespace sequences;

// What a kernel is compiled for. SINK is void for none.
template <bool LEFT_, bool RIGHT_, bool SOFTCAP_, bool ALIBI_, typename SINK_>
struct Masks {
  using Sink = SINK_;
  static constexpr bool LEFT = LEFT_, RIGHT = RIGHT_, SOFTCAP = SOFTCAP_, ALIBI = ALIBI_;
};

template <typename T>
constexpr bool PRESENT = true;
template <>
constexpr bool PRESENT<void> = false;

__device__ __forceinline__ float to_float(float x) { return x; }
using microsdpa::to_float;

constexpr float LOG2_E = 1.44269504088896340736f;

// The rows of a warp, of which a lane has two in every 16, and what becomes of their scores.
template <typename MASKS, int PACK, int ROW_TILES>
struct MaskedRows {
  const VarlenParams& params;
  const Visibility<MASKS, PACK> visibility;
  int first;  // this lane's first row
  int head;   // the first of the PACK
  int b;
  int all_from;  // keys from here, and up to all_end, are seen by all rows of the warp
  int all_end;

  __device__ __forceinline__ MaskedRows(const VarlenParams& params, const Sequence& sequence, int b, int head,
                                        int warp_first)
      : params(params),
        visibility(sequence),
        first(warp_first + lane_index() / 4),
        head(head),
        b(b),
        all_from(visibility.first(params, warp_first + 16 * ROW_TILES - 1)),
        all_end(visibility.end(params, warp_first)) {}

  // A row's sink, in base 2.
  __device__ __forceinline__ float sink(int row) const {
    const auto* sinks = static_cast<const typename MASKS::Sink*>(params.sinks);
    return LOG2_E * to_float(sinks[(head + row % PACK) * params.sink_head_stride]);
  }
  // A head's logit takes its share of rows that have seen nothing yet.
  __device__ __forceinline__ void add_sinks(OnlineSoftmax<ROW_TILES>& softmax) const {
    if constexpr (PRESENT<typename MASKS::Sink>) {
      for_each([&](int t, int half, int row) {
        const float logit = sink(row);
        softmax.stabilizer[t][half] = logit;
        softmax.sum[t][half] = lane_index() % 4 == 0 && logit > negative_infinity() ? 1.0f : 0.0f;
      });
    }
  }

  // Turns products into scores, in base 2; of keys that a row does not see they are -inf.
  template <int KEYS>
  __device__ __forceinline__ void apply(float (&s)[ROW_TILES][KEYS / 8][4], int first_key) const {
    const bool cut = first_key < all_from || first_key + KEYS > all_end;
    const int own = first_key + lane_index() % 4 * 2;
    for_each([&](int t, int half, int row) {
      float slope = 0.0f;
      if constexpr (MASKS::ALIBI) {
        slope = LOG2_E * params.slopes[b * params.slope_batch_stride + (head + row % PACK) * params.slope_head_stride];
      }
      const float cap = params.softcap_log2;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[t][n][2 * half + e];
          x *= params.scale_log2;
          if constexpr (MASKS::SOFTCAP) x = cap * tanhf(x / cap);
          if constexpr (MASKS::ALIBI) {
            x -= slope * fabsf(static_cast<float>(row / PACK + visibility.position - own - 8 * n - e));
          }
        }
      }
      if (cut) {
        const int from = visibility.first(params, row) - own, end = visibility.end(params, row) - own;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < from || 8 * n + e >= end) s[t][n][2 * half + e] = negative_infinity();
          }
        }
      }
    });
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) visit(t, half, first + 16 * t + 8 * half);
    }
  }
};

}  // namespace microsdpa::ampere::varlen
