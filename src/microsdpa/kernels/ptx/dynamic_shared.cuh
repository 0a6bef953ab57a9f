// Dynamic shared memory: what a launch asks for beyond 48 KB of static shared memory, or by its configuration.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// The block's dynamic shared memory as one T, 1024-byte aligned; the launch must ask for sizeof(T) bytes.
template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
  static_assert(alignof(T) <= 1024, "dynamic shared memory starts on 1024 bytes");
  extern __shared__ __align__(1024) unsigned char dynamic_memory[];
  return *reinterpret_cast<T*>(dynamic_memory);
}

}  // namespace microsdpa
