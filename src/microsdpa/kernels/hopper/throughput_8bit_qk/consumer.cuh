// What a consumer warpgroup of hopper/throughput_8bit_qk/kernel.cu does with its 64 rows of each query tile.
#pragma once

#include "../../ptx/control.cuh"
#include "../common/consumer.cuh"
#include "../common/eight_bit_masks.cuh"
#include "../common/tile_softmax.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput_8bit_qk {

template <typename Shared, bool CAUSAL, typename MASKS = NoMasks>
struct Consumer : TileSoftmax<typename Shared::T, Shared::BLOCK_N, true>, ConsumerWarpgroup<Shared::CONSUMERS> {
  using T = typename Shared::T;
  static constexpr int HEAD_DIM = Shared::HEAD_DIM, BLOCK_N = Shared::BLOCK_N, CONSUMERS = Shared::CONSUMERS;
  static constexpr int TERMS = Shared::TERMS;
  static constexpr int SECOND_STEPS = 256;  // a residual term counts this much less
  using Base = TileSoftmax<T, BLOCK_N, true>;
  using Place = ConsumerWarpgroup<CONSUMERS>;
  using Base::rows, Base::scale;
  using Place::pingpong_arrive, Place::pingpong_wait, Place::release, Place::thread, Place::tile_row, Place::warpgroup;
  using typename Base::Probabilities, typename Base::Scores;
  using Sums = int32[TERMS][BLOCK_N / 2];

  Shared& shared;
  const EightBitParams& params;
  RowMasks<MASKS, CAUSAL, BLOCK_N> masks;

  PipelineState<Shared::QUERY_STAGES> query_state;
  PipelineState<Shared::STAGES> key_state, value_state;
  float o[HEAD_DIM / 2];

  // The query tile that scores are computed of.
  int works = 0;  // its number
  int tile = 0;   // of keys
  int tiles;
  int first_row;  // of the warpgroup

  __device__ __forceinline__ Consumer(Shared& shared, const typename EightBitParamsOf<MASKS>::Type& given,
                                      int warpgroup)
      : Place(warpgroup), shared(shared), params(EightBitParamsOf<MASKS>::call(given)), masks(given) {}

