// What the gradients' kernels leave for one another.
#pragma once

#include "../common/backward_params.cuh"

namespace microsdpa::backward {

// What the gradients need of a query's row. The probability of a key is weight 2^(score - lse); WEIGHTED, where a mask
// of numbers may leave scores so low that the LSE has lost the logarithm of the sum, else the weight is 1.
template <bool WEIGHTED>
struct RowTerms;

template <>
struct alignas(8) RowTerms<false> {
  float lse;    // base 2; +inf for a row that sees no key
  float delta;  // rowsum(dO * O), less the gradient of the LSE
  __device__ __forceinline__ float weight() const { return 1.0f; }
};

template <>
struct alignas(16) RowTerms<true> {
  float lse;
  float delta;
  float factor;
  float unused;
  __device__ __forceinline__ float weight() const { return factor; }
};

}  // namespace microsdpa::backward
