// prmt: picks four bytes out of eight (PTX ISA, "prmt").
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Byte i of the result is byte (SELECTOR >> 4 i) & 7 of `high`:`low`, where 0 to 3 are the bytes of `low`.
template <uint32 SELECTOR>
__device__ __forceinline__ uint32 permute_bytes(uint32 low, uint32 high) {
  uint32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(SELECTOR));
  return result;
}

}  // namespace microsdpa
