// Element types of the tensors, and their conversion to and from FP32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace microsdpa {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N consecutive elements that move as one load or store.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T data[N];
};

}  // namespace microsdpa
