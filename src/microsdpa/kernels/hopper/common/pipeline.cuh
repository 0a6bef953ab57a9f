// Where a warp is in a ring of tiles.
#pragma once

#include "../../prelude.cuh"

namespace microsdpa::hopper {

// A stage of a ring of tiles, and the parity of the phase in which it is filled.
template <int STAGES>
struct PipelineState {
  int stage = 0;
  int phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

}  // namespace microsdpa::hopper
