// Soft caps of hopper/latency/kernel.cu: cap * tanh(score / cap).
#pragma once

#include "../../ptx/arithmetic.cuh"

namespace microsdpa::hopper::latency {

constexpr float LOG2_E = 1.44269504088896340736f;

// cap * tanh(x / cap) of any x, with an error of at most 5e-7 of it. The exponential unit has enough to do: the
// quotient begins as a polynomial and is improved twice.
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

// The same for products of which no score exceeds REACH times the cap, with an error of at most 1.5e-6 of it: a
// polynomial, least squares that were weighted until its largest relative errors were equal. Its variable is between -1
// and 1, so that FP32 loses little.
struct SoftCap {
  static constexpr int TERMS = 9;
  static constexpr float REACH = 1.75f, ROOT = 1.41421356f;

  float limit, inverse;  // of a product; the square of a product times `inverse` is at most 2
  float coefficient[TERMS];

  SoftCap() = default;
  __device__ __forceinline__ SoftCap(float cap, float scale) {
    constexpr float OF_TANH[TERMS] = {0.682639301f,    -0.198093623f,  0.0737162456f,    -0.0281694494f, 0.0107873445f,
                                      -0.00391442934f, 0.00148702168f, -0.000857499661f, 0.000334345124f};
    const float rate = scale / cap;
    limit = rate < 1e30f ? REACH / rate : -1.0f;  // no product reaches so small a cap
    inverse = rate * (ROOT / REACH);
#pragma unroll
    for (int i = 0; i < TERMS; ++i) coefficient[i] = OF_TANH[i] * (cap * (REACH / ROOT));
  }
  __device__ __forceinline__ float operator()(float product) const {
    const float x = product * inverse, variable = fmaf(x, x, -1.0f);
    float sum = coefficient[TERMS - 1];
#pragma unroll
    for (int i = TERMS - 2; i >= 0; --i) sum = fmaf(sum, variable, coefficient[i]);
    return x * sum;
  }
};

}  // namespace microsdpa::hopper::latency
