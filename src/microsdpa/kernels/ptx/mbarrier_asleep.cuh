// Waiting for an mbarrier without taking issue slots from the warps that compute (PTX ISA, "nanosleep", sm_70).
#pragma once

#include "mbarrier.cuh"

namespace microsdpa {

// Waits until the phase of this parity has completed, asleep between looks: up to about 0.1 us later than
// mbarrier_wait.
__device__ __forceinline__ void mbarrier_wait_asleep(Mbarrier& barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) asm volatile("nanosleep.u32 40;");
}

}  // namespace microsdpa
