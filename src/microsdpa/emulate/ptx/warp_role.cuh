// elect.sync and setmaxnreg for the emulator; kernels/ptx/warp_role.cuh says what each function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline bool elect_one(emulator::Place place = emulator::Place::here()) { return emulator::elect_one(place); }

template <int REGISTERS>
inline void setmaxnreg_dec(emulator::Place place = emulator::Place::here()) {
  emulator::set_registers(REGISTERS, false, place);
}

template <int REGISTERS>
inline void setmaxnreg_inc(emulator::Place place = emulator::Place::here()) {
  emulator::set_registers(REGISTERS, true, place);
}

}  // namespace microsdpa
