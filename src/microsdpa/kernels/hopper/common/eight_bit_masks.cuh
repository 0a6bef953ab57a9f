// Masks of the kernels with 8-bit values of Q and K that fill the chip: windows, soft caps, ALiBi, sinks, and ranges of
// keys.
//
// A lane of an accumulator has keys 8 n + 2 (lane % 4) + e of rows lane / 4 and lane / 4 + 8 of its warp.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/eight_bit_params.cuh"
#include "../../common/masks.cuh"
#include "../../common/online_softmax.cuh"
#include "../../common/softmax.cuh"
#include "eight_bit.cuh"
#include "masked_scores.cuh"

namespace microsdpa::hopper {

// What a kernel gets under masks.
struct EightBitMasked {
  EightBitParams call;
  MaskParams masks;
};

template <typename MASKS>
struct EightBitParamsOf {
  using Type = EightBitMasked;
  __device__ __forceinline__ static const EightBitParams& call(const EightBitMasked& given) { return given.call; }
};
template <>
struct EightBitParamsOf<NoMasks> {
  using Type = EightBitParams;
  __device__ __forceinline__ static const EightBitParams& call(const EightBitParams& given) { return given; }
};

// The tiles of keys that a query tile visits: all that its rows see by the window. ALiBi makes later keys' scores the
// larger ones: tiles are then visited from the last one on, so that stabilizers last.
template <typename MASKS, int BLOCK_N>
struct MaskedTiles {
  const EightBitMasked& params;

  __device__ __forceinline__ int first(const WorkTile& work) const {
    if constexpr (!MASKS::LEFT) return 0;
    const int last = (params.call.seqlen_k - 1) / BLOCK_N;
    return min(max(work.first_row + params.masks.lowest, 0) / BLOCK_N, last);
  }
  __device__ __forceinline__ WorkTile seen(WorkTile work) const {
    work.tiles = max(1, work.tiles - first(work));
    return work;
  }
  // By its place among them.
  __device__ __forceinline__ int key_tile(const WorkTile& work, int place) const {
    return first(work) + (MASKS::ALIBI ? work.tiles - 1 - place : place);
  }
};
template <typename MASKS, int BLOCK_N>
struct TilesOf {
  using Type = MaskedTiles<MASKS, BLOCK_N>;
};
template <int BLOCK_N>
struct TilesOf<NoMasks, BLOCK_N> {
  struct Type : AllTiles {
    __device__ __forceinline__ explicit Type(const EightBitParams&) {}
  };
};

// The masks of a lane's two rows.
template <typename MASKS, bool CAUSAL, int BLOCK_N>
struct RowMasks {
  using Scores = float[BLOCK_N / 2];
  static constexpr bool MODIFIED = MASKS::SOFTCAP || MASKS::ALIBI;  // scores are more than products times a factor
  static constexpr bool SINKS = PRESENT<typename MASKS::Sink>;
  static constexpr float LOG2_E = 1.44269504088896340736f;
  static_assert(MASKS::RANGED || !PRESENT<typename MASKS::Mask>, "no other masks are read from memory");

  const EightBitMasked& params;
  MaskedTiles<MASKS, BLOCK_N> tiles;
  WorkTile work;
  int first_row;      // the lane's
  float factor[2];    // MODIFIED: of products, base 2
  float slope;        // ALiBi's, base 2
  KeyRange range[2];  // of each row

  __device__ __forceinline__ explicit RowMasks(const EightBitMasked& params) : params(params), tiles{params} {}

