// Q K^T and P V of a warp with 8-bit operands, on mma.sync.m16n8k32.
//
// A tile of 8-bit values is a SwizzledTile of units: two values in 16 bits. An 8-bit fragment of 32 columns is then, in
// every lane, a 16-bit fragment of 16 units. A warp owns 16 query rows; accumulators are those of mma_tile.cuh.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "mma_tile.cuh"

namespace microsdpa {

using Unit = uint16;

// Formats of quantized values: the sums that their products have, and their instruction. A residual term of a value
// counts in STEPS of the first.
struct E4m3 {
  using Sum = float;
  static constexpr int STEPS = 1;
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    mma_m16n8k32_e4m3(d, a, b);
  }
};

struct Int8 {
  using Sum = int32;
  static constexpr int STEPS = 256;
  static __device__ __forceinline__ void multiply(int32 (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    mma_m16n8k32_s8(d, a, b);
  }
};

// Copies rows of quantized values through registers; rows from `valid_rows` on become zeros.
//   global: [valid_rows, columns of the tile], row_stride units apart, 16-byte aligned
template <int THREADS, typename Tile>
__device__ __forceinline__ void copy_rows(Tile& tile, const Unit* global, int64 row_stride, int valid_rows) {
  using Chunk = Vector<Unit, 8>;
  Tile::template for_each_chunk<THREADS>(threadIdx.x, [&](unsigned row, unsigned column) {
    Chunk chunk{};
    if (static_cast<int>(row) < valid_rows) {
      chunk = *reinterpret_cast<const Chunk*>(global + row * row_stride + column);
    }
    *reinterpret_cast<Chunk*>(tile.at(row, column)) = chunk;
  });
}

// s = Q times K, both quantized, for KEYS keys. A query may have a residual term (TERMS 2).
//   query: QueryOperand of [16, TERMS * HEAD_DIM] quantized
template <typename Format, int HEAD_DIM, int TERMS, int KEYS, typename Query, typename Tile>
__device__ __forceinline__ void multiply_quantized(float (&s)[KEYS / 8][4], const Query& query, const Tile& key) {
  constexpr int DEPTH = HEAD_DIM / 32;
  constexpr int SUMS = Format::STEPS == 1 ? 1 : TERMS;  // terms of one step are added up together
#pragma unroll
  for (int n = 0; n < KEYS / 16; ++n) {
    typename Format::Sum sum[SUMS][2][4] = {};
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      uint32 b[2][2];
      load_b_of_keys(b, key, 16 * n, 16 * k);
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        uint32 a[1][4];
        query.get(a, term * DEPTH + k);
        Format::multiply(sum[term % SUMS][0], a[0], b[0]);
        Format::multiply(sum[term % SUMS][1], a[0], b[1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (SUMS == 1) {
          s[2 * n + half][e] = static_cast<float>(sum[0][half][e]);
        } else {  // below 2^30: exact
          s[2 * n + half][e] = static_cast<float>(sum[0][half][e] * Format::STEPS + sum[1][half][e]) / Format::STEPS;
        }
      }
    }
  }
}

// V of 32 keys from `row` on and 16 channels from 2 * `unit` on. Transposed as 16-bit elements, its values come in
// pairs of channels. Of a lane, with g = lane / 4 and t = lane % 4, loaded[i] is
//   V[8 i + 2 t][2 g], V[8 i + 2 t][2 g + 1], V[8 i + 2 t + 1][2 g], V[8 i + 2 t + 1][2 g + 1]
// Even and odd channels are therefore multiplied apart.
template <typename Tile>
__device__ __forceinline__ void load_quantized_value(uint32 (&loaded)[4], const Tile& value, unsigned row,
                                                     unsigned unit) {
  ldmatrix<4, true>(loaded, value.at(row + lane_index(), unit));
}

constexpr uint32 EVEN_BYTES = 0x6420, ODD_BYTES = 0x7531;

// o += P V with P rounded to FP16 and V's E4M3 values turned into FP16, exactly. Of every 16 channels, the first
// accumulator has the even ones, the second the odd ones.
template <int HEAD_DIM, int KEYS, typename Tile>
__device__ __forceinline__ void multiply_half_value(float (&o)[HEAD_DIM / 8][4], const float (&p)[KEYS / 8][4],
                                                    const Tile& value) {
#pragma unroll
  for (int k = 0; k < KEYS / 32; ++k) {
    uint32 a[2][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float (&pair)[4] = p[4 * k + j / 2];
      a[j / 4][j % 4] = pack<__half>(pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      uint32 loaded[4];
      load_quantized_value(loaded, value, 32 * k, 8 * n);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32 even[2], odd[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          even[j] = halves_from_e4m3x2(permute_bytes<EVEN_BYTES>(loaded[2 * i + j], 0));
          odd[j] = halves_from_e4m3x2(permute_bytes<ODD_BYTES>(loaded[2 * i + j], 0));
        }
        mma_m16n8k16<__half>(o[2 * n], a[i], even);
        mma_m16n8k16<__half>(o[2 * n + 1], a[i], odd);
      }
    }
  }
}

// o += P V with P rounded to E4M3; P must not exceed 448. Channels as in multiply_half_value.
//
// The hardware may keep fewer than 24 bits of an 8-bit product's sum: the sum over one tile of keys is made by itself,
// and added to o in FP32. Lane t's four columns of an A operand are four keys of its own: 2 t and 2 t + 1 of two
// neighbouring accumulators; V's values come in the same order.
template <int HEAD_DIM, int KEYS, typename Tile>
__device__ __forceinline__ void multiply_e4m3_value(float (&o)[HEAD_DIM / 8][4], const float (&p)[KEYS / 8][4],
                                                    const Tile& value) {
  uint32 a[KEYS / 32][4];
#pragma unroll
  for (int k = 0; k < KEYS / 32; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float (&low)[4] = p[4 * k + j / 2 * 2];
      const float (&high)[4] = p[4 * k + j / 2 * 2 + 1];
      const int e = j % 2 * 2;
      a[k][j] = e4m3x2_from_floats(low[e], low[e + 1]) | e4m3x2_from_floats(high[e], high[e + 1]) << 16;
    }
  }
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 16; ++n) {
    float part[2][4] = {};
#pragma unroll
    for (int k = 0; k < KEYS / 32; ++k) {
      uint32 loaded[4];
      load_quantized_value(loaded, value, 32 * k, 8 * n);
      const uint32 even[2] = {permute_bytes<EVEN_BYTES>(loaded[0], loaded[1]),
                              permute_bytes<EVEN_BYTES>(loaded[2], loaded[3])};
      const uint32 odd[2] = {permute_bytes<ODD_BYTES>(loaded[0], loaded[1]),
                             permute_bytes<ODD_BYTES>(loaded[2], loaded[3])};
      mma_m16n8k32_e4m3(part[0], a[k], even);
      mma_m16n8k32_e4m3(part[1], a[k], odd);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      o[2 * n][e] += part[0][e];
      o[2 * n + 1][e] += part[1][e];
    }
  }
}

}  // namespace microsdpa
