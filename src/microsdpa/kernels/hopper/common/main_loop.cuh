// The main loop of a consumer warpgroup with operands of 16 bits: from tile to tile of keys, across the tiles of rows
// that its CTA computes. hopper/throughput and hopper/varlen share it.
//
// In every turn a consumer starts S of the next tile of keys, also of the next rows' first, and P V of this one. It
// turns scores into probabilities while products run. In shared memory there are rings of Q, K and V tiles.
#pragma once

#include "consumer.cuh"
#include "pipeline.cuh"
#include "tile_softmax.cuh"

namespace microsdpa::hopper {

// STAGES, QUERY_STAGES: tiles of K and of V, and of Q, that there is room for.
template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int CONSUMERS_, int STAGES_, int QUERY_STAGES_>
struct TileShape {
  using T = ELEMENT;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_N = BLOCK_N_, CONSUMERS = CONSUMERS_, BLOCK_M = ROWS * CONSUMERS;
  static constexpr int STAGES = STAGES_, QUERY_STAGES = QUERY_STAGES_;
  static constexpr int PANEL_ROWS = ROWS;  // of Q that follow each other in shared memory: a warpgroup's, or all
};

// OVERLAP: a consumer's exponentials run beside its own P V too, for which P takes twice the registers; else beside the
// other consumers' products alone. SKIPS: a warpgroup's rows may see fewer tiles than others' rows do.
// Own, the kernel's consumer, is derived from it, and has
//   bool begin_query()                         waits for rows: sets all_tiles, tile, tiles and skipped
//   void score(Scores&)                        starts S of the tile of keys
//   bool see_all()                             what softmax_tile() wants to know of the tile ahead of its products
//   bool softmax_tile(s, p, factor, see_all)   from products to probabilities; gives whether stabilizers have moved
//   void finish(const Rows&)                   writes O and LSE of the rows before those of begin_query()
template <typename Own, typename SHARED, typename SHAPE, bool OVERLAP, bool SKIPS>
struct MainLoop : TileSoftmax<typename SHAPE::T, SHAPE::BLOCK_N, false, false>, ConsumerWarpgroup<SHAPE::CONSUMERS> {
  using T = typename SHAPE::T;
  using Softmax = TileSoftmax<T, SHAPE::BLOCK_N, false, false>;
  using Place = ConsumerWarpgroup<SHAPE::CONSUMERS>;
  using Shared = SHARED;
  using Place::release, Place::thread, Place::tile_row, Place::warpgroup;
  using Softmax::rows;
  using typename Softmax::Probabilities, typename Softmax::Scores;
  static constexpr int HEAD_DIM = SHAPE::HEAD_DIM, BLOCK_N = SHAPE::BLOCK_N, CONSUMERS = SHAPE::CONSUMERS;
  static constexpr int BLOCK_M = SHAPE::BLOCK_M, STAGES = SHAPE::STAGES, QUERY_STAGES = SHAPE::QUERY_STAGES;
  // What a consumer skips, others compute: K and V of it must not fill the rings while they wait for each other.
  static_assert(!SKIPS || (BLOCK_M - ROWS + BLOCK_N - 1) / BLOCK_N < STAGES, "room for the tiles that are skipped");

  Shared& shared;

  PipelineState<QUERY_STAGES> query_state;
  PipelineState<STAGES> key_state, value_state;
  float o[HEAD_DIM / 2];

  // The rows that scores are computed of.
  int works = 0;    // number of their tile
  int written = 0;  // tiles of rows: by this warpgroup
  int all_tiles;    // of keys: the CTA's; 0 when there are no more rows
  int tile = 0;     // of keys
  int tiles;        // that this warpgroup's rows see
  int skipped;      // that others' rows see

  __device__ __forceinline__ MainLoop(Shared& shared, float scale_log2, int warpgroup)
      : Softmax(scale_log2), Place(warpgroup), shared(shared) {}

  __device__ __forceinline__ Own& own() { return static_cast<Own&>(*this); }

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
  __device__ __forceinline__ void wait_query() {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
  }
  // Every lane arrives for itself, since each has read what the rows are.
  __device__ __forceinline__ void end_query() {
    mbarrier_arrive(shared.query_empty[query_state.stage]);
    query_state.advance();
  }

  // This warpgroup's rows of Q in a panel of `width` columns, which has so many columns ahead of it.
  __device__ __forceinline__ T* query_panel(int ahead, int width) const {
    constexpr int PANEL_ROWS = SHAPE::PANEL_ROWS;
    if constexpr (PANEL_ROWS == ROWS) return shared.query[query_state.stage][warpgroup] + ROWS * ahead;
    return shared.query[query_state.stage][0] + PANEL_ROWS * ahead + warpgroup * ROWS * width;
  }

