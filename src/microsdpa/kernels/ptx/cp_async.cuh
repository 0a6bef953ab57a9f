// cp.async: copies from global to shared memory that complete later, in groups (PTX ISA, "cp.async", sm_80).
#pragma once

#include "address.cuh"

namespace microsdpa {

// Copies BYTES (4, 8 or 16) to `shared`; of these the first `valid_bytes` come from `global`, the rest are zeros. Both
// addresses are BYTES-aligned. The data may be read by this thread after cp_async_wait, by others after a barrier too.
template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid_bytes = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (BYTES == 16) {  // past L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES),
                 "r"(valid_bytes)
                 : "memory");
  }
}

// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace microsdpa
