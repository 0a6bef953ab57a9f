// What masks ask for in hopper/latency/kernel.cu ahead of and beside the first products: reading them, what S begins
// with, which keys rows see, and stabilizers that fit.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Makes scores of a tile's products.
template <typename C>
__device__ __forceinline__ void Consumer<C>::mask(float (&s)[BLOCK_N / 2], int round) {
  if constexpr (MASKS::ANY) {
    const Rules rules = score_masks();
    if (ROUNDS > 0) fetch_mask(round, masks.view[0]);
    rules.settle(masks.view[0]);
    rules.score(s, masks.view[0], masks.rows, masks.slope, work.first_key(round, warpgroup), masks.soft_cap);
    // In a ring the next tile's mask is read a tile ahead.
    if (ROUNDS == 0) rules.fetch(masks.view[0], masks.rows, work.first_key(round + 1, warpgroup));
  } else if constexpr (MASKED) {
    mask_of(round).apply(s);
  }
}

// The same of products whose soft cap is applied, where the mask has been read and its numbers are added to them.
template <typename C>
__device__ __forceinline__ void Consumer<C>::mask_behind(float (&s)[BLOCK_N / 2], int round) {
  typename Rules::View& view = masks.view[round];
  if constexpr (Rules::BULK) fetch_mask(round, view);
  score_masks().finish(s, view, masks.rows, masks.slope, work.first_key(round, warpgroup));
}

// Starts to read the mask for a tile.
template <typename C>
__device__ __forceinline__ void Consumer<C>::fetch_mask(int round, typename Rules::View& view) const {
  if constexpr (Rules::BULK) {
    score_masks().take(view, round, warpgroup);
  } else {
    score_masks().fetch(view, masks.rows, work.first_key(round, warpgroup));
  }
}

// Works out all that masks do not have to be read for, and starts to read the others: of all tiles, or of a ring's
// first one.
template <typename C>
__device__ __forceinline__ void Consumer<C>::read_masks() {
  const Rules rules = score_masks();
  masks.rows = rules.find_rows();
  masks.soft_cap = rules.find_soft_cap();
  if constexpr (Rules::READS && !Rules::BULK) {
    masks.rows.hold();
  } else if constexpr (!Rules::READS_ROWS && !Rules::BULK) {
    look_at_rows();
  }
  if constexpr (Rules::WAITS) grid_dependency_wait();
  rules.read_ranges(masks.rows);
  masks.slope = rules.slope();
  masks.sink = rules.sink();
  if constexpr (!Rules::BULK) {
#pragma unroll
    for (int round = 0; round < (ROUNDS == 0 ? 1 : ROUNDS); ++round) fetch_mask(round, masks.view[round]);
  }
}
// Of rows without a mask tensor: which keys they see, and not less than what is added to a score of any tile of the
// CTA.
template <typename C>
__device__ __forceinline__ void Consumer<C>::look_at_rows() {
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) see_keys(round);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    masks.highest[half] = negative_infinity();
#pragma unroll
    for (int tile = 0; tile < WARPGROUPS * ROUNDS; ++tile) {
      const int first_key = work.first_key(tile / WARPGROUPS, tile % WARPGROUPS);
      const float highest = score_masks().highest_of_keys(masks.rows, half, masks.slope, first_key);
      masks.highest[half] = fmaxf(masks.highest[half], highest);
    }
  }
}
// Finds the keys of a tile that rows see, bits of the thread's own first.
template <typename C>
__device__ __forceinline__ void Consumer<C>::see_keys(int round) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    KeyBits bits = score_masks().seen(masks.view[round], masks.rows, half, work.first_key(round, warpgroup));
    if (round == 0) masks.sees_first[half] = bits.word[0] & (1 << STABILIZER_KEYS) - 1;
    bits.word[0] >>= 2 * fragment.quad_lane();
    bits.word[1] >>= 2 * fragment.quad_lane();
    masks.seen[round][half] = bits;
  }
}

// What S of the first tile begins with where masks are numbers: these, but of the first 16 keys nothing, in which the
// stabilizer is found.
template <typename C>
__device__ __forceinline__ void Consumer<C>::begin_first(float (&s)[BLOCK_N / 2]) {
  if constexpr (Rules::BULK) {
    mbarrier_wait(shared.mask_full[0], 0);
    fetch_mask(0, masks.view[0]);
  } else {
    score_masks().settle(masks.view[0]);
  }
  score_masks().begin(s, masks.view[0], masks.slope, work.first_key(0, warpgroup));
#pragma unroll
  for (int i = 0; i < STABILIZER_KEYS / 2; ++i) masks.first[i] = s[i], s[i] = 0.0f;
}

