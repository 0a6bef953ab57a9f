// Control of warps and grids: named barriers, programmatic launch, roles of warps, pauses.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Named barriers among some of a block's warps (PTX ISA, "barrier"). Barrier 0 is __syncthreads'.

// Waits until `threads` threads, a multiple of 32, have synchronized on or arrived at barrier `id` (0 to 15).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Programmatic dependent launch (PTX ISA, "griddepcontrol", sm_90).

// Waits until the grids that this one depends on have ended and their writes are visible. Before it a kernel that is
// launched programmatically may read nothing but its parameters and may write no global memory.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the grids that depend on this one begin, once every CTA has called it or ended.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// What tells the warps of a specialized kernel apart: one elected thread, and registers that move between warpgroups
// (PTX ISA, "elect.sync" and "setmaxnreg", sm_90).

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

// Letting time pass (PTX ISA, "%clock64" and "nanosleep", sm_70).

// Returns after about so many clocks of the SM, or a few hundred more; the warp takes hardly an issue slot meanwhile.
__device__ __forceinline__ void pause(int clocks) {
  const int64 begin = clock64();
  while (clock64() - begin < clocks) asm volatile("nanosleep.u32 100;");
}

}  // namespace microsdpa
