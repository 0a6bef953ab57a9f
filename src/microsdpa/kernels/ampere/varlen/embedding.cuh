// Rows of queries and new keys with their RMS norm and rotary embedding (RoPE), each in the registers of a few lanes.
//
// A row x of D elements becomes x / sqrt(mean(x^2) + eps) * weight, and is rotated then: all of it is FP32, and rounded
// once.
#pragma once

#include "../../common/element.cuh"
#include "../../common/softmax.cuh"
#include "../../common/varlen_params.cuh"
#include "../../ptx/arithmetic.cuh"
#include "masks.cuh"

namespace microsdpa::ampere::varlen {

template <typename T>
using Chunk = Vector<T, 8>;

// What a kernel is compiled for. Of ROTARY columns, a multiple of 16 or 0 for none, pairs are neighbours, or as far
// apart as half of them. ANGLE is the type of cosines and sines, WEIGHT that of norms' weights, void without norms.
template <int ROTARY_, bool INTERLEAVED_, typename ANGLE_, typename WEIGHT_ = void>
struct Embedding {
  using Angle = ANGLE_;
  using Weight = WEIGHT_;
  static constexpr int ROTARY = ROTARY_;
  static constexpr bool INTERLEAVED = INTERLEAVED_, NORM = PRESENT<WEIGHT_>, CHANGES = ROTARY > 0 || NORM;
  static constexpr int ANGLES = INTERLEAVED ? 4 : 8;  // of a chunk
};

// The embedding of rows that are loaded: one that leaves them as they are stands for none.
template <typename EMBEDDING>
struct EmbeddingOf {
  using Type = EMBEDDING;
};
template <>
struct EmbeddingOf<void> {
  using Type = Embedding<0, false, float>;
};

// The norm of a row: none.
template <typename EMBEDDING, bool = EMBEDDING::NORM>
struct NormOf {
  template <typename PARAMS>
  __device__ __forceinline__ NormOf(const PARAMS&, bool) {}
};
// That of queries or new keys; `weights` are null where these have none.
template <typename EMBEDDING>
struct NormOf<EMBEDDING, true> {
  const typename EMBEDDING::Weight* weights;
  float eps;

  __device__ __forceinline__ NormOf(const NormedParams& params, bool of_keys)
      : weights(static_cast<const typename EMBEDDING::Weight*>(of_keys ? params.key_norm : params.query_norm)),
        eps(params.norm_eps) {}
};

// The parameter of a kernel that appends; CACHE is void for elements like those of queries.
template <bool NORM, typename CACHE>
struct AppendGiven {
  using Params = CacheParams;
};
template <>
struct AppendGiven<false, void> {
  using Params = AppendParams;
};
template <typename CACHE>
struct AppendGiven<true, CACHE> {
  using Params = NormedParams;
};

// What a row is held as until it is used: words where it is changed then, since whoever took a word apart would wait
// for it where it was loaded.
template <typename T, bool CHANGES>
struct Held {
  using Type = Vector<uint32, 4>;
};
template <typename T>
struct Held<T, false> {
  using Type = Chunk<T>;
};

// COUNT numbers of a table on their way to registers: at once where they are aligned, else when they are needed.
template <typename Number, int COUNT>
class TableRow {
 public:
  // Starts loading the numbers. Nothing waits for them before get().
  __device__ __forceinline__ void begin(const Number* from) {
    from_ = from;
    if (!is_aligned()) return;
#pragma unroll
    for (int i = 0; i < WORDS; i += AT_ONCE) {
      const auto some = *reinterpret_cast<const Vector<uint32, AT_ONCE>*>(reinterpret_cast<const uint32*>(from) + i);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) words_.data[i + j] = some.data[j];
    }
  }
  // Zeros, unless the row has begun.
  __device__ __forceinline__ void get(float (&to)[COUNT]) const {
    if (is_aligned()) {
      const auto& numbers = reinterpret_cast<const Vector<Number, COUNT>&>(words_);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) to[i] = to_float(numbers.data[i]);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) to[i] = to_float(from_[i]);
    }
  }

 private:
  static constexpr int WORDS = COUNT * sizeof(Number) / 4, AT_ONCE = WORDS < 4 ? WORDS : 4;
  __device__ __forceinline__ bool is_aligned() const { return reinterpret_cast<uint64>(from_) % (4 * AT_ONCE) == 0; }

  const Number* from_ = nullptr;
  Vector<uint32, WORDS> words_{};
};

