// The instructions of kernels/ptx/arithmetic.cuh for the emulator.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// ex2.approx. Rounded correctly, where the
// hardware's results may be off in the last places.

inline float ex2_approx(float x) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
  emulator::count_exp2(1);
  if (std::fabs(x) < SMALLEST_NORMAL) return 1.0f;
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));
  return y < SMALLEST_NORMAL ? 0.0f : y;
}

inline float rcp_approx(float x) { return 1.0f / x; }

// Subnormal inputs are zeros of their sign.
inline float rsqrt_approx(float x) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
  return 1.0f / std::sqrt(std::fabs(x) < SMALLEST_NORMAL ? std::copysign(0.0f, x) : x);
}

inline uint32 ex2_approx_f16x2(uint32 x) {
  emulator::count_exp2(2);
  uint32 y = 0;
  for (int i = 0; i < 2; ++i) {
    const auto half = emulator::bit_cast<__half>(static_cast<unsigned short>(x >> 16 * i));
    const __half result = __double2half(std::exp2(static_cast<double>(__half2float(half))));
    y |= static_cast<uint32>(emulator::bit_cast<unsigned short>(result)) << 16 * i;
  }
  return y;
}

// cvt, by the host bodies of NVIDIA's headers.

inline uint32 e4m3x2_from_floats(float low, float high) {
  return __nv_cvt_float_to_fp8(low, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32>(__nv_cvt_float_to_fp8(high, __NV_SATFINITE, __NV_E4M3)) << 8;
}

inline uint32 halves_from_e4m3x2(uint32 packed) {
  const auto low = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(packed), __NV_E4M3);
  const auto high = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(packed >> 8), __NV_E4M3);
  return low.x | static_cast<uint32>(high.x) << 16;
}

// cvt of four floats.

inline uint32 e4m3x4_from_floats(float a, float b, float c, float d) {
  return e4m3x2_from_floats(a, b) | e4m3x2_from_floats(c, d) << 16;
}

// prmt.

template <uint32 SELECTOR>
inline uint32 permute_bytes(uint32 low, uint32 high) {
  const uint64 bytes = low | static_cast<uint64>(high) << 32;
  uint32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32 number = SELECTOR >> 4 * i, byte = static_cast<uint32>(bytes >> 8 * (number & 7) & 0xff);
    result |= ((number & 8) == 0 ? byte : byte >> 7 != 0 ? 0xffu : 0u) << 8 * i;
  }
  return result;
}

// opaque.

inline uint32 opaque(uint32 x) { return x; }

}  // namespace microsdpa
