// What a consumer warpgroup of hopper/throughput/kernel.cu does with its 64 rows of each query tile.
#pragma once

#include "../../ptx/control.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/tma.cuh"
#include "../common/consumer.cuh"
#include "../common/tile_softmax.cuh"
#include "masks.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput {

template <typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES, bool OVERLAP, bool CAUSAL,
          typename MASKS>
struct Consumer : TileSoftmax<T, BLOCK_N, false, false>, ConsumerWarpgroup<CONSUMERS> {
  using Base = TileSoftmax<T, BLOCK_N, false, false>;
  using Place = ConsumerWarpgroup<CONSUMERS>;
  using Base::rows, Base::scale;
  using Place::pingpong_arrive, Place::pingpong_wait, Place::release, Place::thread, Place::tile_row, Place::warpgroup;
  using typename Base::Probabilities, typename Base::Scores;
  using Shared = SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, typename MaskTraits<MASKS>::Added,
                               MaskTraits<MASKS>::DEALT>;
  using Masked = MaskTraits<MASKS>;
  static constexpr int BLOCK_M = ROWS * CONSUMERS;
  static constexpr int BOX = PANEL<HEAD_DIM>, END = TAIL<HEAD_DIM>, WIDE = HEAD_DIM - END;
  // What a consumer skips, others compute: K and V of it must not fill the rings while they wait for each other.
  static_assert(!CAUSAL || (BLOCK_M - ROWS + BLOCK_N - 1) / BLOCK_N < STAGES, "room for the tiles that are skipped");

  Shared& shared;
  const AttentionParams& params;

  PipelineState<QUERY_STAGES> query_state;
  PipelineState<STAGES> key_state, value_state;
  float o[HEAD_DIM / 2];

  // The query tile that scores are computed of.
  int works = 0;    // its number
  int written = 0;  // query tiles that this warpgroup has written
  int all_tiles;    // of keys: the CTA's; 0 when there is no query tile
  int tile = 0;     // of keys
  int tiles;        // that this warpgroup's rows see
  int skipped;      // that others' rows see
  int last_key;     // that the first row sees, by the causal mask

  const typename MASKS::Params& masked_params;
  PipelineState<Shared::Masks::STAGES> mask_state;
  TileMasks<MASKS, CAUSAL, BLOCK_M, BLOCK_N> masks;

  __device__ __forceinline__ Consumer(Shared& shared, const typename MASKS::Params& params, int warpgroup)
      : Base(Masked::MODIFIED ? 1.0f : MASKS::call(params).scale_log2),
        Place(warpgroup),
        shared(shared),
        params(MASKS::call(params)),
        masked_params(params),
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

  // Waits for a query tile. False when there is none, or none of its rows is this warpgroup's.
  __device__ __forceinline__ bool begin_query() {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    const WorkTile work = shared.work[works % WORK_TILES];
    all_tiles = work.tiles;
    const int first_row = work.first_row + ROWS * warpgroup;
    if (all_tiles == 0 || first_row >= params.seqlen_q) return false;
    tile = 0;
    if constexpr (MASKS::ANY) {
      masks.begin(work, ROWS * warpgroup + tile_row(0));
      tiles = CAUSAL && !Masked::LISTED && !Masked::BACKWARDS
                  ? key_tiles_from<MASKS, CAUSAL, BLOCK_N>(masks.first_tile, masked_params, first_row, ROWS)
                  : work.tiles;
    } else {
      tiles = CAUSAL ? key_tiles<CAUSAL, BLOCK_N>(params, first_row, ROWS) : work.tiles;
    }
    skipped = work.tiles - tiles;
    last_key = first_row + params.diagonal;
    if (!Masked::MODIFIED && params.scale_log2 < 0.0f) negate_query();
    return true;
  }
  // A negative scale is a positive one of -Q.
  __device__ __forceinline__ void negate_query() {
    auto* chunks = reinterpret_cast<uint4*>(shared.query[query_state.stage][warpgroup]);
    for (int i = thread; i < ROWS * STORED_COLUMNS<HEAD_DIM> / 8; i += WARPGROUP_THREADS) {
      const uint4 old = chunks[i];
      chunks[i] = make_uint4(old.x ^ 0x80008000u, old.y ^ 0x80008000u, old.z ^ 0x80008000u, old.w ^ 0x80008000u);
    }
    fence_proxy_async();
    // mutation: pingpong_wait() brings the warpgroup together too, before the products
    named_barrier_sync((QUERY_NEGATED + warpgroup) % BARRIERS, WARPGROUP_THREADS);
  }
  // Every lane arrives for itself, since each has read the query tile's description.
  __device__ __forceinline__ void end_query() {
    mbarrier_arrive(shared.query_empty[query_state.stage]);
    query_state.advance();
  }

