// Caches of 8-bit keys and values beside queries of 16 bits: how they are widened, and what their scales multiply.
//
// Both products are of FP16, which holds every 8-bit value exactly. Queries come to shared memory as FP16 times a power
// of two for each row, so that those of BF16 keep their bits: what is less than 2^-38 of a row's largest is rounded.
#pragma once

#include "../../common/formats.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../common/sequence.cuh"
#include "embedding.cuh"
#include "shared.cuh"

namespace microsdpa::ampere::varlen {

using namespace sequences;

// Formats of a cache: from four values, which are four of a row, or two neighbours of two rows, to two pairs in FP16.
struct E4m3Cache {
  using Encoder = format::E4m3;
  // Values 0 and 1, and 2 and 3.
  static __device__ __forceinline__ void widen_row(uint32 (&pairs)[2], uint32 four) {
    pairs[0] = halves_from_e4m3x2(four & 0xffff), pairs[1] = halves_from_e4m3x2(four >> 16);
  }
  // Values 0 and 2, and 1 and 3.
  static __device__ __forceinline__ void widen_rows(uint32& even, uint32& odd, uint32 four) {
    uint32 pairs[2];
    widen_row(pairs, permute_bytes<0x3120>(four, 0));
    even = pairs[0], odd = pairs[1];
  }
};

// A value plus 128 is the low byte of 1024 plus as much in FP16.
struct Int8Cache {
  using Encoder = format::Int8;
  static __device__ __forceinline__ void widen_row(uint32 (&pairs)[2], uint32 four) {
    widen<0x4140, 0x4342>(pairs[0], pairs[1], four);
  }
  static __device__ __forceinline__ void widen_rows(uint32& even, uint32& odd, uint32 four) {
    widen<0x4240, 0x4341>(even, odd, four);
  }

 private:
  static constexpr uint32 THOUSANDS = 0x64646464;  // the high byte of 1024
  template <uint32 ONE, uint32 OTHER>
  static __device__ __forceinline__ void widen(uint32& one, uint32& other, uint32 four) {
    four ^= 0x80808080;
    one = centred(permute_bytes<ONE>(four, THOUSANDS)), other = centred(permute_bytes<OTHER>(four, THOUSANDS));
  }
  static __device__ __forceinline__ uint32 centred(uint32 pair) {
    const __half2 offset = __floats2half2_rn(1152.0f, 1152.0f);
    const __half2 found = __hsub2(*reinterpret_cast<const __half2*>(&pair), offset);
    return *reinterpret_cast<const uint32*>(&found);
  }
};

// What a kernel is compiled for. Either each token of a key head has a scale of K and one of V, or all of a head have.
template <typename FORMAT_, bool EACH_TOKEN_>
struct EightBits {
  using Format = FORMAT_;
  static constexpr bool EACH_TOKEN = EACH_TOKEN_;
};

// s = Q K^T for KEYS keys, like multiply_query_key(). A lane has four neighbours of a row of K, which is therefore
// multiplied with columns of Q in the order of place_of_pair().
template <typename FORMAT, int ROW_TILES, int COLUMNS, int KEYS, typename Query, typename Tile>
__device__ __forceinline__ void multiply_query_narrow_key(float (&s)[ROW_TILES][KEYS / 8][4], const Query& query,
                                                          const Tile& key) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < COLUMNS / 32; ++k) {
    uint32 a[2][ROW_TILES][4];
    query.get(a[0], 2 * k), query.get(a[1], 2 * k + 1);
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32 b[2][2];
      load_b_of_keys(b, key, 16 * n, 16 * k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // of the two blocks of 16 columns
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32 wide[2];
          FORMAT::widen_row(wide, b[half][i]);
#pragma unroll
          for (int t = 0; t < ROW_TILES; ++t) mma_m16n8k16<__half>(s[t][2 * n + half], a[i][t], wide);
        }
      }
    }
  }
}

