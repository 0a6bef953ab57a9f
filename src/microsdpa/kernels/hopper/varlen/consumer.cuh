// What a consumer warpgroup of hopper/varlen/kernel.cu does with its 64 rows of each segment.
#pragma once

#include "../common/consumer.cuh"
#include "../common/tile_softmax.cuh"
#include "masks.cuh"

namespace microsdpa::hopper::varlen {

constexpr int MERGE = OUT_FULL;  // from this barrier on, one for every warpgroup

template <typename C, bool OVERLAP, typename MASKS, int PACK>
struct Consumer : TileSoftmax<typename C::T, C::BLOCK_N, false, false>, ConsumerWarpgroup<C::CONSUMERS> {
  using T = typename C::T;
  using Base = TileSoftmax<T, C::BLOCK_N, false, false>;
  using Place = ConsumerWarpgroup<C::CONSUMERS>;
  using Base::rows;
  using Place::release, Place::thread, Place::tile_row, Place::warpgroup;
  using typename Base::Probabilities, typename Base::Scores;
  static constexpr int HEAD_DIM = C::HEAD_DIM, BLOCK_N = C::BLOCK_N;
  static constexpr bool SKIPS = MASKS::RIGHT && !MASKS::BACKWARDS && C::CONSUMERS > 1;
  // What a consumer skips, others compute: K and V of it must not fill the rings while they wait for each other.
  static_assert(!SKIPS || (C::BLOCK_M - ROWS + BLOCK_N - 1) / BLOCK_N < C::STAGES, "room for tiles that are skipped");

  SharedStorage<C>& shared;
  const VarlenParams& params;

  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::STAGES> key_state, value_state;
  float o[HEAD_DIM / 2];

  // The segment that scores are computed of.
  int segments = 0;  // its number
  int all_tiles;     // of keys: the CTA's; 0 when there is no segment
  int tile = 0;      // of keys
  int tiles;         // that this warpgroup's rows see
  int skipped;       // that others' rows see
  MaskedRows<MASKS, PACK, BLOCK_N> masks;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared, const VarlenParams& params, int warpgroup)
      : Base(MASKS::MODIFIED ? 1.0f : params.scale_log2),
        Place(warpgroup),
        shared(shared),
        params(params),
        masks(params) {}