// Eight columns of a row of HEAD_DIM. LANES consecutive lanes have the row, chunk by chunk: all lanes of a warp take
// part. Loads are started by begin() and turn_to(); embedded() waits for them. Sums are the same in every kernel.
template <typename T, int COLUMNS, int HEAD_DIM, typename EMBEDDING>
class RowChunk {
 public:
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int LANES = CHUNKS <= 1    ? 1
                               : CHUNKS <= 2  ? 2
                               : CHUNKS <= 4  ? 4
                               : CHUNKS <= 8  ? 8
                               : CHUNKS <= 16 ? 16
                                              : 32;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % LANES; }
  __device__ __forceinline__ static int column() { return lane() * 8; }

  __device__ __forceinline__ RowChunk() {}  // of zeros
  // `row` is the row's first element, whose token stands at `position`; null for zeros.
  __device__ __forceinline__ RowChunk(const T* row, int position, const AppendParams& params,
                                      const NormOf<EMBEDDING>& norm) {
    if constexpr (EMBEDDING::NORM) own_.normed = norm.weights != nullptr, own_.eps = norm.eps;
    if (row == nullptr) return;
    begin(row, norm);
    turn_to(position, params);
  }

  // Starts loading the row and the weights of its norm.
  __device__ __forceinline__ void begin(const T* row, const NormOf<EMBEDDING>& norm) {
    row_ = *reinterpret_cast<const Row*>(row + column());
    if constexpr (EMBEDDING::NORM) {
      own_.normed = norm.weights != nullptr, own_.eps = norm.eps;
      if (norm.weights != nullptr) own_.weights.begin(norm.weights + column());
    }
  }
  // Has the row rotated by the angles of a position, which are loaded from here on.
  __device__ __forceinline__ void turn_to(int position, const AppendParams& params) {
    if constexpr (ROTARY > 0) {
      if (column() >= ROTARY) return;
      position = min(position, params.positions - 1);
      const int first = EMBEDDING::INTERLEAVED ? column() / 2 : column() % HALF;
      cos_.begin(static_cast<const Angle*>(params.rotary_cos) + position * params.cos_stride + first);
      sin_.begin(static_cast<const Angle*>(params.rotary_sin) + position * params.sin_stride + first);
    }
  }

  __device__ __forceinline__ const Chunk<T>& as_it_was() const { return reinterpret_cast<const Chunk<T>&>(row_); }
  __device__ __forceinline__ Chunk<T> embedded() const {
    if constexpr (EMBEDDING::NORM) {
      return normed();
    } else if constexpr (ROTARY > 0) {
      return rotated();
    } else {
      return as_it_was();
    }
  }

 private:
  static constexpr int ROTARY = EMBEDDING::ROTARY, HALF = ROTARY / 2;

  using Angle = typename EMBEDDING::Angle;
  using Row = typename Held<T, EMBEDDING::CHANGES>::Type;

  // What a norm needs beside the row.
  template <bool NORM, typename = void>
  struct Own {};
  template <typename UNUSED>
  struct Own<true, UNUSED> {
    TableRow<typename EMBEDDING::Weight, 8> weights;
    float eps = 0.0f;
    bool normed = false;
  };

  // The row with its embedding, where it has no norm.
  __device__ __forceinline__ Chunk<T> rotated() const {
    const Chunk<T>& chunk = as_it_was();
    Chunk<T> result = chunk;
    float cos[EMBEDDING::ANGLES], sin[EMBEDDING::ANGLES];
    cos_.get(cos), sin_.get(sin);
    if constexpr (EMBEDDING::INTERLEAVED) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float c = cos[i / 2], s = sin[i / 2];
        const float x = to_float(chunk.data[i]), y = to_float(chunk.data[i + 1]);
        result.data[i] = from_float<T>(fmaf(x, c, -__fmul_rn(y, s)));
        result.data[i + 1] = from_float<T>(fmaf(x, s, __fmul_rn(y, c)));
      }
    } else {
      const bool second = column() >= HALF;
      const int partner = static_cast<int>(threadIdx.x) % 32 + (second ? -HALF / 8 : HALF / 8);
      Row other_words;
#pragma unroll
      for (int i = 0; i < 4; ++i) other_words.data[i] = __shfl_sync(FULL_WARP, row_.data[i], partner & 31);
      const auto& other = reinterpret_cast<const Chunk<T>&>(other_words);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = to_float(chunk.data[i]), y = to_float(other.data[i]);
        result.data[i] = from_float<T>(fmaf(x, cos[i], __fmul_rn(second ? y : -y, sin[i])));
      }
    }
    return column() < ROTARY ? result : chunk;
  }

  // The row with its norm, if it has one, and its embedding.
  __device__ __forceinline__ Chunk<T> normed() const {
    const Chunk<T>& chunk = as_it_was();
    float x[8], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(chunk.data[i]), squares = fmaf(x[i], x[i], squares);
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) squares += __shfl_xor_sync(FULL_WARP, squares, offset);
    if (own_.normed) {
      float weights[8];
      own_.weights.get(weights);
      const float factor = rsqrt_approx(squares * (1.0f / HEAD_DIM) + own_.eps);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * factor * weights[i];
    }
    Chunk<T> result;
    [[maybe_unused]] float cos[EMBEDDING::ANGLES], sin[EMBEDDING::ANGLES];
    if constexpr (ROTARY > 0) cos_.get(cos), sin_.get(sin);
    if constexpr (ROTARY > 0 && !EMBEDDING::INTERLEAVED) {
      const bool second = column() >= HALF, rotates = column() < ROTARY;
      const int partner = static_cast<int>(threadIdx.x) % 32 + (second ? -HALF / 8 : HALF / 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float y = __shfl_sync(FULL_WARP, x[i], partner & 31);
        if (rotates) x[i] = fmaf(x[i], cos[i], __fmul_rn(second ? y : -y, sin[i]));
      }
    } else if constexpr (ROTARY > 0) {
      if (column() < ROTARY) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float c = cos[i / 2], s = sin[i / 2], first = x[i], second = x[i + 1];
          x[i] = fmaf(first, c, -__fmul_rn(second, s));
          x[i + 1] = fmaf(first, s, __fmul_rn(second, c));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) result.data[i] = from_float<T>(x[i]);
    return result;
  }

  Row row_{};
  TableRow<Angle, EMBEDDING::ANGLES> cos_, sin_;
  Own<EMBEDDING::NORM> own_;
};

}  // namespace microsdpa::ampere::varlen