  // Starts S of the tile of keys.
  __device__ __forceinline__ void score(Scores& s) {
    if constexpr (MASKS::ANY) masks.fetch(tile);
    const uint64 query =
        matrix_descriptor(shared.query[query_state.stage][warpgroup], 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    const uint64 key = matrix_descriptor(shared.key[key_state.stage], 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDE / 16; ++step) {
      const int panel = step / (BOX / 16), column = step % (BOX / 16) * 16;
      wgmma<T, BLOCK_N>(s, advance(query, (panel * ROWS * BOX + column) * sizeof(T)),
                        advance(key, (panel * BLOCK_N * BOX + column) * sizeof(T)), step > 0);
    }
    if constexpr (END > 0) {
      const T *last_query = shared.query[query_state.stage][warpgroup] + ROWS * WIDE,
              *last_key = shared.key[key_state.stage] + BLOCK_N * WIDE;
      wgmma<T, BLOCK_N>(s, matrix_descriptor(last_query, 16, 8 * END * sizeof(T), TAIL_PATTERN),
                        matrix_descriptor(last_key, 16, 8 * END * sizeof(T), TAIL_PATTERN));
    }
    wgmma_commit();
  }

  // Starts O = P V, or adds to O.
  __device__ __forceinline__ void accumulate(const Probabilities& p, bool add) {
    accumulate_values<T, HEAD_DIM>(o, p, shared.value[value_state.stage], add);
  }

  // Turns products into scores where they are more than that; keys that a row does not see get -inf.
  __device__ __forceinline__ void mask(Scores& s) {
    if constexpr (MASKS::ANY) {
      if constexpr (Masked::ADDED) {
        auto& ring = static_cast<typename Shared::Masks&>(shared);
        mbarrier_wait(ring.full[mask_state.stage][warpgroup], mask_state.phase);
        masks.apply(s, AddedTile<typename MASKS::Mask>(ring.tile[mask_state.stage][warpgroup],
                                                       masked_params.masks.mask_strides.row != 0));
        release(ring.empty[mask_state.stage][warpgroup]);
        mask_state.advance();
      } else {
        masks.apply(s, NothingAdded());
      }
      return;
    }
    const int keys = params.seqlen_k - BLOCK_N * tile;
    const int first_visible = CAUSAL ? last_key - BLOCK_N * tile + 1 : BLOCK_N;
    // mutation: a tile that is seen to its last key has none to hide
    if (min(keys, first_visible) >= BLOCK_N) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Base::hide(s, half, CAUSAL ? min(keys, first_visible + tile_row(half)) : keys);
    }
  }

  // Probabilities of a tile. The first one's stabilizers are a guess, which softmax_tile corrects where it does not
  // fit.
  __device__ __forceinline__ bool softmax_tile(Scores& s, Probabilities& p, float (&factor)[2]) {
    if constexpr (MASKS::ANY) {
      // A row's stabilizer is a score that it sees: as long as there is none, each tile is looked at for one.
      if (tile == 0) rows.reset();
      const bool blind = fminf(rows.stabilizer[0], rows.stabilizer[1]) == negative_infinity();
      bool look = __any_sync(FULL_WARP, blind);
      if constexpr (Masked::CAPPED_LATE) {
        if (masks.late && !look) {
          float added[2];
          Base::exponentials(s, p, rows.stabilizer, added, masks.near_cap());
          if (__all_sync(FULL_WARP, Base::fits(rows.stabilizer, added))) {
            rows.sum[0] += added[0], rows.sum[1] += added[1];
            return false;
          }
          look = true;
        }
        if (masks.late) masks.cap_near(s);
      }
      return Base::softmax_tile(s, p, factor, false, look);
    }
    if (tile == 0) Base::guess_stabilizers(s);
    return Base::softmax_tile(s, p, factor, false);
  }

  // Adds the head's sink to a row's sum, of which it has a share but no value, and scales the stabilizer. Gives what O
  // is to be multiplied by.
  __device__ __forceinline__ float with_sink(int head, float& sum, float& stabilizer) const {
    const float sink = decltype(masks)::sink_of(masked_params, head), scaled = stabilizer * Base::scale_of(0);
    const float larger = fmaxf(sink, scaled);
    const float own = sum == 0.0f ? 0.0f : ex2_approx(scaled - finite(larger));
    sum = sum * own + ex2_approx(sink - finite(larger)), stabilizer = larger;
    return own * normalizer(sum);
  }

