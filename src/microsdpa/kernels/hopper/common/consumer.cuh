// A consumer warpgroup of a persistent kernel: its place among the others, its turn to multiply, and O += P V.
#pragma once

#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/wgmma.cuh"
#include "warpgroup.cuh"

namespace microsdpa::hopper {

template <int CONSUMERS>
struct ConsumerWarpgroup {
  const int warpgroup;  // among the consumers
  const int thread;     // of the warpgroup

  __device__ __forceinline__ explicit ConsumerWarpgroup(int warpgroup)
      : warpgroup(warpgroup), thread(static_cast<int>(threadIdx.x % WARPGROUP_THREADS)) {}

  // Which of the warpgroup's rows are this thread's two.
  __device__ __forceinline__ int tile_row(int half) const { return thread / 32 * 16 + 8 * half + thread % 32 / 4; }

  // This warp is done with a tile in shared memory.
  __device__ __forceinline__ void release(Mbarrier& done) const {
    // mutation: where wgmma alone has read the tile, the wait for it has brought the warp together
    __syncwarp();
    if (elect_one()) mbarrier_arrive(done);
  }

  // Consumers start their products in turn, so that some have their exponentials while others multiply.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (CONSUMERS > 1) named_barrier_sync(PINGPONG + warpgroup, 2 * WARPGROUP_THREADS);
  }
  __device__ __forceinline__ void pingpong_arrive() const {
    if constexpr (CONSUMERS > 1) {
      named_barrier_arrive(PINGPONG + (warpgroup + 1) % CONSUMERS, 2 * WARPGROUP_THREADS);
    }
  }
};

// Starts O = P V, or adds to O. The tile of V has 16 bits, and lies in panels of PANEL channels, and perhaps a tail.
template <typename T, int HEAD_DIM, int STEPS>
__device__ __forceinline__ void accumulate_values(float (&o)[HEAD_DIM / 2], const uint32 (&p)[STEPS][4], const T* tile,
                                                  bool add) {
  constexpr int BOX = PANEL<HEAD_DIM>, END = TAIL<HEAD_DIM>, WIDE = HEAD_DIM - END;
  const uint64 value = matrix_descriptor(tile, 16 * STEPS * BOX * sizeof(T), 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
  wgmma_fence_registers(o);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma<T, WIDE, Major::MN>(reinterpret_cast<float (&)[WIDE / 2]>(o), p[step],
                              advance(value, 16 * BOX * step * sizeof(T)), add || step > 0);
    if constexpr (END > 0) {
      const uint64 last = matrix_descriptor(tile + 16 * STEPS * WIDE, 16, 8 * END * sizeof(T), TAIL_PATTERN);
      wgmma<T, END, Major::MN>(reinterpret_cast<float (&)[END / 2]>(o[WIDE / 2]), p[step],
                               advance(last, 16 * END * step * sizeof(T)), add || step > 0);
    }
  }
  wgmma_commit();
}

// Multiplies the accumulators of two rows.
template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] *= factor[i / 2 % 2];
}

}  // namespace microsdpa::hopper
