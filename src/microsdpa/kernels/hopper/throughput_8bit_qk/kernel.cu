// INT8 Q K^T with P V in 16 bits, for calls that fill the chip: both products on wgmma.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, of INT8 values of Q and K with scales and of V in
// FP16 or BF16, for tiles of BLOCK_M = 64 CONSUMERS queries of one head. A query may have a residual term (TERMS 2),
// which counts 1/256 of the first. One CTA per SM stays and takes one tile after the other. Roles: in the first
// warpgroup one thread issues all copies and one warp fetches the scales of keys; each other warpgroup, a consumer,
// computes 64 rows.
// Pipeline: 1. TMA fills rings of Q, K and V tiles, across query tiles   2. in its turn, a consumer starts S of the
//           next tile, also of the next query tile, and P V of this one, which adds to O   3. while others multiply,
//           and its own P V runs, it turns integers into scores and scores into probabilities
// Bound by: the tensor cores, which have as much to do as in FP16 where queries have a residual term.
// docs/hopper-8bit.md has the measurements.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "../common/key_scales.cuh"
#include "consumer.cuh"

namespace microsdpa::hopper::throughput_8bit_qk {

// Issues every copy of the CTA, in the order in which the tiles are needed: S of a tile is computed ahead of P V of the
// one before it. One thread.
template <bool CAUSAL, typename Shared, typename Tiles>
__device__ __forceinline__ void produce(Shared& shared, const EightBitParams& params, const Tiles& tiles,
                                        const TensorMap& query, const TensorMap& key, const TensorMap& value) {
  constexpr int BLOCK_N = Shared::BLOCK_N, HEAD_DIM = Shared::HEAD_DIM, BOX = Shared::BOX;
  PipelineState<Shared::QUERY_STAGES> query_state;
  PipelineState<Shared::STAGES> key_state, value_state;
  int works = 0;

  // Says what comes next, once there is room for its queries.
  auto announce = [&](const WorkTile& work) {
    mbarrier_wait_asleep(shared.query_empty[query_state.stage], query_state.phase ^ 1);
    shared.work[works++ % WORK_TILES] = work;
  };

  const auto load = [&](const WorkTile& work) {
    const int head_kv = work.head / (params.heads / params.heads_kv);
    announce(work);
    Mbarrier& query_full = shared.query_full[query_state.stage];
    mbarrier_arrive_expect(query_full, Shared::BLOCK_M * Shared::TERMS * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < Shared::CONSUMERS; ++i) {
#pragma unroll
      for (int term = 0; term < Shared::TERMS; ++term) {
        tma_load(shared.query[query_state.stage][i][term], query, query_full, term * HEAD_DIM,
                 work.first_row + ROWS * i, work.head, work.batch);
      }
    }
    query_state.advance();
    for (int tile = 0; tile <= work.tiles; ++tile) {
      if (tile < work.tiles) {
        Mbarrier& full = shared.key_full[key_state.stage];
        mbarrier_wait_asleep(shared.key_empty[key_state.stage], key_state.phase ^ 1);
        mbarrier_arrive_expect(full, BLOCK_N * HEAD_DIM);
        tma_load(shared.key[key_state.stage], key, full, 0, BLOCK_N * tiles.key_tile(work, tile), head_kv, work.batch);
        key_state.advance();
      }
      if (tile > 0) {
        Mbarrier& full = shared.value_full[value_state.stage];
        mbarrier_wait_asleep(shared.value_empty[value_state.stage], value_state.phase ^ 1);
        mbarrier_arrive_expect(full, BLOCK_N * HEAD_DIM * sizeof(typename Shared::T));
#pragma unroll
        for (int panel = 0; panel < HEAD_DIM / BOX; ++panel) {
          tma_load(shared.value[value_state.stage] + panel * BLOCK_N * BOX, value, full, panel * BOX,
                   BLOCK_N * tiles.key_tile(work, tile - 1), head_kv, work.batch);
        }
        value_state.advance();
      }
    }
  };
  for_each_work<CAUSAL, Shared>(params, load, tiles);
  announce({0, 0, 0, 0});
  mbarrier_arrive(shared.query_full[query_state.stage]);
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
    mbarrier_init(shared.key_full[stage], 1 + SCALE_WRITERS);
    mbarrier_init(shared.key_empty[stage], 32 * READERS);
    mbarrier_init(shared.value_full[stage], 1);
    mbarrier_init(shared.value_empty[stage], READERS);
  }
  mbarrier_init_fence();
}

// STAGES, QUERY_STAGES: tiles of K and of V, and of Q, that there is room for. CAUSAL: what a row sees has a right end.
// MASKS: what else decides about scores.
template <typename T, int HEAD_DIM, int TERMS, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES, bool CAUSAL,
          typename MASKS = NoMasks>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    attention(const __grid_constant__ typename EightBitParamsOf<MASKS>::Type given,
              const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value) {
  // Registers of a thread. What consumers claim, the others must have released of what the CTA was launched with: the
  // most that all its threads can have, in eights.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
  constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
  constexpr int LAUNCHED = 65536 / ((1 + CONSUMERS) * WARPGROUP_THREADS) / 8 * 8;
  static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (1 + CONSUMERS) * LAUNCHED,
                "consumers would wait for registers for ever");

  using Shared = SharedStorage<T, HEAD_DIM, TERMS, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES>;
  const EightBitParams& params = EightBitParamsOf<MASKS>::call(given);
  const typename TilesOf<MASKS, BLOCK_N>::Type tiles{given};
  auto& shared = dynamic_shared<Shared>();
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) initialize(shared);
  __syncthreads();
  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();

  if (warp < 4) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (elect_one()) {
        prefetch_tensor_map(query);
        prefetch_tensor_map(key);
        prefetch_tensor_map(value);
        produce<CAUSAL>(shared, params, tiles, query, key, value);
      }
    } else if (warp == 1) {
      fetch_key_scales<CAUSAL>(shared, params, tiles);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer<Shared, CAUSAL, MASKS> consumer(shared, given, warp / 4 - 1);
    consumer.run();
  }
}

}  // namespace microsdpa::hopper::throughput_8bit_qk
