// Norms and rotary embedding (RoPE) of rows of Q and K that lie in shared memory, ahead of the products.
//
// A row x of D elements becomes norm(x) = x / sqrt(mean(x^2) + eps) * weight, or LayerNorm's, and then, for each pair
// (a, b) of its first R elements, (a cos - b sin, a sin + b cos) with the angles of the row's position. All of it is
// FP32; the result is rounded once, to the 16 bits that the products take.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "../ptx/control.cuh"
#include "../ptx/prefetch.cuh"
#include "element.cuh"
#include "mma_tile.cuh"
#include "prologue_params.cuh"
#include "softmax.cuh"

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
    return within(params, found);
  }

  // The same of a counted row; of others some row of the tables.
  template <bool KEY>
  __device__ __forceinline__ static int counted(const PrologueParams& params, int row) {
    return within(params, static_cast<int64>(KEY ? params.key_first : params.query_first) + row);
  }

 private:
  __device__ __forceinline__ static int within(const PrologueParams& params, int64 found) {
    const int64 last = params.positions - 1;
    return static_cast<int>(found < 0 ? 0 : found > last ? last : found);
  }
};

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__half x) { return to_float(x); }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return to_float(x); }

// Rows that a warp changes at once have LANES lanes each, and lie in a tile in an order that lets 8-byte accesses of
// half a warp touch every bank once: chunks lie where SwizzledTile has them.
template <int LANES>
__device__ __forceinline__ int row_of_lanes(int index) {
  constexpr int AT_ONCE = 16 / LANES, STEP = 8 / AT_ONCE;  // rows of half a warp, and the distance of two
  return index / 8 * 8 + index % AT_ONCE * STEP + index / AT_ONCE % STEP;
}

// A row of D columns, a multiple of 8. Its lanes deal out units of twice four columns: those that are rotated with one
// another, and of the others four and as many half of them further. Side by side lanes then have neighbouring angles:
// of 64 columns eight lanes read 128 bytes of FP32. Neighbours that are rotated are eight columns in one piece.
template <typename PROLOGUE, bool KEY, typename T, int D>
class PrologueRow {
 public:
  static constexpr int LANES = D <= 32 ? 4 : 8, AT_ONCE = 32 / LANES;  // of a row; rows of a warp
  static_assert(D % 8 == 0, "rows are dealt in units of eight columns");

 private:
  static constexpr Norm NORM = PROLOGUE::template NORM<KEY>;
  static constexpr int ROTARY = PROLOGUE::template ROTARY<KEY>;
  static constexpr int UNITS = D / 8, OWN = (UNITS + LANES - 1) / LANES, ROTATED_UNITS = ROTARY / 8;
  static constexpr bool IN_ONE_PIECE = PROLOGUE::INTERLEAVED;
  using Angle = typename PROLOGUE::Angle;
  using Weight = typename PROLOGUE::Weight;
  using Four = Vector<T, 4>;
  using Eight = Vector<T, 8>;

 public:
  // Cosines and sines of a row.
  struct Angles {
    Vector<Angle, 4> cos[ROTARY > 0 ? OWN : 1], sin[ROTARY > 0 ? OWN : 1];
  };
  // A row, of each unit both fours.
  using Elements = float[OWN][2][4];

