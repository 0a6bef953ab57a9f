// From the scores of a tile of keys to probabilities, for 64 rows on a warpgroup's accumulator.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/wgmma.cuh"

namespace microsdpa::hopper {

// State of this thread's two rows. Probabilities are 2^(scale * (score - stabilizer)).
struct Rows {
  float stabilizer[2];  // a score of the row; -inf before the first visible key
  float sum[2];         // this thread's part of l

  __device__ __forceinline__ void reset() {
    stabilizer[0] = stabilizer[1] = negative_infinity();
    sum[0] = sum[1] = 0.0f;
  }
};

// ROW_SCALES: whether each row's scores have a scale of their own, or all have one. FROM_ZERO: whether sums begin with
// zero, or with a tile's first probabilities, which ptxas makes other code of.
template <typename T, int BLOCK_N, bool ROW_SCALES = false, bool FROM_ZERO = true>
struct TileSoftmax {
  static constexpr int STEPS = BLOCK_N / 16;      // of P V, 16 keys each
  static constexpr float LARGEST_SUM = 16384.0f;  // of a thread's part of a tile: FP16 holds probabilities up to 65504
  static constexpr int GUESS = 16;                // keys that a first stabilizer may come from
  using Scores = float[BLOCK_N / 2];
  using Probabilities = uint32[STEPS][4];

  float scale[ROW_SCALES ? 2 : 1];  // > 0, base 2
  Rows rows;

  // 0 must not meet a masked score of -inf.
  __device__ __forceinline__ explicit TileSoftmax(float scale_log2) : scale{fmaxf(fabsf(scale_log2), 1e-30f)} {}
  __device__ __forceinline__ TileSoftmax() {}

  __device__ __forceinline__ float scale_of(int half) const { return scale[ROW_SCALES ? half : 0]; }

  // Keys that a row does not see get -inf: those from `visible` on, which counts from the tile's first key.
  __device__ __forceinline__ static void hide(Scores& s, int half, int visible) {
    const int left = visible - static_cast<int>(2 * (threadIdx.x % 4));
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e >= left) s[4 * n + 2 * half + e] = negative_infinity();
      }
    }
  }

  // Makes the largest scores the stabilizers, and takes these from the scores, which is exact however large they are.
  // What was made with the stabilizers before is to be multiplied by `factor`.
  __device__ __forceinline__ void update_stabilizers(Scores& s, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = s[2 * half], odd = s[2 * half + 1];
#pragma unroll
      for (int n = 1; n < BLOCK_N / 8; ++n) {
        even = fmaxf(even, s[4 * n + 2 * half]);
        odd = fmaxf(odd, s[4 * n + 2 * half + 1]);
      }
      const float next = fmaxf(rows.stabilizer[half], quad_max(fmaxf(even, odd)));
      factor[half] = ex2_approx((rows.stabilizer[half] - finite(next)) * scale_of(half));
      rows.sum[half] *= factor[half];
      rows.stabilizer[half] = next;
#pragma unroll
      for (int i = 2 * half; i < BLOCK_N / 2; i += 4) {
        s[i] -= finite(next);
        s[i + 1] -= finite(next);
      }
    }
  }

  // Makes the largest scores among a tile's first keys the stabilizers.
  __device__ __forceinline__ void guess_stabilizers(const Scores& s) {
    rows.reset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = negative_infinity();
#pragma unroll
      for (int n = 0; n < GUESS / 8; ++n) largest = fmaxf(largest, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      rows.stabilizer[half] = quad_max(largest);
    }
  }

  // Probabilities relative to what is still to be subtracted, and their sums. Scores are what `factor` makes of them.
  template <typename Factor>
  __device__ __forceinline__ void exponentials(const Scores& s, Probabilities& p, const float (&subtract)[2],
                                               float (&added)[2], const Factor& factor) const {
    float even[2] = {0.0f, 0.0f}, odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 8 * step; i < 8 * step + 8; i += 2) {
        const int half = i / 2 % 2;
        const float x = ex2_approx(fmaf(s[i], factor(s[i], half), -subtract[half]));
        const float y = ex2_approx(fmaf(s[i + 1], factor(s[i + 1], half), -subtract[half]));
        even[half] = FROM_ZERO || i >= 4 ? even[half] + x : x;
        odd[half] = FROM_ZERO || i >= 4 ? odd[half] + y : y;
        p[step][i / 2 % 4] = pack<T>(x, y);
      }
      // mutation: it holds back the compiler, and does nothing when the kernel runs
      wgmma_fence_registers(p[step]);  // step by step: the compiler would compute all exponents first
    }
    added[0] = even[0] + odd[0];
    added[1] = even[1] + odd[1];
  }

  // Whether probabilities with these sums stand: later maxima are not looked for as long as no sum comes near the end
  // of FP16's range, and no scaled stabilizer is so large that its rounding would show, nor infinite.
  __device__ __forceinline__ static bool fits(const float (&subtracted)[2], const float (&added)[2]) {
    const bool usual = fmaxf(fabsf(subtracted[0]), fabsf(subtracted[1])) < LARGE_STABILIZER;
    return usual && fmaxf(added[0], added[1]) <= LARGEST_SUM;
  }

  // Turns the scores of a tile into probabilities. Stabilizers are the maxima of a row's first tile, where `first` says
  // that this is one, or have been guessed; they stay while the probabilities fit. Gives whether stabilizers have
  // moved: O is then to be multiplied by `factor`. `look` has the maxima looked for at once.
  __device__ __forceinline__ bool softmax_tile(Scores& s, Probabilities& p, float (&factor)[2], bool first,
                                               bool look = false) {
    bool moved = first || look;
    if (first) rows.reset();
    float added[2];
    while (true) {
      float subtract[2] = {0.0f, 0.0f};
      if (moved) {
        update_stabilizers(s, factor);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) subtract[half] = rows.stabilizer[half] * scale_of(half);
      }
      exponentials(s, p, subtract, added, [this](float, int half) { return scale_of(half); });
      const bool stands = fits(subtract, added);
      if (moved || __all_sync(FULL_WARP, stands)) break;
      moved = true;
    }
    rows.sum[0] += added[0];
    rows.sum[1] += added[1];
    return moved;
  }
};

}  // namespace microsdpa::hopper
