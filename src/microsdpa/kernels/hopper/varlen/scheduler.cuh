// Which part of a call a CTA computes: found on the device, from the sequences' lengths. One warp.
#pragma once

#include "../../common/cluster_tile.cuh"
#include "../../common/sequence.cuh"
#include "../../common/softmax.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::varlen {

using namespace sequences;

// Counters behind those of shared rows: segments that were taken, and CTAs that found no more.
constexpr int TAKEN = 1022, FINISHED = 1023;
// What a part of the keys of a tile of rows costs beside its products, in tiles of keys, and how many it has at least.
// CTAs share where that saves an eighth. At other keys than their neighbours they wait for DRAM a fourth longer.
constexpr int SHARING_COSTS = 3, LEAST_SHARE = 4, WORTH = 8, APART = 4;
// Parts that a CTA takes at most.
constexpr int MOST_TAKEN = 3;
// Bytes of K and V that the key heads that are computed at a time have: an L2 has 50 MB, and keeps some lines twice.
constexpr int SECTION_BYTES = 16 << 20;
// Bytes of K and V of all heads and sequences that stay in L2: then it does not matter when CTAs come to them.
constexpr int64 L2_BYTES = 32 << 20;

// The tiles of rows of a sequence, each of them for one key head.
template <typename C, typename MASKS, int PACK>
struct RowTiles {
  const VarlenParams& params;
  const Sequence sequence;
  const Visibility<MASKS, PACK> visibility;
  const int rows, count;

  __device__ __forceinline__ RowTiles(const VarlenParams& params, int b)
      : params(params),
        sequence(params, b),
        visibility(sequence),
        rows(sequence.queries * PACK),
        count((rows + C::TILE_ROWS - 1) / C::TILE_ROWS) {}

  __device__ __forceinline__ int from(int tile) const { return visibility.first(params, tile * C::TILE_ROWS); }
  __device__ __forceinline__ int end(int tile) const {
    return visibility.end(params, min((tile + 1) * C::TILE_ROWS, rows) - 1);
  }
  __device__ __forceinline__ int first_key_tile(int tile) const {
    return min(from(tile), max(sequence.keys - 1, 0)) / C::BLOCK_N;
  }
  // Tiles of keys; at least one, so that somebody writes the output of rows without keys.
  __device__ __forceinline__ int key_tiles(int tile) const {
    return max(1, (end(tile) + C::BLOCK_N - 1) / C::BLOCK_N - first_key_tile(tile));
  }

  // What a segment is of the sequence's, which has all keys of a tile of rows.
  __device__ __forceinline__ void describe(Segment& segment, int b, int tile) const {
    segment.b = b;
    segment.first_row = tile * C::TILE_ROWS;
    segment.rows = min(C::TILE_ROWS, rows - segment.first_row);
    segment.first_tile = first_key_tile(tile), segment.tiles = key_tiles(tile);
    segment.keys = sequence.keys, segment.position = visibility.position;
    segment.first_query = sequence.first_query, segment.first_key = sequence.first_key;
    segment.from = from(tile), segment.end = end(tile);
  }
};

// The clusters of a launch each have a tile of rows of a sequence and key head, and their CTAs equal parts of its keys:
// [CLUSTER, H_kv, tiles].
template <typename C, typename MASKS, int PACK, int CLUSTER, bool PACKED>
class ClusterScheduler {
 public:
  __device__ __forceinline__ explicit ClusterScheduler(const VarlenParams& params) : params_(params) {}

  // The CTA's only segment, which may have no tiles of keys; then one that has none.
  __device__ __forceinline__ Segment next() {
    Segment segment{};
    if (done_) return segment;
    done_ = true;
    const auto found = ClusterTile::find<C::TILE_ROWS, PACK, PACKED>(params_, static_cast<int>(blockIdx.z));
    if (!found.exists) return segment;
    const int part = static_cast<int>(blockIdx.x);
    const RowTiles<C, MASKS, PACK> row_tiles(params_, found.b);
    row_tiles.describe(segment, found.b, found.tile);
    segment.head_kv = static_cast<int>(blockIdx.y);
    // mutation: a CTA without rows goes past its tiles, and writes nothing
    const int tiles = row_tiles.count > 0 ? segment.tiles : 0;
    const int first = tiles * part / CLUSTER;
    segment.first_tile += first, segment.tiles = tiles * (part + 1) / CLUSTER - first;
    segment.part = part, segment.parts = CLUSTER;
    return segment;
  }

