// What tells the warps of a specialized kernel apart: one elected thread, and registers that move between warpgroups
// (PTX ISA, "elect.sync" and "setmaxnreg", sm_90).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// True for one lane of the warp, the same at every call. All lanes call.
__device__ __forceinline__ bool elect_one() {
  uint32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// Registers of every thread of the warpgroup from here on: a multiple of 8 from 24 to 256. All its warps call.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// The same, upwards: waits until other warpgroups have released as many.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace microsdpa
