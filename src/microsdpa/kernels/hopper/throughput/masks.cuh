// Masks of hopper/throughput/kernel.cu: which tiles of keys a query tile visits, and what becomes of their scores.
//
// A lane of an accumulator has keys 8 n + 2 (lane % 4) + e of rows lane / 4 and lane / 4 + 8 of its warp.
#pragma once

#include "../../common/head.cuh"
#include "../../common/masks.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/mma.cuh"
#include "../common/masked_scores.cuh"
#include "../common/tile_scheduler.cuh"
#include "../common/warpgroup.cuh"
#include "added_tile.cuh"
#include "tile_list.cuh"
#include "tile_range.cuh"

namespace microsdpa::hopper::throughput {

// What a kernel does for its masks. RANGED: a tensor of ranges of keys (tile_range.cuh). LISTED: a tensor of booleans,
// for which there are lists of tiles (tile_list.cuh). TABLED: one whose memory has them. ADDED: a tensor of numbers,
// which comes through shared memory. MODIFIED: scores are more than products times a scale.
template <typename MASKS>
struct MaskTraits {
  static constexpr bool RANGED = MASKS::RANGED, LISTED = is_bool<typename MASKS::Mask>;
  static constexpr bool TABLED = is_summed<typename MASKS::Mask>;
  static constexpr bool ADDED = PRESENT<typename MASKS::Mask> && !LISTED && !RANGED;
  static constexpr bool MODIFIED = ADDED || MASKS::SOFTCAP || MASKS::ALIBI, SINKS = PRESENT<typename MASKS::Sink>;
  // Nothing is added to what a soft cap makes: it may be a part of the exponentials.
  static constexpr bool CAPPED_LATE = MASKS::SOFTCAP && !ADDED && !MASKS::ALIBI;
  // ALiBi makes later keys' scores the larger ones: tiles are visited from the last one on, so that stabilizers last.
  static constexpr bool BACKWARDS = MASKS::ALIBI && !LISTED && !RANGED;
  using Added = If<ADDED, typename MASKS::Mask>;
};
template <>
struct MaskTraits<NoMasks> {
  static constexpr bool RANGED = false, LISTED = false, TABLED = false, ADDED = false, MODIFIED = false, SINKS = false,
                        CAPPED_LATE = false, BACKWARDS = false;
  using Added = void;
};

// Whether CTAs take query tiles as they come to them (tile_scheduler.cuh). Those that ranges leave are of any length;
// those under a causal mask take longer on some SMs than on others. Lists, and masks of numbers, keep the fixed order.
template <typename MASKS, bool OVERLAP, bool CAUSAL, int CTAS>
constexpr bool DEALT_TILES = MaskTraits<MASKS>::RANGED || (CAUSAL && OVERLAP && CTAS == 1 &&
                                                           !MaskTraits<MASKS>::LISTED && !MaskTraits<MASKS>::ADDED);

// The first tile of keys that any query from `first_row` on sees.
template <typename MASKS, int BLOCK_N>
__device__ __forceinline__ int first_key_tile(const typename MASKS::Params& params, int first_row) {
  if constexpr (MASKS::LEFT) {
    const int last = (params.call.seqlen_k - 1) / BLOCK_N;
    return min(max(first_row + params.masks.lowest, 0) / BLOCK_N, last);
  }
  return 0;
}

// Tiles from `first` on that `rows` queries from `first_row` on see; at least one, so that rows without keys are
// written too.
template <typename MASKS, bool CAUSAL, int BLOCK_N>
__device__ __forceinline__ int key_tiles_from(int first, const typename MASKS::Params& params, int first_row,
                                              int rows) {
  return max(1, key_tiles<CAUSAL, BLOCK_N>(MASKS::call(params), first_row, rows) - first);
}

// The list of a query tile. Those of scratch memory have been cut off where no row sees a key; of a table's this begins
// where a row does.
template <typename MASKS, int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ auto list_of(const MaskedParams& params, const WorkTile& work) {
  if constexpr (MaskTraits<MASKS>::TABLED) {
    TableList<BLOCK_M, BLOCK_N> list(params, work.batch, work.head, work.first_row);
    if constexpr (MASKS::LEFT) list.begin_at(first_key_tile<MASKS, BLOCK_N>(params, work.first_row));
    return list;
  } else {
    return TileList<BLOCK_M, BLOCK_N>(params, work.batch, work.head, work.first_row);
  }
}

template <typename MASKS>
using WorkOf = WorkTileOf<MaskTraits<MASKS>::RANGED>;

// A query tile as the schedule has it, with the tiles of keys that the masks leave. Not for ranges.
template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ WorkTile masked_work(const typename MASKS::Params& params, WorkTile work) {
  if constexpr (MASKS::ANY) {
    if (work.tiles == 0) return work;
    if constexpr (MaskTraits<MASKS>::TABLED) {
      auto list = list_of<MASKS, BLOCK_M, BLOCK_N>(params, work);
      if constexpr (CAUSAL) list.end_at(key_tiles<CAUSAL, BLOCK_N>(params.call, work.first_row, BLOCK_M));
      work.tiles = list.count;
    } else if constexpr (MaskTraits<MASKS>::LISTED) {
      work.tiles = *list_of<MASKS, BLOCK_M, BLOCK_N>(params, work).count;
    } else if constexpr (MASKS::LEFT) {
      const int first = first_key_tile<MASKS, BLOCK_N>(params, work.first_row);
      work.tiles = key_tiles_from<MASKS, CAUSAL, BLOCK_N>(first, params, work.first_row, BLOCK_M);
    }
  }
  return work;
}

// The tiles of keys that a query tile visits, by their place.
template <typename MASKS, int BLOCK_M, int BLOCK_N>
struct VisitedTiles {
  int first;
  int last;
  const int32* entries;

