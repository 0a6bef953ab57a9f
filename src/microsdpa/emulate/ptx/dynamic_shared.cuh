// Dynamic shared memory for the emulator, where each block has its own; kernels/ptx/dynamic_shared.cuh says what it is.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

template <typename T>
inline T& dynamic_shared(emulator::Place place = emulator::Place::here()) {
  static_assert(alignof(T) <= 1024, "dynamic shared memory starts on 1024 bytes");
  return *reinterpret_cast<T*>(emulator::dynamic_shared(sizeof(T), place));
}

}  // namespace microsdpa
