// What the first warpgroup of a CTA of hopper/backward does: a warp loads, and two add to the sums of dQ.
#pragma once

#include "../../common/params.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;

// Copies TILE_ROWS rows of one head, from `row` on. Rows past the tensor become zeros.
template <typename C, int TILE_ROWS>
__device__ __forceinline__ void load_tile(typename C::T* shared, const TensorMap& map, Mbarrier& full, int row,
                                          int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::COLUMNS / BOX; ++panel) {
    tma_load(shared + panel * TILE_ROWS * BOX, map, full, panel * BOX, row, head, batch);
  }
}

// Issues every load of the CTA. One thread.
template <typename C, typename M, bool IN_ORDER, typename Storage>
__device__ __forceinline__ void produce(Storage& shared, const AttentionParams& call, const Walk<C, M, IN_ORDER>& walk,
                                        const TensorMap& query, const TensorMap& key, const TensorMap& value,
                                        const TensorMap& grad_out) {
  constexpr int OWNED_BYTES = C::BLOCK_N * C::COLUMNS * sizeof(typename C::T);
  constexpr int WALKED_BYTES = C::BLOCK_M * C::COLUMNS * sizeof(typename C::T);
  constexpr int ROW_BYTES = C::BLOCK_M * sizeof(float);
  constexpr int RANGE_BYTES = C::RANGED ? RANGE_NUMBERS<C::BLOCK_M> * sizeof(int32) : 0;
  if (walk.turns == 0) return;
  mbarrier_arrive_expect(shared.owned_full, 2 * OWNED_BYTES);
  load_tile<C, C::BLOCK_N>(shared.key, key, shared.owned_full, walk.first_key, walk.head_kv, walk.batch);
  const WorkspaceOf<C> workspace(call);
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Turn at(walk);
  for (int turn = 0; turn < walk.turns; ++turn) {
    const int row = at.tile * C::BLOCK_M, head = walk.batch * call.heads + at.head;
    Mbarrier& query_full = shared.query_full[query_state.stage];
    mbarrier_wait(shared.query_empty[query_state.stage], query_state.phase ^ 1);
    mbarrier_arrive_expect(query_full, WALKED_BYTES + 2 * ROW_BYTES + RANGE_BYTES);
    load_tile<C, C::BLOCK_M>(shared.query[query_state.stage], query, query_full, row, at.head, walk.batch);
    bulk_load(shared.lse[query_state.stage], workspace.lse(head, at.tile), ROW_BYTES, query_full);
    bulk_load(shared.delta[query_state.stage], workspace.delta(head, at.tile), ROW_BYTES, query_full);
    if constexpr (C::RANGED) {
      bulk_load(shared.ranges.ends[query_state.stage], workspace.range(head, at.tile), RANGE_BYTES, query_full);
    }
    query_state.advance();
    if (turn == 0) {
      load_tile<C, C::BLOCK_N>(shared.value, value, shared.owned_full, walk.first_key, walk.head_kv, walk.batch);
    }
    Mbarrier& grad_full = shared.grad_full[grad_state.stage];
    mbarrier_wait(shared.grad_empty[grad_state.stage], grad_state.phase ^ 1);
    mbarrier_arrive_expect(grad_full, WALKED_BYTES);
    load_tile<C, C::BLOCK_M>(shared.grad_out[grad_state.stage], grad_out, grad_full, row, at.head, walk.batch);
    grad_state.advance();
    at.advance(walk);
  }
}

// Adds what a consumer leaves in shared memory to the sums of dQ: with IN_ORDER, after the tiles of keys ahead. These
// have CTAs of lower numbers, which begin earlier. One warp.
template <typename C, typename M, bool IN_ORDER, typename Storage>
__device__ __forceinline__ void add_sums(Storage& shared, const MaskedParams& params, const Walk<C, M, IN_ORDER>& walk,
                                         int consumer) {
  const AttentionParams& call = params.call;
  const WorkspaceOf<C> workspace(call);
  const bool elected = elect_one();
  Turn at(walk);
  for (int turn = 0; turn < walk.turns; ++turn) {
#pragma unroll
    for (int i = 0; i < C::PARTS; i += CONSUMERS) {
      const int part = i + consumer;
      if (C::PARTS % CONSUMERS != 0 && part >= C::PARTS) break;
      named_barrier_sync(SUMS_FULL + consumer, SUMS_THREADS);
      if (elected) {
        const int head = walk.batch * call.heads + at.head;
        float* const sum = workspace.sum(head, at.tile) + part * C::PART;
        const int bytes = C::part_bytes(part);
        if constexpr (IN_ORDER) {
          const int before = walk.keys_before(params, at.tile);
          int32* const turn_of = workspace.turn(head, at.tile) + part;
          wait_for_turn(turn_of, before);
          bulk_reduce_add(sum, shared.sums[consumer], bytes);
          tma_store_commit();
          tma_store_wait();
          end_turn(turn_of, before + 1);
        } else {
          bulk_reduce_add(sum, shared.sums[consumer], bytes);
          tma_store_commit();
          tma_store_wait_read<0>();
        }
      }
      __syncwarp();
      const bool last = (C::PARTS % CONSUMERS == 0 ? i : part) + CONSUMERS >= C::PARTS;
      if (!last || turn + 1 < walk.turns) named_barrier_arrive(SUMS_EMPTY + consumer, SUMS_THREADS);
    }
    at.advance(walk);
  }
}

// Stores the parts of dQ that a consumer leaves in shared memory, which are whole. One warp.
template <typename C, typename W>
__device__ __forceinline__ void store_queries(SharedStorage<C>& shared, const W& walk, int consumer,
                                              const TensorMap& grad_query) {
  const bool elected = elect_one();
  Turn at(walk);
  for (int turn = 0; turn < walk.turns; ++turn) {
    named_barrier_sync(SUMS_FULL + consumer, SUMS_THREADS);
    if (elected) {
      const int row = at.tile * C::BLOCK_M + (C::BLOCK_M > BOX ? ROWS * consumer : 0);
      tma_store(grad_query, reinterpret_cast<const typename C::T*>(shared.sums[consumer]),
                C::BLOCK_M > BOX ? 0 : BOX * consumer, row, at.head, walk.batch);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
    __syncwarp();
    if (turn + 1 < walk.turns) named_barrier_arrive(SUMS_EMPTY + consumer, SUMS_THREADS);
    at.advance(walk);
  }
}

constexpr int READERS = 4 * CONSUMERS;  // warps

// Readiness of what the CTA loads.
template <typename C, typename Storage>
__device__ __forceinline__ void init_barriers(Storage& shared) {
  if (threadIdx.x == 0) {
    if constexpr (C::BLOCK_N > ROWS) {
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared.ds_full[i], READERS);
        mbarrier_init(shared.ds_empty[i], READERS);
      }
    }
    mbarrier_init(shared.owned_full, 1);
#pragma unroll
    for (int stage = 0; stage < C::QUERY_STAGES; ++stage) {
      mbarrier_init(shared.query_full[stage], 1);
      mbarrier_init(shared.query_empty[stage], READERS);
    }
#pragma unroll
    for (int stage = 0; stage < C::GRAD_STAGES; ++stage) {
      mbarrier_init(shared.grad_full[stage], 1);
      mbarrier_init(shared.grad_empty[stage], READERS);
    }
    mbarrier_init_fence();
  }
}

}  // namespace microsdpa::hopper::backward
