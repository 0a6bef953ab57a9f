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

// Eight columns of a row of HEAD_DIM. LANES consecutive lanes have the row, chunk by chunk: all lanes of a warp take
// part. Loads are started by the constructor; embedded() waits for them. Sums are the same in every kernel.
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

  // `row` is the row's first element, whose token stands at `position`; null for zeros.
  __device__ __forceinline__ RowChunk(const T* row, int position, const AppendParams& params,
                                      const NormOf<EMBEDDING>& norm) {
    if constexpr (EMBEDDING::NORM) own_.normed = norm.weights != nullptr, own_.eps = norm.eps;
    if (row == nullptr) return;
    chunk_ = *reinterpret_cast<const Chunk<T>*>(row + column());
    if constexpr (EMBEDDING::NORM) {
      if (norm.weights != nullptr) load(own_.weights, norm.weights + column());
    }
    if constexpr (ROTARY > 0) {
      if (column() >= ROTARY) return;
      using Angle = typename EMBEDDING::Angle;
      position = min(position, params.positions - 1);
      const int first = EMBEDDING::INTERLEAVED ? column() / 2 : column() % HALF;
      load(cos_, static_cast<const Angle*>(params.rotary_cos) + position * params.cos_stride + first);
      load(sin_, static_cast<const Angle*>(params.rotary_sin) + position * params.sin_stride + first);
    }
  }

  __device__ __forceinline__ const Chunk<T>& as_it_was() const { return chunk_; }
  __device__ __forceinline__ Chunk<T> embedded() const {
    if constexpr (EMBEDDING::NORM) return normed();
    if constexpr (ROTARY == 0) return chunk_;
    Chunk<T> rotated = chunk_;
    if constexpr (EMBEDDING::INTERLEAVED) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float c = cos_[i / 2], s = sin_[i / 2];
        const float x = to_float(chunk_.data[i]), y = to_float(chunk_.data[i + 1]);
        rotated.data[i] = from_float<T>(fmaf(x, c, -__fmul_rn(y, s)));
        rotated.data[i + 1] = from_float<T>(fmaf(x, s, __fmul_rn(y, c)));
      }
    } else {
      const bool second = column() >= HALF;
      const int partner = static_cast<int>(threadIdx.x) % 32 + (second ? -HALF / 8 : HALF / 8);
      const auto& words = reinterpret_cast<const Vector<uint32, 4>&>(chunk_);
      Vector<uint32, 4> other_words;
#pragma unroll
      for (int i = 0; i < 4; ++i) other_words.data[i] = __shfl_sync(FULL_WARP, words.data[i], partner & 31);
      const auto& other = reinterpret_cast<const Chunk<T>&>(other_words);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = to_float(chunk_.data[i]), y = to_float(other.data[i]);
        rotated.data[i] = from_float<T>(fmaf(x, cos_[i], __fmul_rn(second ? y : -y, sin_[i])));
      }
    }
    return column() < ROTARY ? rotated : chunk_;
  }

 private:
  static constexpr int ROTARY = EMBEDDING::ROTARY, HALF = ROTARY / 2;

  // What a norm needs beside the row.
  template <bool NORM, typename = void>
  struct Own {};
  template <typename UNUSED>
  struct Own<true, UNUSED> {
    float weights[8] = {};
    float eps = 0.0f;
    bool normed = false;
  };

  // The row with its norm, if it has one, and its embedding.
  __device__ __forceinline__ Chunk<T> normed() const {
    float x[8], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(chunk_.data[i]), squares = fmaf(x[i], x[i], squares);
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) squares += __shfl_xor_sync(FULL_WARP, squares, offset);
    if (own_.normed) {
      const float factor = rsqrt_approx(squares * (1.0f / HEAD_DIM) + own_.eps);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * factor * own_.weights[i];
    }
    Chunk<T> result;
    if constexpr (ROTARY > 0 && !EMBEDDING::INTERLEAVED) {
      const bool second = column() >= HALF, rotates = column() < ROTARY;
      const int partner = static_cast<int>(threadIdx.x) % 32 + (second ? -HALF / 8 : HALF / 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float y = __shfl_sync(FULL_WARP, x[i], partner & 31);
        if (rotates) x[i] = fmaf(x[i], cos_[i], __fmul_rn(second ? y : -y, sin_[i]));
      }
    } else if constexpr (ROTARY > 0) {
      if (column() < ROTARY) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float c = cos_[i / 2], s = sin_[i / 2], first = x[i], second = x[i + 1];
          x[i] = fmaf(first, c, -__fmul_rn(second, s));
          x[i + 1] = fmaf(first, s, __fmul_rn(second, c));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) result.data[i] = from_float<T>(x[i]);
    return result;
  }

  // Cosines, sines or weights of the chunk, at once where they are aligned.
  template <int COUNT, typename Angle>
  __device__ __forceinline__ static void load(float (&to)[COUNT], const Angle* from) {
    constexpr int AT_ONCE = COUNT * sizeof(Angle) < 16 ? COUNT : 16 / sizeof(Angle);
    if (reinterpret_cast<uint64>(from) % (AT_ONCE * sizeof(Angle)) == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; i += AT_ONCE) {
        const auto some = *reinterpret_cast<const Vector<Angle, AT_ONCE>*>(from + i);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) to[i + j] = angle(some.data[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) to[i] = angle(from[i]);
    }
  }
  __device__ __forceinline__ static float angle(float x) { return x; }
  template <typename Angle>
  __device__ __forceinline__ static float angle(Angle x) {
    return to_float(x);
  }

  Chunk<T> chunk_{};
  float cos_[EMBEDDING::ANGLES] = {}, sin_[EMBEDDING::ANGLES] = {};
  Own<EMBEDDING::NORM> own_;
};

}  // namespace microsdpa::ampere::varlen
