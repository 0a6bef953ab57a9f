// Encoders of the 8-bit formats. A residual term of a value counts in STEPS of the first. quantize.py has the same
// arithmetic, and every value agrees. encode() takes any number. encode4() takes four that are no NaN and no larger
// than LARGEST, but for what scaling rounds; the first is in the lowest byte. residual4() has what their values lack.
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
  static __device__ __forceinline__ uint32 encode4(const float (&x)[4]) {
    return e4m3x4_from_floats(x[0], x[1], x[2], x[3]);
  }
  static __device__ __forceinline__ uint32 residual4(const float (&x)[4], uint32 first) {
    const uint32 halves[2] = {halves_from_e4m3x2(first & 0xffff), halves_from_e4m3x2(first >> 16)};
    float rest[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 decoded = __half22float2(*reinterpret_cast<const __half2*>(&halves[i]));
      rest[2 * i] = x[2 * i] - decoded.x, rest[2 * i + 1] = x[2 * i + 1] - decoded.y;
    }
    return encode4(rest);
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
  // Beside MAGIC a float counts in ones, and its last byte is the integer's.
  static constexpr float MAGIC = 12582912.0f;
  static __device__ __forceinline__ uint32 encode4(const float (&x)[4]) {
    uint32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(x[i] + MAGIC);
    return permute_bytes<0x5410>(permute_bytes<0x0040>(bits[0], bits[1]), permute_bytes<0x0040>(bits[2], bits[3]));
  }
  static __device__ __forceinline__ uint32 residual4(const float (&x)[4], uint32) {
    float rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rest[i] = fminf(fmaxf((x[i] - (x[i] + MAGIC - MAGIC)) * STEPS, -127.0f), 127.0f);
    return encode4(rest);
  }
};

// A linear format of [-448, 448] in 0 to 255; NaN becomes 0, and the scale NaN.
struct SimulatedU8 {
  static constexpr bool HAS_NAN = false;
  static constexpr float LARGEST = 448.0f;
  static __device__ __forceinline__ unsigned char encode(float x) {
    const float clamped = fminf(fmaxf(x, -448.0f), 448.0f) + 448.0f;
    return x == x ? static_cast<unsigned char>(rintf(clamped * (255.0f / 896.0f))) : 0;
  }
  static __device__ __forceinline__ uint32 encode4(const float (&x)[4]) {
    return encode(x[0]) | encode(x[1]) << 8 | encode(x[2]) << 16 | static_cast<uint32>(encode(x[3])) << 24;
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

// Numbers are multiplied with 1 / scale. Both are multiplied with a power of two before where the inverse, or a product
// with it, could overflow or lose bits: 1 for all scales that are not very small or very large.
__device__ __forceinline__ float factor_of(float scale) {
  return scale < 0x1p-60f ? 0x1p100f : scale > 0x1p60f ? 0x1p-60f : 1.0f;
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
