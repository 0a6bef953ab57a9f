// Waiting asleep for the emulator, where every wait is; kernels/ptx/mbarrier_asleep.cuh says what it does.
#pragma once

#include "mbarrier.cuh"

namespace microsdpa {

inline void mbarrier_wait_asleep(Mbarrier& barrier, int parity, emulator::Place place = emulator::Place::here()) {
  mbarrier_wait(barrier, parity, place);
}

}  // namespace microsdpa
