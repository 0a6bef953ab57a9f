// cvt: conversions to and from packed E4M3 (PTX ISA, "cvt", sm_89).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Two floats to E4M3, round to nearest even, saturated to +-448; `low` is in the low byte. NaN stays NaN.
__device__ __forceinline__ uint32 e4m3x2_from_floats(float low, float high) {
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two E4M3 values to FP16, exactly; the low byte goes to the low half.
__device__ __forceinline__ uint32 halves_from_e4m3x2(uint32 packed) {
  uint32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(packed)));
  return halves;
}

}  // namespace microsdpa
