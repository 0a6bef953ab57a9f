// Which tile of queries a persistent CTA computes next.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Walks through the tiles of all heads, every gridDim.x-th of them. Under a causal mask the longest tiles come first,
// of all heads, so that the short ones fill the gaps at the end; without one, the tiles of a head follow each other, so
// that CTAs that run at the same time read the same K and V.
template <bool CAUSAL, int BLOCK_M>
struct TileScheduler {
  int heads;    // of all batch entries
  int q_tiles;  // of a head
  int index;    // of the current tile

  template <typename Params>
  __device__ __forceinline__ explicit TileScheduler(const Params& params)
      : heads(params.batch * params.heads), q_tiles((params.seqlen_q + BLOCK_M - 1) / BLOCK_M), index(blockIdx.x) {}

  __device__ __forceinline__ bool valid() const { return index < heads * q_tiles; }
  __device__ __forceinline__ void advance() { index += gridDim.x; }
  __device__ __forceinline__ int head() const { return CAUSAL ? index % heads : index / q_tiles; }
  __device__ __forceinline__ int first_row() const {
    return (CAUSAL ? q_tiles - 1 - index / heads : index % q_tiles) * BLOCK_M;
  }
};

}  // namespace microsdpa
