// Rows of queries and new keys with their rotary embedding (RoPE), each in the registers of a few lanes.
#pragma once

#include "../../common/element.cuh"
#include "../../common/softmax.cuh"
#include "../../common/varlen_params.cuh"

namespace microsdpa::ampere::varlen {

template <typename T>
using Chunk = Vector<T, 8>;

// What a kernel is compiled for. Of ROTARY columns, a multiple of 16 or 0 for none, pairs are neighbours, or as far
// apart as half of them. ANGLE is the type of cosines and sines.
template <int ROTARY_, bool INTERLEAVED_, typename ANGLE_>
struct Embedding {
  using Angle = ANGLE_;
  static constexpr int ROTARY = ROTARY_;
  static constexpr bool INTERLEAVED = INTERLEAVED_;
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

template <typename EMBEDDING>
constexpr int ROTATED_COLUMNS = EMBEDDING::ROTARY;
template <>
constexpr int ROTATED_COLUMNS<void> = 0;

// Eight columns of a row. LANES consecutive lanes have the row, chunk by chunk: all lanes of a warp take part.
// Loads are started by the constructor; embedded() waits for them. Sums are the same in every kernel.
template <typename T, int COLUMNS, typename EMBEDDING>
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
  __device__ __forceinline__ RowChunk(const T* row, int position, const AppendParams& params) {
    if (row == nullptr) return;
    chunk_ = *reinterpret_cast<const Chunk<T>*>(row + column());
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

  // Cosines or sines of the chunk, at once where they are aligned.
  template <typename Angle>
  __device__ __forceinline__ static void load(float (&to)[EMBEDDING::ANGLES], const Angle* from) {
    constexpr int COUNT = EMBEDDING::ANGLES, AT_ONCE = COUNT * sizeof(Angle) < 16 ? COUNT : 16 / sizeof(Angle);
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
};

}  // namespace microsdpa::ampere::varlen
