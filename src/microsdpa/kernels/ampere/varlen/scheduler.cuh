// Which part of a call a CTA computes: found on the device, from the sequences' lengths.
#pragma once

#include "../../common/cluster_tile.cuh"
#include "../../common/sequence.cuh"
#include "../../common/softmax.cuh"

namespace microsdpa::ampere::varlen {

using namespace sequences;

// A tile of rows of one key head, and tiles of its keys.
struct WorkTile {
  int b, head_kv, first_row;
  int first_tile, end_tile;  // of keys
  int part, parts;           // of those that share the rows; one alone stores the output
  int owner;                 // a number for the CTA that has the first of them; others follow
  int slot;                  // of the workspace, for the first of parts of a fixed size
  bool alone;                // whether one CTA has all parts of a fixed size, and adds them one after the other
};

// Every sequence has tiles of rows, these have key heads, and these have tiles of keys, all numbered one after the
// other. With part_heads every CTA has as many of them as any other, whoever they belong to; else a CTA has all keys
// of one tile of rows. A warp finds its CTA's part alone: nothing is shared.
//
// Where CTAs divide keys, the grid is [heads, parts]: CTAs next to one another have the same keys of neighbouring
// heads. A token's heads lie together in memory, and are read at the same time. Each CTA numbers the tiles of its heads
// alone.
//
// With SPLIT, parts are of so many tiles, from key 0 on, whoever they are computed by: parts instead of tiles are
// numbered, and shared equally. Where there are more than MOST_PARTS, which the workspace has room for, the CTA that
// has the first part of a tile of rows has the others as well. A CTA that has all parts of a tile of rows adds them as
// it gets them. So the parts that several CTAs have are of one tile of rows for each CTA that has begun with one, and
// its counter is theirs alone.
template <typename MASKS, int PACK, int BLOCK_M, int TILE, int SPLIT, int MOST_PARTS>
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const VarlenParams& params) : params_(params) {
    const int parts = static_cast<int>(abreast() ? gridDim.y : gridDim.x);
    int total = 0;
    for (int b = lane(); b < params.batch; b += 32) total += count(Extent(params, b));
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(FULL_WARP, total, offset);
    each_ = params.part_heads ? max(1, (total + parts - 1) / parts) : 1;
    at_ = min(total, part() * each_);
    end_ = min(total, at_ + each_);
    if constexpr (SPLIT > 0) alone_ = total > MOST_PARTS;
    if (at_ < end_) seek();
    if (SPLIT > 0 && alone_ && at_ < end_) {  // the first tile of rows that begins here
      const int weight = Extent(params_, sequence_).weight;
      at_ = begin_ + (at_ - begin_ + weight - 1) / weight * weight;
    }
  }

  // Whether there is a further tile, which this gives and goes on from.
  __device__ __forceinline__ bool next(WorkTile& work) {
    if (at_ >= max(end_, stop_)) return false;
    Extent extent(params_, sequence_);
    while (at_ >= begin_ + count(extent)) {
      begin_ += count(extent);
      extent = Extent(params_, ++sequence_);
    }
    const int unit = (at_ - begin_) / extent.weight;  // a tile of rows of a key head
    const int unit_begin = begin_ + unit * extent.weight, unit_end = unit_begin + extent.weight;
    work.b = sequence_;
    work.head_kv = unit % heads();
    // Under a causal mask the longest tiles come first.
    work.first_row = (extent.row_tiles - 1 - unit / heads()) * BLOCK_M;
    work.owner = unit_begin / each_;
    if constexpr (SPLIT > 0) {
      fixed_part(work, extent, unit_begin);
      return true;
    }
    const int stop = min(end_, unit_end);
    work.parts = (unit_end - 1) / each_ - work.owner + 1;
    work.part = part() - work.owner;
    work.first_tile = extent.first_tile + (params_.part_heads ? at_ - unit_begin : 0);
    work.end_tile = extent.first_tile + (params_.part_heads ? stop - unit_begin : extent.tiles);
    if (params_.part_heads) {
      work.head_kv = work.head_kv * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
      work.owner += static_cast<int>(blockIdx.x) * static_cast<int>(gridDim.y);
    }
    at_ = stop;
    return true;
  }

 private:
  static constexpr int PART_KEYS = SPLIT * TILE;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  // Key heads that the CTA has, and which part of their keys.
  __device__ __forceinline__ bool abreast() const { return SPLIT == 0 && params_.part_heads; }
  __device__ __forceinline__ int heads() const { return abreast() ? params_.part_heads : params_.heads_kv; }
  __device__ __forceinline__ int part() const { return static_cast<int>(abreast() ? blockIdx.y : blockIdx.x); }

  struct Extent {
    int row_tiles, first_tile, tiles;
    int weight;  // what a tile of rows counts

    __device__ __forceinline__ Extent(const VarlenParams& params, int b) {
      const Sequence sequence(params, b);
      row_tiles = (sequence.queries * PACK + BLOCK_M - 1) / BLOCK_M;
      // A sequence without keys has an empty tile: somebody writes its output.
      first_tile = min(Visibility<MASKS, PACK>(sequence).first(params, 0), max(sequence.keys - 1, 0)) / TILE;
      tiles = max(1, (sequence.keys + TILE - 1) / TILE - first_tile);
      weight = params.part_heads ? tiles : 1;
      if constexpr (SPLIT > 0) weight = (first_tile + tiles - 1) / SPLIT - first_tile / SPLIT + 1;
    }
  };

  __device__ __forceinline__ int count(const Extent& extent) const {
    return extent.row_tiles * heads() * extent.weight;
  }

  // The part of a fixed size that at_ is, and goes on from.
  __device__ __forceinline__ void fixed_part(WorkTile& work, const Extent& extent, int unit_begin) {
    const int first = extent.first_tile / SPLIT;  // of all rows of the sequence
    int from = first, end = first + extent.weight;
    work.alone = alone_ || work.owner == (unit_begin + extent.weight - 1) / each_;
    work.slot = unit_begin;
    if (alone_) {  // parts that no row of the tile sees are left out
      const Sequence sequence(params_, work.b);
      const Visibility<MASKS, PACK> visibility(sequence);
      const int last_row = min(work.first_row + BLOCK_M, sequence.queries * PACK) - 1;
      from = min(max(from, visibility.first(params_, work.first_row) / PART_KEYS), end - 1);
      end = min(end, max(from + 1, (visibility.end(params_, last_row) + PART_KEYS - 1) / PART_KEYS));
      if (at_ == unit_begin) at_ += from - first;
      work.slot = 2 * static_cast<int>(blockIdx.x);
    }
    const int number = first + at_ - unit_begin;
    work.part = number - from, work.parts = end - from;
    work.first_tile = max(extent.first_tile, number * SPLIT);
    work.end_tile = min(extent.first_tile + extent.tiles, (number + 1) * SPLIT);
    ++at_;
    stop_ = alone_ ? unit_begin + extent.weight : 0;
    if (alone_ && number + 1 == end) at_ = stop_;
  }

  // Finds the sequence that at_ lies in.
  __device__ __forceinline__ void seek() {
    for (int first = 0;; first += 32) {
      const int b = first + lane();
      const int own = b < params_.batch ? count(Extent(params_, b)) : 0;
      int sum = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane() >= offset) sum += before;
      }
      const unsigned past = __ballot_sync(FULL_WARP, begin_ + sum > at_);
      if (past == 0) {
        begin_ += __shfl_sync(FULL_WARP, sum, 31);
        continue;
      }
      const int found = __ffs(past) - 1;
      sequence_ = first + found;
      begin_ += __shfl_sync(FULL_WARP, sum - own, found);
      return;
    }
  }

  const VarlenParams& params_;
  int each_, at_, end_;
  int sequence_ = 0, begin_ = 0;  // where at_ is, and where that sequence begins
  int stop_ = 0;                  // where the tile of rows ends that this CTA has alone
  bool alone_ = false;
};

