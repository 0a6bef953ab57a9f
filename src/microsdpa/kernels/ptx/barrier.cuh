// Named barriers among some of a block's warps (PTX ISA, "barrier"). Barrier 0 is __syncthreads'.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Waits until `threads` threads, a multiple of 32, have synchronized on or arrived at barrier `id` (0 to 15).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace microsdpa
