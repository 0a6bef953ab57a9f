// Any number of rounds of hopper/latency/kernel.cu's warpgroups, with the running maximum of Milakov and Gimelshein as
// stabilizer: tiles go through a ring, which each warpgroup refills for itself.
#pragma once

#include "consumer.cuh"
#include "masked_rounds.cuh"

namespace microsdpa::hopper::latency {

// S of `key_round` and P V of `value_round` have ended: their places in the rings take the tiles STAGES rounds ahead.
template <typename C>
__device__ __forceinline__ void Consumer<C>::refill(int key_round, int value_round) {
  if (ROUNDS > 0 || min(key_round, value_round) + STAGES >= work.rounds) return;
  named_barrier_sync(warpgroup == 0 ? TILE_READ_BY_FIRST : TILE_READ_BY_SECOND, WARPGROUP_THREADS);
  if (fragment.warp() == 0 && elect_one()) {
    refill_place(shared.key, key_boxes, true, key_round);
    refill_place(shared.value, value_boxes, false, value_round);
  }
  __syncwarp();
}
template <typename C>
template <typename Ring>
__device__ __forceinline__ void Consumer<C>::refill_place(Ring& ring, const Boxes& boxes, bool is_key, int round) {
  if (round < 0 || round + STAGES >= work.rounds) return;
  const int stage = round % STAGES;
  Mbarrier& full = is_key ? shared.key_full(stage, warpgroup) : shared.value_full(stage, warpgroup);
  T* const tail = is_key ? shared.key_tail(stage, warpgroup) : shared.value_tail(stage, warpgroup);
  load_tile<T, HEAD_DIM>(ring[stage][warpgroup], tail, boxes, full, work.first_key(round + STAGES, warpgroup),
                         work.head_kv, work.batch);
}

// One round, of which S and the maxima are known; gives those of the next one, and starts S of the one after it.
// What is not touched while it is in flight decides the order: P V of the round before, and the next S, end here.
template <typename C>
__device__ __forceinline__ void Consumer<C>::advance_round(float (&s)[BLOCK_N / 2], float (&next)[BLOCK_N / 2],
                                                           uint32 (&p)[STEPS][4], float (&factor)[2], int round) {
  exponentials<0, 2, true>(s, p, round);
  wgmma_fence_registers(p[0]);
  wgmma_fence_registers(p[1]);
  wgmma_wait<0>();
  wgmma_fence_registers(next);
  wgmma_fence_registers(o);
  if (round > 0) rescale(factor);
  mask(next, round + 1);
  refill(round + 1, round - 1);
  accumulate<0, 2>(o, p, round, round > 0);
  float largest[2] = {stabilizer[0], stabilizer[1]};
  maxima(next, largest);
  exponentials<2, 4, true>(s, p, round);
  accumulate<2, 4>(o, p, round, true);
  change_keys(round + 2);
  // Past the last round its S is computed again and not used: a product started by condition would be serialized.
  score(s, min(round + 2, work.rounds - 1));
  update_stabilizer(largest, factor);
  subtract_stabilizers();
}

template <typename C>
__device__ __forceinline__ void Consumer<C>::last_round(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4],
                                                        const float (&factor)[2], int round) {
  exponentials<0, 2, true>(s, p, round);
  if (round > 0) {
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    rescale(factor);
  }
  accumulate<0, 2>(o, p, round, round > 0);
  exponentials<2, 4, true>(s, p, round);
  accumulate<2, 4>(o, p, round, true);
}

// Any number of rounds, with the running maximum of Milakov and Gimelshein as stabilizer.
template <typename C>
__device__ __forceinline__ void Consumer<C>::run_online() {
  float s[2][BLOCK_N / 2];
  uint32 p[2][STEPS][4];
  float factor[2];
  sum[0] = sum[1] = 0.0f;
  stabilizer[0] = stabilizer[1] = negative_infinity();
  if constexpr (MASKS::ANY) {
    if (work.rank == 0 && warpgroup == 0) stabilizer[0] = stabilizer[1] = masks.sink;
  }
  score(s[0], 0);
  change_keys(1);
  score(s[1], min(1, work.rounds - 1));
  wgmma_wait<0>();
  wgmma_fence_registers(s[0]);
  refill(0, -1);
  mask(s[0], 0);
  maxima(s[0], stabilizer);
  if constexpr (MASKS::ANY) sum[0] = sink_part(0), sum[1] = sink_part(1);
  subtract_stabilizers();
  // Two rounds per iteration, so that which registers hold a tile is known when compiling.
  int round = 0;
  while (true) {
    if (round + 1 == work.rounds) {
      last_round(s[0], p[0], factor, round);
      break;
    }
    advance_round(s[0], s[1], p[0], factor, round++);
    if (round + 1 == work.rounds) {
      last_round(s[1], p[1], factor, round);
      break;
    }
    advance_round(s[1], s[0], p[1], factor, round++);
  }
}

}  // namespace microsdpa::hopper::latency
