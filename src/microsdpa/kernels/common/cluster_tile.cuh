// Which tile of rows a cluster of CTAs has, in launches whose clusters have one each.
#pragma once

#include "sequence.cuh"
#include "softmax.cuh"

namespace microsdpa::sequences {

// Which tile of rows a cluster has: the first B clusters have each sequence's first one, those behind them the others.
struct ClusterTile {
  int b, tile;
  bool exists;

  // PACKED: whether sequences may have other tiles than their first one. The lanes of a warp ask together.
  template <int BLOCK_M, int PACK, bool PACKED>
  __device__ __forceinline__ static ClusterTile find(const VarlenParams& params, int cluster) {
    if constexpr (!PACKED) return {cluster, 0, true};
    if (cluster < params.batch) return {cluster, 0, Sequence(params, cluster).queries > 0};
    const int lane = static_cast<int>(threadIdx.x % 32);
    int place = cluster - params.batch;
    for (int first = 0; first < params.batch; first += 32) {
      const int queries = first + lane < params.batch ? Sequence(params, first + lane).queries : 0;
      const int own = max(0, (queries * PACK - 1) / BLOCK_M);
      int sum = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane >= offset) sum += before;
      }
      const unsigned past = __ballot_sync(FULL_WARP, sum > place);
      if (past != 0) {
        const int found = __ffs(past) - 1;
        return {first + found, 1 + place - __shfl_sync(FULL_WARP, sum - own, found), true};
      }
      place -= __shfl_sync(FULL_WARP, sum, 31);
    }
    return {0, 0, false};
  }
};

}  // namespace microsdpa::sequences
