// ex2.approx: 2^x on the special-function unit (PTX ISA, "ex2").
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Subnormal inputs and results are zero; 2^-inf is 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both FP16 halves of a register (sm_75); two operations of the unit on sm_90.
__device__ __forceinline__ uint32 ex2_approx_f16x2(uint32 x) {
  uint32 y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace microsdpa
