// What probes share: every thread reads IN words at its own place and writes OUT words.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

struct ProbeParams {
  const uint32* input;  // [blocks * threads, IN]
  uint32* out;          // [blocks * threads, OUT]
};

template <int IN>
__device__ __forceinline__ const uint32* input_of(const ProbeParams& params) {
  return params.input + (blockIdx.x * blockDim.x + threadIdx.x) * IN;
}

template <int OUT>
__device__ __forceinline__ uint32* output_of(const ProbeParams& params) {
  return params.out + (blockIdx.x * blockDim.x + threadIdx.x) * OUT;
}

}  // namespace microsdpa
