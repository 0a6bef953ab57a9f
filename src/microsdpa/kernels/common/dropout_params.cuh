// What dropout adds to a kernel's parameter.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Of a call that drops probabilities.
struct DropoutParams {
  const uint64* drawn;  // seed and offset in device memory; null for the two numbers that follow
  uint64 seed;
  uint64 offset;
  uint64* state;  // where the forward pass leaves seed and offset for the backward pass; null where nobody wants them
  uint32 kept;    // of 65,536 random numbers, those that keep a probability
  float scale;    // of kept probabilities: 65,536 / kept, or 0 where nothing is kept
};

template <typename P>
struct Dropped {
  P call;
  DropoutParams dropout;
};

}  // namespace microsdpa
