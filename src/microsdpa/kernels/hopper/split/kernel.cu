// Attention calls of about one tile of queries per SM: every warpgroup has a part of the keys, so that four share an
// SM.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for QUERY_TILES tiles of 64 queries of one head per
// CTA. GROUPS = 4 / QUERY_TILES warpgroups compute each query tile: tile t of BLOCK_N = 64 keys is group t % GROUPS's.
// Four warpgroups keep tensor cores and exponential unit busy in turns, which two of a larger tile do not.
// Pipeline: 1. a thread issues the copies that there is room for   2. each warpgroup: S of its next tile, and P V of
//           this one beside the exponentials, relative to the first tile's maximum; a place that is free is filled
//           3. O's columns change warpgroups, which weigh and add them   4. 16-byte stores
// Bound by: exponentials (16 per clock) and products take the same; docs/hopper-split.md has the measurements.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "consumer.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::split {

// Sets the barriers up, and issues the copies that shared memory has room for, in the order in which they are needed.
// One thread.
template <typename T, int QUERY_TILES, int STAGES, int GROUP, bool CAUSAL>
__device__ __forceinline__ void begin(SharedStorage<T, QUERY_TILES, STAGES>& shared,
                                      const WorkTile<QUERY_TILES, GROUP, CAUSAL>& work, const TensorMap& query,
                                      const TensorMap& key, const TensorMap& value) {
  constexpr int GROUPS = WARPGROUPS / QUERY_TILES;
  prefetch_tensor_map(query);
  prefetch_tensor_map(key);
  prefetch_tensor_map(value);
#pragma unroll
  for (int i = 0; i < QUERY_TILES; ++i) mbarrier_init(shared.query_full[i], 1);
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared.key_full[group][stage], 1);
      mbarrier_init(shared.value_full[group][stage], 1);
    }
  }
  mbarrier_init_fence();

  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();
#pragma unroll
  for (int turn = 0; turn <= STAGES; ++turn) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int tile = turn * GROUPS + group;
      if (turn == 0 && group < QUERY_TILES && work.tiles[group] > 0) {
        load_tile(shared.query[group], query, shared.query_full[group], work.first_row[group], work.head, work.batch);
      }
      if (turn < STAGES && tile < work.all_tiles) {
        load_tile(shared.key[group][turn], key, shared.key_full[group][turn], BLOCK_N * tile, work.head_kv, work.batch);
      }
      if (turn > 0 && tile - GROUPS < work.all_tiles) {
        load_tile(shared.value[group][turn - 1], value, shared.value_full[group][turn - 1], BLOCK_N * (tile - GROUPS),
                  work.head_kv, work.batch);
      }
    }
  }
  // mutation: barriers that nobody waits at are set up in vain
  if (work.all_tiles > STAGES * GROUPS) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(shared.tile_empty[group][stage], QUERY_TILES * WARPGROUP_THREADS / 32);
      }
    }
  }
}

// STAGES: tiles of K, and of V, that there is room for, of each group. GROUP: query heads of a key head.
template <typename T, int QUERY_TILES, int STAGES, int GROUP, bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ AttentionParams params, const __grid_constant__ TensorMap query,
              const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value) {
  static_assert(QUERY_TILES == 1 || QUERY_TILES == 2, "four or two warpgroups share a query tile");
  auto& shared = dynamic_shared<SharedStorage<T, QUERY_TILES, STAGES>>();
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  const WorkTile<QUERY_TILES, GROUP, CAUSAL> work(params);
  if (threadIdx.x < 32 && elect_one()) begin(shared, work, query, key, value);
  __syncthreads();
  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_THREADS, 0);
  Consumer<T, QUERY_TILES, STAGES, GROUP, CAUSAL> consumer(shared, params, work, key, value, warpgroup);
  consumer.attend();
  consumer.combine();
}

}  // namespace microsdpa::hopper::split
