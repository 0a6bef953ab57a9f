// Keys of a tile that the rows of hopper/latency/kernel.cu's query tile do not see: behind S, or ahead of it.
#pragma once

#include "../../common/head.cuh"
#include "../../common/softmax.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

template <int CLUSTER, bool CAUSAL>
struct TileMask {
  const AttentionParams& params;
  const Fragment<CLUSTER>& fragment;
  const int first_row;  // of the query tile
  const int first_key;  // of the tile of keys

  // How many keys of the tile, from its first one on, a row of the query tile sees; negative for none.
  __device__ __forceinline__ int visible(int row) const {
    const int keys = params.seqlen_k - first_key;
    return CAUSAL ? min(keys, first_row + row + params.diagonal - first_key + 1) : keys;
  }

  // Keys that a row does not see get -inf.
  __device__ __forceinline__ void hide(float (&s)[BLOCK_N / 2]) const {
    const int column = 2 * fragment.quad_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = visible(fragment.tile_row(half));
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + column + e >= seen) s[4 * n + 2 * half + e] = negative_infinity();
        }
      }
    }
  }
  __device__ __forceinline__ void apply(float (&s)[BLOCK_N / 2]) const {
    // mutation: a tile whose first row sees all of it has nothing to hide
    if (visible(0) < BLOCK_N) hide(s);
  }

  // What S of the tile begins with instead of 0, to the same effect. A hidden key whose product is no number leaves a
  // score that is none; the row's sum shows it as it shows an overflow, and all is computed again with `apply`.
  __device__ __forceinline__ void begin(float (&s)[BLOCK_N / 2]) const {
    // mutation: apply() hides every key of such a tile too
    const bool hidden = visible(BLOCK_M - 1) <= 0;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) s[i] = hidden ? negative_infinity() : 0.0f;
    if (!hidden) apply(s);
  }
};

}  // namespace microsdpa::hopper::latency