  __device__ __forceinline__ void wait_key() { mbarrier_wait(shared.key_full[key_state.stage], key_state.phase); }
  __device__ __forceinline__ void end_key() {
    release(shared.key_empty[key_state.stage]);
    key_state.advance();
  }
  __device__ __forceinline__ void wait_value() {
    mbarrier_wait(shared.value_full[value_state.stage], value_state.phase);
  }
  __device__ __forceinline__ void end_value() {
    release(shared.value_empty[value_state.stage]);
    value_state.advance();
  }
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (C::CONSUMERS > 1) Place::pingpong_wait();
  }
  __device__ __forceinline__ void pingpong_arrive() const {
    if constexpr (C::CONSUMERS > 1) Place::pingpong_arrive();
  }

  // Waits for a segment. False when there is none, or none of its rows is this warpgroup's.
  __device__ __forceinline__ bool begin_query() {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    const Segment& segment = shared.segment[segments % SEGMENTS];
    all_tiles = segment.tiles;
    if (all_tiles == 0 || ROWS * warpgroup >= segment.rows) return false;
    tile = 0;
    masks.begin(segment, ROWS * warpgroup + tile_row(0));
    tiles = all_tiles;
    if constexpr (SKIPS) {
      const int end = masks.end(ROWS * warpgroup + ROWS - 1);
      tiles = min(tiles, max(1, (end + BLOCK_N - 1) / BLOCK_N - segment.first_tile));
    }
    skipped = all_tiles - tiles;
    return true;
  }
  // Every lane arrives for itself, since each has read the segment's description.
  __device__ __forceinline__ void end_query() {
    mbarrier_arrive(shared.query_empty[query_state.stage]);
    query_state.advance();
  }

  // Starts S of the tile of keys.
  __device__ __forceinline__ void score(Scores& s) {
    constexpr int BOX = C::COLUMNS;
    const uint64 query =
        matrix_descriptor(shared.query[query_state.stage][warpgroup], 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    const uint64 key = matrix_descriptor(shared.key[key_state.stage], 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int panel = step / (BOX / 16), column = step % (BOX / 16) * 16;
      wgmma<T, BLOCK_N>(s, advance(query, (panel * ROWS * BOX + column) * sizeof(T)),
                        advance(key, (panel * BLOCK_N * BOX + column) * sizeof(T)), step > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void accumulate(const Probabilities& p, bool add) {
    accumulate_values<T, HEAD_DIM>(o, p, shared.value[value_state.stage], add);
  }

  // The first key of the tile.
  __device__ __forceinline__ int first_key() const {
    return BLOCK_N * (masks.segment->first_tile + (MASKS::BACKWARDS ? all_tiles - 1 - tile : tile));
  }
  __device__ __forceinline__ bool see_all() const { return masks.see_all(ROWS * warpgroup, first_key()); }

  // Turns products into scores, and these into probabilities. The first tile's stabilizers are a guess, which
  // softmax_tile corrects where it does not fit, or are looked for where rows may not see the first keys.
  __device__ __forceinline__ bool softmax_tile(Scores& s, Probabilities& p, float (&factor)[2], bool all) {
    masks.apply(s, ROWS * warpgroup + tile_row(0), first_key(), all);
    if constexpr (MASKS::LEFT || MASKS::MODIFIED) {
      if (tile == 0) rows.reset();
      const bool blind = fminf(rows.stabilizer[0], rows.stabilizer[1]) == negative_infinity();
      return Base::softmax_tile(s, p, factor, false, __any_sync(FULL_WARP, blind));
    }
    if (tile == 0) Base::guess_stabilizers(s);
    return Base::softmax_tile(s, p, factor, false);
  }

  // Writes O and LSE of a finished segment, or its part of them.
  __device__ __forceinline__ void finish(const Segment& segment, const Rows& done) {
    float sum[2], stabilizer[2];
    const bool misplaced = shared.misplaced[(segments - 1) % SEGMENTS] != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // NaN: never a value of memory that is not the cache's.
      sum[half] = misplaced ? __uint_as_float(0x7fffffffu) : quad_sum(done.sum[half]);
      stabilizer[half] = done.stabilizer[half] * Base::scale_of(half);
    }
    if (segment.parts > 1 && !merge(segment, sum, stabilizer)) return;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = ROWS * warpgroup + tile_row(half), row = segment.first_row + own_row;
      float own = 1.0f;
      if constexpr (MASKS::SINKS) {
        const float sink = masks.sink_of(segment, row), larger = fmaxf(sink, stabilizer[half]);
        own = sum[half] == 0.0f ? 0.0f : ex2_approx(stabilizer[half] - finite(larger));
        sum[half] = sum[half] * own + ex2_approx(sink - finite(larger)), stabilizer[half] = larger;
      }
      inverse[half] = own * normalizer(sum[half]);
      if (params.lse != nullptr && own_row < segment.rows && thread % 4 == 0) {
        const Strides strides{params.lse_batch_stride, params.lse_head_stride, 1};
        params.lse[offset(segment, row, strides)] = log_sum_exp(stabilizer[half], sum[half]);
      }
    }
    store(segment, inverse);
  }

  __device__ __forceinline__ static int64 offset(const Segment& segment, int row, const Strides& strides) {
    return segment.b * strides.batch + (static_cast<int64>(segment.head_kv) * PACK + row % PACK) * strides.head +
           (static_cast<int64>(segment.first_query) + row / PACK) * strides.row;
  }

  // O times `factor`: the lanes of a quad exchange words, so that each has 16 bytes of a row.
  __device__ __forceinline__ void store(const Segment& segment, const float (&factor)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = ROWS * warpgroup + tile_row(half);
      T* out = static_cast<T*>(params.out) + offset(segment, segment.first_row + own_row, params.out_strides);
      uint4 chunk[HEAD_DIM / 32];
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        uint32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (n + i) + 2 * half;
          word[i] = pack<T>(o[at] * factor[half], o[at + 1] * factor[half]);
        }
        chunk[n / 4] = transpose_quad(word[0], word[1], word[2], word[3]);
      }
      if (own_row < segment.rows) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) *reinterpret_cast<uint4*>(out + 8 * (4 * i + thread % 4)) = chunk[i];
      }
      __syncwarp();  // else ptxas takes the whole loop for divergent, with 150 moves into uniform registers
    }
  }

  // Leaves O and the rows' statistics in the workspace. The warpgroup that is the last one to do so goes on with the
  // sum of all parts, which are added in their order; false for the others.
  __device__ __forceinline__ bool merge(const Segment& segment, float (&sum)[2], float (&stabilizer)[2]) {
    const Partials<C> partials(params);
    {
      float4* own = partials.at(segment, segment.part, warpgroup, thread, 0);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        own[i * WARPGROUP_THREADS] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
      }
      own[C::HEAD_DIM / 8 * WARPGROUP_THREADS] = make_float4(stabilizer[0], sum[0], stabilizer[1], sum[1]);
    }
    __threadfence();
    named_barrier_sync(MERGE + warpgroup, WARPGROUP_THREADS);
    if (thread == 0) {
      uint32& arrivals = params.arrivals[segment.owner * C::CONSUMERS + warpgroup];
      const bool is_last = atomicAdd(&arrivals, 1u) == static_cast<uint32>(segment.parts - 1);
      __threadfence();
      if (is_last) arrivals = 0;  // for the next launch
      shared.is_last[warpgroup] = is_last;
    }
    named_barrier_sync(MERGE + warpgroup, WARPGROUP_THREADS);
    if (!shared.is_last[warpgroup]) return false;
    const auto statistics = [&](int part) {
      return *partials.at(segment, part, warpgroup, thread, Partials<C>::STATISTICS);
    };
    stabilizer[0] = stabilizer[1] = negative_infinity();
    for (int part = 0; part < segment.parts; ++part) {
      const float4 found = statistics(part);
      stabilizer[0] = fmaxf(stabilizer[0], found.x), stabilizer[1] = fmaxf(stabilizer[1], found.z);
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.0f;
    for (int part = 0; part < segment.parts; ++part) {
      const float4 found = statistics(part);
      const float weight[2] = {ex2_approx(found.x - finite(stabilizer[0])),
                               ex2_approx(found.z - finite(stabilizer[1]))};
      sum[0] += weight[0] * found.y, sum[1] += weight[1] * found.w;
      const float4* values = partials.at(segment, part, warpgroup, thread, 0);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        const float4 four = values[i * WARPGROUP_THREADS];
        o[4 * i] += weight[0] * four.x, o[4 * i + 1] += weight[0] * four.y;
        o[4 * i + 2] += weight[1] * four.z, o[4 * i + 3] += weight[1] * four.w;
      }
    }
    return true;
  }

  // The segment's tiles of V have all been read by this warpgroup, which skips those that are the others' alone.
  __device__ __forceinline__ void end_values(int to_skip) {
    for (int i = 0; SKIPS && i < to_skip; ++i) {
      wait_value();
      end_value();
    }
  }

  // The same for K: false when begin_query() is.
  __device__ __forceinline__ bool next_query() {
    for (int i = 0; SKIPS && i < skipped; ++i) {
      pingpong_wait();
      pingpong_arrive();
      wait_key();
      end_key();
    }
    ++segments;
    return begin_query();
  }
  __device__ __forceinline__ const Segment& previous_segment() const {
    return shared.segment[(segments - 1) % SEGMENTS];
  }

  // From P of one tile to P of the next: O += P V, S, exponentials. False when there is no next one to go on with.
  __device__ __forceinline__ bool step(const Probabilities& p, Probabilities& next_p) {
    const bool first = tile == 0, last = tile + 1 == tiles;
    const int to_skip = skipped;
    ++tile;
    if (last && !next_query()) return false;
    wait_key();
    wait_value();
    const bool all = see_all();
    pingpong_wait();
    Scores s;
    float factor[2];
    if constexpr (OVERLAP) {
      score(s);
      accumulate(p, !first);
      pingpong_arrive();
      wgmma_wait<1>();
      wgmma_fence_registers(s);
      end_key();
      if (tile + 1 == tiles) end_query();
      const Rows done = rows;
      const bool moved = softmax_tile(s, next_p, factor, all);
      wgmma_wait<0>();
      wgmma_fence_registers(o);
      end_value();
      if (last) {
        end_values(to_skip);
        finish(previous_segment(), done);
      } else if (moved) {
        rescale(o, factor);
      }
    } else {
      accumulate(p, !first);
      score(s);
      wgmma_wait<1>();
      pingpong_arrive();  // the next one's products follow S without a gap
      wgmma_wait<0>();
      wgmma_fence_registers(s);
      wgmma_fence_registers(o);
      end_key();
      end_value();
      if (tile + 1 == tiles) end_query();
      if (last) {
        end_values(to_skip);
        finish(previous_segment(), rows);
      }
      if (softmax_tile(s, next_p, factor, all) && !last) rescale(o, factor);
    }
    return true;
  }

  // Goes past a segment that has no rows for this warpgroup.
  __device__ __forceinline__ void skip_query() {
    end_query();
    for (int i = 0; i < all_tiles; ++i) {
      pingpong_wait();
      pingpong_arrive();
      wait_key();
      end_key();
      wait_value();
      end_value();
    }
    ++segments;
  }

  // P of a segment's first tile, when there is no P V to run beside S.
  __device__ __forceinline__ void begin(Probabilities& p) {
    wait_key();
    pingpong_wait();
    Scores s;
    score(s);
    pingpong_arrive();
    wgmma_wait<0>();
    wgmma_fence_registers(s);
    end_key();
    if (tiles == 1) end_query();
    float factor[2];
    softmax_tile(s, p, factor, see_all());
  }

  // P V of a segment's last tile, when no S runs beside it; `tiles` is still its segment's.
  __device__ __forceinline__ void end(const Probabilities& p) {
    wait_value();
    accumulate(p, tiles > 1);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    end_value();
    end_values(skipped);
    finish(previous_segment(), rows);
  }

  // From a segment on to the last one before there is none for this warpgroup.
  __device__ __forceinline__ void go_on() {
    Probabilities p[OVERLAP ? 2 : 1];
    begin(p[0]);
    if constexpr (OVERLAP) {  // which registers hold P is known when compiling
      while (true) {
        if (!step(p[0], p[1])) return end(p[0]);
        if (!step(p[1], p[0])) return end(p[1]);
      }
    } else {
      while (step(p[0], p[0])) {
      }
      end(p[0]);
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == C::CONSUMERS - 1) pingpong_arrive();
    bool found = begin_query();
    while (all_tiles > 0) {
      if (found) {
        go_on();  // and has asked for a segment in vain
        found = false;
      } else {
        skip_query();
        found = begin_query();
      }
    }
    if (warpgroup == 0) pingpong_wait();  // nobody else takes the last one
  }
};

}  // namespace microsdpa::hopper::varlen
