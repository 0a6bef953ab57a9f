// A known number of rounds of hopper/latency/kernel.cu's warpgroups, with one stabilizer for each row from the first
// tile on: nothing waits for a maximum, and O is never rescaled.
#pragma once

#include "consumer.cuh"
#include "masked_rounds.cuh"

namespace microsdpa::hopper::latency {

// The stabilizer of both warpgroups: the first one's, whose first tile comes first. A row that sees none of its keys
// sees none of this CTA's.
template <typename C>
template <int N>
__device__ __forceinline__ void Consumer<C>::find_stabilizer(const float (&s)[N]) {
  const int row = fragment.row_of_half();
  if (warpgroup == 0) {
    stabilizer[0] = stabilizer[1] = negative_infinity();
    maxima<STABILIZER_KEYS>(s, stabilizer);
    // A large one becomes no number. Nor is then the row's sum, which calls for the second pass.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool large = MASKED ? is_large(stabilizer[half]) : fabsf(stabilizer[half]) >= LARGE_STABILIZER;
      if constexpr (MASKS::ANY) {
        const bool sees = masks.highest[half] != negative_infinity();
        stabilizer[half] = sees ? stabilizer[half] + masks.highest[half] - headroom(half) : negative_infinity();
        large = sees && !(fabsf(stabilizer[half]) < LARGE_STABILIZER);
        if (Rules::SINKS && work.rank == 0) {
          large |= is_large(masks.sink);
          stabilizer[half] = fmaxf(stabilizer[half], masks.sink);
        }
      }
      if (large) stabilizer[half] = __uint_as_float(0x7fffffffu);
    }
    if (fragment.quad_lane() == 0) {
      shared.stabilizer[0][0][row] = stabilizer[0];
      shared.stabilizer[0][1][row] = stabilizer[1];
    }
    named_barrier_arrive(STABILIZER_KNOWN, THREADS);
    // For compute-sanitizer: racecheck takes what follows for races when some threads have waited at fewer barriers
    // than others. It is hidden behind the products in flight.
    // mutation: racecheck alone asks for it
    named_barrier_sync(STABILIZER_SENT, WARPGROUP_THREADS);
  } else {
    named_barrier_sync(STABILIZER_KNOWN, THREADS);
    stabilizer[0] = shared.stabilizer[0][0][row];
    stabilizer[1] = shared.stabilizer[0][1][row];
  }
  subtract_stabilizers();
  if constexpr (MASKS::ANY) sum[0] = sink_part(0), sum[1] = sink_part(1);
}

// The largest score of each row among this CTA's keys becomes its stabilizer.
template <typename C>
__device__ __forceinline__ void Consumer<C>::know_stabilizer() {
  float s[BLOCK_N / 2], own[2] = {negative_infinity(), negative_infinity()};
  if constexpr (MASKS::ANY) {
    if (work.rank == 0) own[0] = own[1] = masks.sink;
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    score(s, round);
    wgmma_wait<0>();
    wgmma_fence_registers(s);
    take_products(s, round);
    mask(s, round);
    maxima(s, own);
  }
  stabilizer[0] = own[0];
  stabilizer[1] = own[1];
  this->larger_stabilizers(stabilizer);
  subtract_stabilizers();
}

template <typename C>
template <bool KNOWN>
__device__ __forceinline__ void Consumer<C>::last_round(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4]) {
  constexpr int ROUND = ROUNDS - 1;
  exponentials<0, 2, KNOWN>(s, p, ROUND);
  accumulate<0, 2>(o, p, ROUND, ROUND > 0);
  exponentials<2, 4, KNOWN>(s, p, ROUND);
  accumulate<2, 4>(o, p, ROUND, true);
}

// The last tile, when another CTA finishes half of the rows: those first, so that they travel while the exponentials
// of the others run. Zeros keep them company, and the others' products have sums of their own.
template <typename C>
template <bool KNOWN>
__device__ __forceinline__ void Consumer<C>::last_round_peer_first(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4]) {
  constexpr int ROUND = ROUNDS - 1;
  uint32 given[STEPS][4];
  clear_other<1>(given);
  half_exponentials<1, 0, 4, KNOWN>(s, given, ROUND);
  accumulate<0, 4>(o, given, ROUND, ROUND > 0);
  clear_other<0>(p);
  if (!KNOWN) cluster_wait();  // the peer's barriers are set up
  half_exponentials<0, 0, 2, KNOWN>(s, p, ROUND);
  accumulate<0, 2, false>(rest, p, ROUND, false);
  this->template send_sum<KNOWN>();
  wgmma_wait<1>();
  wgmma_fence_registers(o);
  Columns<QUADRUPLES> columns;
  this->template give<1>(o, columns);
  this->arrive(PEER_COLUMNS_GIVEN);
  this->template send_columns<KNOWN>(columns);
  half_exponentials<0, 2, 4, KNOWN>(s, p, ROUND);
  accumulate<2, 4>(rest, p, ROUND, true);
}