// Beside the products of the first tile: what S of the later tiles begins with, which keys rows see, and the largest
// number that masks add to a score of each row. This one and the largest product of the first keys make the stabilizer:
// it is near the row's largest score whatever keys are hidden, and -inf when all of the CTA's are.
template <typename C>
__device__ __forceinline__ void Consumer<C>::look_at_masks(float (&s)[2][BLOCK_N / 2]) {
  const Rules rules = score_masks();
  // Long over. What follows depends on shuffles behind it: ptxas would put it amid the products and delay these.
  if constexpr (!Rules::BULK) {
    // mutation: the products in flight have waited for the same
    mbarrier_wait(shared.query_full(), 0);
  } else if constexpr (!MASK_AHEAD) {
    mbarrier_wait(shared.mask_full[0], 0);
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    if constexpr (Rules::IN_TURN) {
      if (round > 0) mbarrier_wait(shared.mask_full[round], 0);
    }
    if (Rules::BULK && (Rules::IN_TURN ? !MASK_AHEAD && round == 0 : !MASK_AHEAD || round > 0)) {
      fetch_mask(round, masks.view[round]);
    }
    if (!MASK_AHEAD || round > 0) rules.settle(masks.view[round]);
    if (MASK_AHEAD && round > 0 && !Rules::BULK) {
      rules.begin(s[round], masks.view[round], masks.slope, work.first_key(round, warpgroup));
    }
    see_keys(round);
  }
  float of_samples[2] = {negative_infinity(), negative_infinity()};
  if constexpr (Rules::IN_TURN) look_at_samples(of_samples);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    masks.highest[half] = of_samples[half];
#pragma unroll
    for (int round = 0; round < (Rules::IN_TURN ? 1 : ROUNDS); ++round) {
      const float highest =
          rules.highest(masks.view[round], masks.rows, half, masks.slope, work.first_key(round, warpgroup));
      masks.highest[half] = fmaxf(masks.highest[half], highest);
    }
    if constexpr (Rules::ADDS) {
      masks.highest[half] = quad_max(masks.highest[half]);
      bool shown = false;
#pragma unroll
      for (int n = 0; n < STABILIZER_KEYS / 8; ++n) shown |= shows_first(half, n, 0) | shows_first(half, n, 1);
      const uint32 lanes = __ballot_sync(FULL_WARP, shown) >> fragment.lane() / 4 * 4;
      masks.sees_first[half] = masks.sees_first[half] && lanes % 16 != 0;
    }
  }
  wgmma_fence_registers(masks.highest);
  // The first warpgroup, which finds the stabilizer, is told the second one's.
  const int row = fragment.row_of_half();
  if (warpgroup == 0) {
    named_barrier_sync(MASKS_READ, THREADS);
#pragma unroll
    for (int half = 0; half < 2; ++half) masks.highest[half] = fmaxf(masks.highest[half], shared.sum[1][half][row]);
  } else {
    if (fragment.quad_lane() == 0) {
      shared.sum[1][0][row] = masks.highest[0];
      shared.sum[1][1][row] = masks.highest[1];
    }
    named_barrier_arrive(MASKS_READ, THREADS);
    // mutation: racecheck alone asks for it
    named_barrier_sync(MASKS_SENT, WARPGROUP_THREADS);  // for racecheck, as below
  }
}

// Looks at the later tiles' numbers where they take long: at half of them, unless these hide their keys from a row.
// What the others have more than these, a row's sum leaves room for, or shows.
template <typename C>
__device__ __forceinline__ void Consumer<C>::look_at_samples(float (&found)[2]) {
  static_assert(MASK_AHEAD || ADDED_BEHIND, "the first tile's numbers are known");
  const Rules rules = score_masks();
#pragma unroll
  for (int round = 1; round < ROUNDS; ++round) {
    float largest[2];
    rules.sample(largest, round, warpgroup);
    if (__any_sync(FULL_WARP, fminf(largest[0], largest[1]) < Rules::HIDING)) {
      fetch_mask(round, masks.view[round]);
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[half] = rules.largest_element(masks.view[round].words[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first_key = work.first_key(round, warpgroup);
      const float highest = rules.highest_of_keys(masks.rows, half, masks.slope, first_key);
      found[half] = fmaxf(found[half], highest + Rules::scaled(largest[half]));
    }
  }
}

// What S of the later tiles begins with, where bulk copies have brought the numbers. Their look is over; this comes
// beside the products of the first tile.
template <typename C>
__device__ __forceinline__ void Consumer<C>::begin_later(float (&s)[2][BLOCK_N / 2]) {
  // mutation: the products in flight have waited for the same
  mbarrier_wait(shared.query_full(), 0);
#pragma unroll
  for (int round = 1; round < ROUNDS; ++round) {
    fetch_mask(round, masks.view[round]);
    score_masks().begin(s[round], masks.view[round], masks.slope, work.first_key(round, warpgroup));
  }
}

// Beside the products of the first tile: what look_at_masks finds, of rows without a mask tensor.
template <typename C>
__device__ __forceinline__ void Consumer<C>::look_at_rows_later() {
  // mutation: the products in flight have waited for the same
  mbarrier_wait(shared.query_full(), 0);
  masks.slope = __shfl_sync(FULL_WARP, masks.slope, 0);
  look_at_rows();
}

// Whether a mask of numbers does not hide key 8 n + e of the thread's own from a row, one of those that the stabilizer
// is found in.
template <typename C>
__device__ __forceinline__ bool Consumer<C>::shows_first(int half, int n, int e) const {
  if constexpr (ADDED_BEHIND) return to_float(Rules::element(masks.view[0].words[half], n, e)) != negative_infinity();
  return masks.first[4 * n + 2 * half + e] != negative_infinity();
}

// Finds the stabilizer in the scores of the first 16 keys. Those that are hidden do not count, unless all are.
template <typename C>
__device__ __forceinline__ void Consumer<C>::find_masked_stabilizer(const float (&s)[BLOCK_N / 2]) {
  float counted[STABILIZER_KEYS / 2];
#pragma unroll
  for (int i = 0; i < STABILIZER_KEYS / 2; ++i) {
    const int half = i / 2 % 2;
    bool shown = sees(0, half, i / 4, i % 2);
    if constexpr (Rules::ADDS) shown = shown && shows_first(half, i / 4, i % 2);
    counted[i] = shown || !masks.sees_first[half] ? s[i] : negative_infinity();
  }
  find_stabilizer(counted);
}

}  // namespace microsdpa::hopper::latency
