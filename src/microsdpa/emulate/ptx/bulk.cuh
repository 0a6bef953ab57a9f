// Bulk copies of bytes, bulk reductions and turns for the emulator; kernels/ptx/bulk.cuh says what each function does.
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

inline void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier,
                      emulator::Place place = emulator::Place::here()) {
  emulator::bulk_load_bytes(emulator::shared_address(shared, place), global, bytes,
                            emulator::shared_address(&barrier, place), place);
}

inline void bulk_reduce_add(float* global, const float* shared, int bytes,
                            emulator::Place place = emulator::Place::here()) {
  emulator::bulk_reduce_add(global, emulator::shared_address(shared, place), bytes, place);
}

inline void tma_store_wait() { emulator::bulk_wait_read(0); }

// Turns that CTAs take.

inline void wait_for_turn(const int32* number, int32 turn, emulator::Place place = emulator::Place::here()) {
  emulator::wait_for_turn(number, turn, place);
}

inline void end_turn(int32* number, int32 next, emulator::Place place = emulator::Place::here()) {
  emulator::end_turn(number, next, place);
}

}  // namespace microsdpa
