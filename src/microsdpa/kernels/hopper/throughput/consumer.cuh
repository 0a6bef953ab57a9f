// What a consumer warpgroup of hopper/throughput/kernel.cu does with its 64 rows of each query tile.
#pragma once

#include "../../common/continued.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/tma.cuh"
#include "../common/main_loop.cuh"
#include "divided.cuh"
#include "masks.cuh"
#include "policies.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput {

template <typename SHAPE, bool OVERLAP, bool CAUSAL, typename MASKS, typename DIVISION>
using SharedOf =
    StorageOf<SharedStorage<typename SHAPE::T, SHAPE::HEAD_DIM, SHAPE::BLOCK_N, SHAPE::CONSUMERS, SHAPE::STAGES,
                            SHAPE::QUERY_STAGES, typename MaskTraits<MASKS>::Added, MaskTraits<MASKS>::RANGED,
                            DEALT_TILES<MASKS, OVERLAP, CAUSAL, DIVISION::CTAS>>,
              SHAPE::CONSUMERS, DIVISION>;

template <typename SHAPE, bool OVERLAP, bool CAUSAL, typename GIVEN>
struct Consumer
    : MainLoop<
          Consumer<SHAPE, OVERLAP, CAUSAL, GIVEN>,
          SharedOf<SHAPE, OVERLAP, CAUSAL, typename PoliciesOf<GIVEN>::Masks, typename PoliciesOf<GIVEN>::Division>,
          SHAPE, OVERLAP, CAUSAL> {
  using MASKS = typename PoliciesOf<GIVEN>::Masks;
  using DROP = typename PoliciesOf<GIVEN>::Drop;
  using Division = typename PoliciesOf<GIVEN>::Division;
  static constexpr int CONTINUES = PoliciesOf<GIVEN>::CONTINUES;
  static constexpr bool DIVIDED = Division::CTAS > 1;
  static constexpr bool DEALT = DEALT_TILES<MASKS, OVERLAP, CAUSAL, Division::CTAS>;
  using Loop = MainLoop<Consumer, SharedOf<SHAPE, OVERLAP, CAUSAL, MASKS, Division>, SHAPE, OVERLAP, CAUSAL>;
  using Masked = MaskTraits<MASKS>;
  using Loop::all_tiles, Loop::o, Loop::query_state, Loop::rows, Loop::shared, Loop::skipped, Loop::tile, Loop::tiles;
  using Loop::BLOCK_M, Loop::BLOCK_N, Loop::HEAD_DIM;
  using Loop::release, Loop::thread, Loop::tile_row, Loop::warpgroup, Loop::works, Loop::written;
  using typename Loop::Probabilities, typename Loop::Scores, typename Loop::Shared, typename Loop::T;
  static constexpr int BOX = PANEL<HEAD_DIM>, END = TAIL<HEAD_DIM>, WIDE = HEAD_DIM - END;

  const AttentionParams& params;
  int last_key;  // that the first row sees, by the causal mask

  const typename MASKS::Params& masked_params;
  PipelineState<Shared::Masks::STAGES> mask_state;
  TileMasks<MASKS, CAUSAL, BLOCK_M, BLOCK_N> masks;
  DROP drop;
  Partners<Division, Shared, T, HEAD_DIM> partners;

  __device__ __forceinline__ Consumer(Shared& shared, const typename MASKS::Params& params, const DROP& drop,
                                      int warpgroup)
      : Loop(shared, Masked::MODIFIED ? 1.0f : MASKS::call(params).scale_log2, warpgroup),
        params(MASKS::call(params)),
        masked_params(params),
        masks(params),
        drop(drop),
        partners(shared, warpgroup, thread) {}

  // Waits for a query tile. False when there is none, or none of its rows is this warpgroup's.
  __device__ __forceinline__ bool begin_query() {
    Loop::wait_query();
    const WorkOf<MASKS> work = shared.work[works % WORK_TILES];
    all_tiles = work.tiles;
    const int first_row = work.first_row + ROWS * warpgroup;
    if (all_tiles == 0 || first_row >= params.seqlen_q) return false;
    tile = 0;
    if constexpr (MASKS::ANY) {
      masks.begin(work, ROWS * warpgroup + tile_row(0));
      tiles = CAUSAL && !Masked::LISTED && !Masked::RANGED && !Masked::BACKWARDS
                  ? key_tiles_from<MASKS, CAUSAL, BLOCK_N>(masks.first_tile, masked_params, first_row, ROWS)
                  : work.tiles;
    } else {
      tiles = CAUSAL ? key_tiles<CAUSAL, BLOCK_N>(params, first_row, ROWS) : work.tiles;
      if constexpr (DIVIDED && CAUSAL) tiles = Division::share(tiles, partners.rank);
    }
    skipped = work.tiles - tiles;
    last_key = first_row + params.diagonal;
    if constexpr (DROP::ANY) drop.begin(work, params.heads, ROWS * warpgroup + tile_row(0));
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

  // Starts S of the tile of keys.
  __device__ __forceinline__ void score(Scores& s) {
    if constexpr (MASKS::ANY) masks.fetch(tile);
    Loop::score(s);
  }
  __device__ __forceinline__ static constexpr bool see_all() { return false; }  // mask() looks for itself

  __device__ __forceinline__ const WorkTile& previous_work() const { return shared.work[(works - 1) % WORK_TILES]; }

  // Turns products into scores where they are more than that; keys that a row does not see get -inf.
  __device__ __forceinline__ void mask(Scores& s) {
    if constexpr (MASKS::ANY) {
      if constexpr (Masked::ADDED) {
        auto& ring = static_cast<typename Shared::Masks&>(shared);
        mbarrier_wait(ring.full[mask_state.stage][warpgroup], mask_state.phase);
        masks.apply(s, AddedTile<typename MASKS::Mask, BLOCK_N>(ring.tile[mask_state.stage][warpgroup],
                                                                masked_params.masks.mask_strides, masks.shifts));
        release(ring.empty[mask_state.stage][warpgroup]);
        mask_state.advance();
      } else {
        masks.apply(s, NothingAdded());
      }
      return;
    }
    const int first_key = BLOCK_N * key_tile(), keys = params.seqlen_k - first_key;
    const int first_visible = CAUSAL ? last_key - first_key + 1 : BLOCK_N;
    // mutation: a tile that is seen to its last key has none to hide
    if (min(keys, first_visible) >= BLOCK_N) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Loop::hide(s, half, CAUSAL ? min(keys, first_visible + tile_row(half)) : keys);
    }
  }

  // Number of the tile of keys.
  __device__ __forceinline__ int key_tile() const {
    if constexpr (MASKS::ANY) return masks.tile;
    if constexpr (DIVIDED) return Division::CTAS * tile + partners.rank;
    return tile;
  }

  // Probabilities of a tile, less what is dropped.
  __device__ __forceinline__ bool softmax_tile(Scores& s, Probabilities& p, float (&factor)[2], bool) {
    const bool moved = probabilities(s, p, factor);
    if constexpr (DROP::ANY) drop(p, BLOCK_N * key_tile());
    return moved;
  }

  // Probabilities of a tile. The first one's stabilizers are a guess, which softmax_tile corrects where it does not
  // fit.
  __device__ __forceinline__ bool probabilities(Scores& s, Probabilities& p, float (&factor)[2]) {
    if constexpr (Masked::RANGED) {
      if (tile == 0) rows.reset();
      if (masks.hides_tile()) {
#pragma unroll
        for (int i = 0; i < 4 * Loop::STEPS; ++i) p[i / 4][i % 4] = 0;
        return false;
      }
    }
    mask(s);
    if constexpr (MASKS::ANY) {
      // A row's stabilizer is a score that it sees: as long as there is none, each tile is looked at for one.
      if (tile == 0) rows.reset();
      const bool blind = fminf(rows.stabilizer[0], rows.stabilizer[1]) == negative_infinity();
      bool look = __any_sync(FULL_WARP, blind);
      if constexpr (Masked::CAPPED_LATE) {
        if (masks.late && !look) {
          float added[2];
          Loop::exponentials(s, p, rows.stabilizer, added, masks.near_cap());
          if (__all_sync(FULL_WARP, Loop::fits(rows.stabilizer, added))) {
            rows.sum[0] += added[0], rows.sum[1] += added[1];
            return false;
          }
          look = true;
        }
        if (masks.late) masks.cap_near(s);
      }
      return Loop::softmax_tile(s, p, factor, false, look);
    }
    if (tile == 0) Loop::guess_stabilizers(s);
    return Loop::softmax_tile(s, p, factor, false);
  }

  // Adds the head's sink to a row's sum, of which it has a share but no value, and scales the stabilizer. Gives what O
  // is to be multiplied by.
  __device__ __forceinline__ float with_sink(int head, float& sum, float& stabilizer) const {
    const float sink = decltype(masks)::sink_of(masked_params, head), scaled = stabilizer * Loop::scale_of(0);
    const float larger = fmaxf(sink, scaled);
    const float own = sum == 0.0f ? 0.0f : ex2_approx(scaled - finite(larger));
    sum = sum * own + ex2_approx(sink - finite(larger)), stabilizer = larger;
    return own * normalizer(sum);
  }

  // Makes a row of O, of which `inverse` is the factor, and its LSE those of the keys before too. `inverse` becomes 1.
  // The kernel ahead, which may have written both, has ended: the copies that came here were issued behind it.
  __device__ __forceinline__ void finish_continued(const WorkTile& work, int row, int half, float& inverse,
                                                   float stabilizer, float sum) {
    const bool exists = row < params.seqlen_q;
    float* lse = params.lse + (static_cast<int64>(work.batch) * params.heads + work.head) * params.seqlen_q + row;
    const Shares shares = continue_row(exists ? *lse : negative_infinity(), stabilizer, sum);
    __syncwarp();  // all lanes of the row have read what one writes
    if (exists && thread % 4 == 0) *lse = log_sum_exp(stabilizer, sum);
    const Strides& strides = params.out_strides;
    const T* out = static_cast<const T*>(params.out) + work.batch * strides.batch + work.head * strides.head +
                   row * strides.row + thread % 4 * 2;
#pragma unroll
    for (int at = 2 * half; at < CONTINUES / 2; at += 4) {
      float x[2] = {o[at] * (inverse * shares.own), o[at + 1] * (inverse * shares.own)};
      add_before(x, out + 2 * (at - 2 * half), exists ? shares.before : 0.0f);
      o[at] = x[0], o[at + 1] = x[1];
    }
    inverse = 1.0f;
  }

  // Writes this CTA's columns of O, over all keys, and LSE of a finished query tile, of which O is over some.
  __device__ __forceinline__ void finish_divided(const WorkTile& work, const Rows& done) {
    constexpr int OWN = Partners<Division, Shared, T, HEAD_DIM>::OWN;
    const int first_row = work.first_row + ROWS * warpgroup, own_rows[2] = {tile_row(0), tile_row(1)};
    float stabilizer[2] = {done.stabilizer[0], done.stabilizer[1]}, inverse[2];
    float sum[2] = {quad_sum(done.sum[0]), quad_sum(done.sum[1])};
    partners.add_up(o, stabilizer, sum, written, Loop::scale_of(0), own_rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      inverse[half] = normalizer(sum[half]);
      const int row = first_row + own_rows[half];
      if (params.lse != nullptr && partners.rank == 0 && row < params.seqlen_q && thread % 4 == 0) {
        const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer[half] * Loop::scale_of(half), sum[half]);
      }
    }
    const Strides& strides = params.out_strides;
    T* const out = static_cast<T*>(params.out) + work.batch * strides.batch + work.head * strides.head;
    store_blocks<T, OWN, Division::COLUMNS>(out, strides.row, o, inverse, partners.first_column(), first_row,
                                            params.seqlen_q);
  }

  // Writes O and LSE of a finished query tile.
  __device__ __forceinline__ void finish(const WorkTile& work, const Rows& done) {
    if constexpr (DIVIDED) {
      finish_divided(work, done);
      return;
    }
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
      if constexpr (DROP::ANY) inverse[half] *= drop.scale;
      const int row = first_row + tile_row(half);
      if constexpr (CONTINUES > 0) {
        finish_continued(work, row, half, inverse[half], stabilizer * (Masked::SINKS ? 1.0f : Loop::scale_of(half)),
                         sum);
        continue;
      }
      if (params.lse != nullptr && row < params.seqlen_q && thread % 4 == 0) {
        const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;
        const float scale = Masked::SINKS ? 1.0f : Loop::scale_of(half);
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer * scale, sum);
      }
    }
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += OUT_COLUMNS<HEAD_DIM>) {
      if (written > 0 || column > 0)
        named_barrier_sync(OUT_EMPTY + warpgroup, OUT_THREADS);  // what was there is stored
      put<OUT_COLUMNS<HEAD_DIM>>(shared.out[warpgroup], column, inverse);
      if constexpr (DEALT) {
        if (thread == 0) shared.stored(warpgroup) = work;
      }
      fence_proxy_async();
      named_barrier_arrive(OUT_FULL + warpgroup, OUT_THREADS);
    }
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

  __device__ __forceinline__ void run() {
    Loop::run();
    if constexpr (DIVIDED) {  // partners' last arrivals have come
      cluster_arrive<false>();
      cluster_wait();
    }
    if constexpr (DEALT) {
      if (written > 0) named_barrier_sync(OUT_EMPTY + warpgroup, OUT_THREADS);
      if (thread == 0) shared.stored(warpgroup) = {0, 0, 0, 0};
      named_barrier_arrive(OUT_FULL + warpgroup, OUT_THREADS);
    }
  }
};

}  // namespace microsdpa::hopper::throughput
