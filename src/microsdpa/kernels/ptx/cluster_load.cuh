// Loads of 16 bytes from the shared memory of other CTAs of a cluster (PTX ISA, "ld.shared::cluster", sm_90).
#pragma once

#include "address.cuh"

namespace microsdpa {

// What another CTA has stored before a barrier of the cluster.
__device__ __forceinline__ float4 load_peer4(ClusterAddress address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address.value)
               : "memory");
  return x;
}

}  // namespace microsdpa
