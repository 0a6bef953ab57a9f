// cvt for the emulator, by the host bodies of NVIDIA's headers; kernels/ptx/convert.cuh says what each function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline uint32 e4m3x2_from_floats(float low, float high) {
  return __nv_cvt_float_to_fp8(low, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32>(__nv_cvt_float_to_fp8(high, __NV_SATFINITE, __NV_E4M3)) << 8;
}

inline uint32 halves_from_e4m3x2(uint32 packed) {
  const auto low = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(packed), __NV_E4M3);
  const auto high = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(packed >> 8), __NV_E4M3);
  return low.x | static_cast<uint32>(high.x) << 16;
}

}  // namespace microsdpa
