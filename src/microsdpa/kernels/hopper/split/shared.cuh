// Shared memory of hopper/split/kernel.cu, and the part of the problem that a CTA computes.
#pragma once

#include "../../common/element.cuh"
#include "../../common/head.cuh"
#include "../../ptx/mbarrier.cuh"

namespace microsdpa::hopper::split {

constexpr int ROWS = 64;      // queries of a tile: one wgmma's rows
constexpr int BLOCK_N = 64;   // keys of a tile
constexpr int HEAD_DIM = 64;  // 128 bytes, one repetition of the swizzle pattern
constexpr int WARPGROUPS = 4;
constexpr int WARPGROUP_THREADS = 128;
constexpr int THREADS = WARPGROUPS * WARPGROUP_THREADS;

// Barriers among warps, one for either query tile; 0 is __syncthreads'.
enum NamedBarrier : int { GROUPS_SYNC = 1 };

// Four floats of each thread, stored so that a warp's accesses are consecutive: rows 0 and 1 of an 8-column block.
using Block = Vector<float, 4>;

// What is known of a row from a part of its keys: probabilities are 2^(score - stabilizer), and add up to `sum`.
struct alignas(8) RowPart {
  float stabilizer;
  float sum;
};

// STAGES: tiles of K, and of V, that each group has room for.
template <typename T, int QUERY_TILES, int STAGES>
struct SharedStorage {
  static constexpr int GROUPS = WARPGROUPS / QUERY_TILES;  // warpgroups that share a query tile's keys
  static constexpr int BLOCKS = HEAD_DIM / 8 / GROUPS;     // columns that each of them finishes, by eight

  alignas(1024) T query[QUERY_TILES][ROWS * HEAD_DIM];
  alignas(1024) T key[GROUPS][STAGES][BLOCK_N * HEAD_DIM];
  alignas(1024) T value[GROUPS][STAGES][BLOCK_N * HEAD_DIM];
  // Columns of O, by who finishes them and who gives them.
  Block given[QUERY_TILES][GROUPS][GROUPS - 1][BLOCKS][WARPGROUP_THREADS];
  RowPart part[QUERY_TILES][GROUPS][ROWS];
  Mbarrier query_full[QUERY_TILES];
  Mbarrier key_full[GROUPS][STAGES];
  Mbarrier value_full[GROUPS][STAGES];
  Mbarrier tile_empty[GROUPS][STAGES];
};

// A CTA's query tiles. Under a causal mask a late tile goes with an early one: all CTAs have the same work.
template <int QUERY_TILES, int GROUP, bool CAUSAL>
struct WorkTile {
  static constexpr int GROUPS = WARPGROUPS / QUERY_TILES;

  int head, head_kv, batch;
  int first_row[QUERY_TILES];
  int tiles[QUERY_TILES];  // of keys that its rows see; at least one, so that rows without keys are written too
  int all_tiles;           // the larger number

  __device__ __forceinline__ explicit WorkTile(const AttentionParams& params)
      : head(static_cast<int>(blockIdx.x)), head_kv(head / GROUP), batch(static_cast<int>(blockIdx.z)), all_tiles(0) {
    const int y = static_cast<int>(blockIdx.y), last = static_cast<int>(gridDim.y) * QUERY_TILES - 1;
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i) {
      // Tiles that see the most keys first: they take longest.
      const int tile = CAUSAL ? (i == 0 ? last - y : y) : QUERY_TILES * y + i;
      first_row[i] = ROWS * tile;
      tiles[i] = max(1, (keys_seen<CAUSAL>(params, first_row[i], ROWS) + BLOCK_N - 1) / BLOCK_N);
      // mutation: what rows behind the last query would give is not written; this saves their time
      if (i > 0 && first_row[i] >= params.seqlen_q) tiles[i] = 0;
      all_tiles = max(all_tiles, tiles[i]);
    }
  }

  // How many of the first `tiles` tiles of keys are a group's.
  __device__ __forceinline__ static int rounds(int tiles, int group) { return (tiles - group + GROUPS - 1) / GROUPS; }
};

}  // namespace microsdpa::hopper::split
