// Addresses in the shared memory of any CTA of a cluster (PTX ISA, "mapa", sm_90).
#pragma once

#include "shared_address.cuh"

namespace microsdpa {

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

}  // namespace microsdpa
