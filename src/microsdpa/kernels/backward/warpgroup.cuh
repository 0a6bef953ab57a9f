// The products of a warpgroup's 64 rows by wgmma. Accumulators and A operands are laid out as those of mma.sync, 16
// rows per warp, and the swizzled tiles are what wgmma reads.
#pragma once

#include "../common/mma_tile.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

namespace microsdpa::backward {

// Accumulators as one array, which wgmma takes.
template <int N>
__device__ __forceinline__ float (&flat(float (&d)[1][N][4]))[4 * N] {
  return reinterpret_cast<float (&)[4 * N]>(d);
}

template <typename C>
struct WarpgroupProducts {
  using T = typename C::T;
  static constexpr int PANEL = C::Owned::PANEL, EIGHT_ROWS = 8 * PANEL * sizeof(T), STEP = C::STEP;
  static constexpr Swizzle PATTERN = PANEL == 64 ? Swizzle::BYTES_128 : Swizzle::BYTES_64;

  // Starts d = X Y^T for the warpgroup's rows of X and STEP rows of Y, those from `first` on.
  __device__ __forceinline__ static void scores(float (&d)[1][STEP / 8][4], const typename C::Owned& x, int warp_row,
                                                const typename C::Walked& y, int first) {
    static_assert(PANEL >= 32 && C::ROW_TILES == 1, "wgmma reads tiles of whole patterns, 16 rows a warp");
    const uint64 a = matrix_descriptor(x.data + warp_row / C::UNIT * C::UNIT * PANEL, 16, EIGHT_ROWS, PATTERN);
    const uint64 b = matrix_descriptor(y.data + first * PANEL, 16, EIGHT_ROWS, PATTERN);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::COLUMNS / 16; ++k) {
      const int panel = k * 16 / PANEL, column = k * 16 % PANEL;
      wgmma<T, STEP>(flat(d), advance(a, (panel * C::BLOCK_OWN * PANEL + column) * sizeof(T)),
                     advance(b, (panel * C::BLOCK_WALK * PANEL + column) * sizeof(T)), k > 0);
    }
    wgmma_commit();
  }

  // Starts d += P Y for the same rows.
  __device__ __forceinline__ static void sum(float (&d)[1][C::COLUMNS / 8][4], const uint32 (&p)[1][STEP / 16][4],
                                             const typename C::Walked& y, int first) {
    const uint64 b = matrix_descriptor(y.data + first * PANEL, C::BLOCK_WALK * PANEL * sizeof(T), EIGHT_ROWS, PATTERN);
    wgmma_fence_registers(flat(d));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) {
      wgmma<T, C::COLUMNS, Major::MN>(flat(d), p[0][k], advance(b, 16 * PANEL * k * sizeof(T)));
    }
    wgmma_commit();
  }
};

}  // namespace microsdpa::backward
