// cvt: four floats to E4M3 in one register (PTX ISA, "cvt", sm_89).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Round to nearest even, saturated to +-448; `a` is in the lowest byte. In one statement, so that the second conversion
// writes beside the first one's result: two instructions on sm_90.
__device__ __forceinline__ uint32 e4m3x4_from_floats(float a, float b, float c, float d) {
  uint32 packed;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

}  // namespace microsdpa