  __device__ __forceinline__ VisitedTiles(const typename MASKS::Params& params, const WorkOf<MASKS>& work) {
    if constexpr (MaskTraits<MASKS>::LISTED) {
      entries = list_of<MASKS, BLOCK_M, BLOCK_N>(params, work).entries;
    } else if constexpr (MaskTraits<MASKS>::RANGED) {
      first = work.first_tile;
    } else {
      first = first_key_tile<MASKS, BLOCK_N>(params, work.first_row), last = first + work.tiles - 1;
    }
  }
  __device__ __forceinline__ int operator[](int place) const {
    if constexpr (MaskTraits<MASKS>::LISTED) return ListEntry(entries[place]).tile();
    return MaskTraits<MASKS>::BACKWARDS ? last - place : first + place;
  }
};

template <int BLOCK_M, int BLOCK_N>
struct VisitedTiles<NoMasks, BLOCK_M, BLOCK_N> {
  __device__ __forceinline__ VisitedTiles(const AttentionParams&, const WorkTile&) {}
  __device__ __forceinline__ int operator[](int place) const { return place; }
};

// What SoftCap does, from products whose scores are at most NEAR of the cap and without the exponential unit: a
// polynomial, least squares that were weighted until all its largest relative errors were the same, 6e-7. Of -inf it
// makes -inf.
struct NearSoftCap {
  static constexpr float NEAR = 0.75f;

  float limit;  // of products
  float coefficient[5];

  __device__ __forceinline__ NearSoftCap(float cap, float scale) {
    constexpr float OF_TANH[5] = {0.999999464f, -0.333282501f, 0.132589832f, -0.0500562824f, 0.0129296156f};
    const float factor = scale / cap;
    float power = scale;
#pragma unroll
    for (int i = 0; i < 5; ++i) coefficient[i] = OF_TANH[i] * power, power *= factor * factor;
    // Negative scales, and factors whose powers are out of range, are left to the others.
    limit = factor < 1e3f && coefficient[4] > 1e-37f ? NEAR / factor : -1.0f;
  }
  // A score divided by its product.
  __device__ __forceinline__ float operator()(float product, int = 0) const {
    const float square = product * product;
    float sum = coefficient[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, coefficient[i]);
    return sum;
  }
};

// No numbers to be added.
struct NothingAdded {
  __device__ __forceinline__ int load(int) const { return 0; }
};

// The masks of a consumer's 64 rows of a query tile.
template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N>
struct TileMasks {
  using Traits = MaskTraits<MASKS>;
  using Scores = float[BLOCK_N / 2];
  using Mask = typename MASKS::Mask;
  using List = IfElse<Traits::TABLED, TableList<BLOCK_M, BLOCK_N>, TileList<BLOCK_M, BLOCK_N>>;
  static constexpr float LOG2_E = 1.44269504088896340736f;

