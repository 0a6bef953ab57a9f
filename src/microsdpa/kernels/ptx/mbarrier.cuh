// Barriers in shared memory that count arrivals and bytes.
#pragma once

#include "address.cuh"

namespace microsdpa {

// mbarrier: barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier", sm_80; transactions sm_90).
//
// A phase completes when all expected arrivals and all expected bytes have come; the next one begins at once. A wait
// names the parity of the phase that it wants to see completed: 0 for the first, 1 for the second, and so on in turn.

struct alignas(8) Mbarrier {
  uint64 state;  // opaque
};

// Sets up `barrier` for `arrivals` arrivals per phase. Other threads may use it after a barrier of the block; bulk
// copies and other CTAs after mbarrier_init_fence as well.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Publishes this thread's initializations to the cluster and to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives on a barrier of another CTA of the cluster: what this thread wrote is visible to who waits with cluster
// scope, for which a memory barrier of the device is paid.
__device__ __forceinline__ void mbarrier_arrive_peer(ClusterAddress barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}

// Whether the phase of this parity has completed. Does not block for long.
__device__ __forceinline__ bool mbarrier_test(Mbarrier& barrier, int parity) {
  uint32 done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// The same, and sees what other CTAs of the cluster wrote before they arrived or sent their bytes.
__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier& barrier, int parity) {
  uint32 done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

// Waiting for an mbarrier without taking issue slots from the warps that compute (PTX ISA, "nanosleep", sm_70).

// Waits until the phase of this parity has completed, asleep between looks: up to about 0.1 us later than
// mbarrier_wait.
__device__ __forceinline__ void mbarrier_wait_asleep(Mbarrier& barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) asm volatile("nanosleep.u32 40;");
}

}  // namespace microsdpa
