// Masks in a kernel: which keys a lane's rows see, and what becomes of their scores.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "element.cuh"
#include "mask_params.cuh"
#include "mma_tile.cuh"
#include "online_softmax.cuh"

namespace microsdpa {

// A mask of two numbers a row: its query sees the keys from `first` on that come before `last`.
struct KeyRange {
  int32 first;
  int32 last;
};

// Booleans, a byte each. Behind those of each row come a summary, a byte for 32 keys; a bit for each key, in groups of
// 128 keys; and lists of tiles of keys, for tiles of 128, 96 and 64 (call/summary.py).
struct SummedBool {
  static constexpr int GRANULE = 32, ALIGNMENT = 128, NONE = 0, ALL = 2;
  static constexpr int GROUP = 128, GROUP_BYTES = GROUP / 8, TILE_ROWS = 128;
  bool value;

  __device__ __forceinline__ static int filled(int bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
  // Bytes of a list: how many tiles it names, and room for all of them.
  template <int BLOCK_N>
  __device__ __forceinline__ static int list_bytes(int keys) {
    return 4 + (keys + BLOCK_N - 1) / BLOCK_N * 4;
  }
  // From a row's first boolean to its summary, its bits and its list.
  __device__ __forceinline__ static int summary(int keys) { return filled(keys); }
  __device__ __forceinline__ static int bits(int keys) {
    return summary(keys) + filled((keys + GRANULE - 1) / GRANULE);
  }
  template <int BLOCK_N>
  __device__ __forceinline__ static int list(int keys) {
    static_assert(BLOCK_N == 128 || BLOCK_N == 96 || BLOCK_N == 64, "there are lists of these tiles");
    const int first = bits(keys) + filled(((keys + GROUP - 1) / GROUP + 1) * GROUP_BYTES);
    return first + (BLOCK_N < 128 ? list_bytes<128>(keys) : 0) + (BLOCK_N < 96 ? list_bytes<96>(keys) : 0);
  }
};

// Of the type of a mask's or sink's elements, which is void for none.
template <typename T>
constexpr bool PRESENT = true;
template <>
constexpr bool PRESENT<void> = false;
template <typename T>
constexpr bool is_bool = false;
template <>
constexpr bool is_bool<bool> = true;
template <>
constexpr bool is_bool<SummedBool> = true;
template <typename T>
constexpr bool is_summed = false;
template <>
constexpr bool is_summed<SummedBool> = true;
template <typename T>
constexpr bool is_range = false;
template <>
constexpr bool is_range<KeyRange> = true;
template <typename T>
constexpr int BYTES_OF = sizeof(T);
template <>
constexpr int BYTES_OF<void> = 4;
template <>
constexpr int BYTES_OF<KeyRange> = 4;  // of each of the two

// -inf, in each of a word's elements.
template <typename T>
constexpr uint32 HIDING_WORD = 0xff800000u;
template <>
constexpr uint32 HIDING_WORD<__half> = 0xfc00fc00u;
template <>
constexpr uint32 HIDING_WORD<__nv_bfloat16> = 0xff80ff80u;

__device__ __forceinline__ float to_float(float x) { return x; }

// A score in base 2 with a mask's element added to it, which hides its key when it is -inf. Finite numbers stay finite:
// the lowest one, with which some callers mean -inf, still leaves a row that has nothing else an average, as it does in
// exact arithmetic. NaN stays NaN, which fmaxf would not let it.
template <typename T>
__device__ __forceinline__ float add_mask(float score, T element) {
  constexpr float LOG2_E = 1.44269504088896340736f, LOWEST = -3.402823466e38f;
  const float natural = to_float(element), scaled = natural * LOG2_E;
  const float visible = natural == negative_infinity() ? negative_infinity() : score;
  return BYTES_OF<T> == 2 && HIDING_WORD<T> == HIDING_WORD<__half> ? fmaf(natural, LOG2_E, visible)
                                                                   : visible + (scaled < LOWEST ? LOWEST : scaled);
}

// The masks that a kernel is compiled for, beside a right end of what rows see.
template <typename MASK_, bool LEFT_, bool SOFTCAP_, bool ALIBI_, typename SINK_>
struct Masks {
  using Params = MaskedParams;
  using Mask = MASK_;
  using Sink = SINK_;
  static constexpr bool ANY = true, LEFT = LEFT_, SOFTCAP = SOFTCAP_, ALIBI = ALIBI_, RANGED = is_range<MASK_>;
  __device__ __forceinline__ static const AttentionParams& call(const MaskedParams& params) { return params.call; }
};

struct NoMasks {
  using Params = AttentionParams;
  static constexpr bool ANY = false, LEFT = false, RANGED = false;
  __device__ __forceinline__ static const AttentionParams& call(const AttentionParams& params) { return params; }
};

// A quarter of a tile's keys, which follow one another, is each lane's: its elements of a mask are one load's. So keys
// stand in a tile in an order of their own. Gives the key in a row of the tile.
template <int BLOCK_N>
__device__ __forceinline__ unsigned key_in_row(unsigned row) {
  return row % 8 / 2 * (BLOCK_N / 4) + row / 8 * 2 + row % 2;
}

// The rows of a warp, of which this lane has two in every ROW_TILES tiles of 16, and the keys that these see. Row r is
// query r / PACK of head r % PACK of those that are tiled together.
template <typename MASKS, bool RIGHT, int BLOCK_N, int PACK = 1, int ROW_TILES = 1>
struct MaskedRows {
  using Mask = typename MASKS::Mask;
  static constexpr bool RANGED = MASKS::RANGED;
  static constexpr bool READS = PRESENT<Mask> && !RANGED, HIDES = is_bool<Mask>, ADDS = READS && !HIDES;
  static constexpr int KEYS = BLOCK_N / 4;  // of a tile, this lane's; its accumulators [n][e] are of key 2 n + e % 2
  static constexpr int BYTES = BYTES_OF<Mask>, WORDS = KEYS * BYTES / 4;
  static constexpr uint32 ALL = KEYS == 16 ? 0xffffffffu : (1u << 2 * KEYS) - 1;
  static constexpr float LOG2_E = 1.44269504088896340736f;
  static_assert(KEYS <= 16 && KEYS % 4 == 0, "a lane has a bit for each of its scores");

