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

// The same for products of which no score exceeds the cap, with an error of at most 1e-7: a polynomial, least squares
// that were weighted until all its largest relative errors were the same.
struct SoftCap {
  float limit;
  float coefficient[7];

  SoftCap() = default;
  __device__ __forceinline__ SoftCap(float cap, float scale) {
    constexpr float OF_TANH[7] = {1.0f,          -0.333328396f,   0.133252040f,  -0.0534570292f,
                                  0.0202899761f, -0.00620337576f, 0.00104102155f};
    const float factor = scale / cap;
    limit = factor < 1e3f ? 1.0f / factor : -1.0f;  // powers of a larger one are out of range
    float power = scale;
#pragma unroll
    for (int i = 0; i < 7; ++i) coefficient[i] = OF_TANH[i] * power, power *= factor * factor;
  }
  __device__ __forceinline__ float operator()(float product) const {
    const float square = product * product;
    float sum = coefficient[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) sum = fmaf(sum, square, coefficient[i]);
    return product * sum;
  }
};

}  // namespace microsdpa::hopper::latency
