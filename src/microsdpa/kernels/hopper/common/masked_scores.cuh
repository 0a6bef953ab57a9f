// Scores on a warpgroup's accumulator that are hidden, or capped.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/arithmetic.cuh"

namespace microsdpa::hopper {

// Scores of one row become -inf where `hidden` says so of the lane's key 8 n + e.
template <int BLOCK_N, typename Hidden>
__device__ __forceinline__ void hide_where(float (&s)[BLOCK_N / 2], int half, Hidden hidden) {
#pragma unroll
  for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (hidden(n, e)) s[4 * n + 2 * half + e] = negative_infinity();
    }
  }
}

// Scores in base 2, capped: cap tanh(score / cap). tanh x = 1 - 2 / (1 + e^2x) has an error of 2^-22, which the cap
// multiplies. EXACT, small scores go through the series of tanh instead, whose error is a part of the score: for caps
// that are large beside most scores.
template <bool EXACT>
struct SoftCap {
  static constexpr float LARGE = 2048.0f;  // base 2

  float cap;
  float rate;     // e^2x is 2^(rate score)
  float inverse;  // of the cap

  __device__ __forceinline__ explicit SoftCap(float cap)
      : cap(cap), rate(2.0f * 1.44269504088896340736f / cap), inverse(1.0f / cap) {}
  __device__ __forceinline__ float operator()(float score) const {
    const float far = fmaf(-2.0f * cap, rcp_approx(1.0f + ex2_approx(score * rate)), cap);
    if constexpr (!EXACT) return far;
    const float x = score * inverse, square = x * x;
    const float near = score * fmaf(square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
    return square < 0.01f ? near : far;
  }
};

}  // namespace microsdpa::hopper