  // Waits for the next query tile; false when there is none.
  __device__ __forceinline__ bool begin_query() {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    const WorkTile& work = shared.work[works % WORK_TILES];
#pragma unroll
    for (int half = 0; half < 2 && works > 0; ++half) rows.stabilizer[half] *= scale[half];  // for the LSE
    if (work.tiles == 0) return false;
    tile = 0, tiles = work.tiles;
    first_row = work.first_row + ROWS * warpgroup;
    const float all = fmaxf(fabsf(params.scale_log2), 1e-30f);  // 0 must not meet a masked score of -inf
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + tile_row(half), params.seqlen_q - 1);
      scale[half] = all * *params.query_scale.at(work.batch, work.head, row) / (TERMS == 1 ? 1 : SECOND_STEPS);
    }
    if constexpr (MASKS::ANY) masks.begin(work, first_row + tile_row(0), scale);
    return true;
  }

  __device__ __forceinline__ void wait_key() { mbarrier_wait(shared.key_full[key_state.stage], key_state.phase); }
  __device__ __forceinline__ void wait_value() {
    mbarrier_wait(shared.value_full[value_state.stage], value_state.phase);
  }
  __device__ __forceinline__ void end_value() {
    release(shared.value_empty[value_state.stage]);
    value_state.advance();
  }

  // Starts the products with the tile of keys.
  __device__ __forceinline__ void score(Sums& sums) {
    const uint64 key = rows_descriptor<HEAD_DIM>(shared.key[key_state.stage]);
    const uint64 query = rows_descriptor<HEAD_DIM>(shared.query[query_state.stage][warpgroup][0]);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 32; ++step) {
        wgmma<signed char, BLOCK_N>(sums[term], advance(query, term * ROWS * HEAD_DIM + 32 * step),
                                    advance(key, 32 * step), step > 0);
      }
    }
    wgmma_commit();
  }

  // Scores of complete sums, -inf where a row does not see a key.
  __device__ __forceinline__ void take_scores(Sums& sums, Scores& s) {
    using OfTwoKeys = Vector<float, 2>;
    const float* scales = shared.key_scale[key_state.stage];
#pragma unroll
    for (int term = 0; term < TERMS; ++term) wgmma_fence_registers(sums[term]);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      const OfTwoKeys scale = *reinterpret_cast<const OfTwoKeys*>(scales + 8 * n + 2 * (thread % 4));
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; ++i) {
        const int32 sum = TERMS == 1 ? sums[0][i] : sums[0][i] * SECOND_STEPS + sums[TERMS - 1][i];  // below 2^30
        s[i] = static_cast<float>(sum) * scale.data[i % 2];
      }
    }
    // Every lane arrives: each has read scales of keys, and the query tile's description, for itself.
    mbarrier_arrive(shared.key_empty[key_state.stage]);
    key_state.advance();
    if (tile + 1 == tiles) {
      mbarrier_arrive(shared.query_empty[query_state.stage]);
      query_state.advance();
    }
    if constexpr (MASKS::ANY) return masks.apply(s, tile);
    const int keys = params.seqlen_k - BLOCK_N * tile;
    const int first_visible = CAUSAL ? first_row + params.diagonal - BLOCK_N * tile + 1 : BLOCK_N;
    if (min(keys, first_visible) >= BLOCK_N) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Base::hide(s, half, CAUSAL ? min(keys, first_visible + tile_row(half)) : keys);
    }
  }

  // Starts O = P V, or adds to O.
  __device__ __forceinline__ void accumulate(const Probabilities& p, bool add) {
    accumulate_values<T, HEAD_DIM>(o, p, shared.value[value_state.stage], add);
  }

  // Writes O and LSE of a finished query tile. A quad exchanges its words, so that a lane has eight neighbours.
  __device__ __forceinline__ void finish(const WorkTile& of, const Rows& done) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = quad_sum(done.sum[half]), stabilizer = done.stabilizer[half], inverse;
      if constexpr (decltype(masks)::SINKS) {
        inverse = masks.with_sink(of, sum, stabilizer);
      } else {
        inverse = normalizer(sum);
      }
      const int row = of.first_row + ROWS * warpgroup + tile_row(half);
      const bool real = row < params.seqlen_q;
      if (params.lse != nullptr && real && thread % 4 == 0) {
        const int64 head = static_cast<int64>(of.batch) * params.heads + of.head;
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer, sum);
      }
      T* out = const_cast<T*>(params.out_strides.at<T>(params.out, of.batch, of.head, row)) + 8 * (thread % 4);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; ++i) {
        uint32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 16 * i + 4 * j + 2 * half;
          word[j] = pack<T>(o[at] * inverse, o[at + 1] * inverse);
        }
        const uint4 eight = transpose_quad(word[0], word[1], word[2], word[3]);
        if (real) *reinterpret_cast<uint4*>(out + 32 * i) = eight;
      }
    }
  }

  // From P of one tile to P of the next: O += P V, S, exponentials. False when there is no next one.
  __device__ __forceinline__ bool step(const Probabilities& p, Probabilities& next_p) {
    const bool first = tile == 0, last = tile + 1 == tiles;
    ++tile;
    if (last) {
      ++works;
      if (!begin_query()) return false;
    }
    wait_key();
    wait_value();
    pingpong_wait();
    Sums sums;
    Scores s;
    score(sums);
    accumulate(p, !first);
    pingpong_arrive();
    wgmma_wait<1>();
    take_scores(sums, s);
    const Rows done = rows;
    float correction[2];
    const bool moved = Base::softmax_tile(s, next_p, correction, tile == 0);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    end_value();
    if (last) {
      finish(shared.work[(works - 1) % WORK_TILES], done);
    } else if (moved) {
      rescale(o, correction);
    }
    return true;
  }

  // P of the very first tile.
  __device__ __forceinline__ bool begin(Probabilities& p) {
    if (!begin_query()) return false;
    if (warpgroup == CONSUMERS - 1) pingpong_arrive();
    wait_key();
    Sums sums;
    Scores s;
    score(sums);
    wgmma_wait<0>();
    take_scores(sums, s);
    float correction[2];
    Base::softmax_tile(s, p, correction, true);
    return true;
  }

  // P V of the very last tile; `tiles` is still its query tile's.
  __device__ __forceinline__ void end(const Probabilities& p) {
    wait_value();
    accumulate(p, tiles > 1);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    finish(shared.work[(works - 1) % WORK_TILES], rows);
    if (warpgroup == 0) pingpong_wait();  // nobody else takes the last one
  }

  __device__ __forceinline__ void run() {
    Probabilities p[2];
    if (!begin(p[0])) return;
    while (true) {  // which registers hold P is known when compiling
      if (!step(p[0], p[1])) return end(p[0]);
      if (!step(p[1], p[0])) return end(p[1]);
    }
  }
};

}  // namespace microsdpa::hopper::throughput_8bit_qk
