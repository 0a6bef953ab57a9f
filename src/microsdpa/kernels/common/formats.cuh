// Encoders of the 8-bit formats. A residual term of a value counts in STEPS of the first. quantize.py has the same
// arithmetic, and every value agrees.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "element.cuh"

namespace microsdpa {

namespace format {

// E4M3: round to nearest even, saturated at 448.
struct E4m3 {
  static constexpr bool HAS_NAN = true;
  static constexpr float LARGEST = 448.0f;
  static constexpr float STEPS = 1.0f;
  static __device__ __forceinline__ unsigned char encode(float x) {
    // NaN has one encoding here, whatever its sign.
    return x == x ? e4m3x2_from_floats(x, 0.0f) & 0xff : 0x7f;
  }
  static __device__ __forceinline__ float decode(unsigned char value) {
    const uint32 halves = halves_from_e4m3x2(value);
    return __low2float(*reinterpret_cast<const __half2*>(&halves));
  }
};

// -127 to 127, symmetric; NaN becomes 0, and the scale NaN.
struct Int8 {
  static constexpr bool HAS_NAN = false;
  static constexpr float LARGEST = 127.0f;
  static constexpr float STEPS = 256.0f;
  static __device__ __forceinline__ unsigned char encode(float x) {
    return x == x ? static_cast<unsigned char>(static_cast<int32>(fminf(fmaxf(rintf(x), -127.0f), 127.0f))) : 0;
  }
  static __device__ __forceinline__ float decode(unsigned char value) { return static_cast<signed char>(value); }
};

// A linear format of [-448, 448] in 0 to 255; NaN becomes 0, and the scale NaN.
struct SimulatedU8 {
  static constexpr bool HAS_NAN = false;
  static constexpr float LARGEST = 448.0f;
  static __device__ __forceinline__ unsigned char encode(float x) {
    const float clamped = fminf(fmaxf(x, -448.0f), 448.0f) + 448.0f;
    return x == x ? static_cast<unsigned char>(rintf(clamped * (255.0f / 896.0f))) : 0;
  }
};

// The values are left as they are.
struct None {
  static constexpr float LARGEST = 0.0f;
};

}  // namespace format

// What values are divided by, of the largest magnitude among them: never zero. NaN has one pattern.
template <typename Format>
__device__ __forceinline__ float scale_of(float largest) {
  const float scale = largest / Format::LARGEST;
  if (!Format::HAS_NAN && scale != scale) return __uint_as_float(0x7fc00000u);
  return scale == 0.0f ? 1.0f : scale;
}

// Eight values divided by their scales, the same bits as x / scale in fewer instructions: `inverse` is 1 / scale.
template <int N>
__device__ __forceinline__ void divide(float (&y)[N], const float (&x)[N], const float (&scale)[N],
                                       const float (&inverse)[N]) {
  // Nothing overflows on the way, or underflows but for quotients that become zero.
  bool usual = true;
#pragma unroll
  for (int i = 0; i < N; ++i) usual &= scale[i] > 1e-18f && scale[i] < 1e18f;
  if (usual) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // The first step leaves an error below one unit in the last place; after the second one it is the rounding's.
      float quotient = x[i] * inverse[i];
      quotient = fmaf(fmaf(-scale[i], quotient, x[i]), inverse[i], quotient);
      quotient = fmaf(fmaf(-scale[i], quotient, x[i]), inverse[i], quotient);
      y[i] = fabsf(x[i]) < __uint_as_float(0x7f800000u) ? copysignf(quotient, x[i]) : x[i];  // -0 too
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = x[i] / scale[i];
  }
}

// The larger one of two magnitudes, or of formats without NaN the one that is NaN: the scale then tells of it. As
// integers, magnitudes have the order of their values, and NaN comes behind infinity.
template <typename Format>
__device__ __forceinline__ float larger(float a, float b) {
  if constexpr (Format::HAS_NAN) return fmaxf(a, b);
  return __int_as_float(max(__float_as_int(a), __float_as_int(b)));
}

// Largest of |x| and `largest`; infinities do not count, nor does NaN where the format has it.
template <typename Format>
__device__ __forceinline__ float larger_magnitude(float largest, float x) {
  const float magnitude = fabsf(x), infinity = __uint_as_float(0x7f800000u);
  const bool counts = Format::HAS_NAN ? magnitude < infinity : magnitude != infinity;
  return counts ? larger<Format>(largest, magnitude) : largest;
}

}  // namespace microsdpa
