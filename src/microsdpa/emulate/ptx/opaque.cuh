// opaque for the emulator; kernels/ptx/opaque.cuh says what it does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline uint32 opaque(uint32 x) { return x; }

}  // namespace microsdpa
