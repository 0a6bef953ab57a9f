// Instructions on registers: 2^x, conversions to and from E4M3, permutations of bytes.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// ex2.approx: 2^x on the special-function unit (PTX ISA, "ex2").

// Subnormal inputs and results are zero; 2^-inf is 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, with an error of at most one unit in the last place (PTX ISA, "rcp"): 0 gives infinity, and infinity 0.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x), with a relative error of at most 2^-22.9 (PTX ISA, "rsqrt"): 0 gives infinity.
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both FP16 halves of a register (sm_75); two operations of the unit on sm_90.
__device__ __forceinline__ uint32 ex2_approx_f16x2(uint32 x) {
  uint32 y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// cvt: conversions to and from packed E4M3 (PTX ISA, "cvt", sm_89).

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

// cvt: four floats to E4M3 in one register (PTX ISA, "cvt", sm_89).

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

// prmt: picks four bytes out of eight (PTX ISA, "prmt").

// Byte i of the result is byte (SELECTOR >> 4 i) & 7 of `high`:`low`, where 0 to 3 are the bytes of `low`. With 8 added
// to that number it is the byte's sign, eight times.
template <uint32 SELECTOR>
__device__ __forceinline__ uint32 permute_bytes(uint32 low, uint32 high) {
  uint32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(SELECTOR));
  return result;
}

// An empty instruction: the compiler cannot know where its result comes from.

// Gives `x`. What is computed from the result in a loop is computed there, not kept in registers from before the loop.
__device__ __forceinline__ uint32 opaque(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace microsdpa
