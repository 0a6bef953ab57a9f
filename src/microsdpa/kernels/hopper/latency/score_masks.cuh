// What masks make of the scores of hopper/latency/kernel.cu: windows, ALiBi, mask tensors, soft caps and sinks.
//
// A thread has two rows, and of every tile of 64 keys the keys 8 n + 2 q + e, where q is its place in the quad. Masks
// are read straight from global memory while the first keys are on their way. Then S begins with what is added to it,
// where there is no soft cap (`begin`); else it is added behind it (`finish`).
#pragma once

#include "../../common/masks.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

constexpr float LOG2_E = 1.44269504088896340736f;

// cap * tanh(x / cap), with an error of at most 5e-7 of it. The exponential unit has enough to do: the quotient begins
// as a polynomial and is improved twice.
__device__ __forceinline__ float soft_cap(float x, float cap, float inverse) {
  const float y = x * inverse;
  const float t = ex2_approx(-2.0f * LOG2_E * fabsf(y));
  const float divisor = 1.0f + t;  // 1 to 2
  float quotient = fmaf(fmaf(0.323232323f, divisor, -1.454545455f), divisor, 2.121212121f);
  quotient = fmaf(quotient, fmaf(-divisor, quotient, 1.0f), quotient);
  quotient = fmaf(quotient, fmaf(-divisor, quotient, 1.0f), quotient);
  const float large = copysignf(1.0f - t, y) * quotient;
  const float square = y * y;
  const float small = fmaf(y * square, fmaf(square, fmaf(square, -0.0539682540f, 0.133333333f), -0.333333333f), y);
  return cap * (fabsf(y) < 0.25f ? small : large);
}

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

template <typename MASKS, int CLUSTER, bool RIGHT>
struct ScoreMasks {
  static_assert(MASKS::ANY, "for calls that have some");
  using Mask = typename MASKS::Mask;
  static constexpr bool READS = PRESENT<Mask>, HIDES = is_bool<Mask>, ADDS = READS && !HIDES;
  static constexpr bool SINKS = PRESENT<typename MASKS::Sink>;
  static constexpr int BYTES = BYTES_OF<Mask>;
  // A thread's elements of a row and tile: 16 consecutive bytes for the quad's bits, or pairs of numbers.
  static constexpr int WORDS = HIDES ? 4 : ADDS ? 4 * BYTES : 1;

  // What a tile's rows have of the mask.
  struct View {
    uint32 words[2][WORDS];
    bool bits;  // of a bool mask: words are KeyBits already
  };

  const MaskedParams& params;
  const WorkTile& work;
  const Fragment<CLUSTER>& fragment;
  const float scale;  // > 0, base 2

  __device__ __forceinline__ int row(int half) const { return work.first_row + fragment.tile_row(half); }

  // Keys that a row sees, masks aside, from the first key of a tile on.
  __device__ __forceinline__ int first_seen(int row, int first_key) const {
    return MASKS::LEFT ? max(row + params.masks.lowest - first_key, 0) : 0;
  }
  __device__ __forceinline__ int end_seen(int row, int first_key) const {
    const int keys = params.call.seqlen_k - first_key;
    return min(RIGHT ? min(keys, row + params.call.diagonal - first_key + 1) : keys, BLOCK_N);
  }

  // A row of the mask, the last one for those past it.
  __device__ __forceinline__ const char* mask_row(int row) const {
    const MaskParams& masks = params.masks;
    return static_cast<const char*>(masks.mask) +
           BYTES * (work.batch * masks.mask_strides.batch + work.head * masks.mask_strides.head +
                    min(row, params.call.seqlen_q - 1) * masks.mask_strides.row);
  }
  __device__ __forceinline__ static uint32 code(const char* element) {
    if constexpr (BYTES == 1) return *reinterpret_cast<const unsigned char*>(element);
    if constexpr (BYTES == 2) return *reinterpret_cast<const uint16*>(element);
    return *reinterpret_cast<const uint32*>(element);
  }

