// Addresses in a cluster's shared memory for the emulator; kernels/ptx/cluster_address.cuh says what they are.
#pragma once

#include "shared_address.cuh"

namespace microsdpa {

struct ClusterAddress {
  uint32 value;
};

inline ClusterAddress peer_address(const void* shared, int rank, emulator::Place place = emulator::Place::here()) {
  return {emulator::peer_address(shared, rank, place)};
}

inline ClusterAddress operator+(ClusterAddress address, int bytes) {
  return {address.value + static_cast<uint32>(bytes)};
}

}  // namespace microsdpa