  // Starts to read the weights, which all rows share.
  __device__ __forceinline__ void fetch_weights(const PrologueParams& params) {
    if constexpr (NORM != Norm::NONE) {
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        read_weights(weight_[i], KEY ? params.key_weight : params.query_weight, i);
        if constexpr (PROLOGUE::BIASED) read_weights(bias_[i], KEY ? params.key_bias : params.query_bias, i);
      }
    }
  }

  // Starts to read the angles of a position.
  __device__ __forceinline__ static void fetch(Angles& angles, const PrologueParams& params, int position) {
    if constexpr (ROTARY > 0) {
      const Angle* cos = static_cast<const Angle*>(params.cos) + position * params.cos_stride;
      const Angle* sin = static_cast<const Angle*>(params.sin) + position * params.sin_stride;
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        if (!is_rotated(i)) continue;
        angles.cos[i] = *reinterpret_cast<const Vector<Angle, 4>*>(cos + 4 * unit(i));
        angles.sin[i] = *reinterpret_cast<const Vector<Angle, 4>*>(sin + 4 * unit(i));
      }
    }
  }

  // Reads a row, of whose columns at(column) gives the address; VECTORS: they lie on as many bytes as units have.
  template <bool VECTORS = true, typename At>
  __device__ __forceinline__ static void load(Elements& x, At at) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      Eight eight{};
      if (has(i)) {
        if constexpr (!VECTORS) {
#pragma unroll
          for (int e = 0; e < 8; ++e) eight.data[e] = *at(column(i, e / 4) + e % 4);
        } else if constexpr (IN_ONE_PIECE) {
          eight = *reinterpret_cast<const Eight*>(at(column(i, 0)));
        } else {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const Four four = *reinterpret_cast<const Four*>(at(column(i, side)));
#pragma unroll
            for (int e = 0; e < 4; ++e) eight.data[4 * side + e] = four.data[e];
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e / 4][e % 4] = to_float(eight.data[e]);
    }
  }

  // Norm and rotation of N rows, side by side, so that none waits for another's sums. All lanes of a warp take part.
  template <int N>
  __device__ __forceinline__ void change(Elements (&x)[N], const Angles* angles, float eps) const {
    if constexpr (NORM != Norm::NONE) normalize(x, eps);
    if constexpr (ROTARY > 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
          if (is_rotated(i)) rotate(x[n][i], angles[n].cos[i], angles[n].sin[i]);
        }
      }
    }
  }

  template <typename At>
  __device__ __forceinline__ static void store(const Elements& x, At at) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (!has(i)) continue;
      Vector<uint32, 2> words[2];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[e / 2].data[e % 2] = pack<T>(x[i][e / 2][e % 2 * 2], x[i][e / 2][e % 2 * 2 + 1]);
      if constexpr (IN_ONE_PIECE) {
        const Vector<uint32, 4> eight{words[0].data[0], words[0].data[1], words[1].data[0], words[1].data[1]};
        *reinterpret_cast<Vector<uint32, 4>*>(at(column(i, 0))) = eight;
      } else {
        *reinterpret_cast<Vector<uint32, 2>*>(at(column(i, 0))) = words[0];
        *reinterpret_cast<Vector<uint32, 2>*>(at(column(i, 1))) = words[1];
      }
    }
  }

  // Requests the angles of a position ahead of the grids that may yet write them. Weights are not: all CTAs of a grid
  // would ask for one line at once.
  __device__ __forceinline__ static void prefetch(const PrologueParams& params, int position) {
    if constexpr (NORM != Norm::NONE) fetch_address(KEY ? params.key_weight : params.query_weight);
    if constexpr (ROTARY > 0) {
      prefetch_line(static_cast<const Angle*>(params.cos) + position * params.cos_stride);
      prefetch_line(static_cast<const Angle*>(params.sin) + position * params.sin_stride);
    }
  }

 private:
  __device__ __forceinline__ static int unit(int i) { return static_cast<int>(threadIdx.x) % LANES + LANES * i; }
  // Whether a unit is there, and is rotated, as far as possible known when compiling.
  __device__ __forceinline__ static bool has(int i) { return LANES * (i + 1) <= UNITS || unit(i) < UNITS; }
  __device__ __forceinline__ static bool is_rotated(int i) {
    return LANES * (i + 1) <= ROTATED_UNITS || (LANES * i < ROTATED_UNITS && unit(i) < ROTATED_UNITS);
  }
  __device__ __forceinline__ static int column(int i, int side) {
    const int u = unit(i);
    if (IN_ONE_PIECE) return 8 * u + 4 * side;
    return is_rotated(i) ? 4 * u + side * ROTARY / 2 : ROTARY + 4 * (u - ROTATED_UNITS) + side * (D - ROTARY) / 2;
  }

  __device__ __forceinline__ static void read_weights(Vector<Weight, 4> (&to)[2], const void* weights, int i) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (has(i)) {
        to[side] = *reinterpret_cast<const Vector<Weight, 4>*>(static_cast<const Weight*>(weights) + column(i, side));
      }
    }
  }

  template <int N>
  __device__ __forceinline__ static void row_sums(float (&x)[N]) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) x[n] += __shfl_xor_sync(FULL_WARP, x[n], lanes);
    }
  }
  template <int N>
  __device__ __forceinline__ void normalize(Elements (&x)[N], float eps) const {
    if constexpr (NORM == Norm::LAYER) {
      float means[N] = {};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) means[n] += x[n][i][0][e] + x[n][i][1][e];
        }
      }
      row_sums(means);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            // Columns that a lane does not have are zeros, which have no part in the variance.
            float& element = x[n][i][e / 4][e % 4];
            element = has(i) ? element - means[n] * (1.0f / D) : 0.0f;
          }
        }
      }
    }
    float squares[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float sides[2] = {};
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sides[side] = fmaf(x[n][i][side][e], x[n][i][side][e], sides[side]);
        }
      }
      squares[n] = sides[0] + sides[1];
    }
    row_sums(squares);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float factor = rsqrt_approx(squares[n] * (1.0f / D) + eps);
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scaled = x[n][i][side][e] * factor, weight = widened(weight_[i][side].data[e]);
            x[n][i][side][e] =
                PROLOGUE::BIASED ? fmaf(scaled, weight, widened(bias_[i][side].data[e])) : scaled * weight;
          }
        }
      }
    }
  }

  __device__ __forceinline__ static void rotate(float (&x)[2][4], const Vector<Angle, 4>& cos,
                                                const Vector<Angle, 4>& sin) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float& a = IN_ONE_PIECE ? x[pair / 2][pair % 2 * 2] : x[0][pair];
      float& b = IN_ONE_PIECE ? x[pair / 2][pair % 2 * 2 + 1] : x[1][pair];
      const float c = widened(cos.data[pair]), s = widened(sin.data[pair]);
      const float rotated = fmaf(a, c, -(b * s));
      b = fmaf(a, s, b * c);
      a = rotated;
    }
  }

  Vector<Weight, 4> weight_[NORM != Norm::NONE ? OWN : 1][2]{}, bias_[PROLOGUE::BIASED ? OWN : 1][2]{};
};

