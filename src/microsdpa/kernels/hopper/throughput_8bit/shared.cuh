// Shared memory of hopper/throughput_8bit/kernel.cu.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../common/eight_bit.cuh"
#include "../common/pipeline.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::throughput_8bit {

// Q and K are quantized, of type FORMAT, E4M3 or INT8. Q, K and V lie in tiles, a query's residual terms in tiles of
// their own, cut into panels of COLUMNS channels; V^T of a panel is cut into panels of KEY_PANEL keys. Panels are
// stored one after another.
template <typename FORMAT_, int HEAD_DIM_, int TERMS_, int BLOCK_N_, int CONSUMERS_, int STAGES_, int VALUE_STAGES_,
          int QUERY_STAGES_, bool KEY_SCALES_, int PROMOTED_TILES_>
struct SharedStorage {
  using FORMAT = FORMAT_;
  using Sum = typename SumOf<FORMAT>::Type;
  static constexpr bool INTEGERS = SumOf<FORMAT>::INTEGER;
  static constexpr int HEAD_DIM = HEAD_DIM_, TERMS = TERMS_, BLOCK_N = BLOCK_N_, CONSUMERS = CONSUMERS_;
  static constexpr int STAGES = STAGES_, VALUE_STAGES = VALUE_STAGES_, QUERY_STAGES = QUERY_STAGES_;
  static constexpr bool KEY_SCALES = KEY_SCALES_;  // whether the keys of a head have different scales
  // Tiles over which the tensor cores sum P V before the sum is moved away, 0 if it never is: to the output, or here.
  static constexpr int PROMOTED_TILES = PROMOTED_TILES_;
  static constexpr bool PROMOTES = PROMOTED_TILES > 0, IN_SHARED = PROMOTES && HEAD_DIM_ <= 128;
  static constexpr bool QUERY_STAYS = false;  // whether its place is wanted for O when its last scores are there
  static constexpr int TRANSPOSERS = HEAD_DIM > 128 && !KEY_SCALES ? 3 : 2;  // warps that turn V into V^T
  static constexpr int BLOCK_M = ROWS * CONSUMERS;
  static constexpr int COLUMNS = HEAD_DIM < 128 ? HEAD_DIM : 128;
  static constexpr int KEY_PANEL = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32;
  static_assert(!INTEGERS || (TERMS == 1 && KEY_SCALES),
                "integers have one term, and become floats by their keys' scales");
  static_assert(QUERY_STAGES + 2 <= WORK_TILES, "a query tile is described while consumers may ask");

  alignas(1024) Byte query[QUERY_STAGES][CONSUMERS][TERMS][ROWS * HEAD_DIM];
  alignas(1024) Byte key[STAGES][BLOCK_N * HEAD_DIM];
  alignas(1024) Byte value[VALUE_STAGES][BLOCK_N * HEAD_DIM];  // [BLOCK_N, HEAD_DIM], as it is in memory
  alignas(1024) Byte transposed[STAGES][HEAD_DIM * BLOCK_N];   // [HEAD_DIM, BLOCK_N]
  alignas(16) float key_scale[STAGES][KEY_SCALES ? BLOCK_N : 4];
  alignas(
      16) float4 promoted[IN_SHARED ? CONSUMERS : 1][IN_SHARED ? HEAD_DIM / 8 : 1][IN_SHARED ? WARPGROUP_THREADS : 1];
  WorkTile work[WORK_TILES];
  int head_kv[WORK_TILES];
  int value_end[VALUE_STAGES];  // that no tile of V comes any more
  Mbarrier query_full[QUERY_STAGES];
  Mbarrier query_empty[QUERY_STAGES];
  Mbarrier key_full[STAGES];
  Mbarrier key_empty[STAGES];
  Mbarrier value_full[VALUE_STAGES];
  Mbarrier value_empty[VALUE_STAGES];
  Mbarrier transposed_full[STAGES];
  Mbarrier transposed_empty[STAGES];
};

}  // namespace microsdpa::hopper::throughput_8bit
