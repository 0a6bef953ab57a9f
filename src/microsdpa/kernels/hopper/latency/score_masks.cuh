// What masks make of the scores of hopper/latency/kernel.cu: windows, ALiBi, mask tensors, soft caps and sinks.
//
// A thread has two rows, and of every tile of 64 keys the keys 8 n + 2 q + e, where q is its place in the quad. Masks
// are read straight from global memory while the first keys are on their way. Unrolled rounds begin S with a mask's
// numbers (`begin`), give no probability to keys that rows do not see (`seen`), and have ALiBi in their exponents. The
// ring and the second pass make scores of products in the order of mask_params.cuh (`score`).
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/masks.cuh"
#include "../../ptx/wgmma.cuh"
#include "mask_tiles.cuh"
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

// Bits of the bytes of a word that are not zero.
__device__ __forceinline__ uint32 bits_of_bytes(uint32 word) {
  const uint32 highest = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
  return highest * 0x00204081u >> 28;
}

template <typename T>
struct PairOf {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// RIGHT: what a row sees has a right end. RAGGED: so, or keys do not fill the tiles. MEMORY: what bulk copies bring of a
// mask tensor; NoMaskTiles where threads read it.
template <typename MASKS, int CLUSTER, bool RIGHT, bool RAGGED, typename MEMORY>
struct ScoreMasks {
  using Mask = typename MASKS::Mask;
  static constexpr bool RANGED = MASKS::RANGED;
  static constexpr bool READS = PRESENT<Mask> && !RANGED, HIDES = is_bool<Mask>, ADDS = READS && !HIDES;
  static constexpr bool BULK = HAS_MASK_TILES<MEMORY>;
  static constexpr bool SOME_HIDDEN = HIDES || RANGED || MASKS::LEFT || RAGGED;  // but for what a mask of numbers hides
  static constexpr bool SINKS = PRESENT<typename MASKS::Sink>;
  static constexpr bool READS_ROWS = !READS && (RANGED || MASKS::ALIBI);  // numbers of a row or of all
  static constexpr bool LATE = READS_ROWS && MASKS::ALIBI;             // looked at beside the first products
  static constexpr bool WAITS = PRESENT<Mask> && !BULK || MASKS::ALIBI || SINKS;   // for the kernel ahead, which may write them
  static constexpr int BYTES = BYTES_OF<Mask>;
  static constexpr int WORDS = READS ? 4 * BYTES : 1;  // of the sixteen elements that a thread reads of a row and tile

  // What a tile's rows have of the mask, as it was read, or settled: KeyBits of a bool mask, or pairs of numbers.
  struct View {
    uint32 words[2][WORDS];
  };
  // Of a thread's rows of the mask, the bytes to them from its first element, or the keys that they see.
  struct Rows {
    int64 start[2];
    bool vectors;
    KeyRange range[2];

    // Keeps the compiler from working it out later.
    __device__ __forceinline__ void hold() {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 words[2] = {static_cast<uint32>(start[half]), static_cast<uint32>(start[half] >> 32)};
        wgmma_fence_registers(words);
        start[half] = static_cast<int64>(static_cast<uint64>(words[1]) << 32 | words[0]);
      }
    }
  };

  const MaskedParams& params;
  const WorkTile& work;
  const Fragment<CLUSTER>& fragment;
  const float scale;  // > 0, base 2
  const MEMORY& memory;

  __device__ __forceinline__ int row(int half) const { return work.first_row + fragment.tile_row(half); }

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

  // Bytes to a row of the mask, to the last one for those past it.
  __device__ __forceinline__ int64 distance_of_row(int row) const {
    const MaskParams& masks = params.masks;
    return BYTES * (work.batch * masks.mask_strides.batch + work.head * masks.mask_strides.head +
                    min(row, params.call.seqlen_q - 1) * masks.mask_strides.row);
  }
  __device__ __forceinline__ const char* mask() const { return static_cast<const char*>(params.masks.mask); }
  __device__ __forceinline__ static uint32 code(const char* element) {
    if constexpr (BYTES == 1) return *reinterpret_cast<const unsigned char*>(element);
    if constexpr (BYTES == 2) return *reinterpret_cast<const uint16*>(element);
    return *reinterpret_cast<const uint32*>(element);
  }

  // Finds where a thread's rows of the mask are, and whether all rows can be read 16 bytes at a time.
  __device__ __forceinline__ Rows find_rows() const {
    Rows rows{};
    if constexpr (READS && !BULK) {
      const MaskParams& masks = params.masks;
      const int64 distances = reinterpret_cast<int64>(mask() + distance_of_row(0)) | masks.mask_strides.row * BYTES;
      rows.vectors = masks.mask_column_stride == 1 && distances % 16 == 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.start[half] = distance_of_row(row(half));
    }
    return rows;
  }

  // Of four vectors that a row of numbers in FP32 has for a quad, the one that a lane reads.
  __device__ __forceinline__ int place() const {
    return BYTES == 4 ? fragment.quad_lane() % 2 * 2 + fragment.quad_lane() / 2 : fragment.quad_lane();
  }