  __device__ __forceinline__ void score(Scores& s) {
    constexpr int BOX = PANEL<HEAD_DIM>, END = TAIL<HEAD_DIM>, WIDE = HEAD_DIM - END;
    const uint64 query = matrix_descriptor(query_panel(0, BOX), 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    const uint64 key = matrix_descriptor(shared.key[key_state.stage], 16, 8 * BOX * sizeof(T), PATTERN<HEAD_DIM>);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDE / 16; ++step) {
      const int panel = step / (BOX / 16), column = step % (BOX / 16) * 16;
      wgmma<T, BLOCK_N>(s, advance(query, (panel * SHAPE::PANEL_ROWS * BOX + column) * sizeof(T)),
                        advance(key, (panel * BLOCK_N * BOX + column) * sizeof(T)), step > 0);
    }
    if constexpr (END > 0) {
      const T *last_query = query_panel(WIDE, END), *last_key = shared.key[key_state.stage] + BLOCK_N * WIDE;
      wgmma<T, BLOCK_N>(s, matrix_descriptor(last_query, 16, 8 * END * sizeof(T), TAIL_PATTERN),
                        matrix_descriptor(last_key, 16, 8 * END * sizeof(T), TAIL_PATTERN));
    }
    wgmma_commit();
  }

  // Starts O = P V, or adds to O.
  __device__ __forceinline__ void accumulate(const Probabilities& p, bool add) {
    accumulate_values<T, HEAD_DIM>(o, p, shared.value[value_state.stage], add);
  }

  // Skips tiles of V that are the others' alone.
  __device__ __forceinline__ void skip_values(int to_skip) {
    for (int i = 0; SKIPS && i < to_skip; ++i) {
      // mutation: the next query tile is announced once these copies are issued: what was in their places has been left
      wait_value();
      end_value();
    }
  }
  // Ends the rows before, of which P V is complete.
  __device__ __forceinline__ void end_rows(int to_skip, const Rows& done) {
    own().skip_values(to_skip);
    own().finish(own().previous_work(), done);
    ++written;
  }

  // Skips such tiles of K and waits for the next rows: false when begin_query() is.
  __device__ __forceinline__ bool next_query() {
    for (int i = 0; SKIPS && i < skipped; ++i) {
      Place::pingpong_wait();
      Place::pingpong_arrive();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_key();
      end_key();
    }
    ++works;
    return own().begin_query();
  }

  // From P of one tile to P of the next: O += P V, S, exponentials. False when there is no next one to go on with.
  __device__ __forceinline__ bool step(const Probabilities& p, Probabilities& next_p) {
    const bool first = tile == 0, last = tile + 1 == tiles;
    const int to_skip = skipped;
    ++tile;
    if (last && !next_query()) return false;
    wait_key();
    wait_value();
    const bool all = own().see_all();
    Place::pingpong_wait();
    Scores s;
    float factor[2];
    if constexpr (OVERLAP) {
      own().score(s);
      accumulate(p, !first);
      Place::pingpong_arrive();
      wgmma_wait<1>();
      wgmma_fence_registers(s);
      end_key();
      if (tile + 1 == tiles) end_query();
      const Rows done = rows;
      const bool moved = own().softmax_tile(s, next_p, factor, all);
      wgmma_wait<0>();
      wgmma_fence_registers(o);
      end_value();
      if (last) {
        end_rows(to_skip, done);
      } else if (moved) {
        rescale(o, factor);
      }
    } else {
      accumulate(p, !first);
      own().score(s);
      wgmma_wait<1>();           // mutation: the wait behind it is for this product too
      Place::pingpong_arrive();  // the next one's products follow S without a gap
      wgmma_wait<0>();
      wgmma_fence_registers(s);
      wgmma_fence_registers(o);
      end_key();
      end_value();
      if (tile + 1 == tiles) end_query();
      if (last) {
        end_rows(to_skip, rows);
      }
      if (own().softmax_tile(s, next_p, factor, all) && !last) rescale(o, factor);
    }
    return true;
  }

  // Goes past a tile of rows of which none is this warpgroup's.
  __device__ __forceinline__ void skip_query() {
    end_query();
    for (int i = 0; i < all_tiles; ++i) {
      Place::pingpong_wait();
      Place::pingpong_arrive();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_key();
      end_key();
      // mutation: at its turn, the others have left the tile before the last one, and there are at least two places
      wait_value();
      end_value();
    }
    ++works;
  }

  // P of the rows' first tile of keys, when there is no P V to run beside S.
  __device__ __forceinline__ void begin(Probabilities& p) {
    wait_key();
    Place::pingpong_wait();
    Scores s;
    own().score(s);
    Place::pingpong_arrive();
    wgmma_wait<0>();
    wgmma_fence_registers(s);
    end_key();
    if (tiles == 1) end_query();
    float factor[2];
    own().softmax_tile(s, p, factor, own().see_all());
  }

  // P V of the rows' last tile of keys, when no S runs beside it; `tiles` is still that of these rows.
  __device__ __forceinline__ void end(const Probabilities& p) {
    wait_value();
    accumulate(p, tiles > 1);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    end_value();
    end_rows(skipped, rows);
  }

  // From a tile of rows on to the last one before there is none for this warpgroup.
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
    if (warpgroup == CONSUMERS - 1) Place::pingpong_arrive();
    bool found = own().begin_query();
    while (all_tiles > 0) {
      if (found) {
        go_on();  // and has asked for rows in vain
        found = false;
      } else {
        skip_query();
        found = own().begin_query();
      }
    }
    if (warpgroup == 0) Place::pingpong_wait();  // nobody else takes the last one
  }
};

}  // namespace microsdpa::hopper
