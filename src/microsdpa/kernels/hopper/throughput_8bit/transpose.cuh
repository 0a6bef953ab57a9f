// V^T out of V, in shared memory: wgmma wants 8-bit operands contiguous along the dimension that it sums over, keys.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "../../ptx/mma.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput_8bit {

// Transposes CHANNELS of a tile of 8-bit values: `warp` of WARPS takes its share, with AT_A_TIME loads under way
// together.
//   value: [KEYS, CHANNELS]   transposed: these rows of panels [ALL_CHANNELS, PANEL]; both swizzled
//
// ldmatrix transposes 16-bit units: with g = lane / 4, t = lane % 4 and eight keys from k on, a lane gets the values
// V[k + 2t][2g], V[k + 2t][2g + 1], V[k + 2t + 1][2g], V[k + 2t + 1][2g + 1]. Of two such registers, permuting bytes
// makes four keys of channel 2g and four of 2g + 1, which stmatrix stores as rows. What is not in order then is
//   - keys: bytes 4t to 4t + 3 of 16 are those of keys 2t, 2t + 1, 8 + 2t, 8 + 2t + 1: just those whose scores lane t
//     of a quad has in an accumulator, so that probabilities become the left operand of wgmma where they are;
//   - channels: of 16, rows 0 to 7 are the even ones, rows 8 to 15 the odd ones. Eight rows then meet in no bank.
template <int CHANNELS, int ALL_CHANNELS, int KEYS, int PANEL, int WARPS, int AT_A_TIME>
__device__ __forceinline__ void transpose_value(Byte* transposed, const Byte* value, int warp) {
  constexpr uint32 EVEN_BYTES = 0x6420, ODD_BYTES = 0x7531;
  constexpr int CHUNKS = CHANNELS / 16;
  const int lane = threadIdx.x % 32;
  const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll 1
  for (int group = warp; group < KEYS / 32; group += WARPS) {
    const int first = 32 * group;
    Byte* panel = transposed + first / PANEL * (ALL_CHANNELS * PANEL);
    const int column = first % PANEL / 16 + lane / 16;
#pragma unroll
    for (int start = 0; start < CHUNKS; start += AT_A_TIME) {
      uint32 loaded[AT_A_TIME][4];
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        ldmatrix<4, true>(loaded[i], value + swizzled<CHANNELS>(first + lane, start + i));
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        const uint32(&from)[4] = loaded[i];
        const uint32 to[4] = {permute_bytes<EVEN_BYTES>(from[0], from[1]), permute_bytes<ODD_BYTES>(from[0], from[1]),
                              permute_bytes<EVEN_BYTES>(from[2], from[3]), permute_bytes<ODD_BYTES>(from[2], from[3])};
        stmatrix(panel + swizzled<PANEL>(16 * (start + i) + row, column), to);
      }
    }
  }
}

// The channel of O in element 2 * half + e of the thread's accumulator block `n` of eight columns: neighbours 0 to 3 of
// 16 i + 4 t are, of a row, elements 0 of block 2 i and of block 2 i + 1, and then elements 1.
template <int N>
__device__ __forceinline__ float& channel_of_quad(float (&o)[N], int i, int half, int neighbour) {
  return o[8 * i + 4 * (neighbour % 2) + 2 * half + neighbour / 2];
}

}  // namespace microsdpa::hopper::throughput_8bit
