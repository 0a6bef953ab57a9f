// Online softmax over one row, spread over the lanes of a warp (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

constexpr uint32 FULL_WARP = 0xffffffffu;
constexpr float LN_2 = 0.693147180559945309f;

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
  return x;
}

// State of one query row, in the base-2 domain; every lane holds the same values.
struct RowState {
  float max = negative_infinity();  // m: largest score so far
  float sum = 0.0f;                 // l: sum of 2^(score - m)

  // Takes the lane's score of the next 32 keys and gives its probability relative to the new maximum;
  // `rescale` is what the sums made so far must be multiplied by. A row that has seen no key yet keeps m =
  // -inf: the stabilizer is then 0, because -inf - (-inf) would be NaN.
  __device__ __forceinline__ float update(float score, float& rescale) {
    const float new_max = fmaxf(max, warp_max(score));
    const float stabilizer = new_max == negative_infinity() ? 0.0f : new_max;
    const float probability = exp2f(score - stabilizer);
    rescale = exp2f(max - stabilizer);
    sum = sum * rescale + warp_sum(probability);
    max = new_max;
    return probability;
  }

  // What the accumulated P V is multiplied by: a row without keys gives zeros.
  __device__ __forceinline__ float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Natural logarithm of the sum of exp(score): -inf for a row without keys.
  __device__ __forceinline__ float log_sum_exp() const {
    return sum == 0.0f ? negative_infinity() : (max + log2f(sum)) * LN_2;
  }
};

}  // namespace microsdpa
