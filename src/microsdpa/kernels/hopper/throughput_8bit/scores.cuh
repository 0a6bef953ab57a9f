// What a consumer warpgroup of hopper/throughput_8bit/kernel.cu does with Q and K: from the rings to scores of its 64
// rows.
#pragma once

#include "../../common/online_softmax.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "../common/consumer.cuh"
#include "../common/eight_bit_masks.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput_8bit {

template <typename Shared, bool CAUSAL, typename MASKS = NoMasks>
struct ScoringConsumer : ConsumerWarpgroup<Shared::CONSUMERS> {
  using Place = ConsumerWarpgroup<Shared::CONSUMERS>;
  using Place::thread, Place::tile_row, Place::warpgroup;
  static constexpr int HEAD_DIM = Shared::HEAD_DIM, BLOCK_N = Shared::BLOCK_N, CONSUMERS = Shared::CONSUMERS;
  using Sum = typename Shared::Sum;  // of products of quantized values

  using Params = typename EightBitParamsOf<MASKS>::Type;

  Shared& shared;
  const EightBitParams& params;
  RowMasks<MASKS, CAUSAL, BLOCK_N> masks;

  float factor[2];  // what scores of quantized values are multiplied by, base 2; > 0
  int first_row;    // of the warpgroup
  int tile, tiles;  // of keys: that of the scores, and all of the query tile
  int work;         // number of the query tile
  PipelineState<Shared::QUERY_STAGES> query_state;
  PipelineState<Shared::STAGES> key_state;

  __device__ __forceinline__ ScoringConsumer(Shared& shared, const Params& given, int warpgroup)
      : Place(warpgroup), shared(shared), params(EightBitParamsOf<MASKS>::call(given)), masks(given), work(0) {}

  __device__ __forceinline__ void release(Mbarrier& read) const {
    if (elect_one()) mbarrier_arrive(read);
  }

  // Done with a tile of keys. Every lane arrives that has read scales of keys for itself.
  __device__ __forceinline__ void end_key() {
    if constexpr (Shared::KEY_SCALES) {
      mbarrier_arrive(shared.key_empty[key_state.stage]);
    } else {
      release(shared.key_empty[key_state.stage]);
    }
    key_state.advance();
  }

  // Done with the query tile, and with the description of the one that was stored last, which every lane has read.
  __device__ __forceinline__ void end_query() {
    mbarrier_arrive(shared.query_empty[query_state.stage]);
    query_state.advance();
  }

  // Waits for the next query tile; false when there is none.
  __device__ __forceinline__ bool wait_query() {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    const WorkTile& next = shared.work[work % WORK_TILES];
    tile = 0, tiles = next.tiles;
    if (tiles == 0) return false;
    first_row = next.first_row + ROWS * warpgroup;
    return true;
  }

