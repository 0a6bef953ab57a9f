// What masks make of the scores of hopper/latency/kernel.cu: windows, ALiBi, mask tensors, soft caps and sinks.
//
// Masks are read while the first keys are on their way (mask_reads.cuh). Unrolled rounds begin S with a mask's
// numbers (`begin`), give no probability to keys that rows do not see (`seen`), and have ALiBi in their exponents. The
// ring and the second pass make scores of products in the order of mask_params.cuh (`score`).
#pragma once

#include "mask_reads.cuh"
#include "shared.cuh"
#include "soft_cap.cuh"

namespace microsdpa::hopper::latency {

constexpr float LOWEST = -3.402823466e38f;

// Of the 64 keys of a tile, a bit for each.
struct KeyBits {
  uint32 word[2];

  __device__ __forceinline__ static uint32 below(int count) {
    return count >= 32 ? 0xffffffffu : (1u << max(count, 0)) - 1;
  }
  __device__ __forceinline__ static KeyBits interval(int first, int end) {
    return {below(end) & ~below(first), below(end - 32) & ~below(first - 32)};
  }
};

template <typename MASKS>
constexpr bool IS_CAPPED = MASKS::SOFTCAP;
template <>
constexpr bool IS_CAPPED<NoMasks> = false;

template <typename T>
struct PairOf {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// RIGHT: what a row sees has a right end. RAGGED: so, or keys do not fill the tiles.
template <typename MASKS, int CLUSTER, bool RIGHT, bool RAGGED, typename MEMORY>
struct ScoreMasks : MaskReads<MASKS, CLUSTER, MEMORY> {
  using Base = MaskReads<MASKS, CLUSTER, MEMORY>;
  using Base::ADDS, Base::BULK, Base::BYTES, Base::HIDES, Base::RANGED, Base::READS, Base::WORDS;
  using Base::element, Base::fragment, Base::params, Base::row, Base::work;
  using typename Base::Mask, typename Base::Rows, typename Base::View;
  static constexpr bool SOME_HIDDEN = HIDES || RANGED || MASKS::LEFT || RAGGED;  // but for what a mask of numbers hides
  static constexpr bool SINKS = PRESENT<typename MASKS::Sink>, ALIBI = MASKS::ALIBI;
  static constexpr bool READS_ROWS = !READS && (RANGED || MASKS::ALIBI);  // numbers of a row or of all
  static constexpr bool LATE = READS_ROWS && MASKS::ALIBI;                // looked at beside the first products
  static constexpr bool WAITS =
      PRESENT<Mask> && !BULK || MASKS::ALIBI || SINKS;  // for the kernel ahead, which may write them

  static constexpr float HIDING = -1000.0f;  // numbers below it most likely hide keys

  const float scale;  // > 0, base 2

  // Keys that a row sees, other masks aside, from the first key of a tile on.
  __device__ __forceinline__ int first_seen(const Rows& rows, int half, int first_key) const {
    int first = MASKS::LEFT ? max(row(half) + params.masks.lowest, 0) : 0;
    if constexpr (RANGED) first = max(first, rows.range[half].first);
    return max(first - first_key, 0);
  }
  __device__ __forceinline__ int end_seen(const Rows& rows, int half, int first_key) const {
    int end = params.call.seqlen_k;
    if constexpr (RIGHT) end = min(end, row(half) + params.call.diagonal + 1);
    if constexpr (RANGED) end = min(end, rows.range[half].last);
    return min(end - first_key, BLOCK_N);
  }

  // The keys of a tile that a row sees, but for those that a mask of numbers hides.
  __device__ __forceinline__ KeyBits seen(const View& view, const Rows& rows, int half, int first_key) const {
    KeyBits bits = KeyBits::interval(first_seen(rows, half, first_key), end_seen(rows, half, first_key));
    if constexpr (HIDES) bits.word[0] &= view.words[half][0], bits.word[1] &= view.words[half][1];
    return bits;
  }

