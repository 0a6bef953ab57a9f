// Addresses of shared memory: of this CTA, of another CTA of the cluster, and of the dynamic part.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Addresses of shared memory, as the instructions want them.

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Addresses in the shared memory of any CTA of a cluster (PTX ISA, "mapa", sm_90).

struct ClusterAddress {
  uint32 value;
};

// Where CTA `rank` of the cluster keeps what this CTA keeps at `shared`.
__device__ __forceinline__ ClusterAddress peer_address(const void* shared, int rank) {
  ClusterAddress peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer.value) : "r"(shared_address(shared)), "r"(rank));
  return peer;
}

__device__ __forceinline__ ClusterAddress operator+(ClusterAddress address, int bytes) {
  return {address.value + static_cast<uint32>(bytes)};
}

// Dynamic shared memory: what a launch asks for beyond 48 KB of static shared memory, or by its configuration.

// The block's dynamic shared memory as one T, 1024-byte aligned; the launch must ask for sizeof(T) bytes.
template <typename T>
__device__ __forceinline__ T& dynamic_shared() {
  static_assert(alignof(T) <= 1024, "dynamic shared memory starts on 1024 bytes");
  extern __shared__ __align__(1024) unsigned char dynamic_memory[];
  return *reinterpret_cast<T*>(dynamic_memory);
}

}  // namespace microsdpa