 private:
  const VarlenParams& params_;
  bool done_ = false;
};

// Leaves to a segment, which has all keys of the tile of rows `unit`, one of at most `parts` parts of them. There may
// be fewer parts than of other tiles of rows: then it is left no keys.
__device__ __forceinline__ void leave_part(Segment& segment, int unit, int part, int parts) {
  const int each = (segment.tiles + parts - 1) / parts, first = part * each;
  segment.part = part, segment.parts = (segment.tiles + each - 1) / each;
  segment.owner = parts <= MOST_AT_ONCE ? unit : unit * parts, segment.slot = unit * parts;
  segment.tiles = min(each, segment.tiles - first), segment.first_tile += first;
}

// What a CTA computes where all sequences have one length: the launcher has counted and decided (runtime/sequences.h).
// A CTA takes parts of the keys of tiles of rows, at distances of as many as there are CTAs, or, where all tiles of
// keys are numbered, as many of them as any other CTA.
template <typename C, typename MASKS, int PACK>
class OneLengthScheduler {
 public:
  __device__ __forceinline__ explicit OneLengthScheduler(const OneLengthParams& params)
      : params_(params),
        numbered_(params.each > 0),
        at_(static_cast<int>(blockIdx.x) * (numbered_ ? params.each : 1)),
        end_(numbered_ ? min(at_ + params.each, params.units * params.key_tiles) : params.units * params.parts) {}

  // The CTA's next segment; one without tiles of keys when there is none.
  __device__ __forceinline__ Segment next() {
    Segment segment{};
    while (at_ < end_ && segment.tiles <= 0) {
      if (numbered_) {
        take_numbered(segment);
      } else {
        take_part(segment);
      }
    }
    segment.tiles = max(segment.tiles, 0);
    return segment;
  }

 private:
  // Describes a tile of rows with all of its keys.
  __device__ __forceinline__ void describe(Segment& segment, int unit) const {
    const int tile = unit % params_.row_tiles, head = unit / params_.row_tiles;
    const int b = head / params_.heads_kv;
    segment.head_kv = head - b * params_.heads_kv;
    RowTiles<C, MASKS, PACK>(params_, b).describe(segment, b, tile);
  }

  __device__ __forceinline__ void take_part(Segment& segment) {
    const int part = at_ / params_.units, unit = at_ - part * params_.units;
    at_ += static_cast<int>(gridDim.x);
    describe(segment, unit);
    leave_part(segment, unit, part, params_.parts);
  }

  __device__ __forceinline__ void take_numbered(Segment& segment) {
    const int unit = at_ / params_.key_tiles, begin = unit * params_.key_tiles;
    const int first = at_ - begin, last = min(end_ - begin, params_.key_tiles);
    at_ = begin + last;
    describe(segment, unit);
    segment.slot = -1, segment.owner = begin / params_.each;
    segment.parts = (begin + segment.tiles - 1) / params_.each - segment.owner + 1;
    segment.part = static_cast<int>(blockIdx.x) - segment.owner;
    segment.tiles = min(segment.tiles, last) - first, segment.first_tile += first;
  }

  const OneLengthParams& params_;
  const bool numbered_;
  int at_;
  const int end_;
};

