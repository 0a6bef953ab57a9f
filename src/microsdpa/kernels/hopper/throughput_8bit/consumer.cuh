// What a consumer warpgroup of hopper/throughput_8bit/kernel.cu does with the scores of its 64 rows, and with V.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/element.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/arithmetic.cuh"
#include "scores.cuh"
#include "transpose.cuh"

namespace microsdpa::hopper::throughput_8bit {

// Stabilizer of a row that has seen no key: finite, so that probabilities of masked scores are 0 beside it too.
constexpr float NO_STABILIZER = -3.402823466e38f;

// Probabilities are 2^(score - stabilizer), and the largest score's is 2^LARGEST. As E4M3 they end at 448.
template <typename T, typename Shared, bool CAUSAL, int LARGEST = 8, typename MASKS = NoMasks>
struct Consumer : ScoringConsumer<Shared, CAUSAL, MASKS> {
  using Base = ScoringConsumer<Shared, CAUSAL, MASKS>;
  using Base::Base, Base::BLOCK_N, Base::CONSUMERS, Base::HEAD_DIM, Base::factor, Base::key_state, Base::params;
  using Base::begin_query, Base::pingpong_arrive, Base::next_tile, Base::score, Base::take_scores, Base::pingpong_wait;
  using Base::release, Base::shared, Base::thread, Base::tile_row, Base::warpgroup, Base::work;
  using typename Base::Sum;
  using Element = __nv_fp8_e4m3;
  static constexpr int STEPS = BLOCK_N / 32;                   // products of P V
  static constexpr int PART = HEAD_DIM > 128 ? 32 : HEAD_DIM;  // channels of P V that are computed at a time
  static constexpr float BIAS = LARGEST;

  float o[HEAD_DIM / 2];    // O of the tiles before, in FP32
  float partial[PART / 2];  // P V of one tile: E4M3 products keep about 14 bits of their sums
  uint32 p[STEPS][4];
  float stabilizer[2];  // of the two rows: base 2, scaled
  float sum[2];         // this thread's part of l
  float correction[2];  // what O is to be multiplied by when P V of the last probabilities is added
  float inverse[2];     // of l, for the query tile that is complete but for P V of its last tile of keys
  int ended;            // number of the query tile that `inverse` is of
  PipelineState<Shared::STAGES> value_state;