// o += P V for KEYS keys, like multiply_probability_value(). Of every 16 columns, the first accumulator has the even
// ones, the second the odd ones.
template <typename FORMAT, int ROW_TILES, int COLUMNS, int KEYS, typename Tile>
__device__ __forceinline__ void multiply_probability_narrow_value(float (&o)[ROW_TILES][COLUMNS / 8][4],
                                                                  const float (&p)[ROW_TILES][KEYS / 8][4],
                                                                  const Tile& value) {
  uint32 packed[ROW_TILES][KEYS / 16][4];
  pack_probabilities<__half, ROW_TILES, KEYS>(packed, p);
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 32; ++n) {
      uint32 b[2][2];
      load_b_of_values(b, value, 16 * k, 16 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the 32 columns
        uint32 even[2], odd[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) FORMAT::widen_rows(even[i], odd[i], b[half][i]);
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
          mma_m16n8k16<__half>(o[t][4 * n + 2 * half], packed[t][k], even);
          mma_m16n8k16<__half>(o[t][4 * n + 2 * half + 1], packed[t][k], odd);
        }
      }
    }
  }
}

// Where a pair of neighbouring columns of Q, whose first one is `column`, stands among those that are multiplied with
// four neighbours of K for each lane: of every 16, pairs 0, 2, 4, 6 come before pairs 1, 3, 5, 7.
__device__ __forceinline__ int place_of_pair(int column) {
  return column / 16 * 16 + column / 2 % 2 * 8 + column % 16 / 4 * 2;
}

// Eight columns of a row of Q to FP16, times a power of two that makes the row's largest 2^14 to 2^15; LANES lanes have
// the row. Gives what products with the row are to be multiplied by.
template <int LANES>
__device__ __forceinline__ float narrow_row(Chunk<__half>& to, const Chunk<__nv_bfloat16>& from) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(to_float(from.data[i])));
#pragma unroll
  for (int offset = 1; offset < LANES; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
  }
  const int exponent = min(max(__float_as_int(largest) >> 23, 15), 254);
  const float factor = __int_as_float((268 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 8; ++i) to.data[i] = __float2half_rn(to_float(from.data[i]) * factor);
  return __int_as_float((exponent - 14) << 23);
}
template <int LANES>
__device__ __forceinline__ float narrow_row(Chunk<__half>& to, const Chunk<__half>& from) {
  to = from;
  return 1.0f;
}

// Scales of tokens on their way to a stage: a thread copies those of every GROUP_THREADS-th key.
template <typename C, Layout LAYOUT>
struct TokenScales {
  static constexpr int PASSES = (C::BLOCK_N + C::GROUP_THREADS - 1) / C::GROUP_THREADS;

  struct Pages {
    int page[PASSES], within[PASSES];
  };

  __device__ __forceinline__ static int key_of(int pass) {
    return pass * C::GROUP_THREADS + static_cast<int>(threadIdx.x) % C::GROUP_THREADS;
  }
  template <typename Segment>
  __device__ __forceinline__ static void fetch(Pages& pages, const VarlenParams& params, const Segment& segment,
                                               int first_key) {
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int key = first_key + key_of(p);
      const auto place = segment.keys.place(params, key);
      pages.within[p] = place.within;
      pages.page[p] = LAYOUT != CONTIGUOUS && key < params.most_keys ? segment.keys.table[place.number] : 0;
    }
  }
  // Starts copying the scales of a tile; those of keys that are not read become zero.
  template <typename Segment>
  __device__ __forceinline__ static void copy_async(Stage<C>& stage, const Pages& pages, const CacheParams& cache,
                                                    const Segment& segment, int first_key) {
    const VarlenParams& params = cache.call;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      if (C::BLOCK_N % C::GROUP_THREADS != 0 && key_of(p) >= C::BLOCK_N) continue;
      bool valid = segment.is_cached(first_key + key_of(p));
      if (LAYOUT != CONTIGUOUS) valid &= static_cast<uint32>(pages.page[p]) < static_cast<uint32>(params.pages);
      const auto copy = [&](float* to, const float* scales, const Strides& strides) {
        const Keys<LAYOUT>& keys = segment.keys;
        const int64 at = keys.start(strides, params, segment.sequence, segment.work.b, segment.work.head_kv) +
                         keys.offset(strides, pages.page[p], pages.within[p]);
        cp_async<4>(to + key_of(p), valid ? scales + at : scales, valid ? 4 : 0);
      };
      copy(stage.key_scale, cache.key_scale, cache.key_scale_strides);
      copy(stage.value_scale, cache.value_scale, cache.value_scale_strides);
    }
  }
};

