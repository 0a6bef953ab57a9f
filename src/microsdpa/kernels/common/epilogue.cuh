// From a warp's output accumulators to global memory.
#pragma once

#include "element.cuh"
#include "mma_tile.cuh"

namespace microsdpa {

// Writes o * scale, rounded to T, by way of a swizzled tile of which the warp owns the rows from `row` on: the lanes
// hold pairs of columns, and global memory wants 16-byte stores that fill whole lines.
//   o: of COLUMNS columns, of which the first HEAD_DIM are written
//   destination(row in the warp's rows) gives the output row's address, or null when there is no such row
template <typename T, int ROW_TILES, int COLUMNS, int HEAD_DIM = COLUMNS, typename Tile, typename Destination>
__device__ __forceinline__ void store_rows(Tile& staging, unsigned row, const float (&o)[ROW_TILES][COLUMNS / 8][4],
                                           const float (&scale)[ROW_TILES][2], Destination destination) {
  const unsigned lane = lane_index();
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        *reinterpret_cast<uint32*>(staging.at(row + 16 * i + 8 * half + lane / 4, 8 * n + lane % 4 * 2)) =
            pack<T>(o[i][n][2 * half] * scale[i][half], o[i][n][2 * half + 1] * scale[i][half]);
      }
    }
  }
  __syncwarp();
  using Chunk = Vector<T, Tile::CHUNK>;
  Tile::template WithRows<16 * ROW_TILES>::template for_each_chunk<32>(lane, [&](unsigned r, unsigned column) {
    if (COLUMNS != HEAD_DIM && column >= HEAD_DIM) return;
    if (T* out = destination(r)) {
      *reinterpret_cast<Chunk*>(out + column) = *reinterpret_cast<const Chunk*>(staging.at(row + r, column));
    }
  });
}

}  // namespace microsdpa
