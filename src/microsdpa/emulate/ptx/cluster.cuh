// Thread block clusters for the emulator; kernels/ptx/cluster.cuh says what each function does.
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

inline int cluster_rank() { return emulator::cluster_rank(); }

template <bool RELEASE = true>
inline void cluster_arrive(emulator::Place place = emulator::Place::here()) {
  emulator::cluster_arrive(RELEASE, place);
}

inline void cluster_wait(emulator::Place place = emulator::Place::here()) { emulator::cluster_wait(place); }

inline void store_peer(ClusterAddress address, float x, emulator::Place place = emulator::Place::here()) {
  emulator::peer_access(address.value, &x, sizeof(x), true, place);
}

inline float load_peer(ClusterAddress address, emulator::Place place = emulator::Place::here()) {
  float x;
  emulator::peer_access(address.value, &x, sizeof(x), false, place);
  return x;
}

inline void store_async(ClusterAddress address, float x, float y, ClusterAddress barrier,
                        emulator::Place place = emulator::Place::here()) {
  const float data[] = {x, y};
  emulator::store_async(address.value, data, sizeof(data), barrier.value, place);
}

inline void store_async(ClusterAddress address, float x, float y, float z, float w, ClusterAddress barrier,
                        emulator::Place place = emulator::Place::here()) {
  const float data[] = {x, y, z, w};
  emulator::store_async(address.value, data, sizeof(data), barrier.value, place);
}

}  // namespace microsdpa