// Rows of a tile that a warp changes in their place, TURNS times as many as it does at once. Angles and weights are on
// their way from fetch() on.
template <typename PROLOGUE, bool KEY, typename T, int D, int TURNS>
class PrologueRows {
 public:
  using Row = PrologueRow<PROLOGUE, KEY, T, D>;
  static constexpr int ROWS = TURNS * Row::AT_ONCE;

  // Rows are those from `index` on of the tile's from `tile_row` on, in the order of row_of_lanes(); order(row of the
  // tile) gives the row of Q or K, of `rows` that there are.
  template <typename Order>
  __device__ __forceinline__ void fetch(const PrologueParams& params, int batch, int tile_row, int index, int rows,
                                        Order order) {
    row_.fetch_weights(params);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int group = static_cast<int>(threadIdx.x) % 32 / Row::LANES;
      place_[turn] = tile_row + row_of_lanes<Row::LANES>(index + turn * Row::AT_ONCE + group);
      const int row = order(place_[turn]);
      exists_[turn] = row < rows;
      Row::fetch(angles_[turn], params, PROLOGUE::template position<KEY>(params, batch, min(row, rows - 1)));
    }
  }

  // chunk(row of the tile, column) gives the address of eight columns.
  template <typename Chunk>
  __device__ __forceinline__ void apply(float eps, Chunk chunk) const {
    // Loads ahead of stores, which might change what they read.
    typename Row::Elements x[AT_A_TIME];
#pragma unroll
    for (int first = 0; first < TURNS; first += AT_A_TIME) {
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) Row::load(x[i], columns(first + i, chunk));
      row_.change(x, angles_ + first, eps);
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        if (exists_[first + i]) Row::store(x[i], columns(first + i, chunk));
      }
    }
  }

 private:
  // Turns that are changed side by side, as far as registers allow.
  static constexpr int AT_A_TIME = D <= 64 ? TURNS : D <= 128 && TURNS % 2 == 0 ? 2 : 1;
  static_assert(TURNS <= 4, "more turns would take more registers");

  template <typename Chunk>
  __device__ __forceinline__ auto columns(int turn, Chunk chunk) const {
    return [=](int column) { return chunk(place_[turn], column & ~7) + column % 8; };
  }

  Row row_;
  typename Row::Angles angles_[TURNS];
  int place_[TURNS];
  bool exists_[TURNS];
};

}  // namespace microsdpa