  // What the rows see of one tile.
  struct View {
    uint32 words[ROW_TILES][2][WORDS];  // elements of the mask
    uint32 seen[ROW_TILES];             // bit KEYS half + j is the j-th key's, but for what a mask of numbers hides
  };

  const MaskedParams& params;
  int64 batch;
  int head;      // the first of the PACK
  int first;     // this lane's first row
  int rows;      // of the heads
  bool vectors;  // a lane's elements of the mask can be read in 16 bytes, or all at once
  float slope[ROW_TILES][2];
  KeyRange range[ROW_TILES][2];

  // The warp's first row is `warp_first` of the `rows` of a head, or of PACK heads from `head` on.
  __device__ __forceinline__ MaskedRows(const MaskedParams& params, int64 batch, int head, int warp_first, int rows)
      : params(params),
        batch(batch),
        head(head),
        first(warp_first + lane_index() / 4),
        rows(rows),
        vectors(params.masks.mask_column_stride == 1) {
    const MaskParams& masks = params.masks;
    for_each([&](int t, int half) {
      constexpr int VECTOR = WORDS % 4 == 0 ? 16 : 4 * WORDS;
      if constexpr (RANGED) range[t][half] = range_at(params, mask(first, t, half));
      if constexpr (READS) vectors = vectors && reinterpret_cast<uint64>(mask(first, t, half)) % VECTOR == 0;
      if constexpr (MASKS::ALIBI) {
        const int64 own_head = head + existing(t, half) % PACK;
        slope[t][half] = LOG2_E * masks.slopes[batch * masks.slope_batch_stride + own_head * masks.slope_head_stride];
      }
    });
  }

  // One past the last key that a query sees, masks aside.
  __device__ __forceinline__ static int last_seen(const MaskedParams& params, int query) {
    return RIGHT ? min(params.call.seqlen_k, query + params.call.diagonal + 1) : params.call.seqlen_k;
  }