  // Writes O and LSE of a finished query tile.
  __device__ __forceinline__ void finish(const WorkTile& work, const Rows& done) {
    const int first_row = work.first_row + ROWS * warpgroup;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = quad_sum(done.sum[half]), stabilizer = done.stabilizer[half];
      if constexpr (Masked::SINKS) {
        inverse[half] = with_sink(work.head, sum, stabilizer);
      } else {
        inverse[half] = normalizer(sum);
      }
      const int row = first_row + tile_row(half);
      if (params.lse != nullptr && row < params.seqlen_q && thread % 4 == 0) {
        const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;
        const float scale = Masked::SINKS ? 1.0f : Base::scale_of(half);
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer * scale, sum);
      }
    }
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += OUT_COLUMNS<HEAD_DIM>) {
      if (written > 0 || column > 0)
        named_barrier_sync(OUT_EMPTY + warpgroup, OUT_THREADS);  // what was there is stored
      put<OUT_COLUMNS<HEAD_DIM>>(shared.out[warpgroup], column, inverse);
      if constexpr (Masked::DEALT) {
        if (thread == 0) shared.stored(warpgroup) = work;
      }
      fence_proxy_async();
      named_barrier_arrive(OUT_FULL + warpgroup, OUT_THREADS);
    }
    ++written;
  }

  // O times `factor`, from `first` on, as the tile that a bulk copy takes.
  template <int COLUMNS>
  __device__ __forceinline__ void put(T* tile, int first, const float (&factor)[2]) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int block = 0; block < (COLUMNS < HEAD_DIM ? COLUMNS : HEAD_DIM) / 16; ++block) {
      const bool is_tail = END > 0 && 16 * block >= WIDE;
      const int columns = is_tail ? END : BOX, chunks = columns / 8;  // of a row of the panel; of 16 bytes each
      uint32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (first + 16 * block) / 2 + 2 * i;
        word[i] = pack<T>(o[at] * factor[i % 2], o[at + 1] * factor[i % 2]);
      }
      const int chunk = (2 * block % chunks + lane / 16) ^ (row * chunks / 8 % chunks);
      stmatrix(tile + 16 * block / BOX * ROWS * BOX + row * columns + 8 * chunk, word);
    }
  }

  // The query tile's tiles of V have all been read by this warpgroup, which skips those that are the others' alone.
  __device__ __forceinline__ void end_values(int to_skip) {
    for (int i = 0; CAUSAL && i < to_skip; ++i) {
      // mutation: the next query tile is announced once these copies are issued: what was in their places has been left
      wait_value();
      end_value();
    }
  }

  // The same for K: false when begin_query() is.
  __device__ __forceinline__ bool next_query() {
    for (int i = 0; CAUSAL && i < skipped; ++i) {
      pingpong_wait();
      pingpong_arrive();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_key();
      end_key();
    }
    ++works;
    return begin_query();
  }
  __device__ __forceinline__ const WorkTile& previous_work() const { return shared.work[(works - 1) % WORK_TILES]; }

  // From P of one tile to P of the next: O += P V, S, exponentials. False when there is no next one to go on with.
  __device__ __forceinline__ bool step(const Probabilities& p, Probabilities& next_p) {
    const bool first = tile == 0, last = tile + 1 == tiles;
    const int to_skip = skipped;
    ++tile;
    if (last && !next_query()) return false;
    wait_key();
    wait_value();
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
      mask(s);
      const bool moved = softmax_tile(s, next_p, factor);
      wgmma_wait<0>();
      wgmma_fence_registers(o);
      end_value();
      if (last) {
        end_values(to_skip);
        finish(previous_work(), done);
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
        finish(previous_work(), rows);
      }
      mask(s);
      if (softmax_tile(s, next_p, factor) && !last) rescale(o, factor);
    }
    return true;
  }

  // Goes past a query tile that has no rows for this warpgroup.
  __device__ __forceinline__ void skip_query() {
    end_query();
    for (int i = 0; i < all_tiles; ++i) {
      pingpong_wait();
      pingpong_arrive();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_key();
      end_key();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_value();
      end_value();
    }
    ++works;
  }

  // P of a query tile's first tile, when there is no P V to run beside S.
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
    mask(s);
    float factor[2];
    softmax_tile(s, p, factor);
  }

  // P V of a query tile's last tile, when no S runs beside it; `tiles` is still its query tile's.
  __device__ __forceinline__ void end(const Probabilities& p) {
    wait_value();
    accumulate(p, tiles > 1);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    end_value();
    end_values(skipped);
    finish(previous_work(), rows);
  }

  // From a query tile on to the last one before there is none for this warpgroup.
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
    if (warpgroup == CONSUMERS - 1) pingpong_arrive();
    bool found = begin_query();
    while (all_tiles > 0) {
      if (found) {
        go_on();  // and has asked for a query tile in vain
        found = false;
      } else {
        skip_query();
        found = begin_query();
      }
    }
    if (warpgroup == 0) pingpong_wait();  // nobody else takes the last one
    if constexpr (Masked::DEALT) {
      if (written > 0) named_barrier_sync(OUT_EMPTY + warpgroup, OUT_THREADS);
      if (thread == 0) shared.stored(warpgroup) = {0, 0, 0, 0};
      named_barrier_arrive(OUT_FULL + warpgroup, OUT_THREADS);
    }
  }
};

}  // namespace microsdpa::hopper::throughput
