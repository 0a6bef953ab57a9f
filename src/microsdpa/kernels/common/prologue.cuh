// Norms and rotary embedding (RoPE) of rows of Q and K that lie in shared memory, ahead of the products.
//
// A row x of D elements becomes norm(x) = x / sqrt(mean(x^2) + eps) * weight, or LayerNorm's, and then, for each pair
// (a, b) of its first R elements, (a cos - b sin, a sin + b cos) with the angles of the row's position. All of it is
// FP32; the result is rounded once, to the 16 bits that the products take.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "../ptx/control.cuh"
#include "element.cuh"
#include "mma_tile.cuh"
#include "prologue_params.cuh"

namespace microsdpa {

// Kernels that take Q and K as they are.
struct NoPrologue {
  static constexpr bool ANY = false;
  template <bool KEY>
  static constexpr bool CHANGES = false;
  struct Given {};
  template <typename P>
  __device__ __forceinline__ static Given given(const P&) {
    return {};
  }
  template <typename P>
  using Params = P;
  template <typename P>
  __device__ __forceinline__ static const P& call(const P& params) {
    return params;
  }
};

// What of it kernels without norms and rotary embedding get.
template <typename P>
struct PartOfPrologued {
  __device__ __forceinline__ static const MaskedParams& of(const Prologued& params) { return params.masked; }
};
template <>
struct PartOfPrologued<AttentionParams> {
  __device__ __forceinline__ static const AttentionParams& of(const Prologued& params) { return params.masked.call; }
};

enum class Norm { NONE, RMS, LAYER };

// A row's position: read from integers in memory, or counted.
template <typename POSITION>
struct PositionOf {
  __device__ __forceinline__ static int64 of(const void* positions, int64 index, int) {
    return static_cast<const POSITION*>(positions)[index];
  }
};
template <>
struct PositionOf<void> {
  __device__ __forceinline__ static int64 of(const void*, int64, int counted) { return counted; }
};

// What a kernel is compiled for. Of ROTARY columns, a multiple of 16 or 0 for none, pairs are neighbours, or as far
// apart as half of them. ANGLE: type of cosines and sines. QUERY_POSITION and KEY_POSITION: types of positions in
// memory; void where rows are counted. WEIGHT: type of the norms' weights; BIASED: they have biases.
// ROTATES_KEY: whether K is rotated as Q is.
template <int ROTARY_, bool INTERLEAVED_, typename ANGLE, typename QUERY_POSITION, typename KEY_POSITION,
          bool ROTATES_KEY, Norm QUERY_NORM, Norm KEY_NORM, typename WEIGHT, bool BIASED_>
struct Prologue {
  static constexpr bool ANY = true, INTERLEAVED = INTERLEAVED_, BIASED = BIASED_;
  using Angle = ANGLE;
  using Weight = WEIGHT;
  template <bool KEY>
  static constexpr Norm NORM = KEY ? KEY_NORM : QUERY_NORM;
  template <bool KEY>
  static constexpr int ROTARY = KEY && !ROTATES_KEY ? 0 : ROTARY_;
  template <bool KEY>
  static constexpr bool CHANGES = NORM<KEY> != Norm::NONE || ROTARY<KEY> > 0;

  // What consumers keep of a kernel's parameter.
  struct Given {
    const PrologueParams& params;
  };
  __device__ __forceinline__ static Given given(const Prologued& params) { return {params.prologue}; }
  template <typename P>
  using Params = Prologued;
  template <typename P>
  __device__ __forceinline__ static const P& call(const Prologued& params) {
    return PartOfPrologued<P>::of(params);
  }

  // Row of the tables for row `row` of Q or K, within the tables whatever memory says.
  template <bool KEY>
  __device__ __forceinline__ static int position(const PrologueParams& params, int batch, int row) {
    int64 found;
    if constexpr (KEY) {
      found = PositionOf<KEY_POSITION>::of(params.key_positions, batch * params.key_positions_stride + row,
                                           params.key_first + row);
    } else {
      found = PositionOf<QUERY_POSITION>::of(params.query_positions, batch * params.query_positions_stride + row,
                                             params.query_first + row);
    }
    const int64 last = params.positions - 1;
    return static_cast<int>(found < 0 ? 0 : found > last ? last : found);
  }
};

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__half x) { return to_float(x); }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return to_float(x); }

// Consecutive lanes have consecutive rows of a tile in an order that lets 16-byte accesses of eight lanes touch every
// bank once: chunks lie where SwizzledTile has them.
template <int LANES>
__device__ __forceinline__ int row_of_lanes(int index) {
  constexpr int AT_ONCE = 8 / LANES;  // rows that eight lanes have
  return index / 8 * 8 + index % AT_ONCE * LANES % 8 + index / AT_ONCE % LANES;
}

// A row of D columns, a multiple of 8, of which LANES lanes, a power of two up to 8, have chunks of eight columns in
// pairs: those that are rotated with one another, and of the others two neighbours.
template <typename PROLOGUE, bool KEY, typename T, int D, int LANES>
class PrologueRow {
 public:
  static_assert(D % 8 == 0 && (LANES & (LANES - 1)) == 0 && LANES <= 8, "rows are dealt in chunks of 16 bytes");