  const MaskedParams& params;
  int first_row;   // this lane's
  int first_tile;  // of keys, for the query tile
  int last_tile;
  float slope;           // ALiBi's, base 2
  const int32* entries;  // of the list
  typename List::LaneWords words;
  bool whole;         // the mask hides nothing in the tile
  uint32 seen[2];     // else, of a boolean mask: bit 2 n + e of each row
  KeyRange range[2];  // of each row
  int tile;           // of keys: its number
  bool late;          // CAPPED_LATE: the tile's scores are still products
  RowShifts<Mask> shifts;

  __device__ __forceinline__ explicit TileMasks(const MaskedParams& params) : params(params) {}

  // `row`: this lane's first one of the query tile.
  __device__ __forceinline__ void begin(const WorkOf<MASKS>& work, int row) {
    const MaskParams& masks = params.masks;
    first_row = work.first_row + row;
    if constexpr (Traits::RANGED) {
      first_tile = work.first_tile;
    } else {
      first_tile = first_key_tile<MASKS, BLOCK_N>(params, work.first_row);
    }
    last_tile = first_tile + work.tiles - 1;
    if constexpr (Traits::ADDED) shifts.find(masks, work.batch, work.head, first_row);
    if constexpr (MASKS::ALIBI) {
      slope = LOG2_E * masks.slopes[work.batch * masks.slope_batch_stride + work.head * masks.slope_head_stride];
    }
    if constexpr (Traits::LISTED) {
      const List list = list_of<MASKS, BLOCK_M, BLOCK_N>(params, work);
      entries = list.entries, words = list.lane_words(params, row);
    }
    if constexpr (Traits::RANGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last_row = params.call.seqlen_q - 1;
        range[half] = keys_in(given_range(params, work.batch, work.head, min(first_row + 8 * half, last_row)),
                              params.call.seqlen_k);
      }
    }
  }

  // Starts to read what is known of the tile, by its place among those of the query tile.
  __device__ __forceinline__ void fetch(int place) {
    tile = Traits::BACKWARDS ? last_tile - place : first_tile + place;
    if constexpr (Traits::LISTED) {
      const ListEntry found(entries[place]);
      tile = found.tile(), whole = found.whole();
      if (!whole) words.read(params, tile, first_row, seen);
    }
  }

