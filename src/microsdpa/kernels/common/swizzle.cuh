// Tiles in shared memory, swizzled so that 16-byte copies and ldmatrix touch every bank once.
#pragma once

#include "../prelude.cuh"
#include "../ptx/cp_async.cuh"

namespace microsdpa {

// [ROWS, COLUMNS] elements of two bytes, for any COLUMNS that is a multiple of 16 and ROWS that is one of 8.
//
// The columns are cut into panels of 64 (or 32, or 16) elements, each stored whole: a row of a panel is a run of 128
// (64, 32) bytes, and eight consecutive 16-byte chunks fill the 32 banks. The chunks of a row are permuted by XOR with
// the number of the 128-byte line group that the row is in, so that one column of chunks, which is what ldmatrix reads
// of eight rows, fills the banks as well.
template <typename T, int ROWS, int COLUMNS>
struct SwizzledTile {
  static constexpr int CHUNK = 16 / sizeof(T);
  static constexpr int PANEL = COLUMNS % 64 == 0 ? 64 : COLUMNS % 32 == 0 ? 32 : 16;
  static constexpr int CHUNKS = PANEL / CHUNK;  // of a panel's row
  static_assert(sizeof(T) == 2 && COLUMNS % 16 == 0 && ROWS % 8 == 0, "a tile of whole ldmatrix matrices");

  alignas(128) T data[ROWS * COLUMNS];

  // The chunk at (row + first_row, column); first_row is a multiple of 8. In a loop `row` and `column` are the lane's,
  // and what depends on the iteration alone, first_row and the panel, is a constant in the address of a load.
  __device__ __forceinline__ static unsigned index(unsigned row, unsigned column) {
    return row * PANEL + ((column % PANEL) ^ (row * CHUNKS / 8 % CHUNKS * CHUNK));
  }
  __device__ __forceinline__ T* at(unsigned row, unsigned column, unsigned first_row = 0) {
    return data + index(row, column) + (column / PANEL * ROWS + first_row) * PANEL;
  }
  __device__ __forceinline__ const T* at(unsigned row, unsigned column, unsigned first_row = 0) const {
    return data + index(row, column) + (column / PANEL * ROWS + first_row) * PANEL;
  }

  // Calls visit(row, column) for the chunks that this one of THREADS threads has to move. Eight consecutive threads
  // have eight consecutive chunks of a panel: whole 128-byte lines of shared memory.
  template <int THREADS, typename Visit>
  __device__ __forceinline__ static void for_each_chunk(unsigned thread, Visit visit) {
    constexpr int COUNT = ROWS * COLUMNS / CHUNK;
    constexpr int IN_PANEL = ROWS * CHUNKS;
#pragma unroll
    for (int first = 0; first < COUNT; first += THREADS) {
      if constexpr (IN_PANEL % THREADS == 0) {  // the panel is known when compiling
        visit(first % IN_PANEL / CHUNKS + thread / CHUNKS, first / IN_PANEL * PANEL + thread % CHUNKS * CHUNK);
      } else {
        const unsigned i = first + thread;
        if (COUNT % THREADS == 0 || i < COUNT) visit(i % IN_PANEL / CHUNKS, i / IN_PANEL * PANEL + i % CHUNKS * CHUNK);
      }
    }
  }

  // Starts copying rows from global memory with THREADS threads; rows from `valid_rows` on become zeros, so that a
  // probability of 0 never meets a stale NaN in P V. Needs commit, wait and a barrier before it is read.
  //   global: [valid_rows, COLUMNS], row_stride elements apart, 16-byte aligned
  template <int THREADS>
  __device__ __forceinline__ void copy_async(const T* global, int64 row_stride, int valid_rows, unsigned thread) {
    // mutation: both ways copy a whole tile alike
    if (valid_rows >= ROWS) {
      for_each_chunk<THREADS>(thread, [&](unsigned row, unsigned column) {
        cp_async<16>(at(row, column), global + row * row_stride + column);
      });
      return;
    }
    for_each_chunk<THREADS>(thread, [&](unsigned row, unsigned column) {
      const bool valid = static_cast<int>(row) < valid_rows;
      // An invalid row's address is never read, and still has to be one that exists.
      const T* source = global + (valid ? row : 0) * row_stride + column;
      cp_async<16>(at(row, column), source, valid ? 16 : 0);
    });
  }

  // The same for rows of EXISTING columns; the tile's further columns become zeros.
  //   global: [valid_rows, EXISTING], row_stride elements apart, 16-byte aligned
  template <int THREADS, int EXISTING>
  __device__ __forceinline__ void copy_columns_async(const T* global, int64 row_stride, int valid_rows,
                                                     unsigned thread) {
    if constexpr (EXISTING == COLUMNS) {
      copy_async<THREADS>(global, row_stride, valid_rows, thread);
    } else {
      for_each_chunk<THREADS>(thread, [&](unsigned row, unsigned column) {
        const bool valid = static_cast<int>(row) < valid_rows && column < EXISTING;
        cp_async<16>(at(row, column), valid ? global + row * row_stride + column : global, valid ? 16 : 0);
      });
    }
  }
};

}  // namespace microsdpa
