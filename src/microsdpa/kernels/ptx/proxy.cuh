// Order between ordinary accesses to global memory and bulk copies (PTX ISA, "fence.proxy.async", sm_90).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Orders this thread's accesses to global memory, and those that it knows of, with bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace microsdpa