  // Starts to read what does not depend on the row's elements: angles at a position, and weights.
  __device__ __forceinline__ void fetch(const PrologueParams& params, int position) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if constexpr (ROTARY > 0) {
        if (is_rotated(i)) {
          read_angles(cos_[i], static_cast<const Angle*>(params.cos) + position * params.cos_stride, unit(i));
          read_angles(sin_[i], static_cast<const Angle*>(params.sin) + position * params.sin_stride, unit(i));
        }
      }
      if constexpr (NORM != Norm::NONE) {
        read_weights(weight_[i], KEY ? params.key_weight : params.query_weight, i);
        if constexpr (PROLOGUE::BIASED) read_weights(bias_[i], KEY ? params.key_bias : params.query_bias, i);
      }
    }
  }

  // Changes the row, whose chunks chunk(column) gives the addresses of. All lanes of a warp take part; a row that does
  // not EXIST stays as it is.
  template <typename Chunk>
  __device__ __forceinline__ void apply(float eps, bool exists, Chunk chunk) const {
    float x[OWN][2][8];
    using Eight = Vector<T, 8>;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        Eight eight{};
        if (has(i, side)) eight = *reinterpret_cast<const Eight*>(chunk(column(i, side)));
#pragma unroll
        for (int e = 0; e < 8; ++e) x[i][side][e] = to_float(eight.data[e]);
      }
    }
    if constexpr (NORM != Norm::NONE) normalize(x, eps);
    if constexpr (ROTARY > 0) {
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        if (is_rotated(i)) rotate(x[i], i);
      }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        Vector<uint32, 4> words;
#pragma unroll
        for (int e = 0; e < 4; ++e) words.data[e] = pack<T>(x[i][side][2 * e], x[i][side][2 * e + 1]);
        if (exists && has(i, side)) *reinterpret_cast<Vector<uint32, 4>*>(chunk(column(i, side))) = words;
      }
    }
  }

 private:
  static constexpr Norm NORM = PROLOGUE::template NORM<KEY>;
  static constexpr int ROTARY = PROLOGUE::template ROTARY<KEY>;
  static constexpr int CHUNKS = D / 8, UNITS = (CHUNKS + 1) / 2, OWN = (UNITS + LANES - 1) / LANES;
  static constexpr int ROTATED_UNITS = ROTARY / 16;
  using Angle = typename PROLOGUE::Angle;
  using Weight = typename PROLOGUE::Weight;

  __device__ __forceinline__ static int unit(int i) { return static_cast<int>(threadIdx.x) % LANES + LANES * i; }
  // Whether a unit's chunks are rotated, as far as possible known when compiling.
  __device__ __forceinline__ static bool is_rotated(int i) {
    return LANES * (i + 1) <= ROTATED_UNITS || (LANES * i < ROTATED_UNITS && unit(i) < ROTATED_UNITS);
  }
  __device__ __forceinline__ static int column(int i, int side) {
    const int u = unit(i);
    return 8 * (is_rotated(i) ? u + side * ROTATED_UNITS : 2 * u + side);
  }
  __device__ __forceinline__ static bool has(int i, int side) {
    return (LANES * (i + 1) <= UNITS && (side == 0 || CHUNKS % 2 == 0)) || column(i, side) < D;
  }

  // The eight angles of a unit: of pairs in both chunks, or of four pairs in each.
  __device__ __forceinline__ static void read_angles(Vector<Angle, 4> (&to)[2], const Angle* row, int unit) {
    constexpr int SECOND = PROLOGUE::INTERLEAVED ? ROTARY / 4 : 4;
    const Angle* from = row + unit * (PROLOGUE::INTERLEAVED ? 4 : 8);
    to[0] = *reinterpret_cast<const Vector<Angle, 4>*>(from);
    to[1] = *reinterpret_cast<const Vector<Angle, 4>*>(from + SECOND);
  }
  __device__ __forceinline__ static void read_weights(Vector<Weight, 8> (&to)[2], const void* weights, int i) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (has(i, side)) {
        to[side] = *reinterpret_cast<const Vector<Weight, 8>*>(static_cast<const Weight*>(weights) + column(i, side));
      }
    }
  }

  __device__ __forceinline__ static float row_sum(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
  }
  __device__ __forceinline__ void normalize(float (&x)[OWN][2][8], float eps) const {
    float mean = 0.0f;
    if constexpr (NORM == Norm::LAYER) {
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) mean += x[i][0][e] + x[i][1][e];
      }
      mean = row_sum(mean) * (1.0f / D);
    }
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          // Columns that a lane does not have are zeros, which have no part in the variance.
          if constexpr (NORM == Norm::LAYER) x[i][side][e] = has(i, side) ? x[i][side][e] - mean : 0.0f;
          squares[side] = fmaf(x[i][side][e], x[i][side][e], squares[side]);
        }
      }
    }
    const float factor = rsqrt_approx(row_sum(squares[0] + squares[1]) * (1.0f / D) + eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float scaled = x[i][side][e] * factor, weight = widened(weight_[i][side].data[e]);
          x[i][side][e] = PROLOGUE::BIASED ? fmaf(scaled, weight, widened(bias_[i][side].data[e])) : scaled * weight;
        }
      }
    }
  }

  __device__ __forceinline__ void rotate(float (&x)[2][8], int i) const {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const int side = PROLOGUE::INTERLEAVED ? pair / 4 : 0, first = PROLOGUE::INTERLEAVED ? pair % 4 * 2 : pair;
      float& a = x[side][first];
      float& b = PROLOGUE::INTERLEAVED ? x[side][first + 1] : x[1][first];
      const float c = widened(cos_[i][pair / 4].data[pair % 4]), s = widened(sin_[i][pair / 4].data[pair % 4]);
      const float rotated = fmaf(a, c, -(b * s));
      b = fmaf(a, s, b * c);
      a = rotated;
    }
  }

  Vector<Angle, 4> cos_[OWN][2]{}, sin_[OWN][2]{};
  Vector<Weight, 8> weight_[OWN][2]{}, bias_[PROLOGUE::BIASED ? OWN : 1][2]{};
};

}  // namespace microsdpa
