// Tiles of rows that are on their way from global to shared memory while the warps compute.
#pragma once

#include "../ptx/cp_async.cuh"
#include "element.cuh"

namespace microsdpa {

// Starts copying `valid_rows` rows of HEAD_DIM elements into a tile of ROWS rows; the rows past them become zeros. The
// copy is part of the thread's next cp_async_commit. Rows that are not aligned to 16 bytes are copied at once, through
// registers: cp.async moves 4 bytes at least.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart, LOAD_BYTES-aligned
//   shared: [ROWS, PITCH], PITCH a multiple of 16 bytes
//   thread: of the THREADS that copy the tile together
template <int ROWS, int HEAD_DIM, int PITCH, int THREADS, int LOAD_BYTES, typename T>
__device__ __forceinline__ void start_tile(T* shared, const T* global, int64 row_stride, int valid_rows, int thread) {
  constexpr int WIDTH = LOAD_BYTES / sizeof(T);
  constexpr int PER_ROW = HEAD_DIM / WIDTH;
  for (int i = thread; i < ROWS * PER_ROW; i += THREADS) {
    const int row = i / PER_ROW;
    const int column = i % PER_ROW * WIDTH;
    T* to = shared + row * PITCH + column;
    const T* from = global + row * row_stride + column;
    if constexpr (LOAD_BYTES == 16) {
      cp_async<16>(to, row < valid_rows ? from : global, row < valid_rows ? 16 : 0);
    } else {
      *to = row < valid_rows ? *from : from_float<T>(0.0f);
    }
  }
}

}  // namespace microsdpa
