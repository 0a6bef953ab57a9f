// Shared memory of hopper/throughput/kernel.cu.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../common/pipeline.cuh"
#include "../common/tile_scheduler.cuh"
#include "../common/warpgroup.cuh"
#include "added_tile.cuh"
#include "tile_range.cuh"

namespace microsdpa::hopper::throughput {

// Columns of O that wait for a bulk copy at once: all, where shared memory has room for them.
template <int HEAD_DIM>
constexpr int OUT_COLUMNS = HEAD_DIM <= 128 || HEAD_DIM % 64 != 0 ? STORED_COLUMNS<HEAD_DIM>
                            : HEAD_DIM % 128 == 0                 ? 128
                                                                  : 64;

// Tiles of a mask of numbers, each consumer's own.
template <typename MASK, int HEAD_DIM, int BLOCK_N, int CONSUMERS>
struct MaskRing {
  static constexpr int STAGES = HEAD_DIM <= 64 && sizeof(MASK) == 2 ? 2 : 1;

  using Tile = AddedTile<MASK, BLOCK_N>;

  alignas(1024) typename Tile::T tile[STAGES][CONSUMERS][ROWS * Tile::COLUMNS];
  Mbarrier full[STAGES][CONSUMERS];
  Mbarrier empty[STAGES][CONSUMERS];
};
template <int HEAD_DIM, int BLOCK_N, int CONSUMERS>
struct MaskRing<void, HEAD_DIM, BLOCK_N, CONSUMERS> {
  static constexpr int STAGES = 1;
};

// Tiles are cut into panels of PANEL columns, stored one after another, and a tail.
// RANGED: rows see ranges of keys. DEALT: CTAs take query tiles as they come to them, and a consumer says which one is
// to be stored.
template <typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES, typename MASK = void,
          bool RANGED = false, bool DEALT = false>
struct SharedStorage : MaskRing<MASK, HEAD_DIM, BLOCK_N, CONSUMERS> {
  using Masks = MaskRing<MASK, HEAD_DIM, BLOCK_N, CONSUMERS>;
  static_assert(QUERY_STAGES + 2 <= WORK_TILES, "a query tile is described while consumers may ask");

  alignas(1024) T query[QUERY_STAGES][CONSUMERS][ROWS * STORED_COLUMNS<HEAD_DIM>];
  alignas(1024) T key[STAGES][BLOCK_N * STORED_COLUMNS<HEAD_DIM>];
  alignas(1024) T value[STAGES][BLOCK_N * STORED_COLUMNS<HEAD_DIM>];
  alignas(1024) T out[CONSUMERS][ROWS * OUT_COLUMNS<HEAD_DIM>];
  WorkTileOf<RANGED> work[WORK_TILES + (DEALT ? CONSUMERS : 0)];
  Mbarrier query_full[QUERY_STAGES];
  Mbarrier query_empty[QUERY_STAGES];
  Mbarrier key_full[STAGES];
  Mbarrier key_empty[STAGES];
  Mbarrier value_full[STAGES];
  Mbarrier value_empty[STAGES];

  // The query tile of which the consumer's O is in `out`; one without keys when there will be no more.
  __device__ __forceinline__ WorkTile& stored(int consumer) {
    static_assert(DEALT, "else the schedule knows");
    return work[WORK_TILES + consumer];
  }
};

}  // namespace microsdpa::hopper::throughput
