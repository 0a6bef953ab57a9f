// Q K^T and P V of a warp on tiles in shared memory, with few registers for addresses.
#pragma once

#include "../../common/mma_tile.cuh"
#include "../../ptx/arithmetic.cuh"

namespace microsdpa::ampere::stream {

// A lane's addresses of ldmatrix in a tile differ by constants and, within a panel, by an XOR with the columns' place:
// its row of the matrices that begin at `row`, a multiple of 8, and at column 16 block.
//   lane: bytes from the tile's first element to the lane's row of the matrices at row 0, column 0
template <int ROWS, typename Tile>
__device__ __forceinline__ const void* lane_row(const Tile& tile, uint32 lane, int row, int block) {
  constexpr int BLOCKS = Tile::PANEL / 16;
  return reinterpret_cast<const char*>(tile.data) + (lane ^ (block % BLOCKS * 32)) +
         (block / BLOCKS * ROWS + row) * Tile::PANEL * 2;
}

// The warp's operands. Addresses are made again for each tile, from one offset a tensor: kept, they would take the
// registers that O needs.
template <typename C, int STAGES, int KEPT>
struct Operands {
  using T = typename C::T;
  using QueryTile = typename C::QueryTile;
  using KeyTile = typename C::KeyTile;

  const QueryTile& query_tile;
  const KeyTile& key_tile;    // the first of the stages
  const KeyTile& value_tile;  // the same
  uint32 query, key, value;   // the lane's offsets, those of K and V in the tile that is current
  uint32 kept[C::ROW_TILES][KEPT > 0 ? KEPT : 1][4];

  __device__ __forceinline__ Operands(const QueryTile& query_tile, const KeyTile& key_tile, const KeyTile& value_tile,
                                      int warp_row)
      : query_tile(query_tile), key_tile(key_tile), value_tile(value_tile) {
    const unsigned lane = lane_index();
    query = 2 * QueryTile::index(warp_row + lane % 16, lane / 16 * 8);
    key = 2 * KeyTile::index(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    value = 2 * KeyTile::index(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
      for (int k = 0; k < KEPT; ++k) load_query(kept[t][k], t, k);
    }
  }

  // Goes on from tile i - 1 to tile i.
  __device__ __forceinline__ void next_tile(int i) {
    constexpr int SIZE = sizeof(KeyTile);
    const int step = i % STAGES == 0 ? (1 - STAGES) * SIZE : SIZE;
    query = opaque(query);
    key = opaque(key + step);
    value = opaque(value + step);
  }

  __device__ __forceinline__ void load_query(uint32 (&a)[4], int t, int k) const {
    ldmatrix<4>(a, lane_row<C::BLOCK_M>(query_tile, query, 16 * t, k));
  }

  // S = Q K^T for KEYS keys of the current tile, from row `first` on.
  template <int KEYS>
  __device__ __forceinline__ void scores(float (&s)[C::ROW_TILES][KEYS / 8][4], int first) const {
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < C::COLUMNS / 16; ++k) {
      uint32 a[C::ROW_TILES][4];
#pragma unroll
      for (int t = 0; t < C::ROW_TILES; ++t) {
        if (k < KEPT) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[t][j] = kept[t][k][j];
        } else {
          load_query(a[t], t, k);
        }
      }
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32 b[4];
        ldmatrix<4>(b, lane_row<C::BLOCK_N>(key_tile, key, first + 16 * n, k));
        multiply(s, a, b, n);
      }
    }
  }

  // O += P V for KEYS keys of the current tile, from row `first` on; P as FP32 accumulators.
  template <int KEYS>
  __device__ __forceinline__ void accumulate(float (&o)[C::ROW_TILES][C::COLUMNS / 8][4],
                                             const float (&s)[C::ROW_TILES][KEYS / 8][4], int first) const {
    uint32 p[C::ROW_TILES][KEYS / 16][4];
    pack_probabilities<T, C::ROW_TILES, KEYS>(p, s);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      uint32 a[C::ROW_TILES][4];
#pragma unroll
      for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[t][j] = p[t][k][j];
      }
#pragma unroll
      for (int n = 0; n < C::COLUMNS / 16; ++n) {
        uint32 b[4];
        ldmatrix<4, true>(b, lane_row<C::BLOCK_N>(value_tile, value, first + 16 * k, n));
        multiply(o, a, b, n);
      }
    }
  }

  // Columns 16 n to 16 n + 15 of `d` += a b.
  template <int N>
  __device__ __forceinline__ static void multiply(float (&d)[C::ROW_TILES][N][4], const uint32 (&a)[C::ROW_TILES][4],
                                                  const uint32 (&b)[4], int n) {
    const uint32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; ++t) {
      mma_m16n8k16<T>(d[t][2 * n], a[t], low);
      mma_m16n8k16<T>(d[t][2 * n + 1], a[t], high);
    }
  }
};

}  // namespace microsdpa::ampere::stream
