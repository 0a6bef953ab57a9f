// Tiles of hopper/varlen, what a CTA keeps in shared memory, and what it leaves in the workspace.
#pragma once

#include "../../common/varlen_params.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../common/main_loop.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::varlen {

// BOX_ROWS: keys of one bulk copy, all of a page; BLOCK_N of them where keys are contiguous. QUERY_ROWS_: rows of Q of
// one bulk copy, whole queries of all heads of a key head; 0 where cp.async copies them. QUERY_DIM: columns that Q and
// K have, at most HEAD_DIM.
template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int CONSUMERS_, int STAGES_, int QUERY_STAGES_, int BOX_ROWS_,
          int QUERY_ROWS_, int QUERY_DIM_>
struct Tiles : TileShape<ELEMENT, HEAD_DIM_, BLOCK_N_, CONSUMERS_, STAGES_, QUERY_STAGES_> {
  using T = ELEMENT;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_N = BLOCK_N_, QUERY_DIM = QUERY_DIM_;
  static constexpr int COLUMNS = PANEL<HEAD_DIM>, PANELS = hopper::PANELS<HEAD_DIM>;  // of a box, and of a tile
  static constexpr int TAIL = hopper::TAIL<HEAD_DIM>, STORED = STORED_COLUMNS<HEAD_DIM>;
  static constexpr int BOX_ROWS = BOX_ROWS_, BOXES = BLOCK_N / BOX_ROWS;
  static constexpr int TILE_BYTES = BLOCK_N * STORED * static_cast<int>(sizeof(T));
  static constexpr bool BULK_QUERIES = QUERY_ROWS_ > 0;
  // Rows of a tile, and of those of a panel of Q that follow each other in shared memory.
  static constexpr int TILE_ROWS = BULK_QUERIES ? QUERY_ROWS_ : ROWS * CONSUMERS_;
  static constexpr int PANEL_ROWS = BULK_QUERIES ? ROWS * CONSUMERS_ : ROWS;
  static constexpr int QUERY_BYTES = TILE_ROWS * STORED * static_cast<int>(sizeof(T));
  static_assert(BLOCK_N % BOX_ROWS == 0 && BOX_ROWS % 8 == 0 && 32 % BOXES == 0, "boxes are whole swizzle patterns");
};

// A tile of rows of one key head, and those tiles of its keys that a CTA computes.
struct alignas(16) Segment {
  int b, head_kv;
  int first_row, rows;    // of the sequence; of the tile
  int first_tile, tiles;  // of keys; no tiles: there is no more work
  int keys, position;     // of the sequence; of its first query among them
  int first_query;        // in packed tensors
  int first_key;
  int from, end;           // keys that any of the rows sees
  int part, parts, owner;  // of those that share the rows, and the place of their counter
  int slot;                // of the first part in the workspace; -1 where that follows from the owner
};

// Parts of the keys of a tile of rows that are added at once; more are added in two steps.
constexpr int MOST_AT_ONCE = 16;

// Segments whose description is in shared memory at once: those of the ring of queries, the one whose output is being
// written, and one that not all consumers have come to.
constexpr int SEGMENTS = 4;

template <typename C>
struct SharedStorage {
  static_assert(C::QUERY_STAGES + 2 <= SEGMENTS, "a segment is described while consumers may ask");

  alignas(1024) typename C::T query[C::QUERY_STAGES][C::CONSUMERS][ROWS * C::STORED];
  alignas(1024) typename C::T key[C::STAGES][C::BLOCK_N * C::STORED];
  alignas(1024) typename C::T value[C::STAGES][C::BLOCK_N * C::STORED];
  Segment segment[SEGMENTS];
  int misplaced[SEGMENTS];    // whether a page of the segment is none of the cache's
  int is_last[C::CONSUMERS];  // whether a warpgroup's part of the rows was the last one to be ready
  Mbarrier described[C::QUERY_STAGES];
  Mbarrier query_full[C::QUERY_STAGES];
  Mbarrier query_empty[C::QUERY_STAGES];
  Mbarrier key_full[C::STAGES];
  Mbarrier key_empty[C::STAGES];
  Mbarrier value_arrived[C::STAGES];  // of a tile that is still to be cleaned
  Mbarrier value_full[C::STAGES];
  Mbarrier value_empty[C::STAGES];
};

// What a warpgroup leaves of rows whose keys CTAs share: O, not divided by l, and the rows' statistics, as its threads
// hold them. A CTA has three of them at most. Where tiles of keys are numbered, the owner is the CTA that has the first
// part, and a CTA has two: of keys from the first one on, and of keys that another CTA has begun with.
template <typename C>
struct Partials {
  static constexpr int STATISTICS = C::HEAD_DIM / 8;                       // behind so many fours of O
  static constexpr int FLOATS = 4 * WARPGROUP_THREADS * (STATISTICS + 1);  // of a warpgroup
  float* const workspace;

  __device__ __forceinline__ explicit Partials(const VarlenParams& params)
      : workspace(static_cast<float*>(params.workspace)) {}

  // The thread's `four`th four floats of O, or its rows' statistics.
  __device__ __forceinline__ float4* at(const Segment& segment, int part, int warpgroup, int thread, int four) const {
    const int64 place = segment.slot < 0 ? 2 * (segment.owner + part) + (part == 0) : segment.slot + part;
    return reinterpret_cast<float4*>(workspace + (place * C::CONSUMERS + warpgroup) * FLOATS) +
           four * WARPGROUP_THREADS + thread;
  }
};

}  // namespace microsdpa::hopper::varlen
