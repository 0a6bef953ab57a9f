// Masks of packed and paged calls on a warpgroup's accumulator: a window, which is what a causal mask is too, soft cap,
// ALiBi and sinks.
#pragma once

#include "../../common/masks.cuh"
#include "../../common/sequence.cuh"
#include "../common/masked_scores.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::varlen {

using namespace sequences;

// What a kernel is compiled for. SINK is void for none.
template <bool LEFT_, bool RIGHT_, bool SOFTCAP_, bool ALIBI_, typename SINK_>
struct Masks {
  using Sink = SINK_;
  static constexpr bool LEFT = LEFT_, RIGHT = RIGHT_, SOFTCAP = SOFTCAP_, ALIBI = ALIBI_, SINKS = PRESENT<SINK_>;
  static constexpr bool MODIFIED = SOFTCAP || ALIBI;  // scores are more than products times a scale
  // ALiBi makes later keys' scores the larger ones: tiles are visited from the last one on, so that stabilizers last.
  static constexpr bool BACKWARDS = ALIBI;
};

constexpr float LOG2_E = 1.44269504088896340736f;

// The rows of a thread, two of the warpgroup's, and what becomes of their scores. Row r of a sequence is query r / PACK
// of the PACK heads that share a key head. What is known of the segment stays in shared memory: registers are few.
template <typename MASKS, int PACK, int BLOCK_N>
struct MaskedRows {
  using Scores = float[BLOCK_N / 2];

  const VarlenParams& params;
  const Segment* segment;
  float slope[2];  // ALiBi's, base 2

  __device__ __forceinline__ explicit MaskedRows(const VarlenParams& params) : params(params) {}

  // `own_row`: this thread's first row of the segment.
  __device__ __forceinline__ void begin(const Segment& of, int own_row) {
    segment = &of;
    if constexpr (MASKS::ALIBI) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64 head = static_cast<int64>(of.head_kv) * PACK + (of.first_row + own_row + 8 * half) % PACK;
        slope[half] = LOG2_E * params.slopes[of.b * params.slope_batch_stride + head * params.slope_head_stride];
      }
    }
  }
  // The first key that a row of the segment sees, and one past the last.
  __device__ __forceinline__ int from(int own_row) const {
    return MASKS::LEFT ? max(0, (segment->first_row + own_row) / PACK + segment->position - params.left) : 0;
  }
  __device__ __forceinline__ int end(int own_row) const {
    if constexpr (!MASKS::RIGHT) return segment->keys;
    return min(segment->keys, (segment->first_row + own_row) / PACK + segment->position + params.right + 1);
  }
  // Whether all rows of a warpgroup, from `own_row` on, see all keys of a tile.
  __device__ __forceinline__ bool see_all(int own_row, int first_key) const {
    return (!MASKS::LEFT || first_key >= from(own_row + ROWS - 1)) && first_key + BLOCK_N <= end(own_row);
  }

  // Turns products into scores; of keys that a row does not see, unless `all` are seen, they are -inf.
  __device__ __forceinline__ void apply(Scores& s, int own_row, int first_key, bool all) const {
    if constexpr (MASKS::SOFTCAP) {
      if (params.softcap_log2 > SoftCap<true>::LARGE) {
        modify<true>(s, own_row, first_key);
      } else {
        modify<false>(s, own_row, first_key);
      }
    } else if constexpr (MASKS::MODIFIED) {
      modify<false>(s, own_row, first_key);
    }
    if (all) return;
    const int own = first_key + static_cast<int>(2 * (threadIdx.x % 4));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int hidden_before = from(own_row + 8 * half) - own, hidden_from = end(own_row + 8 * half) - own;
      hide_where<BLOCK_N>(s, half, [&](int n, int e) {
        return (MASKS::LEFT && 8 * n + e < hidden_before) || 8 * n + e >= hidden_from;
      });
    }
  }

  // Base 2.
  __device__ __forceinline__ float sink_of(const Segment& of, int row) const {
    const auto* sinks = static_cast<const typename MASKS::Sink*>(params.sinks);
    return LOG2_E * to_float(sinks[(static_cast<int64>(of.head_kv) * PACK + row % PACK) * params.sink_head_stride]);
  }

 private:
  template <bool EXACT_CAP>
  __device__ __forceinline__ void modify(Scores& s, int own_row, int first_key) const {
    const float scale = params.scale_log2;
    const SoftCap<EXACT_CAP> capped(MASKS::SOFTCAP ? params.softcap_log2 : 1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of the row's query to this thread's first key.
      const float distance = static_cast<float>((segment->first_row + own_row + 8 * half) / PACK + segment->position -
                                                first_key - static_cast<int>(2 * (threadIdx.x % 4)));
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * half + e];
          x *= scale;
          if constexpr (MASKS::SOFTCAP) x = capped(x);
          if constexpr (MASKS::ALIBI) x = fmaf(-slope[half], fabsf(distance - static_cast<float>(8 * n + e)), x);
        }
      }
    }
  }
};

}  // namespace microsdpa::hopper::varlen
