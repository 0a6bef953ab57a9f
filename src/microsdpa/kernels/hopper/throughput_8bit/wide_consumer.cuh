// What a consumer warpgroup of hopper/throughput_8bit/kernel.cu does with its 64 rows at D = 256.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::throughput_8bit {

// O alone takes 128 registers of a thread. P V is therefore computed in parts of 32 channels, one after the other, each
// added to O while the next one runs; in between there is a part of the exponentials, which stay in the registers of
// the scores until the last product has read P.
template <typename T, typename Shared, bool CAUSAL>
struct WideConsumer : Consumer<T, Shared, CAUSAL> {
  using Base = Consumer<T, Shared, CAUSAL>;
  using Base::Base, Base::shared, Base::warpgroup, Base::o, Base::partial, Base::p;
  using Base::CONSUMERS, Base::BLOCK_N, Base::HEAD_DIM, Base::PART;
  using Base::correction, Base::factor, Base::key_state, Base::stabilizer, Base::sum, Base::value_state;
  using typename Base::Sum;
  static constexpr int PARTS = HEAD_DIM / PART;

  // Turns a part of the scores into exponentials, and adds them to their rows' sums.
  __device__ __forceinline__ void exponentials(float (&s)[BLOCK_N / 2], int part) {
#pragma unroll
    for (int i = part * (BLOCK_N / 2) / PARTS; i < (part + 1) * (BLOCK_N / 2) / PARTS; ++i) {
      const int half = i / 2 % 2;
      s[i] = ex2_approx(fmaf(s[i], factor[half], -stabilizer[half]));
      sum[half] += s[i];
    }
  }

  // The left operand of P V, which nothing may be using.
  __device__ __forceinline__ void round(const float (&s)[BLOCK_N / 2]) {
#pragma unroll
    for (int word = 0; word < BLOCK_N / 8; ++word) {
      const int at = 16 * (word / 4) + 8 * (word % 4 / 2) + 2 * (word % 2);
      p[word / 4][word % 4] = e4m3x4_from_floats(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
  }

  // Waits for a part of P V, adds it to O, and starts the next one.
  __device__ __forceinline__ void add_part(int part, const float (&by)[2]) {
    wgmma_wait<0>();
    wgmma_fence_registers(partial);
#pragma unroll
    for (int i = 0; i < PART / 2; ++i) {
      float& to = o[part * (PART / 2) + i];
      to = fmaf(to, by[i / 2 % 2], partial[i]);
    }
    if (part + 1 < PARTS) {
      Base::multiply_value(PART * (part + 1));
    } else {
      Base::release(shared.transposed_empty[value_state.stage]);
      value_state.advance();
    }
  }

  __device__ __forceinline__ void run() {
    Sum sums[BLOCK_N / 2];
    float converted[Shared::INTEGERS ? BLOCK_N / 2 : 1];
    float (&s)[BLOCK_N / 2] = Base::scores_of(sums, converted);
    if (!Base::begin_query()) return;
    if (warpgroup == CONSUMERS - 1) Base::pingpong_arrive();
    Base::clear(o);
    Base::clear(partial);
    Base::clear_sums();
    mbarrier_wait(shared.key_full[key_state.stage], key_state.phase);
    Base::score(sums);
    wgmma_wait<0>();
    Base::take_scores(sums, s);
    Base::update_stabilizer(s);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) exponentials(s, part);
    round(s);

    bool last;  // the probabilities' tile is the last of its query tile
    while (Base::next_tile(last)) {
      Base::pingpong_wait();
      Base::score(sums);
      Base::wait_value();
      Base::multiply_value();
      Base::pingpong_arrive();
      wgmma_wait<1>();
      Base::take_scores(sums, s);
      const float by[2] = {correction[0], correction[1]};
      if (last) Base::end_sums();
      Base::update_stabilizer(s);
      sum[0] *= correction[0];
      sum[1] *= correction[1];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        add_part(part, by);
        exponentials(s, part);
      }
      round(s);
      if (last) Base::store();
    }
    if (warpgroup == 0) Base::pingpong_wait();  // nobody else takes the last one
    Base::wait_value();
    Base::multiply_value();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) add_part(part, correction);
    Base::end_sums();
    Base::store();
  }
};

}  // namespace microsdpa::hopper::throughput_8bit