  // The largest score of each row. Compared as integers, which takes three at a time: floats compare so as soon as one
  // of them is positive. Where none of a row is, the warp compares floats.
  __device__ __forceinline__ void find_largest(const float (&s)[BLOCK_N / 2], float (&largest)[2]) const {
    constexpr int CHAINS = 4;  // of dependent instructions, for each row
    int most[2][CHAINS];
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int x = __float_as_int(s[4 * n + 2 * half]), y = __float_as_int(s[4 * n + 2 * half + 1]);
        int& of_chain = most[half][n % CHAINS];
        of_chain = n < CHAINS ? max(x, y) : max(max(of_chain, x), y);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] =
          quad_max(__int_as_float(max(max(max(most[half][0], most[half][1]), most[half][2]), most[half][3])));
    }
    if (!__any_sync(FULL_WARP, fminf(largest[0], largest[1]) < 0.0f)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float found = negative_infinity();
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
        found = fmaxf(found, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      }
      largest[half] = quad_max(found);
    }
  }

  // The stabilizer of a row whose largest score, not scaled, is `largest`.
  __device__ __forceinline__ float stabilizer_of(float largest, int half) const {
    return fmaf(largest, factor[half], -BIAS);
  }

  // Takes the largest score so far as stabilizer.
  __device__ __forceinline__ void update_stabilizer(const float (&s)[BLOCK_N / 2]) {
    float found[2];
    find_largest(s, found);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(stabilizer[half], stabilizer_of(found[half], half));
      correction[half] = ex2_approx(stabilizer[half] - largest);
      stabilizer[half] = largest;
    }
  }

  // Turns scores into probabilities, the left operand of P V, which nothing may be using. P V of the tile before
  // becomes part of O meanwhile, with the factor `by` on what was there: the unit of exponentials leaves issue slots
  // free. Sums and rounding follow LAG exponentials behind, so that nothing waits for one.
  __device__ __forceinline__ void exponentiate(float (&s)[BLOCK_N / 2], const float (&by)[2]) {
    constexpr int WORDS = 4 * STEPS, LAG = 3;  // four probabilities each
    float even[2] = {sum[0] * correction[0], sum[1] * correction[1]}, odd[2] = {0.0f, 0.0f};
#pragma unroll
    for (int word = 0; word < WORDS + LAG; ++word) {
      if (word < WORDS) {
        const int at = 16 * (word / 4) + 8 * (word % 4 / 2) + 2 * (word % 2), half = word % 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = s[at + 4 * (j / 2) + j % 2];
          x = ex2_approx(fmaf(x, factor[half], -stabilizer[half]));
        }
#pragma unroll
        for (int i = word * (HEAD_DIM / 2) / WORDS; i < (word + 1) * (HEAD_DIM / 2) / WORDS; ++i) {
          o[i] = fmaf(o[i], by[i / 2 % 2], partial[i]);
        }
      }
      if (word >= LAG) {
        const int behind = word - LAG, half = behind % 2;
        const int at = 16 * (behind / 4) + 8 * (behind % 4 / 2) + 2 * (behind % 2);
        even[half] += s[at];
        odd[half] += s[at + 1];
        even[half] += s[at + 4];
        odd[half] += s[at + 5];
        p[behind / 4][behind % 4] = e4m3x4_from_floats(s[at], s[at + 1], s[at + 4], s[at + 5]);
      }
    }
    sum[0] = even[0] + odd[0];
    sum[1] = even[1] + odd[1];
  }

  // Waits for the next tile of V^T.
  __device__ __forceinline__ void wait_value() {
    mbarrier_wait(shared.transposed_full[value_state.stage], value_state.phase);
    wgmma_fence_registers(partial);
  }

  // Starts P V of it, of the channels from `first` on.
  __device__ __forceinline__ void multiply_value(int first = 0) {
    constexpr int PANEL = Shared::KEY_PANEL;
    const uint64 value = rows_descriptor<PANEL>(shared.transposed[value_state.stage] + first * PANEL);
    wgmma_fence_registers(partial);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int panel = 32 * step / PANEL, column = 32 * step % PANEL;
      wgmma<Element, PART>(partial, p[step], advance(value, panel * HEAD_DIM * PANEL + column), step > 0);
    }
    wgmma_commit();
  }

  // Waits for the product.
  __device__ __forceinline__ void end_value() {
    wgmma_wait<0>();
    wgmma_fence_registers(partial);
    release(shared.transposed_empty[value_state.stage]);
    value_state.advance();
  }

  // Adds it to O.
  __device__ __forceinline__ void add_value(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = fmaf(o[i], by[i / 2 % 2], partial[i]);
  }

  // Begins the sums of a query tile.
  __device__ __forceinline__ void clear_sums() {
    stabilizer[0] = stabilizer[1] = NO_STABILIZER;
    sum[0] = sum[1] = 0.0f;
  }

  // Ends those of the query tile before, and writes its LSE.
  __device__ __forceinline__ void end_sums() {
    ended = work - 1;
    const WorkTile& of = shared.work[ended % WORK_TILES];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = quad_sum(sum[half]);
      if constexpr (decltype(Base::masks)::SINKS) {
        inverse[half] = Base::masks.with_sink(of, l, stabilizer[half]);
      } else {
        inverse[half] = normalizer(l);
      }
      const int row = of.first_row + ROWS * warpgroup + tile_row(half);
      if (params.lse != nullptr && row < params.seqlen_q && thread % 4 == 0) {
        const int64 head = static_cast<int64>(of.batch) * params.heads + of.head;
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer[half], l);
      }
    }
    clear_sums();
  }

  // Writes the rows of the query tile that ended last, and empties O.
  __device__ __forceinline__ void store() {
    const ChannelScales& scale = params.value_scale;
    const int batch = shared.work[ended % WORK_TILES].batch, head_kv = shared.head_kv[ended % WORK_TILES];
    const float* scales = scale.data + batch * scale.batch + head_kv * scale.head;
    if (scale.channel == 0) {
      const float all = *scales;
      store([all](int) { return all; });
    } else {
      store([&](int channel) { return scales[channel * scale.channel]; });
    }
    __syncwarp();  // O is emptied here, not ahead of a branch, for which it would be copied for every tile
    clear(o);
  }

  // Writes them, with the scale of each channel. Four neighbouring channels are in one thread.
  template <typename Scale>
  __device__ __forceinline__ void store(Scale scale) {
    const WorkTile& of = shared.work[ended % WORK_TILES];
    const int channel = 4 * (thread % 4);
    T* out[2];
    bool real[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = of.first_row + ROWS * warpgroup + tile_row(half);
      out[half] = const_cast<T*>(params.out_strides.template at<T>(params.out, of.batch, of.head, row)) + channel;
      real[half] = row < params.seqlen_q;
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      float of_channel[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) of_channel[j] = scale(16 * i + channel + j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<T, 4> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          four.data[j] = from_float<T>(channel_of_quad(o, i, half, j) * (inverse[half] * of_channel[j]));
        }
        if (real[half]) *reinterpret_cast<Vector<T, 4>*>(out[half] + 16 * i) = four;
      }
    }
  }

  template <int N>
  __device__ __forceinline__ static void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = 0.0f;
  }

  __device__ __forceinline__ void run() {
    Sum sums[BLOCK_N / 2];
    float converted[Shared::INTEGERS ? BLOCK_N / 2 : 1];
    float (&s)[BLOCK_N / 2] = Base::scores_of(sums, converted);
    if (!begin_query()) return;
    if (warpgroup == CONSUMERS - 1) pingpong_arrive();
    clear(o);
    clear(partial);
    clear_sums();
    mbarrier_wait(shared.key_full[key_state.stage], key_state.phase);
    score(sums);
    wgmma_wait<0>();
    take_scores(sums, s);
    update_stabilizer(s);
    exponentiate(s, correction);

    bool last;  // the probabilities' tile is the last of its query tile
    while (next_tile(last)) {
      // S of a tile, which may be another query's, and P V of the one before. Then S becomes probabilities, and P V
      // part of O.
      pingpong_wait();
      score(sums);
      wait_value();
      multiply_value();
      pingpong_arrive();
      wgmma_wait<1>();
      take_scores(sums, s);
      const float by[2] = {correction[0], correction[1]};
      if (last) end_sums();
      update_stabilizer(s);
      end_value();
      exponentiate(s, by);
      if (last) store();
    }
    if (warpgroup == 0) pingpong_wait();  // nobody else takes the last one
    wait_value();
    multiply_value();
    end_value();
    add_value(correction);
    end_sums();
    store();
  }
};

}  // namespace microsdpa::hopper::throughput_8bit
