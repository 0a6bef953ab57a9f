// Which tile of which head a CTA computes gradients of.
#pragma once

#include "../prelude.cuh"

namespace microsdpa::backward {

// The tile and the head of a CTA's work. CTAs of up to `together` heads run side by side, so that what they walk over
// stays in L2, and of these heads the first tiles come first.
struct Work {
  int tile, head;

  __device__ __forceinline__ Work(int index, int tiles, int heads, int together) {
    const int section = index / (tiles * together), width = min(together, heads - section * together);
    const int rest = index - section * tiles * together;
    tile = rest / width;
    head = section * together + rest % width;
  }
};

}  // namespace microsdpa::backward
