// Tiles of rows, from global to shared memory.
#pragma once

#include "../prelude.cuh"
#include "element.cuh"

namespace microsdpa {

// Copies `valid_rows` rows of HEAD_DIM elements into a tile of ROWS rows; the rows past them become zeros, so
// that a masked probability of 0 never meets a stale NaN in P V.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart, LOAD_BYTES-aligned
//   shared: [ROWS, PITCH], PITCH a multiple of the load's width
template <int ROWS, int HEAD_DIM, int PITCH, int THREADS, int LOAD_BYTES, typename T>
__device__ __forceinline__ void load_tile(T* shared, const T* global, int64 row_stride, int valid_rows) {
  constexpr int WIDTH = LOAD_BYTES / sizeof(T);
  constexpr int PER_ROW = HEAD_DIM / WIDTH;
  using Load = Vector<T, WIDTH>;
  for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
    const int row = i / PER_ROW;
    const int column = i % PER_ROW * WIDTH;
    Load load{};
    if (row < valid_rows) load = *reinterpret_cast<const Load*>(global + row * row_stride + column);
    *reinterpret_cast<Load*>(shared + row * PITCH + column) = load;
  }
}

}  // namespace microsdpa
