// prmt for the emulator; kernels/ptx/permute.cuh says what it does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

template <uint32 SELECTOR>
inline uint32 permute_bytes(uint32 low, uint32 high) {
  const uint64 bytes = low | static_cast<uint64>(high) << 32;
  uint32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32>(bytes >> 8 * (SELECTOR >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

}  // namespace microsdpa