  // Whether elements of every row can be read `bytes` at a time.
  __device__ __forceinline__ bool aligned(int bytes) const {
    const int64 start = reinterpret_cast<int64>(mask_row(0));
    return params.masks.mask_column_stride == 1 && (start | params.masks.mask_strides.row * BYTES) % bytes == 0;
  }

  // Starts to read the mask for a tile.
  __device__ __forceinline__ void fetch(View& view, int first_key) const {
    if constexpr (READS) {
      if (first_key >= params.call.seqlen_k) return none(view);
      const bool whole = first_key + BLOCK_N <= params.call.seqlen_k;
      if constexpr (HIDES) {
        view.bits = !(whole && aligned(16));
        if (!view.bits) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const char* from = mask_row(row(half)) + first_key + 16 * fragment.quad_lane();
            const auto loaded = *reinterpret_cast<const Vector<uint32, 4>*>(from);
#pragma unroll
            for (int w = 0; w < 4; ++w) view.words[half][w] = loaded.data[w];
          }
        } else {
          fetch_bits(view, first_key);
        }
      } else if (whole && aligned(2 * BYTES)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* from = mask_row(row(half)) + (first_key + 2 * fragment.quad_lane()) * BYTES;
#pragma unroll
          for (int n = 0; n < BLOCK_N / 8; ++n) {
            const auto pair = *reinterpret_cast<const Vector<uint32, BYTES / 2>*>(from + 8 * n * BYTES);
#pragma unroll
            for (int i = 0; i < BYTES / 2; ++i) view.words[half][BYTES / 2 * n + i] = pair.data[i];
          }
        }
      } else {
        fetch_numbers(view, first_key);
      }
    }
  }

  __device__ __forceinline__ static void none(View& view) {
    view.bits = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) view.words[half][w] = 0;
    }
  }

  // The bits of a bool mask with any strides: a warp reads its rows one after another.
  __device__ __forceinline__ void fetch_bits(View& view, int first_key) const {
    const int64 step = params.masks.mask_column_stride;
    const int last = params.call.seqlen_k - 1, lane = fragment.lane();
    const int64 low = min(first_key + lane, last) * step, high = min(first_key + 32 + lane, last) * step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      view.words[half][0] = view.words[half][1] = 0;
#pragma unroll 4
      for (int i = 0; i < 8; ++i) {
        const char* from = mask_row(work.first_row + fragment.tile_row(half, i));
        const uint32 first = __ballot_sync(FULL_WARP, code(from + low) != 0);
        const uint32 second = __ballot_sync(FULL_WARP, code(from + high) != 0);
        if (lane / 4 == i) view.words[half][0] = first, view.words[half][1] = second;
      }
    }
  }

  // Numbers with any strides, four at a time: the addresses of all would take too many registers.
  __device__ __forceinline__ void fetch_numbers(View& view, int first_key) const {
    none(view);
#pragma unroll 1
    for (int key = first_key + 2 * fragment.quad_lane(); key < first_key + BLOCK_N; key += 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        uint32 loaded[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64 last = min(key + e, params.call.seqlen_k - 1);
          loaded[e] = code(mask_row(row(half)) + last * params.masks.mask_column_stride * BYTES);
        }
#pragma unroll
        for (int w = 0; w + BYTES / 2 < WORDS; ++w) words[w] = words[w + BYTES / 2];
        if constexpr (BYTES == 2) {
          words[WORDS - 1] = loaded[0] | loaded[1] << 16;
        } else {
          words[WORDS - 2] = loaded[0], words[WORDS - 1] = loaded[1];
        }
      }
    }
  }

  // Turns what was read of a bool mask into bits: sixteen keys of each lane of a quad become all of them in each.
  __device__ __forceinline__ void settle(View& view) const {
    if constexpr (HIDES) {
      if (view.bits) return;
      view.bits = true;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        uint32 own = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) own |= bits_of_bytes(words[w]) << 4 * w;
        const uint32 next = __shfl_xor_sync(FULL_WARP, own, 1);
        const uint32 pair = fragment.quad_lane() % 2 == 0 ? own | next << 16 : next | own << 16;
        const uint32 other = __shfl_xor_sync(FULL_WARP, pair, 2);
        words[0] = fragment.quad_lane() < 2 ? pair : other;
        words[1] = fragment.quad_lane() < 2 ? other : pair;
      }
    }
  }

  // The keys of a tile that a row sees, but for those that a mask of numbers hides.
  __device__ __forceinline__ KeyBits seen(const View& view, int half, int first_key) const {
    KeyBits bits = KeyBits::interval(first_seen(row(half), first_key), end_seen(row(half), first_key));
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

  // What S begins with: the part of the score beside the product, divided by the scale. Where that is out of the range
  // of floats the row's sum or its stabilizer shows it, and all is computed again with `score`.
  __device__ __forceinline__ void begin(float (&s)[BLOCK_N / 2], const View& view, float slope, int first_key) const {
    constexpr float LOWEST = -3.402823466e38f;
    const float factor = LOG2_E / scale;
    float steep = slope / scale;
    if (!(fabsf(steep) < 1e30f)) steep = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float away = MASKS::ALIBI ? distance(half, first_key) : 0.0f;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * half + e];
          x = MASKS::ALIBI ? -steep * fabsf(away - static_cast<float>(8 * n + e)) : 0.0f;
          if constexpr (ADDS) {
            const float natural = to_float(element(view.words[half], n, e));
            x = fmaf(natural, factor, x);
            // Of numbers in FP16 the quotients are finite.
            if (HIDING_WORD<Mask> != HIDING_WORD<__half> && x == negative_infinity() && natural > x) x = LOWEST;
          }
        }
      }
      if (!ADDS || RIGHT || MASKS::LEFT || first_key + BLOCK_N > params.call.seqlen_k) {
        hide(s, half, seen(view, half, first_key));
      }
    }
  }

  // From products to soft-capped scores, base 2.
  __device__ __forceinline__ void cap(float (&s)[BLOCK_N / 2]) const {
    const float cap = params.masks.softcap_log2, inverse = 1.0f / cap;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      s[i] = __fmul_rn(s[i], scale);
      if constexpr (MASKS::SOFTCAP) s[i] = soft_cap(s[i], cap, inverse);
    }
  }

  // What follows the soft cap.
  __device__ __forceinline__ void finish(float (&s)[BLOCK_N / 2], const View& view, float slope, int first_key) const {
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
      if (!ADDS || RIGHT || MASKS::LEFT || first_key + BLOCK_N > params.call.seqlen_k) {
        hide(s, half, seen(view, half, first_key));
      }
    }
  }

  // From products to scores, base 2.
  __device__ __forceinline__ void score(float (&s)[BLOCK_N / 2], const View& view, float slope, int first_key) const {
    cap(s);
    finish(s, view, slope, first_key);
  }

  // Not less than what is added to any score of a row in a tile, by all but a mask tensor; -inf when it sees no key.
  __device__ __forceinline__ float highest(int half, float slope, int first_key) const {
    const int first = first_seen(row(half), first_key), last = end_seen(row(half), first_key) - 1;
    if (last < first) return negative_infinity();
    if constexpr (!MASKS::ALIBI) return 0.0f;
    const int own = row(half) + params.masks.position - first_key;
    const auto added = [&](int key) { return -slope * fabsf(static_cast<float>(own - key)); };
    return fmaxf(added(min(max(own, first), last)), fmaxf(added(first), added(last)));
  }
};

// What a thread keeps of its masks: of TILES tiles at once.
template <typename MASKS, int CLUSTER, bool RIGHT, int TILES>
struct MaskState {
  typename ScoreMasks<MASKS, CLUSTER, RIGHT>::View view[TILES];
  float slope, sink;                 // of the head, base 2
  float highest[2];                  // of each row: not less than what is added to any of its scores
  float first[STABILIZER_KEYS / 2];  // what is added to the scores that the stabilizer is found in
};
template <int CLUSTER, bool RIGHT, int TILES>
struct MaskState<NoMasks, CLUSTER, RIGHT, TILES> {};

}  // namespace microsdpa::hopper::latency