  // Reads the ends of the keys that rows see.
  __device__ __forceinline__ void read_ranges(Rows& rows) const {
    if constexpr (RANGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* ends = reinterpret_cast<const int32*>(mask() + distance_of_row(row(half)));
        rows.range[half] = {max(ends[0], 0), min(ends[params.masks.mask_column_stride], params.call.seqlen_k)};
      }
    }
  }

  // Starts to read the mask for a tile.
  __device__ __forceinline__ void fetch(View& view, const Rows& rows, int first_key) const {
    if constexpr (READS) {
      if (rows.vectors && first_key + BLOCK_N <= params.call.seqlen_k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* from = mask() + rows.start[half] + (first_key * BYTES + 16 * place());
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
            const auto loaded = *reinterpret_cast<const Vector<uint32, 4>*>(from + 16 * w);
#pragma unroll
            for (int i = 0; i < 4; ++i) view.words[half][w + i] = loaded.data[i];
          }
        }
      } else if constexpr (HIDES) {
        fetch_bytes(view, first_key);
      } else {
        fetch_numbers(view, first_key);
      }
    }
  }

  // Takes it from shared memory: of numbers, what belongs to the thread's scores.
  __device__ __forceinline__ void take(View& view, int round, int warpgroup) const {
    if constexpr (HIDES) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* from = memory.chunk(round, warpgroup, fragment.tile_row(half), fragment.quad_lane());
        const auto loaded = *reinterpret_cast<const Vector<uint32, 4>*>(from);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) view.words[half][w] = loaded.data[w];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          Addends<Mask> addends;
          addends.load(memory, round, warpgroup, part, [&](int row) { return fragment.tile_row(half, row); });
#pragma unroll
          for (int w = 0; w < WORDS / 2; ++w) view.words[half][WORDS / 2 * part + w] = addends.words[w];
        }
      }
    }
  }

  // The same of a bool mask with any strides: a warp reads its rows one after another.
  __device__ __forceinline__ void fetch_bytes(View& view, int first_key) const {
    const int64 step = params.masks.mask_column_stride;
    const int last = params.call.seqlen_k - 1, lane = fragment.lane();
    const int64 low = min(first_key + lane, last) * step, high = min(first_key + 32 + lane, last) * step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 own = 0;
#pragma unroll 4
      for (int i = 0; i < 8; ++i) {
        const char* from = mask() + distance_of_row(work.first_row + fragment.tile_row(half, i));
        const uint32 first = __ballot_sync(FULL_WARP, code(from + low) != 0);
        const uint32 second = __ballot_sync(FULL_WARP, code(from + high) != 0);
        if (lane / 4 == i) own = (fragment.quad_lane() < 2 ? first : second) >> fragment.quad_lane() % 2 * 16;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) view.words[half][w] = (own >> 4 * w & 15) * 0x00204081u & 0x01010101u;
    }
  }

  // Numbers with any strides, a few at a time: the addresses of all would take too many registers.
  __device__ __forceinline__ void fetch_numbers(View& view, int first_key) const {
    constexpr int PER_VECTOR = 16 / BYTES, PER_WORD = 4 / BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) view.words[half][w] = 0;
    }
#pragma unroll 1
    for (int w = 0; w < WORDS; w += 2) {
      const int key = first_key + (w / 4 * 4 + place()) * PER_VECTOR + w % 4 * PER_WORD;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        const char* from = mask() + distance_of_row(row(half));
        uint32 loaded[2 * PER_WORD];
#pragma unroll
        for (int e = 0; e < 2 * PER_WORD; ++e) {
          loaded[e] = code(from + min(key + e, params.call.seqlen_k - 1) * params.masks.mask_column_stride * BYTES);
        }
#pragma unroll
        for (int i = 0; i + 2 < WORDS; ++i) words[i] = words[i + 2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[WORDS - 2 + i] = BYTES == 4 ? loaded[i] : loaded[2 * i] | loaded[2 * i + 1] << 16;
        }
      }
    }
  }

  // Gives each lane of a quad what belongs to its scores: of a bool mask the bits of all keys, of numbers its own
  // pairs.
  __device__ __forceinline__ void settle(View& view) const {
    if constexpr (READS && !(ADDS && BULK)) {
      const bool odd = fragment.quad_lane() % 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        if constexpr (HIDES) {
          uint32 own = 0;
#pragma unroll
          for (int w = 0; w < 4; ++w) own |= bits_of_bytes(words[w]) << 4 * w;
          const uint32 next = __shfl_xor_sync(FULL_WARP, own, 1);
          const uint32 pair = odd ? next | own << 16 : own | next << 16;
          const uint32 other = __shfl_xor_sync(FULL_WARP, pair, 2);
          words[0] = fragment.quad_lane() < 2 ? pair : other;
          words[1] = fragment.quad_lane() < 2 ? other : pair;
        } else if constexpr (BYTES == 2) {
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
            const uint4 pairs = transpose_quad(words[w], words[w + 1], words[w + 2], words[w + 3]);
            words[w] = pairs.x, words[w + 1] = pairs.y, words[w + 2] = pairs.z, words[w + 3] = pairs.w;
          }
        } else {
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32 given = __shfl_xor_sync(FULL_WARP, odd ? words[w + i] : words[w + 2 + i], 1);
              words[w + i] = odd ? given : words[w + i];
              words[w + 2 + i] = odd ? words[w + 2 + i] : given;
            }
          }
        }
      }
    }
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

  __device__ __forceinline__ static Mask element(const uint32 (&words)[WORDS], int n, int e) {
    if constexpr (BYTES == 4) {
      return __uint_as_float(words[2 * n + e]);
    } else {
      const uint16 bits = static_cast<uint16>(words[n] >> 16 * e);
      return *reinterpret_cast<const Mask*>(&bits);
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
      const float natural = largest_element(view.words[half]);
      found += natural > negative_infinity() ? fmaxf(LOG2_E * natural, LOWEST) : natural;
    }
    return found;
  }
};

template <int CLUSTER, bool RIGHT, bool RAGGED, typename MEMORY>
struct ScoreMasks<NoMasks, CLUSTER, RIGHT, RAGGED, MEMORY> {
  static constexpr bool READS = false, READS_ROWS = false, ADDS = false, BULK = false, LATE = false;
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
