// Masks in a kernel: which keys a lane's rows see, and what is added to their scores.
#pragma once

#include "element.cuh"
#include "mask_params.cuh"
#include "mma_tile.cuh"
#include "softmax.cuh"

namespace microsdpa {

// Of the type of a mask's or sink's elements, which is void for none.
template <typename T>
constexpr bool PRESENT = true;
template <>
constexpr bool PRESENT<void> = false;
template <typename T>
constexpr bool is_bool = false;
template <>
constexpr bool is_bool<bool> = true;

__device__ __forceinline__ float to_float(float x) { return x; }

// What a mask's element adds to a score, in base 2. Finite numbers stay finite: the lowest one, with which some callers
// mean -inf, still leaves a row that has nothing else an average, as it does in exact arithmetic.
template <typename T>
__device__ __forceinline__ float mask_bias(T element) {
  constexpr float LOG2_E = 1.44269504088896340736f, LOWEST = -3.402823466e38f;
  const float natural = to_float(element), bias = natural * LOG2_E;
  return bias < LOWEST && natural >= LOWEST ? LOWEST : bias;
}

// Which keys this lane's two rows see, and what is added to their scores.
template <typename MASK, bool LEFT, bool RIGHT, int BLOCK_N>
struct Visibility {
  static constexpr bool READS = PRESENT<MASK>, HIDES = is_bool<MASK>, ADDS = READS && !HIDES;
  static constexpr uint32 ALL = BLOCK_N == 64 ? 0xffffffffu : (1u << BLOCK_N / 2) - 1;
  static_assert(BLOCK_N <= 64, "a lane has a bit for each of its scores");

  int low[2], high[2];      // the rows see keys low .. high - 1
  int warp_low, warp_high;  // keys that all rows of the warp see
  const MASK* mask[2];      // the rows of the mask, or its last one
  int64 step;               // from one key's element to the next one's
  uint32 seen;              // bit 4 n + e is accumulator [n][e]'s

  __device__ __forceinline__ Visibility(const MaskedParams& params, int head, int warp_first) {
    const AttentionParams& call = params.call;
    const MaskParams& masks = params.masks;
    warp_low = LEFT ? max(0, warp_first + 15 + masks.lowest) : 0;
    warp_high = warp_first + 16 > call.seqlen_q ? 0 : last_seen(params, warp_first);
    step = masks.mask_column_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_first + lane_index() / 4 + 8 * half;
      low[half] = LEFT ? max(0, row + masks.lowest) : 0;
      high[half] = row < call.seqlen_q ? last_seen(params, row) : 0;
      if constexpr (READS) {
        mask[half] = static_cast<const MASK*>(masks.mask) + head / call.heads * masks.mask_strides.batch +
                     head % call.heads * masks.mask_strides.head + min(row, call.seqlen_q - 1) * masks.mask_strides.row;
      }
    }
  }

  // One past the last key that a row sees, masks aside.
  __device__ __forceinline__ static int last_seen(const MaskedParams& params, int row) {
    return RIGHT ? min(params.call.seqlen_k, row + params.call.diagonal + 1) : params.call.seqlen_k;
  }

  // Looks at a tile of keys; false when no row of the warp sees any of them. Not unrolled far: the addresses of all
  // elements at once would take more registers than the rest of the kernel.
  __device__ __forceinline__ bool look(int first_key) {
    seen = ALL;
    if (READS || first_key < warp_low || first_key + BLOCK_N > warp_high) {
      seen = 0;
#pragma unroll 2
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e / 2, key = first_key + 8 * n + lane_index() % 4 * 2 + e % 2;
          bool visible = key >= low[half] && key < high[half];
          if constexpr (HIDES) visible = visible && mask[half][key * step];
          if constexpr (ADDS) visible = visible && !(to_float(mask[half][key * step]) == negative_infinity());
          seen |= static_cast<uint32>(visible) << (4 * n + e);
        }
      }
    }
    return __any_sync(FULL_WARP, seen != 0);
  }

  __device__ __forceinline__ bool sees(int n, int e) const { return seen >> (4 * n + e) & 1; }

  // What the mask adds to a score, in base 2; the element is in the L1 cache since look(). Of a key that is not seen it
  // is some number: a branch for each element would take more registers than there are.
  __device__ __forceinline__ float bias(int n, int e, int first_key, int last_key) const {
    return mask_bias(mask[e / 2][min(first_key + 8 * n + lane_index() % 4 * 2 + e % 2, last_key) * step]);
  }
};

}  // namespace microsdpa
