// The instructions of kernels/ptx/prefetch.cuh for the emulator.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline void prefetch_line(const void*) {}

inline void fetch_address(const void*) {}

}  // namespace microsdpa
