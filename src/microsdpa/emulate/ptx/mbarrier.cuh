// The instructions of kernels/ptx/mbarrier.cuh for the emulator.
#pragma once

#include "address.cuh"

namespace microsdpa {

// mbarrier.

struct alignas(8) Mbarrier {
  uint64 state;
};

inline void mbarrier_init(Mbarrier& barrier, int arrivals, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_init(emulator::shared_address(&barrier, place), arrivals, place);
}

inline void mbarrier_init_fence() { emulator::mbarrier_init_fence(); }

inline void mbarrier_arrive(Mbarrier& barrier, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_arrive(emulator::shared_address(&barrier, place), 0, place);
}

inline void mbarrier_arrive_expect(Mbarrier& barrier, int bytes, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_arrive(emulator::shared_address(&barrier, place), bytes, place);
}

inline void mbarrier_arrive_peer(ClusterAddress barrier, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_arrive(barrier.value, 0, place);
}

inline bool mbarrier_test(Mbarrier& barrier, int parity, emulator::Place place = emulator::Place::here()) {
  return emulator::mbarrier_test(emulator::shared_address(&barrier, place), parity, place);
}

inline void mbarrier_wait(Mbarrier& barrier, int parity, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_wait(emulator::shared_address(&barrier, place), parity, false, place);
}

inline void mbarrier_wait_cluster(Mbarrier& barrier, int parity, emulator::Place place = emulator::Place::here()) {
  emulator::mbarrier_wait(emulator::shared_address(&barrier, place), parity, true, place);
}

// Waiting asleep, where every wait is.

inline void mbarrier_wait_asleep(Mbarrier& barrier, int parity, emulator::Place place = emulator::Place::here()) {
  mbarrier_wait(barrier, parity, place);
}

}  // namespace microsdpa
