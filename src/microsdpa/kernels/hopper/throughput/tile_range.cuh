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
  KeyRange seen;   // tiles of keys that any row sees
  KeyRange whole;  // tiles in which nothing is hidden
};

template <bool RANGED>
using WorkTileOf = IfElse<RANGED, RangedWork, WorkTile>;

// The keys that a row sees by its range, in which any numbers may stand.
__device__ __forceinline__ KeyRange range_of_row(const MaskedParams& params, int64 batch, int head, int row) {
  const MaskParams& masks = params.masks;
  const int32* from = static_cast<const int32*>(masks.mask) + batch * masks.mask_strides.batch +
                      head * masks.mask_strides.head + row * masks.mask_strides.row;
  return {max(from[0], 0), max(0, min(from[masks.mask_column_stride], params.call.seqlen_k))};
}

// The query tile with those tiles of keys from `first` to `last` - 1 that any of its rows sees, one at least, so that
// rows without keys are written too. All lanes of a warp get the same.
template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ RangedWork ranged_work(const MaskedParams& params, const WorkTile& work, int first,
                                                  int last) {
  const int keys = params.call.seqlen_k, rows = min(BLOCK_M, params.call.seqlen_q - work.first_row);
  KeyRange any = {keys, 0}, all = {0, keys};  // that one row sees, and that every row does
#pragma unroll
  for (int begin = 0; begin < BLOCK_M; begin += 32) {
    // mutation: a row twice says no more than once
    const int row = work.first_row + min(begin + lane_index(), rows - 1);
    const KeyRange one = range_of_row(params, work.batch, work.head, row);
    // mutation: a range without keys would add tiles of which the row sees no key
    if (one.first < one.last) any = {min(any.first, one.first), max(any.last, one.last)};
    all = {max(all.first, one.first), min(all.last, one.last)};
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    any.first = min(any.first, __shfl_xor_sync(FULL_WARP, any.first, distance));
    any.last = max(any.last, __shfl_xor_sync(FULL_WARP, any.last, distance));
    all.first = max(all.first, __shfl_xor_sync(FULL_WARP, all.first, distance));
    all.last = min(all.last, __shfl_xor_sync(FULL_WARP, all.last, distance));
  }
  const int begin = max(first, any.first / BLOCK_N), end = min(last, (any.last + BLOCK_N - 1) / BLOCK_N);
  RangedWork found;
  static_cast<WorkTile&>(found) = work;
  found.tiles = max(end - begin, 1);
  found.seen.first = min(begin, last - 1), found.seen.last = found.seen.first + found.tiles;
  // mutation: in a tile that is not called whole, each row's range is applied
  found.whole = {(all.first + BLOCK_N - 1) / BLOCK_N, all.last == keys ? last : all.last / BLOCK_N};
  return found;
}

}  // namespace microsdpa::hopper::throughput