// ROUNDS rounds with one stabilizer per row, the same for both warpgroups: O is never rescaled, no later maximum is
// waited for, and the warpgroups' parts of O add up. The stabilizer is the largest of the first scores, or KNOWN.
// Right unless a score exceeds the stabilizer by so much that P overflows, or a stabilizer is large, which the sums
// then show.
template <typename C>
template <bool KNOWN>
__device__ __forceinline__ void Consumer<C>::run_unrolled() {
  float s[2][BLOCK_N / 2];
  uint32 p[2][STEPS][4];
  sum[0] = sum[1] = 0.0f;
  if constexpr (MASKS::ANY && KNOWN) sum[0] = sink_part(0), sum[1] = sink_part(1);
  constexpr bool BEGUN = MASK_AHEAD && !KNOWN;
  if constexpr (MASKS::ANY) {
    if constexpr (BEGUN) begin_first(s[0]);
  } else if constexpr (BEGUN) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) mask_of(round).begin(s[round]);
  }
  if constexpr (!KNOWN && Rules::BULK && !Rules::IN_TURN) look_at_masks(s);
  if constexpr (!KNOWN) load_query();
  if constexpr (!KNOWN && Rules::READS_ROWS && !Rules::LATE) look_at_rows();
  if constexpr (BEGUN) {
    // Each of them in a register of its own, or ptxas would wait for the products.
#pragma unroll
    for (int round = 0; round < (MASKS::ANY ? 1 : ROUNDS); ++round) wgmma_fence_registers(s[round]);
  }
  if constexpr (FIRST_IN_HALVES && !KNOWN) {
    score<BEGUN, 2>(s[0], 0);
    if constexpr (ROUNDS > 1) change_keys(1);
    if constexpr (Rules::READS && (!Rules::BULK || Rules::IN_TURN)) look_at_masks(s);
    if constexpr (Rules::BULK && BEGUN) begin_later(s);
    if constexpr (Rules::LATE) look_at_rows_later();
    if constexpr (MASKS::ANY && BEGUN && ROUNDS > 1) wgmma_fence_registers(s[1]);
    read_factors();
    wgmma_wait<1>();
    wgmma_fence_registers(part_of<2>(s[0], 0));
    take_products<0, BLOCK_N / 4>(s[0], 0);
    if constexpr (MASKS::ANY) {
      if constexpr (IS_CAPPED<MASKS>) score_masks().template cap<0, BLOCK_N / 4>(s[0], masks.soft_cap);
      find_masked_stabilizer(s[0]);
    } else {
      find_stabilizer(s[0]);
    }
    if constexpr (MASKS::ANY && BEGUN) {
#pragma unroll
      for (int i = 0; i < STABILIZER_KEYS / 2; ++i) s[0][i] += masks.first[i];
    }
    wgmma_wait<0>();
    wgmma_fence_registers(part_of<2>(s[0], 1));
    take_products<BLOCK_N / 4, BLOCK_N / 2>(s[0], 0);
    if constexpr (IS_CAPPED<MASKS>) score_masks().template cap<BLOCK_N / 4, BLOCK_N / 2>(s[0], masks.soft_cap);
    if constexpr (ADDED_BEHIND) mask_behind(s[0], 0);
  } else {
    score(s[0], 0);
    if constexpr (!KNOWN) read_factors();
    wgmma_wait<0>();
    wgmma_fence_registers(s[0]);
    take_products(s[0], 0);
    mask(s[0], 0);
    if constexpr (!KNOWN) {
      if constexpr (ROUNDS > 1) change_keys(1);
      find_stabilizer(s[0]);
    }
  }
  if constexpr (ROUNDS > 1) score<BEGUN>(s[1], 1);
#pragma unroll
  for (int round = 0; round + 1 < ROUNDS; ++round) {
    float (&now)[BLOCK_N / 2] = s[round % 2];
    float (&next)[BLOCK_N / 2] = s[1 - round % 2];
    exponentials<0, 4, KNOWN>(now, p[round % 2], round);
    accumulate<0, 4>(o, p[round % 2], round, round > 0);
    if (round + 2 < ROUNDS) {
      if constexpr (!KNOWN) change_keys(round + 2);
      score(now, round + 2);
      wgmma_wait<2>();
    } else {
      wgmma_wait<1>();
    }
    wgmma_fence_registers(next);
    take_products(next, round + 1);
    if constexpr (KNOWN || !MASKS::ANY) {
      if constexpr (!BEGUN) mask(next, round + 1);
    } else {
      if constexpr (IS_CAPPED<MASKS>) score_masks().cap(next, masks.soft_cap);
      if constexpr (ADDED_BEHIND) mask_behind(next, round + 1);
    }
  }
  if constexpr (PEER_FIRST) {
    last_round_peer_first<KNOWN>(s[(ROUNDS - 1) % 2], p[(ROUNDS - 1) % 2]);
  } else {
    last_round<KNOWN>(s[(ROUNDS - 1) % 2], p[(ROUNDS - 1) % 2]);
  }
}

}  // namespace microsdpa::hopper::latency
