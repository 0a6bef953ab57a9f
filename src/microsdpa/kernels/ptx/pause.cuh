// Letting time pass (PTX ISA, "%clock64" and "nanosleep", sm_70).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Returns after about so many clocks of the SM, or a few hundred more; the warp takes hardly an issue slot meanwhile.
__device__ __forceinline__ void pause(int clocks) {
  const int64 begin = clock64();
  while (clock64() - begin < clocks) asm volatile("nanosleep.u32 100;");
}

}  // namespace microsdpa
