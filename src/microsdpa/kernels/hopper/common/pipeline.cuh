// Where in a ring of tiles a warp is.
#pragma once

#include "../../prelude.cuh"

namespace microsdpa {

// A place in a ring of tiles, and the parity of the phase in which it is filled.
template <int STAGES>
struct RingPlace {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

}  // namespace microsdpa
