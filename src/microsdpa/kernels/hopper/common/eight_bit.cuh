// Tiles of 8-bit values in shared memory, and the query tiles of a CTA with 8-bit operands.
#pragma once

#include "../../common/eight_bit_params.cuh"
#include "../../ptx/wgmma.cuh"
#include "tile_scheduler.cuh"

namespace microsdpa::hopper {

using Byte = unsigned char;

// The rows of a tile of 8-bit values are as long as its swizzle pattern.
template <int ROW_BYTES>
constexpr Swizzle PATTERN_OF_ROWS = ROW_BYTES == 128  ? Swizzle::BYTES_128
                                    : ROW_BYTES == 64 ? Swizzle::BYTES_64
                                                      : Swizzle::BYTES_32;

// Bytes from such a tile's start to 16-byte chunk `chunk` of row `row`.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * ROW_BYTES + (chunk ^ (row * ROW_BYTES / 128 % (ROW_BYTES / 16))) * 16;
}

// Descriptor of such a tile as an operand that is contiguous along K.
template <int ROW_BYTES>
__device__ __forceinline__ uint64 rows_descriptor(const Byte* tile) {
  return matrix_descriptor(tile, 16, 8 * ROW_BYTES, PATTERN_OF_ROWS<ROW_BYTES>);
}

// Sums of products of quantized values.
template <typename FORMAT>
struct SumOf {
  using Type = float;
  static constexpr bool INTEGER = false;
};
template <>
struct SumOf<signed char> {
  using Type = int32;
  static constexpr bool INTEGER = true;
};

// Without masks but a causal one, a query tile visits all tiles of keys that the schedule has for it.
struct AllTiles {
  __device__ __forceinline__ WorkTile seen(const WorkTile& work) const { return work; }
  __device__ __forceinline__ int key_tile(const WorkTile&, int place) const { return place; }
};

// Calls `visit` with every query tile of the CTA in turn, as `tiles` leaves it. A row of 8-bit values is as long as one
// of half as many elements.
template <bool CAUSAL, typename Shared, typename Visit, typename Tiles = AllTiles>
__device__ __forceinline__ void for_each_work(const EightBitParams& params, Visit visit, const Tiles& tiles = {}) {
  AttentionParams sizes;
  sizes.batch = params.batch, sizes.heads = params.heads, sizes.heads_kv = params.heads_kv;
  sizes.seqlen_q = params.seqlen_q, sizes.seqlen_k = params.seqlen_k, sizes.diagonal = params.diagonal;
  const Schedule<CAUSAL, Shared::BLOCK_M, Shared::BLOCK_N, Shared::HEAD_DIM / 2> schedule(sizes);
  for (int round = 0; schedule.has(round); ++round) {
    const WorkTile work = schedule.work(round);
    if (work.tiles > 0) visit(tiles.seen(work));
  }
}

}  // namespace microsdpa::hopper
