// Tiles in shared memory, swizzled so that 16-byte copies and ldmatrix touch every bank once.
#pragma once

#include "../prelude.cuh"
#include "../ptx/cp_async.cuh"

namespace microsdpa {

// Columns whose chunks of 16 bytes change places with one another: the largest power of two, up to 64, that divides a
// row into equal groups.
template <int COLUMNS>
constexpr int SWIZZLED_GROUP = COLUMNS % 64 == 0   ? 64
                               : COLUMNS % 32 == 0 ? 32
                                                   : 16;

// [ROWS, COLUMNS] elements of two bytes, for any COLUMNS that is a multiple of 16 and ROWS that is one of 8.
//
// The columns are cut into panels of PANEL elements, each stored whole. A panel is a group of 64, 32 or 16 columns, as
// the patterns of wgmma and of bulk copies want it, or it is the whole row (SwizzledRows below). A row of a group has
// eight, four or two chunks of 16 bytes. They are permuted by XOR with bits of the row's number. So eight consecutive
// chunks of a row fill the 32 banks, and one column of chunks of eight rows, which is what ldmatrix reads, does as
// well.
template <typename T, int ROWS, int COLUMNS, int PANEL_ = SWIZZLED_GROUP<COLUMNS>>
struct SwizzledTile {
  static constexpr int CHUNK = 16 / sizeof(T);
  static constexpr int PANEL = PANEL_, GROUP = SWIZZLED_GROUP<COLUMNS>;
  // Columns of a row that neighbouring threads copy: a panel's, or at most 128 bytes of a whole row.
  static constexpr int PART = PANEL == GROUP ? GROUP : COLUMNS >= 64 ? 64 : 32;
  static constexpr int CHUNKS = GROUP / CHUNK;  // of a group's row
  static_assert(sizeof(T) == 2 && COLUMNS % 16 == 0 && ROWS % 8 == 0, "a tile of whole ldmatrix matrices");
  static_assert(PANEL == GROUP || PANEL == COLUMNS, "panels are groups, or whole rows");

  template <int OTHER>
  using WithRows = SwizzledTile<T, OTHER, COLUMNS, PANEL>;

  alignas(128) T data[ROWS * COLUMNS];

  // The chunk at (row + first_row, column); first_row is a multiple of 8. In a loop `row` and `column` are the lane's,
  // and what depends on the iteration alone, first_row and the group, is a constant in the address of a load.
  __device__ __forceinline__ static unsigned index(unsigned row, unsigned column) {
    const unsigned within = PANEL == GROUP ? 0 : column / GROUP * GROUP;
    return row * PANEL + within + ((column % GROUP) ^ (row * CHUNKS / 8 % CHUNKS * CHUNK));
  }
  __device__ __forceinline__ T* at(unsigned row, unsigned column, unsigned first_row = 0) {
    return data + index(row, column) + (column / PANEL * ROWS + first_row) * PANEL;
  }
  __device__ __forceinline__ const T* at(unsigned row, unsigned column, unsigned first_row = 0) const {
    return data + index(row, column) + (column / PANEL * ROWS + first_row) * PANEL;
  }

  // Calls visit(row, column) for the chunks that this one of THREADS threads has to move. Eight consecutive threads
  // have eight consecutive chunks of a panel, or of a part of its rows: all banks of shared memory.
  template <int THREADS, typename Visit>
  __device__ __forceinline__ static void for_each_chunk(unsigned thread, Visit visit) {
    if constexpr (PANEL != GROUP) {
      visit_columns<THREADS, 0>(thread, visit);
    } else {
      constexpr int COUNT = ROWS * COLUMNS / CHUNK;
      constexpr int IN_PANEL = ROWS * CHUNKS;
#pragma unroll
      for (int first = 0; first < COUNT; first += THREADS) {
        if constexpr (IN_PANEL % THREADS == 0) {  // the panel is known when compiling
          visit(first % IN_PANEL / CHUNKS + thread / CHUNKS, first / IN_PANEL * PANEL + thread % CHUNKS * CHUNK);
        } else {
          const unsigned i = first + thread;
          if (COUNT % THREADS == 0 || i < COUNT) {
            visit(i % IN_PANEL / CHUNKS, i / IN_PANEL * PANEL + i % CHUNKS * CHUNK);
          }
        }
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

 private:
  // for_each_chunk() of whole rows, for the columns from FIRST on: a part of 64, 32 or 16 columns, the widest that
  // there is, and then the rest. A part of 64 columns is 128 bytes of a row in global memory.
  template <int THREADS, int FIRST, typename Visit>
  __device__ __forceinline__ static void visit_columns(unsigned thread, Visit visit) {
    if constexpr (FIRST < COLUMNS) {
      constexpr int LEFT = COLUMNS - FIRST, WIDTH = LEFT >= 64 ? 64 : LEFT >= 32 ? 32 : 16;
      constexpr int OF_ROW = WIDTH / CHUNK, COUNT = ROWS * OF_ROW;
      static_assert(THREADS % OF_ROW == 0, "threads move whole parts");
      // Eight threads have two rows. Those next to each other would share banks: they have every other one.
      constexpr bool IN_TURN = WIDTH == 32 && COLUMNS % 32 == 16;
#pragma unroll
      for (int first = 0; first < COUNT; first += THREADS) {
        if (COUNT % THREADS == 0 || first + thread < COUNT) {
          const unsigned row = thread / OF_ROW;
          visit(first / OF_ROW + (IN_TURN ? row / 4 * 4 + row % 2 * 2 + row / 2 % 2 : row),
                FIRST + thread % OF_ROW * CHUNK);
        }
      }
      visit_columns<THREADS, FIRST + WIDTH>(thread, visit);
    }
  }
};

// The same with whole rows next to one another where groups would have at most MOST columns: rows of 80 are read from
// global memory in parts of 64 and 16 columns, where panels of 16 would have 32 bytes of a row at a time.
template <typename T, int ROWS, int COLUMNS, int MOST = 16>
using SwizzledRows =
    SwizzledTile<T, ROWS, COLUMNS, (SWIZZLED_GROUP<COLUMNS> <= MOST ? COLUMNS : SWIZZLED_GROUP<COLUMNS>)>;

}  // namespace microsdpa
