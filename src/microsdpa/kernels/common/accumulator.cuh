// What kernels on wgmma do with the rows of an accumulator, each spread over the four lanes of a quad.
#pragma once

#include "softmax.cuh"

namespace microsdpa {

// What -inf, the stabilizer of a row without keys, is replaced by: -inf - (-inf) would be NaN.
__device__ __forceinline__ float finite(float stabilizer) {
  return stabilizer == negative_infinity() ? 0.0f : stabilizer;
}

// Transposes the 4 x 4 words of a quad: lane i gets word i of lanes 0 to 3.
__device__ __forceinline__ uint4 transpose_quad(uint32 a, uint32 b, uint32 c, uint32 d) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32 ab = __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);
  const uint32 cd = __shfl_xor_sync(FULL_WARP, odd ? c : d, 1);
  a = odd ? ab : a;
  b = odd ? b : ab;
  c = odd ? cd : c;
  d = odd ? d : cd;
  const uint32 ac = __shfl_xor_sync(FULL_WARP, upper ? a : c, 2);
  const uint32 bd = __shfl_xor_sync(FULL_WARP, upper ? b : d, 2);
  return upper ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
}

}  // namespace microsdpa