  // The keys that some of `count` rows from `first_row` on see by their ranges, in every lane; none where none does.
  __device__ __forceinline__ static KeyRange range_of_rows(const MaskedParams& params, int64 batch, int head,
                                                           int first_row, int count, int rows) {
    KeyRange found = {params.call.seqlen_k, 0};
    for (int r = first_row + lane_index(); r < min(first_row + count, rows); r += 32) {
      const KeyRange one = range_at(params, mask_row_at(params, batch, head, r));
      // mutation: a range without keys would add tiles of which the row sees no key
      if (one.first < one.last) found = {min(found.first, one.first), max(found.last, one.last)};
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      found.first = min(found.first, __shfl_xor_sync(FULL_WARP, found.first, distance));
      found.last = max(found.last, __shfl_xor_sync(FULL_WARP, found.last, distance));
    }
    return found;
  }

  // Adds the sinks of the warp's heads to rows that have seen nothing yet.
  __device__ __forceinline__ void add_sinks(OnlineSoftmax<ROW_TILES>& softmax) const {
    if constexpr (PRESENT<typename MASKS::Sink>) {
      for_each([&](int t, int half) {
        const int64 own_head = head + existing(t, half) % PACK;
        const float logit = LOG2_E * to_float(static_cast<const typename MASKS::Sink*>(
                                         params.masks.sinks)[own_head * params.masks.sink_head_stride]);
        softmax.stabilizer[t][half] = logit;
        softmax.sum[t][half] = lane_index() % 4 == 0 && logit > negative_infinity() ? 1.0f : 0.0f;
      });
    }
  }

