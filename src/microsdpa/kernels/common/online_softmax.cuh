// Online softmax on mma accumulators: the rows of a warp's score tile, each spread over the four lanes of a quad.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "softmax.cuh"

namespace microsdpa {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Scores of keys from `visible` on become -inf; `visible` counts from the accumulator's first key, for one row half.
template <int KEYS>
__device__ __forceinline__ void mask_row(float (&s)[KEYS / 8][4], int half, int visible) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * n + column + e >= visible) s[n][2 * half + e] = negative_infinity();
    }
  }
}

// Probabilities are 2^(scale * score - stabilizer) by one fused operation, whose product has 48 bits, while the
// stabilizer is such a product rounded to 24: from here on what rounding took from it shows in the exponent, as a
// factor of the whole row, which soon leaves the range of floats.
constexpr float LARGE_STABILIZER = 1048576.0f;
__device__ __forceinline__ bool is_large(float stabilizer) {
  return fabsf(stabilizer) >= LARGE_STABILIZER && stabilizer > negative_infinity();
}

// State of a warp's rows: those that this lane holds a part of.
//
// Probabilities are 2^(scale * score - stabilizer). The stabilizer, in textbooks the row's maximum, is a score that the
// row has seen, not always the largest: it follows the maximum only when that has moved by more than 2^SLACK, so that
// the accumulator is rarely rescaled. The result is the same for any stabilizer; probabilities up to 2^SLACK keep every
// bit of precision.
template <int ROW_TILES>
struct OnlineSoftmax {
  static constexpr float SLACK = 8.0f;
  static constexpr float LIMIT = 16384.0f;  // of a lane's sum over some keys: FP16 holds probabilities up to 65504

  float stabilizer[ROW_TILES][2];  // base 2, scaled; -inf before the first visible key
  float sum[ROW_TILES][2];         // this lane's part of l

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) stabilizer[i][half] = negative_infinity(), sum[i][half] = 0.0f;
    }
  }

  // Takes the largest of the first 16 scores as a row's stabilizer.
  template <int KEYS>
  __device__ __forceinline__ void begin(const float (&s)[ROW_TILES][KEYS / 8][4], float scale) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float m =
            fmaxf(fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]), fmaxf(s[i][1][2 * half], s[i][1][2 * half + 1]));
        stabilizer[i][half] = quad_max(m) * scale;
      }
    }
  }

  // Turns scores into probabilities relative to the stabilizers as they are, without looking for the maximum. Gives
  // false, for the whole warp, when one may be too large for FP16, or a stabilizer is: `update` then has to be called
  // with the scores. The stabilizers must be scores that their rows have seen, so that no row's probabilities all
  // vanish.
  template <int KEYS>
  __device__ __forceinline__ bool try_update(float (&s)[ROW_TILES][KEYS / 8][4], float scale) {
    float added[ROW_TILES][2];
    bool small = true;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) added[i][half] = exponentiate<KEYS>(s[i], half, scale, stabilizer[i][half]);
#pragma unroll
      for (int half = 0; half < 2; ++half) small &= added[i][half] <= LIMIT && !is_large(stabilizer[i][half]);
    }
    if (!__all_sync(FULL_WARP, small)) return false;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[i][half] += added[i][half];
    }
    return true;
  }

  // Turns scores into probabilities, and rescales the output accumulator when a stabilizer moves; scale > 0. FUSED has
  // the scale in the exponent's one instruction, and is not for large stabilizers; else products with it are rounded as
  // these are.
  template <int KEYS, int COLUMNS, bool FUSED = false>
  __device__ __forceinline__ void update(float (&s)[ROW_TILES][KEYS / 8][4], float (&o)[ROW_TILES][COLUMNS / 8][4],
                                         float scale) {
    const float factor_of_scores = FUSED ? scale : 1.0f;
    float largest[ROW_TILES][2];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = negative_infinity();
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            if (!FUSED) s[i][n][e] = __fmul_rn(s[i][n][e], scale);
            m = fmaxf(m, s[i][n][e]);
          }
        }
        largest[i][half] = quad_max(m) * factor_of_scores;
        moved |= largest[i][half] > stabilizer[i][half] + SLACK;
      }
    }
    if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float next = fmaxf(stabilizer[i][half], largest[i][half]);
          // A row that has seen no key has stabilizer -inf, and -inf - (-inf) would be NaN.
          const float factor = next == negative_infinity() ? 1.0f : ex2_approx(stabilizer[i][half] - next);
          stabilizer[i][half] = next;
          sum[i][half] *= factor;
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; ++n) {
            o[i][n][2 * half] *= factor;
            o[i][n][2 * half + 1] *= factor;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float subtract = stabilizer[i][half] == negative_infinity() ? 0.0f : stabilizer[i][half];
        sum[i][half] += exponentiate<KEYS>(s[i], half, factor_of_scores, subtract);
      }
    }
  }

  // Probabilities of this lane's scores of one row; gives their sum.
  template <int KEYS>
  __device__ __forceinline__ static float exponentiate(float (&s)[KEYS / 8][4], int half, float scale, float subtract) {
    float sum = 0.0f;
    exponentiate<KEYS>(s, half, scale, subtract, sum);
    return sum;
  }

  // The same, with each added to `sum`.
  template <int KEYS>
  __device__ __forceinline__ static void exponentiate(float (&s)[KEYS / 8][4], int half, float scale, float subtract,
                                                      float& sum) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = ex2_approx(fmaf(s[n][e], scale, -subtract));
        sum += s[n][e];
      }
    }
  }

  // l of a row, in all lanes of its quad.
  __device__ __forceinline__ float total(int i, int half) const { return quad_sum(sum[i][half]); }
};

// What P V is divided by: a row without keys gives zeros.
__device__ __forceinline__ float normalizer(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Natural logarithm of the sum of exp(score), from a row's stabilizer and sum: -inf for a row without keys.
__device__ __forceinline__ float log_sum_exp(float stabilizer, float sum) {
  return sum == 0.0f ? negative_infinity() : (stabilizer + log2f(sum)) * LN_2;
}

}  // namespace microsdpa
