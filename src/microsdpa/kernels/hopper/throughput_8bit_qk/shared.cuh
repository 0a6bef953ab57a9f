// Shared memory of hopper/throughput_8bit_qk/kernel.cu.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../common/eight_bit.cuh"
#include "../common/pipeline.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::throughput_8bit_qk {

// Q and K lie in tiles of HEAD_DIM values, a query's residual terms in tiles of their own; V, of type T, is cut into
// panels of BOX channels, stored one after another.
template <typename T_, int HEAD_DIM_, int TERMS_, int BLOCK_N_, int CONSUMERS_, int STAGES_, int QUERY_STAGES_>
struct SharedStorage {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, TERMS = TERMS_, BLOCK_N = BLOCK_N_, CONSUMERS = CONSUMERS_;
  static constexpr int STAGES = STAGES_, QUERY_STAGES = QUERY_STAGES_;
  static constexpr int BLOCK_M = ROWS * CONSUMERS;
  static constexpr int BOX = PANEL<HEAD_DIM>;
  static constexpr bool INTEGERS = true;
  static_assert(QUERY_STAGES + 2 <= WORK_TILES, "a query tile is described while consumers may ask");

  alignas(1024) Byte query[QUERY_STAGES][CONSUMERS][TERMS][ROWS * HEAD_DIM];
  alignas(1024) Byte key[STAGES][BLOCK_N * HEAD_DIM];
  alignas(1024) T value[STAGES][BLOCK_N * HEAD_DIM];
  alignas(16) float key_scale[STAGES][BLOCK_N];
  WorkTile work[WORK_TILES];
  Mbarrier query_full[QUERY_STAGES];
  Mbarrier query_empty[QUERY_STAGES];
  Mbarrier key_full[STAGES];
  Mbarrier key_empty[STAGES];
  Mbarrier value_full[STAGES];
  Mbarrier value_empty[STAGES];
};

}  // namespace microsdpa::hopper::throughput_8bit_qk
