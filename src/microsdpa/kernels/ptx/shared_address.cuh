// Addresses of shared memory, as the instructions want them.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

}  // namespace microsdpa
