// Addresses of shared memory for the emulator; kernels/ptx/shared_address.cuh says what they are.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline uint32 shared_address(const void* pointer, emulator::Place place = emulator::Place::here()) {
  return emulator::shared_address(pointer, place);
}

}  // namespace microsdpa
