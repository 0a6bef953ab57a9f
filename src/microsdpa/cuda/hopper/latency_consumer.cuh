// What a warpgroup of hopper/fwd_latency.cu does with its keys: S, probabilities, P V, and the rows' state.
#pragma once

#include "../core/head.cuh"
#include "../core/mma_tile.cuh"
#include "../core/online_softmax.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warp_role.cuh"
#include "../ptx/wgmma.cuh"
#include "latency_merge.cuh"
#include "latency_shared.cuh"

namespace microsdpa {

template <typename T, int HEAD_DIM>
constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * static_cast<int>(sizeof(T));

// Copies 64 rows of one head. Rows past the tensor become zeros.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_tile(T* shared, const TensorMap& map, Mbarrier& loaded, int row, int head,
                                          int batch) {
  mbarrier_arrive_expect(loaded, TILE_BYTES<T, HEAD_DIM>);
#pragma unroll
  for (int panel = 0; panel < HEAD_DIM / PANEL; ++panel) {
    tma_load(shared + panel * BLOCK_N * PANEL, map, loaded, panel * PANEL, row, head, batch);
  }
}

// A warpgroup's way through its keys.
template <typename T, int HEAD_DIM, int CLUSTER, int STAGES, int ROUNDS, bool CAUSAL, bool MASKED>
struct Consumer {
  using Shared = SharedStorage<T, HEAD_DIM, STAGES>;
  static constexpr int STEPS = BLOCK_N / 16;           // of P V, 16 keys each
  static constexpr int QUARTER = BLOCK_N / 2 / STEPS;  // a thread's scores of 16 keys

  Shared& shared;
  const AttentionParams& params;
  const TensorMap& key_map;
  const TensorMap& value_map;
  const Work& work;
  const int warpgroup;
  const Fragment<CLUSTER> fragment;
  const float scale;  // > 0, base 2

  uint32 query[HEAD_DIM / 16][4];
  float o[HEAD_DIM / 2];
  float reference[2];  // base 2; a score that the row has seen: the largest so far
  float sum[2];        // this thread's part of l

  // Q's fragments. A negative scale is a positive one of -Q.
  __device__ __forceinline__ void load_query() {
    const int lane = fragment.lane();
    const int row = fragment.tile_row(lane / 8 % 2, lane % 8);
    mbarrier_wait(shared.query_loaded, 0);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
      ldmatrix(query[step], shared.query + step / 4 * BLOCK_M * PANEL + row * PANEL + chunk * 8);
    }
    if (params.scale_log2 < 0.0f) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) query[step][i] ^= 0x80008000u;
      }
    }
  }

  // Starts S of a round.
  __device__ __forceinline__ void score(float (&s)[BLOCK_N / 2], int round) {
    const int stage = round % STAGES;
    const uint64 key = matrix_descriptor(shared.key[warpgroup][stage], 16, 8 * PANEL * sizeof(T), Swizzle::BYTES_128);
    mbarrier_wait(shared.key_loaded[warpgroup][stage], round / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int offset = step / 4 * BLOCK_N * PANEL + step % 4 * 16;
      wgmma<T, BLOCK_N>(s, query[step], advance(key, offset * sizeof(T)), step > 0);
    }
    wgmma_commit();
  }

  // Adds P V of 16-key steps FIRST to LAST - 1.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void accumulate(const uint32 (&p)[STEPS][4], int round) {
    const int stage = round % STAGES;
    const uint64 value = matrix_descriptor(shared.value[warpgroup][stage], BLOCK_N * PANEL * sizeof(T),
                                           8 * PANEL * sizeof(T), Swizzle::BYTES_128);
    mbarrier_wait(shared.value_loaded[warpgroup][stage], round / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
      wgmma<T, HEAD_DIM, Major::MN>(o, p[step], advance(value, 16 * PANEL * step * sizeof(T)), round > 0 || step > 0);
    }
    wgmma_commit();
  }

  // Keys that a row does not see get -inf.
  __device__ __forceinline__ void mask(float (&s)[BLOCK_N / 2], int round) const {
    if constexpr (MASKED) {
      const int first_key = work.first_key<CLUSTER>(round, warpgroup);
      const int keys = params.seqlen_k - first_key;
      const int first_visible = CAUSAL ? work.first_row + params.diagonal - first_key + 1 : BLOCK_N;
      if (min(keys, first_visible) >= BLOCK_N) return;
      const int column = 2 * fragment.quad_lane();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int visible = CAUSAL ? min(keys, first_visible + fragment.tile_row(half)) : keys;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + column + e >= visible) s[4 * n + 2 * half + e] = negative_infinity();
          }
        }
      }
    }
  }

  // The largest scores of the thread's rows, scaled, or what they were before.
  __device__ __forceinline__ void maxima(const float (&s)[BLOCK_N / 2], float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = s[2 * half], odd = s[2 * half + 1];
#pragma unroll
      for (int n = 1; n < BLOCK_N / 8; ++n) {
        even = fmaxf(even, s[4 * n + 2 * half]);
        odd = fmaxf(odd, s[4 * n + 2 * half + 1]);
      }
      largest[half] = fmaxf(largest[half], quad_max(fmaxf(even, odd)) * scale);
    }
  }

  // P of 16-key steps FIRST to LAST - 1, as A's fragments.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void exponentials(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4]) {
    const float subtract[2] = {MASKED ? finite(reference[0]) : reference[0],
                               MASKED ? finite(reference[1]) : reference[1]};
