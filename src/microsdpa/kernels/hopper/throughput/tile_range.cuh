// The tiles of keys that ranges leave to a query tile: the warp that issues the copies finds them as it comes to each.
#pragma once

#include "../../common/head.cuh"
#include "../../common/masks.cuh"
#include "../common/tile_scheduler.cuh"

namespace microsdpa::hopper::throughput {

template <bool, typename T, typename OTHER>
struct Conditional {
  using Type = T;
};
template <typename T, typename OTHER>
struct Conditional<false, T, OTHER> {
  using Type = OTHER;
};
template <bool CONDITION, typename T, typename OTHER>
using IfElse = typename Conditional<CONDITION, T, OTHER>::Type;
template <bool CONDITION, typename T>
using If = IfElse<CONDITION, T, void>;

// A query tile whose rows see ranges of keys. Its tiles of keys follow each other.
struct RangedWork : WorkTile {
  int first_tile;  // of keys that any row sees
  int unused[3];   // written with the others, as all 16 bytes are copied
};

template <bool RANGED>
using WorkTileOf = IfElse<RANGED, RangedWork, WorkTile>;

// A row's range as memory has it: any numbers.
__device__ __forceinline__ KeyRange given_range(const MaskedParams& params, int64 batch, int head, int row) {
  const MaskParams& masks = params.masks;
  const int32* from = static_cast<const int32*>(masks.mask) + batch * masks.mask_strides.batch +
                      head * masks.mask_strides.head + row * masks.mask_strides.row;
  return {from[0], from[masks.mask_column_stride]};
}
// The keys that a row with this range sees.
__device__ __forceinline__ KeyRange keys_in(const KeyRange& given, int keys) {
  return {max(given.first, 0), max(0, min(given.last, keys))};
}

// The ranges of a query tile's rows, which a warp reads.
template <int BLOCK_M, int BLOCK_N>
struct RowRanges {
  static constexpr int OWN = BLOCK_M / 32;  // of a lane

  WorkTile work;
  KeyRange rows[OWN];  // as memory has them: nothing waits for them here

  __device__ __forceinline__ void load(const MaskedParams& params, const WorkTile& tile) {
    work = tile;
    const int last = min(BLOCK_M, params.call.seqlen_q - work.first_row) - 1;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      // mutation: a row twice says no more than once
      const int row = work.first_row + min(32 * i + lane_index(), last);
      rows[i] = given_range(params, work.batch, work.head, row);
    }
  }

  // The query tile with those tiles of keys from `first` to `last` - 1 that any of its rows sees, one at least, so that
  // rows without keys are written too. All lanes get the same.
  __device__ __forceinline__ RangedWork found(int keys, int first, int last) const {
    KeyRange any = {keys, 0};
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const KeyRange row = keys_in(rows[i], keys);
      // mutation: a range without keys would add tiles of which the row sees no key
      if (row.first < row.last) any = {min(any.first, row.first), max(any.last, row.last)};
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      any.first = min(any.first, __shfl_xor_sync(FULL_WARP, any.first, distance));
      any.last = max(any.last, __shfl_xor_sync(FULL_WARP, any.last, distance));
    }
    const int begin = max(first, any.first / BLOCK_N), end = min(last, (any.last + BLOCK_N - 1) / BLOCK_N);
    RangedWork found{};
    static_cast<WorkTile&>(found) = work;
    found.first_tile = min(begin, last - 1), found.tiles = max(end - begin, 1);
    return found;
  }
};

}  // namespace microsdpa::hopper::throughput
