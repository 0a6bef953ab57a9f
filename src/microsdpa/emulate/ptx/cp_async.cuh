// cp.async for the emulator; kernels/ptx/cp_async.cuh says what each function does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

template <int BYTES>
inline void cp_async(void* shared, const void* global, int valid_bytes = BYTES,
                     emulator::Place place = emulator::Place::here()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator::async_copy(shared, global, BYTES, valid_bytes, place);
}

inline void cp_async_commit(emulator::Place place = emulator::Place::here()) { emulator::async_commit(place); }

template <int PENDING>
inline void cp_async_wait(emulator::Place place = emulator::Place::here()) {
  emulator::async_wait(PENDING, place);
}

}  // namespace microsdpa