#pragma unroll
    for (int i = QUARTER * FIRST; i < QUARTER * LAST; i += 2) {
      const int half = i / 2 % 2;
      s[i] = ex2_approx(fmaf(s[i], scale, -subtract[half]));
      s[i + 1] = ex2_approx(fmaf(s[i + 1], scale, -subtract[half]));
      sum[half] += s[i] + s[i + 1];
      p[i / QUARTER][i / 2 % 4] = pack<T>(s[i], s[i + 1]);
    }
  }

  // Moves to new references; O follows when the products that add to it have ended.
  __device__ __forceinline__ void move_reference(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = ex2_approx(reference[half] - (MASKED ? finite(largest[half]) : largest[half]));
      sum[half] *= factor[half];
      reference[half] = largest[half];
    }
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  // S of `key_round` and P V of `value_round` have ended: their places in the rings take the tiles STAGES rounds ahead.
  __device__ __forceinline__ void refill(int key_round, int value_round) {
    if (ROUNDS > 0 || min(key_round, value_round) + STAGES >= work.rounds) return;
    named_barrier_sync(warpgroup == 0 ? TILE_READ_BY_FIRST : TILE_READ_BY_SECOND, WARPGROUP_THREADS);
    if (fragment.warp() == 0 && elect_one()) {
      refill_place(shared.key[warpgroup], key_map, shared.key_loaded[warpgroup], key_round);
      refill_place(shared.value[warpgroup], value_map, shared.value_loaded[warpgroup], value_round);
    }
    __syncwarp();
  }
  template <typename Ring, typename Barriers>
  __device__ __forceinline__ void refill_place(Ring& ring, const TensorMap& map, Barriers& loaded, int round) {
    if (round < 0 || round + STAGES >= work.rounds) return;
    const int stage = round % STAGES;
    load_tile<T, HEAD_DIM>(ring[stage], map, loaded[stage], work.first_key<CLUSTER>(round + STAGES, warpgroup),
                           work.head_kv, work.batch);
  }

  // One round, of which S and the maxima are known; gives those of the next one, and starts S of the one after it.
  // What is not touched while it is in flight decides the order: P V of the round before, and the next S, end here.
  __device__ __forceinline__ void advance_round(float (&s)[BLOCK_N / 2], float (&next)[BLOCK_N / 2],
                                                uint32 (&p)[STEPS][4], float (&factor)[2], int round) {
    exponentials<0, 2>(s, p);
    wgmma_fence_registers(p[0]);
    wgmma_fence_registers(p[1]);
    wgmma_wait<0>();
    wgmma_fence_registers(next);
    wgmma_fence_registers(o);
    if (round > 0) rescale(factor);
    refill(round + 1, round - 1);
    accumulate<0, 2>(p, round);
    mask(next, round + 1);
    float largest[2] = {reference[0], reference[1]};
    maxima(next, largest);
    exponentials<2, 4>(s, p);
    accumulate<2, 4>(p, round);
    // Past the last round its S is computed again and not used: a product started by condition would be serialised.
    score(s, min(round + 2, work.rounds - 1));
    move_reference(largest, factor);
  }

  __device__ __forceinline__ void last_round(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4], const float (&factor)[2],
                                             int round) {
    exponentials<0, 2>(s, p);
    if (round > 0) {
      wgmma_wait<0>();
      wgmma_fence_registers(o);
      rescale(factor);
    }
    accumulate<0, 2>(p, round);
    exponentials<2, 4>(s, p);
    accumulate<2, 4>(p, round);
  }

  // Any number of rounds, with the running maximum of Milakov and Gimelshein as reference.
  __device__ __forceinline__ void run_online() {
    float s[2][BLOCK_N / 2];
    uint32 p[2][STEPS][4];
    float factor[2];
    sum[0] = sum[1] = 0.0f;
    reference[0] = reference[1] = negative_infinity();
    score(s[0], 0);
    score(s[1], min(1, work.rounds - 1));
    wgmma_wait<0>();
    wgmma_fence_registers(s[0]);
    refill(0, -1);
    mask(s[0], 0);
    maxima(s[0], reference);
    // Two rounds a turn, so that which registers hold a tile is known when compiling.
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

  // ROUNDS rounds with the first one's maximum as reference: O is never rescaled, and no later maximum is waited for.
  // Right unless a score exceeds the reference by so much that P overflows, which the sums then show.
  __device__ __forceinline__ void run_straight() {
    float s[2][BLOCK_N / 2];
    uint32 p[2][STEPS][4];
    sum[0] = sum[1] = 0.0f;
    reference[0] = reference[1] = negative_infinity();
    score(s[0], 0);
    if constexpr (ROUNDS > 1) score(s[1], 1);
    wgmma_wait<(ROUNDS > 1)>();
    wgmma_fence_registers(s[0]);
    mask(s[0], 0);
    maxima(s[0], reference);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      exponentials<0, 2>(s[round % 2], p[round % 2]);
      if (round + 1 == ROUNDS) accumulate<0, 2>(p[round % 2], round);
      exponentials<2, 4>(s[round % 2], p[round % 2]);
      if (round + 1 == ROUNDS) {
        accumulate<2, 4>(p[round % 2], round);
      } else {
        accumulate<0, 4>(p[round % 2], round);
        if (round + 2 < ROUNDS) {
          score(s[round % 2], round + 2);
          wgmma_wait<2>();
        } else {
          wgmma_wait<1>();
        }
        wgmma_fence_registers(s[1 - round % 2]);
        mask(s[1 - round % 2], round + 1);
      }
    }
  }

  // Shows the other warpgroup this one's part of the rows and of O; all is there after a barrier.
  __device__ __forceinline__ void publish() {
    sum[0] = quad_sum(sum[0]);
    sum[1] = quad_sum(sum[1]);
    const int row = fragment.row_of_half();
    if (fragment.quad_lane() == 0) {
      shared.row_part[warpgroup][0][row] = {reference[0], sum[0]};
      shared.row_part[warpgroup][1][row] = {reference[1], sum[1]};
    }
    if constexpr (ROUNDS > 1) {
      const bool overflow = __any_sync(FULL_WARP, !(fmaxf(sum[0], sum[1]) < LARGEST_SUM<T>));
      if (fragment.lane() == 0) shared.overflow[warpgroup].data[fragment.warp()] = overflow;
    }
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    if (warpgroup == 0) {
      give_columns<1, HEAD_DIM>(shared, fragment.thread, o);
    } else {
      give_columns<0, HEAD_DIM>(shared, fragment.thread, o);
    }
  }

  __device__ __forceinline__ bool overflowed() const {
    if (ROUNDS < 2) return false;
    int any = 0;
#pragma unroll
    for (int i = 0; i < WARPGROUPS; ++i) {
      const Vector<int32, 4> warps = shared.overflow[i];
      any |= warps.data[0] | warps.data[1] | warps.data[2] | warps.data[3];
    }
    return any != 0;
  }

  // O and the rows' state of this warpgroup's keys, and what the other one has published of its own.
  __device__ __forceinline__ void run() {
    load_query();
    if constexpr (ROUNDS == 0) {
      run_online();
    } else {
      run_straight();
    }
    publish();
    __syncthreads();
  }

  // Again, in any range of scores: the right answer, at about twice the time.
  __device__ __forceinline__ void run_again() {
    __syncthreads();
    run_online();
    publish();
    __syncthreads();
  }

  // The state of this thread's rows over the keys of both warpgroups.
  __device__ __forceinline__ MergedRow merged_row(int half) const {
    return {{reference[half], sum[half]}, shared.row_part[1 - warpgroup][half][fragment.row_of_half()]};
  }

  // Merges what the warpgroups and the CTAs have published, and writes it.
  __device__ __forceinline__ void merge() const {
    const MergedRow row[2] = {merged_row(0), merged_row(1)};
    if constexpr (CLUSTER == 2) {  // ahead of O, which is yet to change warpgroups
      if (warpgroup == 0 && fragment.quad_lane() == 0) {
        store_async(peer_address(&shared.peer_part[fragment.row_of_half()], 1 - work.rank), row[1].reference,
                    row[1].sum, peer_address(&shared.peer_part_arrived, 1 - work.rank));
      }
      __syncwarp();
    }
    // Two copies, so that no register is chosen at run time.
    if (warpgroup == 0) {
      finish<T, 0, CLUSTER, HEAD_DIM>(shared, fragment, o, row, params, work);
    } else {
      finish<T, 1, CLUSTER, HEAD_DIM>(shared, fragment, o, row, params, work);
    }
  }
};

}  // namespace microsdpa
