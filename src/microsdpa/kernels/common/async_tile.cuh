// Tiles of rows that are on their way from global to shared memory while the warps compute.
#pragma once

#include "../ptx/cp_async.cuh"
#include "element.cuh"

namespace microsdpa {

// [ROWS, COLUMNS] elements with 16 bytes of padding a row: eight rows of one column of 16-byte chunks then lie in
// different banks, when COLUMNS is a multiple of 32.
template <typename T, int ROWS, int COLUMNS>
struct PaddedTile {
  static constexpr int PITCH = COLUMNS + 16 / sizeof(T);
  alignas(32) T data[ROWS * PITCH];
  __device__ __forceinline__ T* at(int row, int column) { return data + row * PITCH + column; }
};

// Starts copying rows of HEAD_DIM elements into rows first .. first + ROWS - 1 of a tile; from `valid_rows` on they
// become zeros, so that a probability of 0 never meets a stale NaN in P V. The copies are part of the thread's next
// cp_async_commit. Rows that do not lie on 16 bytes are copied at once, through registers: cp.async moves 4 bytes at
// least.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart, LOAD_BYTES-aligned
//   tile: at(row, column) gives the place of an element; 16-byte chunks stay whole
//   thread: of the THREADS that copy the rows together
template <int ROWS, int HEAD_DIM, int THREADS, int LOAD_BYTES, typename Tile, typename T>
__device__ __forceinline__ void start_rows(Tile& tile, int first, const T* global, int64 row_stride, int valid_rows,
                                           int thread) {
  constexpr int WIDTH = LOAD_BYTES / sizeof(T);
  constexpr int PER_ROW = HEAD_DIM / WIDTH;
  if constexpr (LOAD_BYTES == 16) {
    // A thread keeps its column and goes down the rows: one addition for each copy.
    static_assert(THREADS % PER_ROW == 0, "threads copy whole rows");
    constexpr int STEP = THREADS / PER_ROW;
    const int top = thread / PER_ROW;
    const int column = thread % PER_ROW * WIDTH;
    const T* from = global + top * row_stride + column;
    if (valid_rows >= ROWS) {
#pragma unroll
      for (int row = top; row - top < ROWS; row += STEP, from += STEP * row_stride) {
        if (ROWS % STEP == 0 || row < ROWS) cp_async<16>(tile.at(first + row, column), from);
      }
    } else {
#pragma unroll
      for (int row = top; row - top < ROWS; row += STEP, from += STEP * row_stride) {
        // The address of a row that does not exist is never read, and still has to be one that does.
        const bool valid = row < valid_rows;
        if (ROWS % STEP == 0 || row < ROWS) {
          cp_async<16>(tile.at(first + row, column), valid ? from : global, valid ? 16 : 0);
        }
      }
    }
  } else {
    for (int i = thread; i < ROWS * PER_ROW; i += THREADS) {
      const int row = i / PER_ROW;
      const int column = i % PER_ROW;
      *tile.at(first + row, column) = row < valid_rows ? global[row * row_stride + column] : from_float<T>(0.0f);
    }
  }
}

}  // namespace microsdpa