// What a CTA computes is decided in one of three ways, of which the one that is expected to take least time is taken:
// - Every CTA takes tiles of rows, one after the other, as it gets done with them: in a sequence the longest ones
//   first, of as many heads as leave their keys in L2.
// - The keys of all tiles of rows are divided into equally many parts, and every CTA takes up to three: first those of
//   the first keys. So all CTAs are at the same keys of all heads, which lie side by side in DRAM.
// - All tiles of keys of all tiles of rows are numbered one after the other, and every CTA has as many of them as any
//   other. That is even whatever the lengths are, but CTAs are at other keys than their neighbours.
template <typename C, typename MASKS, int PACK>
class Scheduler {
 public:
  __device__ __forceinline__ explicit Scheduler(const VarlenParams& params) : params_(params) {
    int tiles = 0, keys = 0, longest = 0;  // tiles of rows, and of keys, of all and of one
    Estimate own{};
    // The first group is counted last: what is known of it is what next() wants first.
    for (int first = (params.batch - 1) / 32 * 32; first >= 0; first -= 32) {
      own = estimate(first);
      tiles += own.tiles, keys += own.keys, longest = max(longest, own.longest);
    }
    units_ = total_ = warp_total(tiles) * params.heads_kv;
    at_ = static_cast<int>(blockIdx.x);
    if (params.part_heads && total_ > 0) {
      for (int offset = 16; offset > 0; offset /= 2)
        longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, offset));
      share(warp_total(keys) * params.heads_kv, longest);
    }
    if (each_ == 0 && parts_ == 1) take();
    if (each_ > 0) {
      go_ahead();
    } else {
      set_group(own.tiles);
    }
  }

  // The CTA's next segment; one without tiles of keys when there is none.
  __device__ __forceinline__ Segment next() {
    Segment segment{};
    segment.slot = -1;
    if (each_ > 0) {
      if (at_ < total_) take_numbered(segment);
      return segment;
    }
    if (parts_ == 1) {
      if (asks_) at_ = __shfl_sync(FULL_WARP, taken_, 0);
      if (at_ < total_ && take_rows(segment, at_)) {
        if (asks_) take();
        asks_ = true, segment.parts = 1;
        return segment;
      }
      if (lane() == 0) finish();
      segment.tiles = 0;
      return segment;
    }
    while (at_ < total_) {
      const int part = at_ / units_, unit = at_ - part * units_;
      if (part > 0) rewind();
      if (!take_rows(segment, unit)) break;
      at_ += static_cast<int>(gridDim.x);
      leave_part(segment, unit, part, parts_);
      // mutation: few keys give a CTA one part, and one without keys ends it as well
      if (segment.tiles > 0) return segment;
    }
    segment.tiles = 0;
    return segment;
  }

 private:
  static constexpr int ROW_BYTES = 2 * C::HEAD_DIM * static_cast<int>(sizeof(typename C::T));  // of K and V
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_total(int x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
  }
  // The sum of the lanes up to this one.
  __device__ __forceinline__ static int warp_prefix(int x) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(FULL_WARP, x, offset);
      if (lane() >= offset) x += before;
    }
    return x;
  }

  // Decides whether CTAs share the keys of a tile of rows, and how. All tiles of rows have some `keys` tiles of keys
  // together, and one of them `longest`.
  __device__ __forceinline__ void share(int keys, int longest) {
    const int ctas = static_cast<int>(gridDim.x), rounds = (total_ + ctas - 1) / ctas;
    const int numbered = max((keys + ctas - 1) / ctas, LEAST_SHARE);
    // mutation: who computes what changes no result
    const int whole = max(longest, keys / total_ * rounds);
    if (whole <= numbered + numbered / WORTH) return;
    // mutation: who computes what changes no result
    const bool in_l2 =
        static_cast<int64>(longest) * (C::BLOCK_N * ROW_BYTES) * params_.batch * params_.heads_kv <= L2_BYTES;
    int least = numbered + (in_l2 ? 0 : numbered / APART) + 2 * SHARING_COSTS, parts = 0;
#pragma unroll 1
    for (int taken = 1; taken <= MOST_TAKEN; ++taken) {
      const int fitting = min(ctas * taken / total_, longest / LEAST_SHARE);
      if (fitting <= 1 || (taken > 1 && fitting > MOST_AT_ONCE)) continue;
      // mutation: who computes what changes no result
      const int cost = taken * ((longest + fitting - 1) / fitting + SHARING_COSTS);
      if (cost < least) least = cost, parts = fitting;
    }
    // mutation: who computes what changes no result
    if (whole <= least + least / WORTH) return;
    if (parts > 1) {
      parts_ = parts, total_ *= parts;
      return;
    }
    keys = count_all() * params_.heads_kv;
    each_ = max((keys + ctas - 1) / ctas, LEAST_SHARE), at_ = min(keys, at_ * each_), total_ = min(keys, at_ + each_);
  }

  // The next tiles of keys, where they are numbered.
  __device__ __forceinline__ void take_numbered(Segment& segment) {
    // mutation: every place is in a sequence, unless lengths change during the launch
    if (!seek(at_)) return;
    const RowTiles<C, MASKS, PACK> row_tiles(params_, sequence_);
    const int of_head = in_sequence_ / params_.heads_kv, place = at_ - begin_;
    segment.head_kv = place / of_head;
    int unit_begin = begin_ + segment.head_kv * of_head, tile = 0, own = 0;
    for (;; tile += 32) {  // finds the tile of rows
      // mutation: every place is in a tile of rows, unless lengths change during the launch
      if (tile >= row_tiles.count) return;
      // mutation: a tile behind the last one is behind every place
      own = tile + lane() < row_tiles.count ? row_tiles.key_tiles(tile + lane()) : 0;
      const int sum = warp_prefix(own);
      const unsigned past = __ballot_sync(FULL_WARP, unit_begin + sum > at_);
      const int found = past == 0 ? 31 : __ffs(past) - 1;
      unit_begin += __shfl_sync(FULL_WARP, past == 0 ? sum : sum - own, found);
      if (past == 0) continue;
      tile += found, own = __shfl_sync(FULL_WARP, own, found);
      break;
    }
    const int unit_end = unit_begin + own, stop = min(total_, unit_end);
    row_tiles.describe(segment, sequence_, tile);
    segment.owner = unit_begin / each_;
    segment.parts = (unit_end - 1) / each_ - segment.owner + 1;
    segment.part = static_cast<int>(blockIdx.x) - segment.owner;
    segment.first_tile += at_ - unit_begin, segment.tiles = stop - at_;
    at_ = stop;
  }

  // A tile of rows, with all of its keys. False if there is none, which is so when lengths change during the launch.
  __device__ __forceinline__ bool take_rows(Segment& segment, int unit) {
    // mutation: every place is in a sequence, unless lengths change during the launch
    if (!seek(unit)) return false;
    const RowTiles<C, MASKS, PACK> row_tiles(params_, sequence_);
    const int heads = min(max(SECTION_BYTES / ROW_BYTES / max(row_tiles.sequence.keys, 1), 1), params_.heads_kv);
    const int section = (unit - begin_) / (heads * row_tiles.count), first_head = section * heads;
    const int place = unit - begin_ - first_head * row_tiles.count,
              of_section = min(heads, params_.heads_kv - first_head);
    segment.head_kv = first_head + place % of_section;
    row_tiles.describe(segment, sequence_, row_tiles.count - 1 - place / of_section);
    return true;
  }

  // What a lane's sequence has for a key head.
  struct Estimate {
    int tiles;          // of rows
    int keys, longest;  // tiles of keys, of all tiles of rows and of one
  };

  // Looks at 32 sequences, from `first` on: at the first tile of rows, the middle one and the last one of each. A mask
  // leaves tiles between two of them as many keys as the mean of both, or nearly so.
  __device__ __forceinline__ Estimate estimate(int first) const {
    const int b = first + lane();
    Estimate own{};
    if (b >= params_.batch) return own;
    const RowTiles<C, MASKS, PACK> row_tiles(params_, b);
    own.tiles = row_tiles.count;
    if (!params_.part_heads || own.tiles == 0) return own;
    // mutation: who computes what changes no result
    const int begin = row_tiles.key_tiles(0), middle = row_tiles.key_tiles(own.tiles / 2),
              end = row_tiles.key_tiles(own.tiles - 1);
    own.longest = max(begin, max(middle, end));
    own.keys = own.tiles == 1 ? begin : (begin + 2 * middle + end) * own.tiles / 4;
    return own;
  }

  // Tiles of keys that a lane's sequence has for a key head, all lanes together from the sequence `first` on. Those of
  // many tiles of rows are counted by all lanes.
  __device__ __forceinline__ int count(int first) const {
    constexpr int FEW = 4;
    const int b = first + lane();
    int tiles = 0, keys = 0;
    if (b < params_.batch) {
      const RowTiles<C, MASKS, PACK> row_tiles(params_, b);
      tiles = row_tiles.count;
      for (int tile = 0; tiles <= FEW && tile < tiles; ++tile) keys += row_tiles.key_tiles(tile);
    }
    unsigned long_ones = __ballot_sync(FULL_WARP, tiles > FEW);
    for (; long_ones != 0; long_ones &= long_ones - 1) {
      const int which = __ffs(long_ones) - 1;
      const RowTiles<C, MASKS, PACK> row_tiles(params_, first + which);
      int sum = 0;
      for (int tile = lane(); tile < row_tiles.count; tile += 32) sum += row_tiles.key_tiles(tile);
      sum = warp_total(sum);
      if (lane() == which) keys = sum;
    }
    return keys;
  }
  // The same of all sequences together.
  __device__ __forceinline__ int count_all() const {
    int keys = 0;
    for (int first = 0; first < params_.batch; first += 32) keys += count(first);
    return warp_total(keys);
  }
  // Tiles of rows of a lane's sequence.
  __device__ __forceinline__ int count_rows(int first) const {
    const int b = first + lane();
    return b < params_.batch ? RowTiles<C, MASKS, PACK>(params_, b).count : 0;
  }

  // Finds where the sequences of a group begin, each of which has so many places for a key head.
  __device__ __forceinline__ void set_group(int own) { own_ = own * params_.heads_kv, sum_ = warp_prefix(own_); }

  // Goes back to the first sequences: ahead of them is an empty group.
  __device__ __forceinline__ void rewind() {
    if (group_ > 0) go_ahead();
  }
  __device__ __forceinline__ void go_ahead() { group_ = -32, group_begin_ = own_ = sum_ = 0; }

  // Finds the sequence that a place, which is not before the last one, lies in.
  __device__ __forceinline__ bool seek(int place) {
    // mutation: every place is in a sequence, unless lengths change during the launch
    while (group_ < params_.batch) {
      const unsigned past = __ballot_sync(FULL_WARP, group_begin_ + sum_ > place);
      if (past != 0) {
        const int found = __ffs(past) - 1;
        sequence_ = group_ + found;
        in_sequence_ = __shfl_sync(FULL_WARP, own_, found);
        begin_ = group_begin_ + __shfl_sync(FULL_WARP, sum_ - own_, found);
        return true;
      }
      group_begin_ += __shfl_sync(FULL_WARP, sum_, 31), group_ += 32;
      set_group(each_ > 0 ? count(group_) : count_rows(group_));
    }
    return false;
  }

  // Asks for the segment behind the next one, so that the answer has come by then.
  __device__ __forceinline__ void take() {
    if (lane() == 0) {
      taken_ = static_cast<int>(gridDim.x + atomicAdd(params_.arrivals + TAKEN, 1u));
    }
  }
  // The last CTA to come here leaves the counters as they were.
  __device__ __forceinline__ void finish() const {
    // mutation: the emulator does not model that a thread's own accesses change places
    __threadfence();
    if (atomicAdd(params_.arrivals + FINISHED, 1u) == gridDim.x - 1) {
      params_.arrivals[TAKEN] = 0, params_.arrivals[FINISHED] = 0;
    }
  }

  const VarlenParams& params_;
  int each_ = 0;           // tiles of keys of a CTA, where they are numbered; else 0
  int units_, parts_ = 1;  // tiles of rows, and parts of each
  int at_, total_;         // places: of parts, or of tiles of keys where these are numbered
  int taken_ = 0;
  bool asks_ = false;                               // whether taken_ says what is next
  int group_ = 0, group_begin_ = 0, own_, sum_;     // of 32 sequences: the first, its place, this lane's, those before
  int sequence_ = 0, begin_ = 0, in_sequence_ = 0;  // where at_ is
};

template <typename PARAMS, typename C, typename MASKS, int PACK, int CLUSTER, bool PACKED>
struct SchedulerOf {
  using Type = ClusterScheduler<C, MASKS, PACK, CLUSTER, PACKED>;
};
template <typename C, typename MASKS, int PACK, bool PACKED>
struct SchedulerOf<VarlenParams, C, MASKS, PACK, 1, PACKED> {
  using Type = Scheduler<C, MASKS, PACK>;
};
template <typename C, typename MASKS, int PACK, bool PACKED>
struct SchedulerOf<OneLengthParams, C, MASKS, PACK, 1, PACKED> {
  using Type = OneLengthScheduler<C, MASKS, PACK>;
};

}  // namespace microsdpa::hopper::varlen
