// Programmatic dependent launch for the emulator; kernels/ptx/grid_dependency.cuh says what each function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline void grid_dependency_wait() { emulator::grid_dependency_wait(); }

inline void grid_dependency_launch() {}

}  // namespace microsdpa