  // Whether ranges hide all of the tile from the warp's rows; else it is known whether they hide nothing.
  __device__ __forceinline__ bool hides_tile() {
    const int begin = BLOCK_N * tile, end = min(begin + BLOCK_N, params.call.seqlen_k);
    bool none = true, all = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // mutation: in a tile that is not skipped, each key is hidden
      none &= max(range[half].first, begin) >= min(range[half].last, end);
      // mutation: in a tile that is not called whole, each row's range is applied
      all &= range[half].first <= begin && end <= range[half].last;
    }
    whole = __all_sync(FULL_WARP, all);
    return __all_sync(FULL_WARP, none);
  }

  // The logit, in base 2, that a head's sink adds to the sums of its rows.
  __device__ __forceinline__ static float sink_of(const MaskedParams& params, int head) {
    return LOG2_E *
           to_float(static_cast<const typename MASKS::Sink*>(params.masks.sinks)[head * params.masks.sink_head_stride]);
  }

  // Turns products into scores; of keys that a row does not see they are -inf. `added`: numbers to be added, by load(n)
  // for the keys of two columns of the accumulator.
  template <typename Added>
  __device__ __forceinline__ void apply(Scores& s, const Added& added) {
    if constexpr (MASKS::SOFTCAP) {
      late = are_near(s);
      if (!late) {
        cap_far(s);
      } else if (!Traits::CAPPED_LATE) {
        cap_near(s);
      }
    }
    if constexpr (Traits::MODIFIED) modify(s, added);
    if constexpr (Traits::LISTED || Traits::RANGED) {
      if (!whole) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (Traits::RANGED) {
            const int start = BLOCK_N * tile + static_cast<int>(2 * (threadIdx.x % 4));
            const int first = range[half].first - start, last = range[half].last - start;
            hide_where<BLOCK_N>(s, half, [&](int n, int e) { return 8 * n + e < first || 8 * n + e >= last; });
          } else {
            hide_where<BLOCK_N>(s, half, [&](int n, int e) { return !(seen[half] >> (2 * n + e) & 1); });
          }
        }
      }
    }
    hide_outside(s);
  }

  __device__ __forceinline__ NearSoftCap near_cap() const {
    return {params.masks.softcap_log2, params.call.scale_log2};
  }
  __device__ __forceinline__ void cap_near(Scores& s) const {
    const NearSoftCap near = near_cap();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] *= near(s[i]);
  }

 private:
  // Whether all of a warp's products are near ones. Those that are no number stay so however they are capped.
  __device__ __forceinline__ bool are_near(const Scores& s) const {
    float largest[4] = {};
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(s[i]));
    const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return __all_sync(FULL_WARP, most <= near_cap().limit);
  }
  // From products to soft-capped scores, not all of which are near: all threads have the same cap.
  __device__ __forceinline__ void cap_far(Scores& s) const {
    const float scale = params.call.scale_log2, cap = params.masks.softcap_log2;
    if (cap > SoftCap<true>::LARGE) {
      const SoftCap<true> capped(cap);
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = capped(s[i] * scale);
    } else {
      const SoftCap<false> capped(cap);
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = capped(s[i] * scale);
    }
  }

  // What follows a soft cap, or the product.
  template <typename Added>
  __device__ __forceinline__ void modify(Scores& s, const Added& added) const {
    const float scale = params.call.scale_log2;
    // Of this lane's first query to its first key of the tile.
    const float distance = static_cast<float>(first_row + params.masks.position - BLOCK_N * tile -
                                              static_cast<int>(2 * (threadIdx.x % 4)));
#pragma unroll
    for (int pair = 0; pair < BLOCK_N / 8; pair += 2) {
      const auto elements = added.load(pair);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = pair + i / 4, half = i / 2 % 2, e = i % 2;
        float& x = s[4 * n + 2 * half + e];
        if constexpr (!MASKS::SOFTCAP) x *= scale;
        if constexpr (MASKS::ALIBI) x = fmaf(-slope, fabsf(distance + static_cast<float>(8 * half - 8 * n - e)), x);
        if constexpr (Traits::ADDED) x = add_mask<typename ElementOf<Mask>::Type>(x, elements.at(half, i / 4, e));
      }
    }
  }

  // Keys beyond the last one, and those before and behind what each row sees.
  __device__ __forceinline__ void hide_outside(Scores& s) const {
    const int first_key = BLOCK_N * tile,
              warpgroup_row = first_row - static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    const int keys = params.call.seqlen_k - first_key;
    const int right = warpgroup_row + params.call.diagonal + 1 - first_key;  // of the warpgroup's first row
    if (min(keys, CAUSAL ? right : BLOCK_N) < BLOCK_N) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row - warpgroup_row + 8 * half;
        const int visible = (CAUSAL ? min(keys, right + row) : keys) - static_cast<int>(2 * (threadIdx.x % 4));
        hide_where<BLOCK_N>(s, half, [&](int n, int e) { return 8 * n + e >= visible; });
      }
    }
    if constexpr (MASKS::LEFT) {
      const int left = warpgroup_row + params.masks.lowest - first_key;
      if (left + ROWS - 1 > 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int hidden = left + (first_row - warpgroup_row) + 8 * half - static_cast<int>(2 * (threadIdx.x % 4));
          hide_where<BLOCK_N>(s, half, [&](int n, int e) { return 8 * n + e < hidden; });
        }
      }
    }
  }
};

// Without masks.
template <bool CAUSAL, int BLOCK_M, int BLOCK_N>
struct TileMasks<NoMasks, CAUSAL, BLOCK_M, BLOCK_N> {
  __device__ __forceinline__ explicit TileMasks(const AttentionParams&) {}
};

}  // namespace microsdpa::hopper::throughput
