// All operands in 8 bits, for calls that fill the chip: both products on wgmma.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for tiles of BLOCK_M = 64 CONSUMERS queries of one
// head. Q and K are quantized to E4M3 or INT8, V and P to E4M3. An E4M3 query may have a residual term (TERMS 2), for
// the rounding error of the first.
// One CTA per SM stays and takes one tile after the other. Roles: in the first warpgroup one thread issues all copies,
// two or three warps transpose V, one fetches the scales of keys; each other warpgroup, a consumer, computes 64 rows.
// Pipeline: 1. TMA fills rings of Q, K and V tiles, across query tiles   2. V becomes V^T, its keys in the order in
//           which probabilities lie in registers   3. a consumer starts S of the next tile and P V of this one
//           4. while others multiply it turns scores into probabilities, rounded to E4M3
// E4M3 products keep about 14 bits of their sums. Two consumers have registers to sum P V of each tile by itself and
// add it to O in FP32 among the exponentials; with three or four, or with 256 channels, the tensor cores add to O
// (IN_PLACE), and what those have summed over PROMOTED_TILES tiles is moved away. Bound by: latency: a tile of 192 x 96
// at D = 128 took 2,250 cycles with two tiles of K and V^T, of which the tensor cores and the unit of exponentials need
// 1,152 each; four tiles made it 3 to 6% faster. docs/hopper-8bit.md has the measurements.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "../common/key_scales.cuh"
#include "consumer.cuh"
#include "promoting.cuh"
#include "shared.cuh"
#include "transpose.cuh"
#include "wide_consumer.cuh"

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

// STAGES: tiles of K and of V^T that there is room for; VALUE_STAGES: of V, waiting to be transposed. KEY_SCALES:
// whether the keys of a head have different scales. IN_PLACE: whether the tensor cores add P V to O. CAUSAL: what a row
// sees has a right end. MASKS: what else decides about scores.
template <typename T, typename FORMAT, int HEAD_DIM, int TERMS, int BLOCK_N, int CONSUMERS, int STAGES,
          int VALUE_STAGES, int QUERY_STAGES, bool KEY_SCALES, bool IN_PLACE, int PROMOTED_TILES, bool CAUSAL,
          typename MASKS = NoMasks>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    attention(const __grid_constant__ typename EightBitParamsOf<MASKS>::Type given,
              const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value) {
  using Shared = SharedStorage<FORMAT, HEAD_DIM, TERMS, BLOCK_N, CONSUMERS, STAGES, VALUE_STAGES, QUERY_STAGES,
                               KEY_SCALES, PROMOTED_TILES>;
  // Registers of a thread. What consumers claim, the others must have released of what the CTA was launched with: the
  // most that all its threads can have, in eights.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 4    ? 112
                                     : CONSUMERS == 3  ? 160
                                     : HEAD_DIM == 64  ? 216
                                     : HEAD_DIM == 128 ? 232
                                     : IN_PLACE        ? 224
                                                       : 240;
  constexpr int PRODUCER_REGISTERS = CONSUMERS > 2     ? 32
                                     : HEAD_DIM == 64  ? 72
                                     : HEAD_DIM == 128 ? 40
                                     : IN_PLACE        ? 56
                                                       : 24;
  constexpr int LAUNCHED = 65536 / ((1 + CONSUMERS) * WARPGROUP_THREADS) / 8 * 8;
  static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (1 + CONSUMERS) * LAUNCHED,
                "consumers would wait for registers for ever");
  constexpr int AT_A_TIME = PRODUCER_REGISTERS < 32   ? 1
                            : PRODUCER_REGISTERS < 40 ? 2
                                                      : 4;  // loads of a transposing warp

  static_assert(IN_PLACE || !MASKS::ANY, "masks are known where the tensor cores add to O");
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
    } else if (warp <= Shared::TRANSPOSERS) {
      transpose<AT_A_TIME>(shared, warp - 1);
    } else if (KEY_SCALES) {
      fetch_key_scales<CAUSAL>(shared, params, tiles);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if constexpr (IN_PLACE) {
      PromotingConsumer<T, Shared, CAUSAL, MASKS> consumer(shared, given, warp / 4 - 1);
      consumer.run();
    } else if constexpr (HEAD_DIM > 128) {
      WideConsumer<T, Shared, CAUSAL> consumer(shared, params, warp / 4 - 1);
      consumer.run();
    } else {
      Consumer<T, Shared, CAUSAL> consumer(shared, params, warp / 4 - 1);
      consumer.run();
    }
  }
}

}  // namespace microsdpa::hopper::throughput_8bit