  // Starts to read the mask for a tile of keys.
  __device__ __forceinline__ void fetch(View& view, int first_key) const {
    if constexpr (READS) {
      const int start = first_key + lane_index() % 4 * KEYS;
      // Where the rows begin is found again for every tile: registers are scarcer than instructions.
      const int own = ROW_TILES > 1 ? opaque(first) : first;
      // mutation: both ways read the same elements
      if (vectors && start + KEYS <= params.call.seqlen_k) {
        constexpr int AT_ONCE = WORDS % 4 == 0 ? 4 : WORDS;
        for_each([&](int t, int half) {
          const char* from = mask(own, t, half) + static_cast<int64>(start) * BYTES;
#pragma unroll
          for (int w = 0; w < WORDS; w += AT_ONCE) {
            const auto loaded = *reinterpret_cast<const Vector<uint32, AT_ONCE>*>(from + 4 * w);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) view.words[t][half][w + i] = loaded.data[i];
          }
        });
        return;
      }
      // A word of each row at a time: the addresses of all elements at once would take too many registers.
      for_each([&](int t, int half) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) view.words[t][half][w] = 0;
      });
#pragma unroll 1
      for (int key = start; key < start + KEYS; key += 4 / BYTES) {
        for_each([&](int t, int half) {
          uint32(&words)[WORDS] = view.words[t][half];
#pragma unroll
          for (int w = 0; w + 1 < WORDS; ++w) words[w] = words[w + 1];
          words[WORDS - 1] = 0;
#pragma unroll
          for (int i = 0; i < 4 / BYTES; ++i) {
            const int64 last = min(key + i, params.call.seqlen_k - 1);
            words[WORDS - 1] |= code(mask(own, t, half) + last * params.masks.mask_column_stride * BYTES)
                                << 8 * BYTES * i;
          }
        });
      }
    }
  }

  // Finds what the rows see of the tile; false when no row of the warp sees any key.
  __device__ __forceinline__ bool look(View& view, int first_key) const {
    const int start = first_key + lane_index() % 4 * KEYS;
    uint32 any = 0;
    for_each([&](int t, int half) {
      const int row = first + 16 * t + 8 * half, query = row / PACK;
      // mutation: a row past the last one is not written
      uint32 seen = row < rows ? below(last_seen(params, query) - start) : 0;
      if constexpr (MASKS::LEFT) seen &= ~below(query + params.masks.lowest - start);
      if constexpr (RANGED) seen &= below(range[t][half].last - start) & ~below(range[t][half].first - start);
      uint32 shown = 0;
      if constexpr (HIDES) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {  // four bytes to four bits, which are set for every byte but 0
          const uint32 word = view.words[t][half][w];
          const uint32 highest = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
          shown |= (highest * 0x00204081u >> 28) << 4 * w;
        }
        seen &= shown;
      } else if constexpr (ADDS) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) shown |= view.words[t][half][w] ^ HIDING_WORD<Mask>;
        if (shown == 0) seen = 0;
      }
      view.seen[t] = half == 0 ? seen : view.seen[t] | seen << KEYS;
      any |= seen;
    });
    return __any_sync(FULL_WARP, any != 0);
  }

  // Turns products into scores, in base 2; of keys that a row does not see they are -inf.
  __device__ __forceinline__ void apply(float (&s)[ROW_TILES][BLOCK_N / 8][4], const View& view, int first_key) const {
    const float cap = params.masks.softcap_log2;
    const int start = first_key + lane_index() % 4 * KEYS;
    for_each([&](int t, int half) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        float& x = s[t][j / 2][2 * half + j % 2];
        x *= params.call.scale_log2;
        if constexpr (MASKS::SOFTCAP) x = cap * tanhf(x / cap);
        if constexpr (MASKS::ALIBI) {
          const int query = (first + 16 * t + 8 * half) / PACK;
          x -= slope[t][half] * fabsf(static_cast<float>(query + params.masks.position - start - j));
        }
        if constexpr (ADDS) x = add_mask(x, element(view.words[t][half], j));
      }
    });
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      if (view.seen[t] == ALL) continue;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!(view.seen[t] >> (e / 2 * KEYS + 2 * n + e % 2) & 1)) s[t][n][e] = negative_infinity();
        }
      }
    }
  }

 private:
  // Calls visit(tile, half) for each of the lane's rows.
  template <typename Visit>
  __device__ __forceinline__ static void for_each(Visit visit) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      visit(t, 0);
      visit(t, 1);
    }
  }

  // The lane's row, or the last one.
  __device__ __forceinline__ int existing(int t, int half) const { return min(first + 16 * t + 8 * half, rows - 1); }

  // That row of the mask, for the lane whose first row is `own`.
  __device__ __forceinline__ const char* mask(int own, int t, int half) const {
    return mask_row_at(params, batch, head, min(own + 16 * t + 8 * half, rows - 1));
  }

  __device__ __forceinline__ static const char* mask_row_at(const MaskedParams& params, int64 batch, int head,
                                                            int row) {
    const MaskParams& masks = params.masks;
    return static_cast<const char*>(masks.mask) +
           BYTES * (batch * masks.mask_strides.batch + (head + row % PACK) * masks.mask_strides.head +
                    row / PACK * masks.mask_strides.row);
  }

  // A row's two numbers, brought among those of the keys: any number may stand there.
  __device__ __forceinline__ static KeyRange range_at(const MaskedParams& params, const char* row) {
    const int32* numbers = reinterpret_cast<const int32*>(row);
    const int32 first = numbers[0], last = numbers[params.masks.mask_column_stride];
    return {max(first, 0), max(0, min(last, params.call.seqlen_k))};
  }

  // The first `count` of a lane's keys, as bits.
  __device__ __forceinline__ static uint32 below(int count) { return (1u << min(max(count, 0), KEYS)) - 1; }

  __device__ __forceinline__ static uint32 code(const char* element) {
    if constexpr (BYTES == 1) return *reinterpret_cast<const unsigned char*>(element);
    if constexpr (BYTES == 2) return *reinterpret_cast<const uint16*>(element);
    return *reinterpret_cast<const uint32*>(element);
  }

  __device__ __forceinline__ static Mask element(const uint32 (&words)[WORDS], int j) {
    if constexpr (BYTES == 4) {
      return __uint_as_float(words[j]);
    } else {
      const uint16 bits = static_cast<uint16>(words[j / 2] >> 16 * (j % 2));
      return *reinterpret_cast<const Mask*>(&bits);
    }
  }
};

}  // namespace microsdpa
