// A consumer warpgroup of hopper/throughput_8bit/kernel.cu whose O is summed by the tensor cores, and now and then
// moved away.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::throughput_8bit {

// Three or four consumers, and two at D = 256, have too few registers for P V of a tile beside O. So the tensor cores
// add to O, of which they keep about 14 bits; what they have summed over PROMOTED_TILES tiles is moved away. It goes to
// shared memory, added up there in FP32; or at D = 256, for which there is no room, to where the output will be, as
// BF16: what that leaves of a sum stays in the accumulators, so that nothing is lost.
//
// The stabilizer of a row is the largest score of its first tile; probabilities of that are 16. Later maxima are not
// looked for as long as no thread's sum of a tile passes 448, where E4M3 ends; then the tile is done again with its
// own. (The largest of the first 16 scores would be too small a stabilizer for a later tile of nearly every warp.)
template <typename T, typename Shared, bool CAUSAL, typename MASKS = NoMasks>
struct PromotingConsumer : Consumer<T, Shared, CAUSAL, 4, MASKS> {
  using Base = Consumer<T, Shared, CAUSAL, 4, MASKS>;
  using Base::Base, Base::BIAS, Base::BLOCK_N, Base::HEAD_DIM, Base::STEPS, Base::correction, Base::factor, Base::o;
  using Base::first_row, Base::key_state, Base::p, Base::params, Base::stabilizer, Base::shared, Base::sum,
      Base::thread, Base::tile, Base::tiles;
  using Base::value_state, Base::warpgroup;
  using typename Base::Sum;
  using Probabilities = uint32[STEPS][4];
  static constexpr float LARGEST_SUM = 448.0f;
  static_assert(BLOCK_N / 4 * 16.0f <= LARGEST_SUM, "tiles of equal scores would all be done twice");

  // Four elements of the thread's O, from the i-th on, in shared memory.
  __device__ __forceinline__ float4& promoted(int i) const { return shared.promoted[warpgroup][i / 4][thread]; }

