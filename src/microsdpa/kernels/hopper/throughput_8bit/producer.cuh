// What the first warpgroup of hopper/throughput_8bit/kernel.cu and wide.cu does: copies, V^T, and all barriers.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "shared.cuh"
#include "transpose.cuh"

namespace microsdpa::hopper::throughput_8bit {

// Copies TILE_ROWS rows of one head, from `row` on, and HEAD_DIM columns from `column` on.
template <int TILE_ROWS, typename Shared>
__device__ __forceinline__ void load_panels(Byte* tile, const TensorMap& map, Mbarrier& full, int column, int row,
                                            int head, int batch) {
  constexpr int COLUMNS = Shared::COLUMNS;
#pragma unroll
  for (int panel = 0; panel < Shared::HEAD_DIM / COLUMNS; ++panel) {
    tma_load(tile + panel * TILE_ROWS * COLUMNS, map, full, column + panel * COLUMNS, row, head, batch);
  }
}

// Issues every copy of the CTA, in the order in which the tiles are needed: S of a tile is computed ahead of P V of the
// one before it. One thread.
template <bool CAUSAL, typename Shared, typename Tiles>
__device__ __forceinline__ void produce(Shared& shared, const EightBitParams& params, const Tiles& tiles,
                                        const TensorMap& query, const TensorMap& key, const TensorMap& value) {
  constexpr int BLOCK_N = Shared::BLOCK_N, HEAD_DIM = Shared::HEAD_DIM;
  PipelineState<Shared::QUERY_STAGES> query_state;
  PipelineState<Shared::STAGES> key_state;
  PipelineState<Shared::VALUE_STAGES> value_state;
  int works = 0;

  // Says what comes next, once there is room for its queries.
  auto announce = [&](const WorkTile& work, int head_kv) {
    mbarrier_wait_asleep(shared.query_empty[query_state.stage], query_state.phase ^ 1);
    shared.work[works % WORK_TILES] = work;
    shared.head_kv[works++ % WORK_TILES] = head_kv;
  };
  auto load_value = [&](const WorkTile& work, int head_kv, int tile) {
    Mbarrier& full = shared.value_full[value_state.stage];
    mbarrier_wait_asleep(shared.value_empty[value_state.stage], value_state.phase ^ 1);
    mbarrier_arrive_expect(full, BLOCK_N * HEAD_DIM);
    load_panels<BLOCK_N, Shared>(shared.value[value_state.stage], value, full, 0, BLOCK_N * tiles.key_tile(work, tile),
                                 head_kv, work.batch);
    value_state.advance();
  };

  const auto load = [&](const WorkTile& work) {
    const int head_kv = work.head / (params.heads / params.heads_kv);
    announce(work, head_kv);
    Mbarrier& query_full = shared.query_full[query_state.stage];
    mbarrier_arrive_expect(query_full, Shared::BLOCK_M * Shared::TERMS * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < Shared::CONSUMERS; ++i) {
#pragma unroll
      for (int term = 0; term < Shared::TERMS; ++term) {
        load_panels<ROWS, Shared>(shared.query[query_state.stage][i][term], query, query_full, term * HEAD_DIM,
                                  work.first_row + ROWS * i, work.head, work.batch);
      }
    }
    query_state.advance();
    for (int tile = 0; tile < work.tiles; ++tile) {
      Mbarrier& full = shared.key_full[key_state.stage];
      mbarrier_wait_asleep(shared.key_empty[key_state.stage], key_state.phase ^ 1);
      mbarrier_arrive_expect(full, BLOCK_N * HEAD_DIM);
      load_panels<BLOCK_N, Shared>(shared.key[key_state.stage], key, full, 0, BLOCK_N * tiles.key_tile(work, tile),
                                   head_kv, work.batch);
      key_state.advance();
      if (tile > 0) load_value(work, head_kv, tile - 1);
    }
    load_value(work, head_kv, work.tiles - 1);
  };
  for_each_work<CAUSAL, Shared>(params, load, tiles);
  mbarrier_wait_asleep(shared.value_empty[value_state.stage], value_state.phase ^ 1);
  shared.value_end[value_state.stage] = true;
  mbarrier_arrive(shared.value_full[value_state.stage]);
  announce({0, 0, 0, 0}, 0);
  mbarrier_arrive(shared.query_full[query_state.stage]);
}

// Transposes every tile of V that is full. Each of TRANSPOSERS warps.
template <int AT_A_TIME, typename Shared>
__device__ __forceinline__ void transpose(Shared& shared, int warp) {
  PipelineState<Shared::VALUE_STAGES> from;
  PipelineState<Shared::STAGES> to;
  while (true) {
    mbarrier_wait(shared.value_full[from.stage], from.phase);
    // One lane has read it when that lane says that the warp is done with the stage.
    if (__any_sync(FULL_WARP, threadIdx.x % 32 == 0 && shared.value_end[from.stage])) return;
    mbarrier_wait_asleep(shared.transposed_empty[to.stage], to.phase ^ 1);
#pragma unroll 1
    for (int panel = 0; panel < Shared::HEAD_DIM; panel += Shared::COLUMNS) {
      transpose_value<Shared::COLUMNS, Shared::HEAD_DIM, Shared::BLOCK_N, Shared::KEY_PANEL, Shared::TRANSPOSERS,
                      AT_A_TIME>(shared.transposed[to.stage] + panel * Shared::KEY_PANEL,
                                 shared.value[from.stage] + panel * Shared::BLOCK_N, warp);
    }
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) {
      mbarrier_arrive(shared.value_empty[from.stage]);
      mbarrier_arrive(shared.transposed_full[to.stage]);
    }
    from.advance();
    to.advance();
  }
}

// Sets up all barriers. One thread.
template <typename Shared>
__device__ __forceinline__ void initialize(Shared& shared) {
  constexpr int READERS = 4 * Shared::CONSUMERS;  // warps
#pragma unroll
  for (int stage = 0; stage < Shared::QUERY_STAGES; ++stage) {
    mbarrier_init(shared.query_full[stage], 1);
    mbarrier_init(shared.query_empty[stage], 32 * READERS);
  }
#pragma unroll
  for (int stage = 0; stage < Shared::STAGES; ++stage) {
    mbarrier_init(shared.key_full[stage], Shared::KEY_SCALES ? 1 + SCALE_WRITERS : 1);
    mbarrier_init(shared.key_empty[stage], Shared::KEY_SCALES ? 32 * READERS : READERS);
    mbarrier_init(shared.transposed_full[stage], Shared::TRANSPOSERS);
    mbarrier_init(shared.transposed_empty[stage], READERS);
  }
#pragma unroll
  for (int stage = 0; stage < Shared::VALUE_STAGES; ++stage) {
    shared.value_end[stage] = false;
    mbarrier_init(shared.value_full[stage], 1);
    mbarrier_init(shared.value_empty[stage], Shared::TRANSPOSERS);
  }
  mbarrier_init_fence();
}

}  // namespace microsdpa::hopper::throughput_8bit