// The clusters of a launch each have a tile of rows of a sequence and key head: [CLUSTER, H_kv, tiles].
template <int BLOCK_M, int PACK, bool PACKED>
struct ClusterScheduler {
  const VarlenParams& params;
  bool done = false;

  __device__ __forceinline__ explicit ClusterScheduler(const VarlenParams& params) : params(params) {}
  __device__ __forceinline__ bool next(WorkTile& work) {
    if (done) return false;
    done = true;
    const auto found = ClusterTile::find<BLOCK_M, PACK, PACKED>(params, static_cast<int>(blockIdx.z));
    if (!found.exists) return false;
    work = {found.b,
            static_cast<int>(blockIdx.y),
            found.tile * BLOCK_M,
            0,
            LAST_TILE,
            static_cast<int>(blockIdx.x),
            1,
            0,
            0,
            false};
    return true;
  }

 private:
  static constexpr int LAST_TILE = 0x7fffffff;
};

template <typename MASKS, int PACK, int BLOCK_M, int TILE, int SPLIT, int MOST_PARTS, int CLUSTER, bool PACKED>
struct SchedulerOf {
  using Type = ClusterScheduler<BLOCK_M, PACK, PACKED>;
};
template <typename MASKS, int PACK, int BLOCK_M, int TILE, int SPLIT, int MOST_PARTS, bool PACKED>
struct SchedulerOf<MASKS, PACK, BLOCK_M, TILE, SPLIT, MOST_PARTS, 1, PACKED> {
  using Type = TileScheduler<MASKS, PACK, BLOCK_M, TILE, SPLIT, MOST_PARTS>;
};
template <typename MASKS, int PACK, int BLOCK_M, int TILE, int SPLIT, int MOST_PARTS, int CLUSTER, bool PACKED>
using Scheduler = typename SchedulerOf<MASKS, PACK, BLOCK_M, TILE, SPLIT, MOST_PARTS, CLUSTER, PACKED>::Type;

}  // namespace microsdpa::ampere::varlen