  // `row`: the lane's first. `by`: what products are to be multiplied with, which is done here where masks want it.
  __device__ __forceinline__ void begin(const WorkTile& next, int row, float (&by)[2]) {
    work = next, first_row = row;
    const MaskParams& masks = params.masks;
    if constexpr (MODIFIED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = by[half], by[half] = 1.0f;
    }
    if constexpr (MASKS::ALIBI) {
      slope = LOG2_E * masks.slopes[work.batch * masks.slope_batch_stride + work.head * masks.slope_head_stride];
    }
    if constexpr (MASKS::RANGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int existing = min(row + 8 * half, params.call.seqlen_q - 1);
        const int32* ends = static_cast<const int32*>(masks.mask) + work.batch * masks.mask_strides.batch +
                            work.head * masks.mask_strides.head + existing * masks.mask_strides.row;
        range[half] = {max(ends[0], 0), min(ends[masks.mask_column_stride], params.call.seqlen_k)};
      }
    }
  }

  // Keys from `first` to `last` - 1 that a row sees.
  __device__ __forceinline__ KeyRange visible(int half) const {
    const int row = first_row + 8 * half;
    KeyRange found{0, params.call.seqlen_k};
    if constexpr (CAUSAL) found.last = min(found.last, row + params.call.diagonal + 1);
    if constexpr (MASKS::LEFT) found.first = row + params.masks.lowest;
    if constexpr (MASKS::RANGED) {
      found.first = max(found.first, range[half].first), found.last = min(found.last, range[half].last);
    }
    return found;
  }

  // Turns products of a tile, by its place, into scores; of keys that a row does not see they are -inf.
  __device__ __forceinline__ void apply(Scores& s, int place) const {
    const int first_key = BLOCK_N * tiles.key_tile(work, place), lane_key = first_key + 2 * (threadIdx.x % 4);
    if constexpr (MASKS::SOFTCAP) {
      if (params.masks.softcap_log2 > SoftCap<true>::LARGE) {
        modify<true>(s, lane_key);
      } else {
        modify<false>(s, lane_key);
      }
    } else if constexpr (MODIFIED) {
      modify<false>(s, lane_key);
    }
    KeyRange seen[2];
    bool all = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half] = visible(half);
      all = all && seen[half].first <= first_key && first_key + BLOCK_N <= seen[half].last;
    }
    if (__all_sync(FULL_WARP, all)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = seen[half].first - lane_key, last = seen[half].last - lane_key;
      hide_where<BLOCK_N>(s, half, [&](int n, int e) { return 8 * n + e < first || 8 * n + e >= last; });
    }
  }

  // Adds the head's sink to a row's sum, of which it has a share but no value. Gives what O is to be multiplied by.
  __device__ __forceinline__ float with_sink(const WorkTile& of, float& sum, float& stabilizer) const {
    const auto* sinks = static_cast<const typename MASKS::Sink*>(params.masks.sinks);
    const float sink = LOG2_E * to_float(sinks[of.head * params.masks.sink_head_stride]);
    const float larger = sum == 0.0f ? sink : fmaxf(sink, stabilizer);
    const float own = sum == 0.0f ? 0.0f : ex2_approx(stabilizer - finite(larger));
    sum = sum * own + ex2_approx(sink - finite(larger)), stabilizer = larger;
    return own * normalizer(sum);
  }

 private:
  template <bool EXACT_CAP>
  __device__ __forceinline__ void modify(Scores& s, int lane_key) const {
    const SoftCap<EXACT_CAP> capped(MASKS::SOFTCAP ? params.masks.softcap_log2 : 1.0f);
    const float distance = static_cast<float>(first_row + params.masks.position - lane_key);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      const int n = i / 4, half = i / 2 % 2, e = i % 2;
      float x = s[i] * factor[half];
      if constexpr (MASKS::SOFTCAP) x = capped(x);
      if constexpr (MASKS::ALIBI) x = fmaf(-slope, fabsf(distance + static_cast<float>(8 * half - 8 * n - e)), x);
      s[i] = x;
    }
  }
};

template <bool CAUSAL, int BLOCK_N>
struct RowMasks<NoMasks, CAUSAL, BLOCK_N> {
  static constexpr bool SINKS = false;
  __device__ __forceinline__ explicit RowMasks(const EightBitParams&) {}
};

}  // namespace microsdpa::hopper