// What scales do to a lane's scores and probabilities of one tile of rows.
template <typename C>
class RowScales {
 public:
  // Of a head, and of the warp's rows, whose first one is `warp_row` of the tile.
  template <typename Segment>
  __device__ __forceinline__ RowScales(const CacheParams& cache, const Segment& segment, const float* rows,
                                       int warp_row) {
    const auto of_head = [&](const float* scales, const Strides& strides) {
      return scales[segment.work.b * strides.batch + segment.work.head_kv * strides.head];
    };
    float key = 1.0f;
    if constexpr (!C::EACH_TOKEN) {
      key = of_head(cache.key_scale, cache.key_scale_strides);
      value_ = of_head(cache.value_scale, cache.value_scale_strides);
    }
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_[t][half] = key * rows[warp_row + 16 * t + 8 * half + static_cast<int>(lane_index()) / 4];
      }
    }
  }

  // Turns products of Q and K into those of what they stand for.
  __device__ __forceinline__ void scale(float (&s)[C::ROW_TILES][C::BLOCK_N / 8][4], const Stage<C>& stage) const {
#pragma unroll
    for (int n = 0; n < C::BLOCK_N / 8; ++n) {
      Pair of_keys = {{1.0f, 1.0f}};
      if constexpr (C::EACH_TOKEN) of_keys = pair_of(stage.key_scale, n);
#pragma unroll
      for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] *= row_[t][e / 2] * of_keys.data[e % 2];
      }
    }
  }

  // Multiplies probabilities with the scales of their keys' values, over one that holds for all of o. FP16 has room for
  // those that are up to 64 times as large as that one; a larger one takes its place.
  __device__ __forceinline__ void weigh(float (&p)[C::ROW_TILES][C::BLOCK_N / 8][4],
                                        float (&o)[C::ROW_TILES][C::COLUMNS / 8][4], const Stage<C>& stage) {
    if constexpr (C::EACH_TOKEN) {
      constexpr float MOST = 64.0f;
      float largest = 0.0f;
#pragma unroll
      for (int n = 0; n < C::BLOCK_N / 8; ++n) {
        const Pair pair = pair_of(stage.value_scale, n);
        largest = fmaxf(largest, fmaxf(pair.data[0], pair.data[1]));
      }
      largest = quad_max(largest);
      if (largest > MOST * value_) {  // the same in all lanes
        const float factor = value_ / largest;
        value_ = largest;
#pragma unroll
        for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
          for (int n = 0; n < C::COLUMNS / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[t][n][e] *= factor;
          }
        }
      }
      const float inverse = value_ > 0.0f ? 1.0f / value_ : 0.0f;
#pragma unroll
      for (int n = 0; n < C::BLOCK_N / 8; ++n) {
        const Pair pair = pair_of(stage.value_scale, n);
#pragma unroll
        for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
          for (int e = 0; e < 4; ++e) p[t][n][e] *= pair.data[e % 2] * inverse;
        }
      }
    }
  }

  // Four neighbouring columns of a row of O, the lane's of 16 from 16 n on.
  __device__ __forceinline__ Values4 columns(const float (&o)[C::COLUMNS / 8][4], int n, int half) const {
    const float (&even)[4] = o[2 * n], (&odd)[4] = o[2 * n + 1];
    return {{even[2 * half] * value_, odd[2 * half] * value_, even[2 * half + 1] * value_, odd[2 * half + 1] * value_}};
  }

 private:
  using Pair = Vector<float, 2>;
  // Scales of this lane's two keys of eight.
  __device__ __forceinline__ static Pair pair_of(const float* scales, int n) {
    return *reinterpret_cast<const Pair*>(scales + 8 * n + lane_index() % 4 * 2);
  }

  float row_[C::ROW_TILES][2];  // of products of Q and K
  float value_ = 0.0f;          // of O
};

// RowScales of a segment, or nothing where the cache has elements like those of queries.
template <typename C, typename CACHE, typename Params, typename Segment>
__device__ __forceinline__ auto scales_of(const Params& params, const Segment& segment, const float* rows,
                                          int warp_row) {
  if constexpr (C::NARROW) {
    return RowScales<C>(params, segment, rows, warp_row);
  } else {
    return 0;
  }
}

}  // namespace microsdpa::ampere::varlen
