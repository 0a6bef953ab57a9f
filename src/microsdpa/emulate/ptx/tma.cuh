// Bulk copies for the emulator; kernels/ptx/tma.cuh says what each function does.
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

inline void prefetch_tensor_map(const TensorMap&) {}

inline void tma_load(void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head, int batch,
                     emulator::Place place = emulator::Place::here()) {
  emulator::bulk_load(emulator::shared_address(shared, place), &map, emulator::shared_address(&barrier, place),
                      {column, row, head, batch}, 0, place);
}

inline void tma_load_multicast(void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head,
                               int batch, uint16 ctas, emulator::Place place = emulator::Place::here()) {
  if (ctas == 0) emulator::fail("multicast to no CTA", place);
  emulator::bulk_load(emulator::shared_address(shared, place), &map, emulator::shared_address(&barrier, place),
                      {column, row, head, batch}, ctas, place);
}

inline void tma_store(const TensorMap& map, const void* shared, int column, int row, int head, int batch,
                      emulator::Place place = emulator::Place::here()) {
  emulator::bulk_store(&map, emulator::shared_address(shared, place), {column, row, head, batch}, place);
}

inline void tma_store_commit() { emulator::bulk_commit(); }

template <int PENDING>
inline void tma_store_wait_read() {
  emulator::bulk_wait_read(PENDING);
}

inline void bulk_copy_to_peer(ClusterAddress target, const void* shared, int bytes, ClusterAddress barrier,
                              emulator::Place place = emulator::Place::here()) {
  emulator::bulk_to_peer(target.value, emulator::shared_address(shared, place), bytes, barrier.value, place);
}

inline void fence_proxy_async() { emulator::fence_proxy_async(); }

}  // namespace microsdpa
