// An empty instruction: the compiler cannot know where its result comes from.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Gives `x`. What is computed from the result in a loop is computed there, not kept in registers from before the loop.
__device__ __forceinline__ uint32 opaque(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace microsdpa
