// The instructions of kernels/ptx/control.cuh for the emulator.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Named barriers.

inline void named_barrier_sync(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::named_barrier(id, threads, true, place);
}

inline void named_barrier_arrive(int id, int threads, emulator::Place place = emulator::Place::here()) {
  emulator::named_barrier(id, threads, false, place);
}

// Programmatic dependent launch.

inline void grid_dependency_wait() { emulator::grid_dependency_wait(); }

inline void grid_dependency_launch() {}

// elect.sync and setmaxnreg.

inline bool elect_one(emulator::Place place = emulator::Place::here()) { return emulator::elect_one(place); }

template <int REGISTERS>
inline void setmaxnreg_dec(emulator::Place place = emulator::Place::here()) {
  emulator::set_registers(REGISTERS, false, place);
}

template <int REGISTERS>
inline void setmaxnreg_inc(emulator::Place place = emulator::Place::here()) {
  emulator::set_registers(REGISTERS, true, place);
}

// Letting time pass, which the emulator does not model.

inline void pause(int) {}

}  // namespace microsdpa
