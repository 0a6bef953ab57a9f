// Named barriers for the emulator; kernels/ptx/barrier.cuh says what each function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline void named_barrier_sync(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::named_barrier(id, threads, true, place);
}

inline void named_barrier_arrive(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::named_barrier(id, threads, false, place);
}

}  // namespace microsdpa