  // Keys that a row does not see get -inf.
  __device__ __forceinline__ void hide(float (&s)[BLOCK_N / 2], int half, const KeyBits& bits) const {
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      const uint32 own = bits.word[n / 4] >> 2 * fragment.quad_lane();
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(own >> (n % 4 * 8 + e) & 1)) s[4 * n + 2 * half + e] = negative_infinity();
      }
    }
  }

  // ALiBi's slope of the head, base 2.
  __device__ __forceinline__ float slope() const {
    if constexpr (!MASKS::ALIBI) return 0.0f;
    const MaskParams& masks = params.masks;
    return LOG2_E * masks.slopes[work.batch * masks.slope_batch_stride + work.head * masks.slope_head_stride];
  }
  // Keys between a row and a thread's first key of a tile.
  __device__ __forceinline__ float distance(int half, int first_key) const {
    return static_cast<float>(row(half) + params.masks.position - first_key - 2 * fragment.quad_lane());
  }

  // The sink's logit of the head, base 2.
  __device__ __forceinline__ float sink() const {
    if constexpr (SINKS) {
      const auto* sinks = static_cast<const typename MASKS::Sink*>(params.masks.sinks);
      return LOG2_E * to_float(sinks[work.head * params.masks.sink_head_stride]);
    }
    return negative_infinity();
  }

  // What S begins with where a mask is numbers: these and ALiBi, divided by the scale. Quotients below the range of
  // floats hide a key, as its probability of 0 does. Where they are all that a row has, and where quotients are above
  // the range, the row's sum or its stabilizer shows it, and all is computed again with `score`.
  __device__ __forceinline__ void begin(float (&s)[BLOCK_N / 2], const View& view, float slope, int first_key) const {
    const float inverse = 1.0f / scale, factor = LOG2_E * inverse;
    float steep = slope * inverse;
    if (!(fabsf(steep) < 1e30f)) steep = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float away = MASKS::ALIBI ? distance(half, first_key) : 0.0f;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * half + e];
          const float natural = to_float(element(view.words[half], n, e));
          x = natural * factor;
          if constexpr (MASKS::ALIBI) x = fmaf(-steep, fabsf(away - static_cast<float>(8 * n + e)), x);
        }
      }
    }
  }

  __device__ __forceinline__ SoftCap find_soft_cap() const {
    if constexpr (MASKS::SOFTCAP) return {params.masks.softcap_log2, scale};
    return {};
  }

  // From products FIRST to LAST - 1 to soft-capped scores, base 2.
  template <int FIRST = 0, int LAST = BLOCK_N / 2>
  __device__ __forceinline__ void cap(float (&s)[BLOCK_N / 2], const SoftCap& near) const {
    if constexpr (!MASKS::SOFTCAP) {
#pragma unroll
      for (int i = FIRST; i < LAST; ++i) s[i] = __fmul_rn(s[i], scale);
    } else {
      float largest[4] = {};
#pragma unroll
      for (int i = FIRST; i < LAST; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(s[i]));
      const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      // Products that are no number stay so both ways.
      if (__all_sync(FULL_WARP, most <= near.limit)) {
#pragma unroll
        for (int i = FIRST; i < LAST; ++i) s[i] = near(s[i]);
      } else {
        const float cap = params.masks.softcap_log2, inverse = 1.0f / cap;
#pragma unroll
        for (int i = FIRST; i < LAST; ++i) s[i] = soft_cap(__fmul_rn(s[i], scale), cap, inverse);
      }
    }
  }

  // What follows the soft cap.
  __device__ __forceinline__ void finish(float (&s)[BLOCK_N / 2], const View& view, const Rows& rows, float slope,
                                         int first_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float away = MASKS::ALIBI ? distance(half, first_key) : 0.0f;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * half + e];
          if constexpr (MASKS::ALIBI) x -= slope * fabsf(away - static_cast<float>(8 * n + e));
          if constexpr (ADDS) x = add_mask(x, element(view.words[half], n, e));
        }
      }
      if constexpr (SOME_HIDDEN) hide(s, half, seen(view, rows, half, first_key));
    }
  }

  // From products to scores, base 2.
  __device__ __forceinline__ void score(float (&s)[BLOCK_N / 2], const View& view, const Rows& rows, float slope,
                                        int first_key, const SoftCap& near) const {
    cap(s, near);
    finish(s, view, rows, slope, first_key);
  }

  // The largest of a thread's numbers of a row; those that are none do not count.
  __device__ __forceinline__ static float largest_element(const uint32 (&words)[WORDS]) {
    if constexpr (BYTES == 2) {
      using Pair = typename PairOf<Mask>::Type;
      Pair found = *reinterpret_cast<const Pair*>(&words[0]);
#pragma unroll
      for (int n = 1; n < BLOCK_N / 8; ++n) found = __hmax2(found, *reinterpret_cast<const Pair*>(&words[n]));
      return fmaxf(to_float(found.x), to_float(found.y));
    } else {
      float even = negative_infinity(), odd = even;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
        even = fmaxf(even, to_float(element(words, n, 0)));
        odd = fmaxf(odd, to_float(element(words, n, 1)));
      }
      return fmaxf(even, odd);
    }
  }

  // Not less than what is added to any score of a row in a tile, by all but a mask tensor; -inf when it sees no key.
  __device__ __forceinline__ float highest_of_keys(const Rows& rows, int half, float slope, int first_key) const {
    const int first = first_seen(rows, half, first_key), last = end_seen(rows, half, first_key) - 1;
    float found = 0.0f;
    if constexpr (MASKS::ALIBI) {
      const int own = row(half) + params.masks.position - first_key;
      const auto added = [&](int key) { return -slope * fabsf(static_cast<float>(own - key)); };
      found = fmaxf(added(min(max(own, first), last)), fmaxf(added(first), added(last)));
    }
    return last < first ? negative_infinity() : found;
  }
  // The same with the tensor, of which a thread looks at its own numbers.
  __device__ __forceinline__ float highest(const View& view, const Rows& rows, int half, float slope,
                                           int first_key) const {
    float found = highest_of_keys(rows, half, slope, first_key);
    if constexpr (HIDES) {
      const KeyBits bits = seen(view, rows, half, first_key);
      found = bits.word[0] | bits.word[1] ? found : negative_infinity();
    } else if constexpr (ADDS) {
      found += scaled(largest_element(view.words[half]));
    }
    return found;
  }
  // A mask's number in base 2; a finite one stays so.
  __device__ __forceinline__ static float scaled(float natural) {
    return natural > negative_infinity() ? fmaxf(LOG2_E * natural, LOWEST) : natural;
  }
};

template <int CLUSTER, bool RIGHT, bool RAGGED, typename MEMORY>
struct ScoreMasks<NoMasks, CLUSTER, RIGHT, RAGGED, MEMORY> {
  static constexpr bool READS = false, READS_ROWS = false, ADDS = false, BULK = false, IN_TURN = false, LATE = false;
  struct View {};
};

// What a thread keeps of its masks: of TILES tiles at once.
template <typename RULES, int TILES>
struct MaskState {
  typename RULES::View view[TILES];
  typename RULES::Rows rows;
  float slope, sink;  // of the head, base 2
  SoftCap soft_cap;
  float highest[2];                  // of each row: not less than what is added to any of its scores
  KeyBits seen[TILES][2];            // of each tile and row: keys that the row sees, the thread's own first
  bool sees_first[2];                // whether it sees any of the keys that the stabilizer is found in
  float first[STABILIZER_KEYS / 2];  // what is added to the scores that the stabilizer is found in
};
template <int CLUSTER, bool RIGHT, bool RAGGED, typename MEMORY, int TILES>
struct MaskState<ScoreMasks<NoMasks, CLUSTER, RIGHT, RAGGED, MEMORY>, TILES> {};

}  // namespace microsdpa::hopper::latency