  // The same, with the factors of its scores.
  __device__ __forceinline__ bool begin_query() {
    if (!wait_query()) return false;
    const WorkTile& next = shared.work[work % WORK_TILES];
    const int head_kv = shared.head_kv[work % WORK_TILES];
    float all = fmaxf(fabsf(params.scale_log2),
                      1e-30f);  // 0 must not meet a masked score of -inf
    if (!Shared::KEY_SCALES) all *= *params.key_scale.at(next.batch, head_kv, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + tile_row(half), params.seqlen_q - 1);
      factor[half] = all * *params.query_scale.at(next.batch, next.head, row);
    }
    if constexpr (MASKS::ANY) masks.begin(next, first_row + tile_row(0), factor);
    if (!Shared::INTEGERS && params.scale_log2 < 0.0f) negate_query();
    return true;
  }

  // A negative scale is a positive one of -Q. INT8 has no negative of -128: its keys' scales are negative.
  __device__ __forceinline__ void negate_query() {
    uint4* chunks = reinterpret_cast<uint4*>(shared.query[query_state.stage][warpgroup][0]);
    for (int i = thread; i < Shared::TERMS * ROWS * HEAD_DIM / 16; i += WARPGROUP_THREADS) {
      const uint4 old = chunks[i];
      chunks[i] = make_uint4(old.x ^ 0x80808080u, old.y ^ 0x80808080u, old.z ^ 0x80808080u, old.w ^ 0x80808080u);
    }
    fence_proxy_async();
    named_barrier_sync((QUERY_NEGATED + warpgroup) % BARRIERS, WARPGROUP_THREADS);
  }

  // Where the scores are that sums become: where those are, unless they are integers.
  __device__ __forceinline__ static auto scores_of(float (&sums)[BLOCK_N / 2], float (&)[1]) -> float (&)[BLOCK_N / 2] {
    return sums;
  }
  __device__ __forceinline__ static auto scores_of(int32 (&)[BLOCK_N / 2], float (&converted)[BLOCK_N / 2])
      -> float (&)[BLOCK_N / 2] {
    return converted;
  }

  // Starts S of the next tile of keys, which has been waited for.
  __device__ __forceinline__ void score(Sum (&sums)[BLOCK_N / 2]) {
    constexpr int COLUMNS = Shared::COLUMNS;
    const uint64 key = rows_descriptor<COLUMNS>(shared.key[key_state.stage]);
    const uint64 query = rows_descriptor<COLUMNS>(shared.query[query_state.stage][warpgroup][0]);
    wgmma_fence();
#pragma unroll
    for (int term = 0; term < Shared::TERMS; ++term) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 32; ++step) {
        const int panel = 32 * step / COLUMNS, column = 32 * step % COLUMNS;
        wgmma<typename Shared::FORMAT, BLOCK_N>(sums,
                                                advance(query, (term * HEAD_DIM + panel * COLUMNS) * ROWS + column),
                                                advance(key, panel * COLUMNS * BLOCK_N + column), term + step > 0);
      }
    }
    wgmma_commit();
  }

  // Scores of the tile that was started last, complete: with their keys' scales, and -inf where a row does not see
  // them.
  __device__ __forceinline__ void take_scores(Sum (&sums)[BLOCK_N / 2], float (&s)[BLOCK_N / 2]) {
    wgmma_fence_registers(sums);
    if constexpr (Shared::KEY_SCALES) {
      scale_keys(sums, s, shared.key_scale[key_state.stage]);
    }
    end_key();
    if (!Shared::QUERY_STAYS && tile + 1 == tiles) end_query();
    if constexpr (MASKS::ANY) {
      masks.apply(s, tile);
    } else {
      mask(s);
    }
  }

  __device__ __forceinline__ void scale_keys(const Sum (&sums)[BLOCK_N / 2], float (&s)[BLOCK_N / 2],
                                             const float* scales) const {
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      using Pair = Vector<float, 2>;
      const Pair scale = *reinterpret_cast<const Pair*>(scales + 8 * n + 2 * (thread % 4));
      if constexpr (Shared::INTEGERS) {
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) four[e] = static_cast<float>(sums[4 * n + e]) * scale.data[e % 2];
        wgmma_fence_registers(four);  // in turn: the compiler would convert all integers first
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * n + e] = four[e];
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * n + e] *= scale.data[e % 2];
      }
    }
  }

  __device__ __forceinline__ void mask(float (&s)[BLOCK_N / 2]) const {
    const int keys = params.seqlen_k - tile * BLOCK_N;
    const int first_visible = CAUSAL ? first_row + params.diagonal - tile * BLOCK_N + 1 : BLOCK_N;
    if (min(keys, first_visible) >= BLOCK_N) return;
    const int column = 2 * (thread % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = (CAUSAL ? min(keys, first_visible + tile_row(half)) : keys) - column;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e >= visible) s[4 * n + 2 * half + e] = negative_infinity();
        }
      }
    }
  }

  // Goes to the next tile of keys, if need be of the next query tile, and waits for it; false when there is none.
  //   last: whether the tile before was the last of its query tile
  __device__ __forceinline__ bool next_tile(bool& last) {
    last = ++tile == tiles;
    if (last) {
      ++work;
      if (!begin_query()) return false;
    }
    mbarrier_wait(shared.key_full[key_state.stage], key_state.phase);
    return true;
  }
};

}  // namespace microsdpa::hopper::throughput_8bit
