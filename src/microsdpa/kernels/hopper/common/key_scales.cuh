// Scales of keys on their way into shared memory.
#pragma once

#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "eight_bit.cuh"
#include "pipeline.cuh"

namespace microsdpa::hopper {

// Threads that arrive when a tile's scales are there: each has written some.
constexpr int SCALE_WRITERS = 32;

// Fetches the scales of every tile of keys. One warp.
template <bool CAUSAL, typename Shared, typename Tiles = AllTiles>
__device__ __forceinline__ void fetch_key_scales(Shared& shared, const EightBitParams& params,
                                                 const Tiles& tiles = {}) {
  constexpr int OF_LANE = Shared::BLOCK_N / 32;
  const int lane = threadIdx.x % 32;
  PipelineState<Shared::STAGES> state;
  const auto fetch = [&](const WorkTile& work) {
    const int head_kv = work.head / (params.heads / params.heads_kv);
    for (int tile = 0; tile < work.tiles; ++tile) {
      float scale[OF_LANE];
#pragma unroll
      for (int i = 0; i < OF_LANE; ++i) {
        const int first_key = Shared::BLOCK_N * tiles.key_tile(work, tile);
        const int key = min(first_key + 32 * i + lane, params.seqlen_k - 1);  // later ones are masked
        scale[i] = *params.key_scale.at(work.batch, head_kv, key);
        if (Shared::INTEGERS && params.scale_log2 < 0.0f) scale[i] = -scale[i];
      }
      mbarrier_wait_asleep(shared.key_empty[state.stage], state.phase ^ 1);
#pragma unroll
      for (int i = 0; i < OF_LANE; ++i) shared.key_scale[state.stage][32 * i + lane] = scale[i];
      mbarrier_arrive(shared.key_full[state.stage]);
      state.advance();
    }
  };
  for_each_work<CAUSAL, Shared>(params, fetch, tiles);
}

}  // namespace microsdpa::hopper
