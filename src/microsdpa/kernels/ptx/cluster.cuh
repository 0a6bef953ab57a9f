// Thread block clusters: rank, barrier, and stores to the shared memory of other CTAs (PTX ISA, "barrier.cluster",
// "st.async", sm_90).
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

__device__ __forceinline__ int cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Arrives at the cluster's barrier, which every thread of the cluster takes part in. RELEASE: what this thread did so
// far is visible after the wait. Without it only the arrival counts, and no memory barrier of the device is paid for.
template <bool RELEASE = true>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (RELEASE) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores that another CTA sees after a barrier of the cluster, or after this thread arrived on one of its mbarriers.
__device__ __forceinline__ void store_peer(ClusterAddress address, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address.value), "f"(x) : "memory");
}

__device__ __forceinline__ float load_peer(ClusterAddress address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address.value) : "memory");
  return x;
}

// Asynchronous stores, 8 or 16 bytes: their bytes count towards `barrier` of the CTA that receives them.
__device__ __forceinline__ void store_async(ClusterAddress address, float x, float y, ClusterAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address.value), "f"(x),
      "f"(y), "r"(barrier.value)
      : "memory");
}

__device__ __forceinline__ void store_async(ClusterAddress address, float x, float y, float z, float w,
                                            ClusterAddress barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address.value),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier.value)
      : "memory");
}

}  // namespace microsdpa
