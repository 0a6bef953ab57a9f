// Q K^T and P V of a warp on mma.sync.m16n8k16, with operands in swizzled shared memory or in registers.
//
// A warp owns ROW_TILES tiles of 16 query rows. Its accumulators are float[ROW_TILES][COLUMNS / 8][4]; of tile i, the
// lane holds rows 16 i + lane / 4 (elements 0 and 1) and that + 8 (elements 2 and 3), at the columns 8 n + 2 (lane % 4)
// and the next one.
#pragma once

#include "../ptx/mma.cuh"
#include "element.cuh"
#include "swizzle.cuh"

namespace microsdpa {

// Two floats rounded to nearest even, in one register; `low` is in the low half.
template <typename T>
__device__ __forceinline__ uint32 pack(float low, float high);

template <>
__device__ __forceinline__ uint32 pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32*>(&pair);
}

template <>
__device__ __forceinline__ uint32 pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32*>(&pair);
}

__device__ __forceinline__ unsigned lane_index() { return threadIdx.x % 32; }

// A operand: rows row .. row + 15, columns column .. column + 15.
template <typename Tile>
__device__ __forceinline__ void load_a(uint32 (&a)[4], const Tile& tile, unsigned row, unsigned column) {
  const unsigned lane = lane_index();
  ldmatrix<4>(a, tile.at(lane % 16, column ^ (lane / 16 * 8), row));
}

// B operand of Q K^T: K^T of 16 keys from `row` on and 16 columns; b[n] multiplies into keys row + 8 n onwards.
template <typename Tile>
__device__ __forceinline__ void load_b_of_keys(uint32 (&b)[2][2], const Tile& tile, unsigned row, unsigned column) {
  const unsigned lane = lane_index();
  uint32 loaded[4];
  ldmatrix<4>(loaded, tile.at(lane % 8 + lane / 16 * 8, column ^ (lane / 8 % 2 * 8), row));
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = loaded[i];
}

// B operand of P V: V of 16 keys from `row` on and 16 columns; b[n] multiplies into columns column + 8 n onwards.
template <typename Tile>
__device__ __forceinline__ void load_b_of_values(uint32 (&b)[2][2], const Tile& tile, unsigned row, unsigned column) {
  const unsigned lane = lane_index();
  uint32 loaded[4];
  ldmatrix<4, true>(loaded, tile.at(lane % 16, column ^ (lane / 16 * 8), row));
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = loaded[i];
}

// The A operands of a warp's query rows. The first KEPT of the HEAD_DIM / 16 are loaded once and stay in registers, the
// others are loaded again for every product.
template <typename Tile, int ROW_TILES, int HEAD_DIM, int KEPT>
struct QueryOperand {
  static constexpr bool IN_REGISTERS = KEPT == HEAD_DIM / 16;

  const Tile& tile;
  unsigned row;
  uint32 kept[ROW_TILES][KEPT > 0 ? KEPT : 1][4];

  __device__ __forceinline__ QueryOperand(const Tile& tile, unsigned row) : tile(tile), row(row) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int k = 0; k < KEPT; ++k) load_a(kept[i][k], tile, row + 16 * i, 16 * k);
    }
  }

  // Columns 16 k .. 16 k + 15.
  __device__ __forceinline__ void get(uint32 (&a)[ROW_TILES][4], int k) const {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      if (k < KEPT) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = kept[i][k][j];
      } else {
        load_a(a[i], tile, row + 16 * i, 16 * k);
      }
    }
  }
};

// s = Q K^T for KEYS keys, those from row `first` of the tile on.
//
// With Q in registers the keys are taken 32 at a time, so that the scores of some are finished, and may be worked on,
// while the tensor cores are at the next.
template <typename T, int ROW_TILES, int HEAD_DIM, int KEYS, typename Query, typename Tile>
__device__ __forceinline__ void multiply_query_key(float (&s)[ROW_TILES][KEYS / 8][4], const Query& query,
                                                   const Tile& key, unsigned first) {
  constexpr int AT_A_TIME = Query::IN_REGISTERS && KEYS % 32 == 0 ? 32 : KEYS;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int start = 0; start < KEYS; start += AT_A_TIME) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      uint32 a[ROW_TILES][4];
      query.get(a, k);
#pragma unroll
      for (int n = start / 16; n < (start + AT_A_TIME) / 16; ++n) {
        uint32 b[2][2];
        load_b_of_keys(b, key, first + 16 * n, 16 * k);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
          mma_m16n8k16<T>(s[i][2 * n], a[i], b[0]);
          mma_m16n8k16<T>(s[i][2 * n + 1], a[i], b[1]);
        }
      }
    }
  }
}

// Rounds FP32 accumulators of P to T: two neighbouring 8-column accumulators are, in each lane, just what one A operand
// of 16 columns wants.
template <typename T, int ROW_TILES, int KEYS>
__device__ __forceinline__ void pack_probabilities(uint32 (&a)[ROW_TILES][KEYS / 16][4],
                                                   const float (&p)[ROW_TILES][KEYS / 8][4]) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&pair)[4] = p[i][2 * k + j / 2];
        a[i][k][j] = pack<T>(pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
      }
    }
  }
}

// o += P V for KEYS keys, those from row `first` of the tile on.
template <typename T, int ROW_TILES, int HEAD_DIM, int KEYS, typename Tile>
__device__ __forceinline__ void multiply_probability_value(float (&o)[ROW_TILES][HEAD_DIM / 8][4],
                                                           const uint32 (&p)[ROW_TILES][KEYS / 16][4],
                                                           const Tile& value, unsigned first) {
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      uint32 b[2][2];
      load_b_of_values(b, value, first + 16 * k, 16 * n);
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        mma_m16n8k16<T>(o[i][2 * n], p[i][k], b[0]);
        mma_m16n8k16<T>(o[i][2 * n + 1], p[i][k], b[1]);
      }
    }
  }
}

// The same for P as FP32 accumulators.
template <typename T, int ROW_TILES, int HEAD_DIM, int KEYS, typename Tile>
__device__ __forceinline__ void multiply_probability_value(float (&o)[ROW_TILES][HEAD_DIM / 8][4],
                                                           const float (&p)[ROW_TILES][KEYS / 8][4], const Tile& value,
                                                           unsigned first) {
  uint32 packed[ROW_TILES][KEYS / 16][4];
  pack_probabilities<T, ROW_TILES, KEYS>(packed, p);
  multiply_probability_value<T, ROW_TILES, HEAD_DIM, KEYS>(o, packed, value, first);
}

}  // namespace microsdpa
