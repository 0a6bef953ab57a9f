// Loads from other CTAs of a cluster for the emulator; kernels/ptx/cluster_load.cuh says what the function does.
#pragma once

#include "address.cuh"

namespace microsdpa {

inline float4 load_peer4(ClusterAddress address, emulator::Place place = emulator::Place::here()) {
  float4 x;
  emulator::peer_access(address.value, &x, sizeof(x), false, place);
  return x;
}

}  // namespace microsdpa
