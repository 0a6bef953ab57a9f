// Letting time pass, which the emulator does not model; kernels/ptx/pause.cuh says what the function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline void pause(int) {}

}  // namespace microsdpa
