// Rows of a head between global and shared memory: of any head dimension, on any alignment.
#pragma once

#include "../common/element.cuh"
#include "../common/mma_tile.cuh"
#include "../ptx/cp_async.cuh"

namespace microsdpa::backward {

// Brings rows of C::HEAD_DIM elements into a tile that may be wider; what does not exist becomes zeros. Rows on 16
// bytes are copied asynchronously, others at once.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart
template <typename C, typename Tile>
__device__ __forceinline__ void load_rows(Tile& tile, const typename C::T* global, int64 row_stride, int valid_rows) {
  using T = typename C::T;
  Tile::template for_each_chunk<C::THREADS>(threadIdx.x, [&](unsigned row, unsigned column) {
    const bool valid = static_cast<int>(row) < valid_rows && column < C::HEAD_DIM;
    const T* source = valid ? global + row * row_stride + column : global;  // what is not read still has to exist
    if constexpr (C::LOAD_BYTES == 16) {
      cp_async<16>(tile.at(row, column), source, valid ? 16 : 0);
    } else {
      Vector<T, Tile::CHUNK> chunk;
#pragma unroll
      for (int e = 0; e < Tile::CHUNK; ++e) {
        chunk.data[e] = valid && column + e < C::HEAD_DIM ? source[e] : from_float<T>(0.0f);
      }
      *reinterpret_cast<Vector<T, Tile::CHUNK>*>(tile.at(row, column)) = chunk;
    }
  });
}

// Writes a warp's sums times a factor, of the rows that exist, by way of its rows of a tile.
//   out: [valid_rows, HEAD_DIM], row_stride elements apart
template <typename C, typename Tile>
__device__ __forceinline__ void store_rows(Tile& staging, unsigned warp_row,
                                           const float (&sums)[C::ROW_TILES][C::COLUMNS / 8][4], float factor,
                                           typename C::T* out, int64 row_stride, int valid_rows) {
  using T = typename C::T;
  using Chunk = Vector<T, Tile::CHUNK>;
  const unsigned lane = lane_index();
#pragma unroll
  for (int i = 0; i < 2 * C::ROW_TILES; ++i) {
    const int t = i / 2, half = i % 2;
#pragma unroll
    for (int n = 0; n < C::COLUMNS / 8; ++n) {
      *reinterpret_cast<uint32*>(staging.at(warp_row + 8 * i + lane / 4, 8 * n + lane % 4 * 2)) =
          pack<T>(sums[t][n][2 * half] * factor, sums[t][n][2 * half + 1] * factor);
    }
  }
  __syncwarp();
  SwizzledTile<T, C::WARP_ROWS, C::COLUMNS>::template for_each_chunk<32>(lane, [&](unsigned row, unsigned column) {
    if (static_cast<int>(row) >= valid_rows || column >= C::HEAD_DIM) return;
    const Chunk chunk = *reinterpret_cast<const Chunk*>(staging.at(warp_row + row, column));
    T* place = out + row * row_stride + column;
    if constexpr (C::LOAD_BYTES == 16) {
      *reinterpret_cast<Chunk*>(place) = chunk;
    } else {
#pragma unroll
      for (int e = 0; e < Tile::CHUNK; ++e) {
        if (column + e < C::HEAD_DIM) place[e] = chunk.data[e];
      }
    }
  });
}

}  // namespace microsdpa::backward
