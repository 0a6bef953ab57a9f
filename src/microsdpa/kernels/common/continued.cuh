// Attention that goes on from an output and an LSE of other keys.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "accumulator.cuh"
#include "element.cuh"
#include "online_softmax.cuh"

namespace microsdpa {

// Parts of a row's softmax that this launch's keys have, and those seen before.
struct Shares {
  float own;
  float before;
};

// Adds what was seen before, with the natural LSE `lse`, to a row's sum and stabilizer, which is in base 2 and scaled.
__device__ __forceinline__ Shares continue_row(float lse, float& stabilizer, float& sum) {
  constexpr float LOG2_E = 1.44269504088896340736f;
  const float given = lse * LOG2_E, larger = fmaxf(given, stabilizer);
  const float own = sum == 0.0f ? 0.0f : sum * ex2_approx(stabilizer - finite(larger));
  const float before = ex2_approx(given - finite(larger));
  stabilizer = larger, sum = own + before;
  const float inverse = normalizer(sum);
  return {own * inverse, before * inverse};
}

// Two columns of a row of the output before, times its share. Nothing is read where that is none.
template <typename T>
__device__ __forceinline__ void add_before(float (&x)[2], const T* row, float share) {
  if (share == 0.0f) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) x[i] = fmaf(to_float(row[i]), share, x[i]);
}

}  // namespace microsdpa