  // What was summed since the last time is moved.
  __device__ __forceinline__ void promote(bool first) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 4) {
      float4 sums = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
      if (!first) {
        const float4 before = promoted(i);
        sums = make_float4(before.x + sums.x, before.y + sums.y, before.z + sums.z, before.w + sums.w);
      }
      promoted(i) = sums;
    }
    Base::clear(o);
  }

  // O of all tiles.
  __device__ __forceinline__ void add_promoted() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 4) {
      const float4 before = promoted(i);
      o[i] += before.x, o[i + 1] += before.y, o[i + 2] += before.z, o[i + 3] += before.w;
    }
  }

  // Stabilizers have moved.
  __device__ __forceinline__ void correct(bool has_promoted) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
    if (!has_promoted) return;
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM / 2; i += 4) {
      const float4 before = promoted(i);
      promoted(i) = make_float4(before.x * correction[0], before.y * correction[0], before.z * correction[1],
                                before.w * correction[1]);
    }
  }

  // Probabilities relative to the stabilizers as they are, and their sums, which follow LAG exponentials behind.
  __device__ __forceinline__ void exponentiate(const float (&s)[BLOCK_N / 2], Probabilities& p,
                                               float (&added)[2]) const {
    constexpr int WORDS = 4 * STEPS, LAG = 3;  // four probabilities each
    float x[WORDS][4], even[2], odd[2];
#pragma unroll
    for (int word = 0; word < WORDS + LAG; ++word) {
      if (word < WORDS) {
        const int at = 16 * (word / 4) + 8 * (word % 4 / 2) + 2 * (word % 2), half = word % 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[word][j] = ex2_approx(fmaf(s[at + 4 * (j / 2) + j % 2], factor[half], -stabilizer[half]));
        }
      }
      if (word >= LAG) {
        const int behind = word - LAG, half = behind % 2;
        const float (&four)[4] = x[behind];
        even[half] = behind < 2 ? four[0] : even[half] + four[0];  // zeros would be added
        odd[half] = behind < 2 ? four[1] : odd[half] + four[1];
        even[half] += four[2];
        odd[half] += four[3];
        p[behind / 4][behind % 4] = e4m3x4_from_floats(four[0], four[1], four[2], four[3]);
      }
    }
    added[0] = even[0] + odd[0];
    added[1] = even[1] + odd[1];
  }

  // Turns scores of a query tile's first tile of keys into probabilities.
  __device__ __forceinline__ void begin(const float (&s)[BLOCK_N / 2]) {
    Base::update_stabilizer(s);
    exponentiate(s, p, sum);
  }

  // The same for a later tile; no product is running.
  __device__ __forceinline__ void softmax_tile(const float (&s)[BLOCK_N / 2], bool has_promoted) {
    float added[2];
    exponentiate(s, p, added);
    if (!__all_sync(FULL_WARP, added[0] <= LARGEST_SUM && added[1] <= LARGEST_SUM)) {
      Base::update_stabilizer(s);
      exponentiate(s, p, added);
      correct(has_promoted);
      sum[0] *= correction[0];
      sum[1] *= correction[1];
    }
    sum[0] += added[0];
    sum[1] += added[1];
  }

  // Starts O += P V of the tile of V^T that has been waited for.
  __device__ __forceinline__ void multiply_value(const Probabilities& p) {
    constexpr int PANEL = Shared::KEY_PANEL;
    const uint64 value = rows_descriptor<PANEL>(shared.transposed[value_state.stage]);
    wgmma_fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int panel = 32 * step / PANEL, column = 32 * step % PANEL;
      wgmma<typename Base::Element, HEAD_DIM>(o, p[step], advance(value, panel * HEAD_DIM * PANEL + column), true);
    }
    wgmma_commit();
  }

  // Waits for the product.
  __device__ __forceinline__ void end_value() {
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    Base::release(shared.transposed_empty[value_state.stage]);
    value_state.advance();
  }

  __device__ __forceinline__ void wait_key() { mbarrier_wait(shared.key_full[key_state.stage], key_state.phase); }
  __device__ __forceinline__ void wait_value() {
    mbarrier_wait(shared.transposed_full[value_state.stage], value_state.phase);
  }

  // Takes a query tile from its first tile of keys to the last.
  __device__ __forceinline__ void run_query(Sum (&sums)[BLOCK_N / 2], float (&s)[BLOCK_N / 2]) {
    wait_key();
    Base::score(sums);
    wgmma_wait<0>();
    Base::take_scores(sums, s);
    begin(s);
    bool has_promoted = false;
    while (true) {
      const int end = Shared::PROMOTES ? min(tiles, tile + 1 + Shared::PROMOTED_TILES) : tiles;
      while (tile + 1 < end) {
        ++tile;
        wait_key();
        wait_value();
        Base::score(sums);
        multiply_value(p);  // of the tile before
        wgmma_wait<1>();
        Base::take_scores(sums, s);
        end_value();
        softmax_tile(s, has_promoted);
      }
      if (!Shared::PROMOTES || end == tiles) break;
      promote(!has_promoted);
      has_promoted = true;
    }
    wait_value();
    multiply_value(p);
    end_value();
    if (has_promoted) add_promoted();
  }

  // Counts the tiles of keys that the warpgroup's rows see.
  __device__ __forceinline__ void count_tiles() {
    if (first_row >= params.seqlen_q) {
      tiles = 0;
    } else if constexpr (!MASKS::ANY) {
      tiles = key_tiles<CAUSAL, BLOCK_N>(params, first_row, ROWS);
    }
  }

  // Waits for the next query tile; false when there is none.
  __device__ __forceinline__ bool begin_query() {
    if (!Base::begin_query()) return false;
    count_tiles();
    return true;
  }

  // Goes past the query tile's tiles of keys that none of this warpgroup's rows sees.
  __device__ __forceinline__ void skip() {
    if (tiles == 0) Base::end_query();
    for (int i = tiles; i < shared.work[Base::work % WORK_TILES].tiles; ++i) {
      wait_key();
      __syncwarp();
      Base::end_key();
      wait_value();
      __syncwarp();
      Base::release(shared.transposed_empty[value_state.stage]);
      value_state.advance();
    }
  }

  __device__ __forceinline__ void run() {
    Sum sums[BLOCK_N / 2];
    float converted[Shared::INTEGERS ? BLOCK_N / 2 : 1];
    float (&s)[BLOCK_N / 2] = Base::scores_of(sums, converted);
    Base::clear(o);
    Base::clear_sums();
    while (begin_query()) {
      if (tiles > 0) run_query(sums, s);
      skip();
      ++Base::work;
      if (tiles == 0) continue;
      Base::end_sums();
      Base::store();
    }
  }
};

}  // namespace microsdpa::hopper::throughput_8bit
