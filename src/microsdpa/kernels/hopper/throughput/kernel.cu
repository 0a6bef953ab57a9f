// Attention calls that fill the chip: hundreds of TFLOP/s from tensor cores that seldom wait.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for tiles of BLOCK_M = 64 CONSUMERS queries of one
// head. Under Continuing masks, O and LSE go on from those of other keys, which lie where they are written. Under
// Dividing masks, the CTAs of a cluster share the keys of each tile and add up their parts (divided.cuh).
// One CTA per SM, or one cluster, stays and takes one tile after the other. Roles: one warp of the first warpgroup
// issues the loads, the others the stores; each of the other warpgroups, the consumers, computes 64 rows with BLOCK_N
// keys at a time. Pipeline:
//   1. TMA fills rings of Q, K and V tiles, across query tiles
//   2. a consumer starts P V of a tile of keys and S of the next one, also of the next query tile's first
//   3. it turns the scores into probabilities while other consumers' products run, or its own P V
//   4. a finished O goes to shared memory, from where TMA stores it while the next products run
// Bound by: the tensor cores and the power they take at D = 128 and more; at D = 64 the exponentials (16 per clock)
//           take as long as the products. docs/hopper-throughput.md has the measurements.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "../common/boxes.cuh"
#include "consumer.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::throughput {

// Registers of a thread, which the warpgroups share out anew once they know their roles.
template <int CONSUMERS>
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2   ? 232
                                   : CONSUMERS == 3 ? 160
                                                    : 112;
template <int CONSUMERS>
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;

// Copies TILE_ROWS rows of one head, from `row` on. Rows and columns past the tensor become zeros.
template <int TILE_ROWS, int HEAD_DIM, typename T>
__device__ __forceinline__ void load_tile(T* shared, const Boxes& boxes, Mbarrier& full, int row, int head, int batch) {
  constexpr int BOX = PANEL<HEAD_DIM>, COUNT = PANELS<HEAD_DIM>;
#pragma unroll
  for (int panel = 0; panel < COUNT; ++panel) {
    tma_load(shared + panel * TILE_ROWS * BOX, boxes.panel, full, panel * BOX, row, head, batch);
  }
  if constexpr (TAIL<HEAD_DIM> > 0) {
    tma_load(shared + COUNT * TILE_ROWS * BOX, boxes.tail, full, COUNT * BOX, row, head, batch);
  }
}

// The query tiles of a CTA: those that its place among the CTAs gives it, one in each round, and the tiles of keys that
// masks leave to each. One thread.
template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N, int HEAD_DIM, typename DIVISION>
struct FixedOrder {
  const typename MASKS::Params& params;
  const Schedule<CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, DIVISION::CTAS> schedule;

  __device__ __forceinline__ explicit FixedOrder(const typename MASKS::Params& params)
      : params(params), schedule(MASKS::call(params)) {}

  __device__ __forceinline__ bool has(int round) const { return schedule.has(round); }
  __device__ __forceinline__ WorkTile work(int round) {
    WorkTile work = masked_work<MASKS, CAUSAL, BLOCK_M, BLOCK_N>(params, schedule.work(round));
    if constexpr (DIVISION::CTAS > 1) {
      if (work.tiles > 0) work.tiles = DIVISION::share(work.tiles, cluster_rank());
    }
    return work;
  }
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void look_ahead() {}
};

// The query tiles of a CTA, which takes the next one when it comes to the last keys of the one before.
template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N, int HEAD_DIM>
struct DealtOrder {
  const typename MASKS::Params& params;
  const Schedule<CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM> schedule;
  uint32* const counter;  // of query tiles that are taken beyond the CTAs' first ones; zero between launches
  int next = static_cast<int>(blockIdx.x);
  uint32 taken;

  __device__ __forceinline__ explicit DealtOrder(const typename MASKS::Params& params)
      : params(params), schedule(MASKS::call(params)), counter(static_cast<uint32*>(MASKS::call(params).workspace)) {}

  __device__ __forceinline__ bool has(int) const { return next < schedule.count(); }
  __device__ __forceinline__ WorkTile work(int) const {
    return masked_work<MASKS, CAUSAL, BLOCK_M, BLOCK_N>(params, schedule.numbered(next));
  }
  // Asks for the next one's number, somewhat before it is needed. One thread.
  __device__ __forceinline__ void ask() { taken = atomicAdd(counter, 1u); }
  // Goes on to the next one. Each query tile is counted once: who counts the last one leaves the counter as it was.
  __device__ __forceinline__ void look_ahead() { go_on(taken, true); }

 protected:
  __device__ __forceinline__ void go_on(uint32 number, bool resets) {
    const int ctas = static_cast<int>(gridDim.x);
    next = ctas + static_cast<int>(number);
    if (next == ctas + schedule.count() - 1 && resets) *counter = 0;
  }
};

// The same where rows see ranges of keys. One warp.
template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N, int HEAD_DIM>
struct RangedOrder : DealtOrder<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM> {
  using Base = DealtOrder<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM>;
  using Base::params, Base::schedule, Base::next, Base::taken;
  RowRanges<BLOCK_M, BLOCK_N> ranges;  // of the next one

  __device__ __forceinline__ explicit RangedOrder(const MaskedParams& params) : Base(params) {
    if (Base::has(0)) ranges.load(params, schedule.numbered(next));
  }

  __device__ __forceinline__ RangedWork work(int) const {
    const int first_row = ranges.work.first_row, first = first_key_tile<MASKS, BLOCK_N>(params, first_row);
    const int tiles = key_tiles_from<MASKS, CAUSAL, BLOCK_N>(first, params, first_row, BLOCK_M);
    return ranges.found(params.call.seqlen_k, first, first + tiles);
  }
  __device__ __forceinline__ void ask() {
    if (lane_index() == 0) Base::ask();
  }
  // Begins to read the next one's ranges.
  __device__ __forceinline__ void look_ahead() {
    Base::go_on(__shfl_sync(FULL_WARP, taken, 0), lane_index() == 0);
    if (Base::has(0)) ranges.load(params, schedule.numbered(next));
  }
};

template <typename MASKS, bool CAUSAL, int BLOCK_M, int BLOCK_N, int HEAD_DIM, typename DIVISION, bool RANGED,
          bool DEALT>
using OrderOf = IfElse<RANGED, RangedOrder<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM>,
                       IfElse<DEALT, DealtOrder<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM>,
                              FixedOrder<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, DIVISION>>>;

// The tiles of keys that a CTA visits for a query tile.
template <typename DIVISION, typename MASKS, int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ auto tiles_visited(const typename MASKS::Params& params, const WorkOf<MASKS>& work) {
  if constexpr (DIVISION::CTAS > 1) {
    return SharedTiles<DIVISION::CTAS>();
  } else {
    return VisitedTiles<MASKS, BLOCK_M, BLOCK_N>(params, work);
  }
}

// Issues every copy of the CTA, in the order in which the tiles are needed, and says which query tiles they are of. One
// thread issues; where rows have ranges, its warp finds out what.
template <bool CAUSAL, typename MASKS, typename DIVISION, typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS,
          int STAGES, int QUERY_STAGES, typename MASK, bool RANGED, bool DEALT>
__device__ __forceinline__ void produce(
    SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, MASK, RANGED, DEALT>& shared, bool issues,
    const typename MASKS::Params& masked_params, const Boxes& query, const Boxes& key, const Boxes& value) {
  const AttentionParams& params = MASKS::call(masked_params);
  constexpr int BLOCK_M = ROWS * CONSUMERS;
  constexpr int TILE_BYTES = BLOCK_N * STORED_COLUMNS<HEAD_DIM> * static_cast<int>(sizeof(T));
  constexpr int QUERY_BYTES = BLOCK_M * STORED_COLUMNS<HEAD_DIM> * static_cast<int>(sizeof(T));
  using Work = WorkOf<MASKS>;
  OrderOf<MASKS, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, DIVISION, RANGED, DEALT> order(masked_params);
  PipelineState<QUERY_STAGES> query_state;
  PipelineState<STAGES> key_state, value_state;
  int works = 0;

  // Says what comes next, once there is room for its queries.
  auto announce = [&](const Work& work) {
    mbarrier_wait(shared.query_empty[query_state.stage], query_state.phase ^ 1);
    shared.work[works++ % WORK_TILES] = work;
  };

  for (int round = 0; order.has(round); ++round) {
    const Work work = order.work(round);
    if (work.tiles == 0) continue;
    const auto visited = tiles_visited<DIVISION, MASKS, BLOCK_M, BLOCK_N>(masked_params, work);
    if (issues) {
      announce(work);
      Mbarrier& query_full = shared.query_full[query_state.stage];
      mbarrier_arrive_expect(query_full, QUERY_BYTES);
#pragma unroll
      for (int i = 0; i < CONSUMERS; ++i) {
        load_tile<ROWS, HEAD_DIM>(shared.query[query_state.stage][i], query, query_full, work.first_row + ROWS * i,
                                  work.head, work.batch);
      }
      query_state.advance();
    }

    const int head_kv = work.head / (params.heads / params.heads_kv);
    for (int tile = 0; tile <= work.tiles; ++tile) {  // K of a tile is needed before V of the one ahead of it
      if (RANGED && tile == work.tiles - 1) order.ask();
      if (tile == work.tiles) order.look_ahead();
      if (!issues) continue;
      if (tile < work.tiles) {
        Mbarrier& full = shared.key_full[key_state.stage];
        mbarrier_wait(shared.key_empty[key_state.stage], key_state.phase ^ 1);
        mbarrier_arrive_expect(full, TILE_BYTES);
        load_tile<BLOCK_N, HEAD_DIM>(shared.key[key_state.stage], key, full, BLOCK_N * visited[tile], head_kv,
                                     work.batch);
        key_state.advance();
        if (!RANGED && tile == work.tiles - 1) order.ask();
      }
      if (tile > 0) {
        Mbarrier& full = shared.value_full[value_state.stage];
        mbarrier_wait(shared.value_empty[value_state.stage], value_state.phase ^ 1);
        mbarrier_arrive_expect(full, TILE_BYTES);
        load_tile<BLOCK_N, HEAD_DIM>(shared.value[value_state.stage], value, full, BLOCK_N * visited[tile - 1], head_kv,
                                     work.batch);
        value_state.advance();
      }
    }
  }
  if (!issues) return;
  announce(Work{});
  mbarrier_arrive(shared.query_full[query_state.stage]);
}

// Copies tiles of a mask of numbers: BLOCK_N keys of ROWS queries, or of the one row that all queries have. One thread.
template <int BLOCK_N, typename MASK>
struct MaskCopies {
  static constexpr int COLUMNS = AddedTile<MASK, BLOCK_N>::PANEL_COLUMNS;
  static constexpr int TILE_BYTES = ROWS * BLOCK_N * static_cast<int>(sizeof(MASK));
  static_assert(BLOCK_N % COLUMNS == 0, "whole panels arrive");

  const Strides& strides;
  const TensorMap& mask;

  __device__ __forceinline__ MaskCopies(const MaskedParams& params, const TensorMap& mask)
      : strides(params.masks.mask_strides), mask(mask) {}

  __device__ __forceinline__ void operator()(MASK* tile, Mbarrier& full, int key, int row, int head, int batch) const {
    mbarrier_arrive_expect(full, TILE_BYTES);
#pragma unroll
    for (int panel = 0; panel < BLOCK_N / COLUMNS; ++panel) {
      tma_load(tile + panel * ROWS * COLUMNS, mask, full, key + panel * COLUMNS, strides.row != 0 ? row : 0,
               strides.head != 0 ? head : 0, strides.batch != 0 ? batch : 0);
    }
  }
};

// The same of one whose rows need not start on 16 bytes: of each row all 16 bytes that some of its keys lie in. One
// warp.
template <int BLOCK_N, typename T>
struct MaskCopies<BLOCK_N, Unaligned<T>> {
  static constexpr int COLUMNS = AddedTile<Unaligned<T>, BLOCK_N>::COLUMNS, BYTES = sizeof(T), CHUNK = 16 / BYTES;
  // Chunks of 16 bytes that a row always has, and rows that the warp has lanes for; there may be one chunk more.
  static constexpr int CHUNKS = BLOCK_N / CHUNK, ROWS_AT_ONCE = 32 / CHUNKS;

  const MaskedParams& params;
  const char* begin;  // of the mask
  const char* end;

  // Rows of a tile in the mask.
  struct Rows {
    const char* first;
    int64 stride;
    int count;
  };

  __device__ __forceinline__ explicit MaskCopies(const MaskedParams& params)
      : params(params), begin(static_cast<const char*>(params.masks.mask)) {
    const AttentionParams& call = params.call;
    const T* const last = mask_row<T>(params.masks, call.batch - 1, call.heads - 1, call.seqlen_q - 1);
    end = reinterpret_cast<const char*>(last + call.seqlen_k);
  }

  __device__ __forceinline__ void operator()(T* tile, Mbarrier& full, int key, int row, int head, int batch) const {
    const int64 stride = BYTES * params.masks.mask_strides.row;
    const Rows rows{reinterpret_cast<const char*>(mask_row<T>(params.masks, batch, head, row) + key), stride,
                    stride != 0 ? min(ROWS, params.call.seqlen_q - row) : 1};
    const char* const last = rows.first + (ROWS - 1) * stride;
    // What lies behind a row's keys, and behind a head's rows, is hidden later.
    // mutation: where the mask has all bytes, both ways copy the same
    if (rows.first - 16 >= begin && last + BYTES * BLOCK_N + 16 <= end) {
      copy<false>(tile, rows);
    } else {
      copy<true>(tile, rows);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    if (elect_one()) mbarrier_arrive(full);
  }

 private:
  // AT_END: some of the bytes may lie outside the mask, and are zeros.
  template <bool AT_END>
  __device__ __forceinline__ void copy(T* tile, const Rows& rows) const {
    const int lane = lane_index(), own = lane / CHUNKS, number = lane % CHUNKS, count = rows.stride != 0 ? ROWS : 1;
    const char* row = rows.first + own * rows.stride;
    T* to = tile + own * COLUMNS + number * CHUNK;
    if (own < ROWS_AT_ONCE) {
#pragma unroll(AT_END ? 1 : 4)
      for (int i = own; i < count; i += ROWS_AT_ONCE) {
        // mutation: a row behind the last one is read where the mask has it, and hidden later
        copy_chunk<AT_END>(to, row, number, i < rows.count);
        row += ROWS_AT_ONCE * rows.stride, to += ROWS_AT_ONCE * COLUMNS;
      }
    }
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      // mutation: a row behind the last one is read where the mask has it, and hidden later
      copy_chunk<AT_END>(tile + i * COLUMNS + CHUNKS * CHUNK, rows.first + i * rows.stride, CHUNKS, i < rows.count);
    }
  }

  template <bool AT_END>
  __device__ __forceinline__ void copy_chunk(T* to, const char* row, int number, bool is_row) const {
    const char* const chunk = row - reinterpret_cast<uint64>(row) % 16 + 16 * number;
    if constexpr (!AT_END) {
      cp_async<16>(to, chunk);
    } else {
      const int64 left = is_row ? end - chunk : 0;
      const int valid = left > 16 ? 16 : left < 0 ? 0 : static_cast<int>(left);
      if (chunk >= begin) {
        // mutation: a copy of no bytes reads nothing
        cp_async<16>(to, valid > 0 ? chunk : row - reinterpret_cast<uint64>(row) % 16, valid);
      } else {  // the mask itself does not start on 16 bytes
        for (int i = static_cast<int>(begin - chunk); i < valid; i += BYTES) {
          to[i / BYTES] = *reinterpret_cast<const T*>(chunk + i);
        }
      }
    }
  }
};

constexpr int EVERY_CONSUMER = -1;

// Copies the tiles of a mask of numbers, to each consumer those that it computes; or to one alone. As many threads as
// that takes.
template <bool CAUSAL, typename MASKS, typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES,
          int QUERY_STAGES, typename MASK>
__device__ __forceinline__ void produce_masks(
    SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, MASK>& shared, const MaskedParams& params,
    const MaskCopies<BLOCK_N, MASK>& copy, int only = EVERY_CONSUMER) {
  using Ring = typename SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, MASK>::Masks;
  constexpr int BLOCK_M = ROWS * CONSUMERS;
  const Schedule<CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM> schedule(params.call);
  Ring& ring = shared;
  PipelineState<Ring::STAGES> state[CONSUMERS];

  for (int round = 0; schedule.has(round); ++round) {
    const WorkTile work = masked_work<MASKS, CAUSAL, BLOCK_M, BLOCK_N>(params, schedule.work(round));
    const int first = first_key_tile<MASKS, BLOCK_N>(params, work.first_row);
    const VisitedTiles<MASKS, BLOCK_M, BLOCK_N> visited(params, work);
    for (int tile = 0; tile < work.tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < CONSUMERS; ++i) {
        const int first_row = work.first_row + ROWS * i;
        if ((only != EVERY_CONSUMER && i != only) || first_row >= params.call.seqlen_q) continue;
        if (!MaskTraits<MASKS>::BACKWARDS &&
            tile >= key_tiles_from<MASKS, CAUSAL, BLOCK_N>(first, params, first_row, ROWS)) {
          continue;
        }
        const int stage = state[i].stage;
        mbarrier_wait(ring.empty[stage][i], state[i].phase ^ 1);
        copy(ring.tile[stage][i], ring.full[stage][i], BLOCK_N * visited[tile], first_row, work.head, work.batch);
        state[i].advance();
      }
    }
  }
}

// Copies columns of O from shared memory, as many as there are at once. One thread.
template <int HEAD_DIM, typename T>
__device__ __forceinline__ void store_columns(const Boxes& out, const T* tile, int column, const WorkTile& work,
                                              int first_row) {
  constexpr int BOX = PANEL<HEAD_DIM>, WIDE = HEAD_DIM - TAIL<HEAD_DIM>;
#pragma unroll
  for (int panel = 0; panel < OUT_COLUMNS<HEAD_DIM> / BOX; ++panel) {
    tma_store(out.panel, tile + panel * ROWS * BOX, column + panel * BOX, first_row, work.head, work.batch);
  }
  if constexpr (TAIL<HEAD_DIM> > 0) {
    tma_store(out.tail, tile + ROWS * WIDE, WIDE, first_row, work.head, work.batch);
  }
  tma_store_commit();
}

// Copies what some of the consumers leave in shared memory to O: `first`, and every STORERS-th after it. One warp.
template <bool CAUSAL, int STORERS, typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES,
          typename MASK>
__device__ __forceinline__ void store(
    SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, MASK, false, false>& shared,
    const AttentionParams& params, const Boxes& out, int first) {
  const Schedule<CAUSAL, ROWS * CONSUMERS, BLOCK_N, HEAD_DIM> schedule(params);
  const bool elected = elect_one();
  int before = 0;  // consumers, one bit each, that have written
  for (int round = 0; schedule.has(round); ++round) {
    const WorkTile work = schedule.work(round);
    if (work.tiles == 0) continue;
    for (int column = 0; column < HEAD_DIM; column += OUT_COLUMNS<HEAD_DIM>) {
      for (int i = first; i < CONSUMERS; i += STORERS) {
        const int first_row = work.first_row + ROWS * i;
        if (first_row >= params.seqlen_q) continue;
        if (before >> i & 1) {
          if (elected) tma_store_wait_read<0>();
          // mutation: the lanes meet for an aligned barrier, which the emulator does not ask for; it counts every lane
          __syncwarp();
          named_barrier_arrive(OUT_EMPTY + i, OUT_THREADS);
        }
        named_barrier_sync(OUT_FULL + i, OUT_THREADS);
        if (elected) store_columns<HEAD_DIM>(out, shared.out[i], column, work, first_row);
        before |= 1 << i;
        // mutation: the lanes meet for an aligned barrier, which the emulator does not ask for; it counts every lane
        __syncwarp();
      }
    }
  }
  if (elected) tma_store_wait_read<0>();
}

// The same of one consumer, which says what it leaves, where CTAs take query tiles as they come to them. One warp.
template <bool CAUSAL, int STORERS, typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES,
          typename MASK, bool RANGED>
__device__ __forceinline__ void store(
    SharedStorage<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, MASK, RANGED, true>& shared,
    const AttentionParams&, const Boxes& out, int consumer) {
  static_assert(CONSUMERS <= STORERS, "a warp for each");
  if (consumer >= CONSUMERS) return;
  const bool elected = elect_one();
  bool before = false;
  while (true) {
    for (int column = 0; column < HEAD_DIM; column += OUT_COLUMNS<HEAD_DIM>) {
      if (before) {
        if (elected) tma_store_wait_read<0>();
        // mutation: the lanes meet for an aligned barrier, which the emulator does not ask for; it counts every lane
        __syncwarp();
        named_barrier_arrive(OUT_EMPTY + consumer, OUT_THREADS);
      }
      named_barrier_sync(OUT_FULL + consumer, OUT_THREADS);
      const WorkTile work = shared.stored(consumer);
      if (work.tiles == 0) return;
      if (elected) {
        store_columns<HEAD_DIM>(out, shared.out[consumer], column, work, work.first_row + ROWS * consumer);
      }
      before = true;
      // mutation: the lanes meet for an aligned barrier, which the emulator does not ask for; it counts every lane
      __syncwarp();
    }
  }
}

// STAGES, QUERY_STAGES: tiles of K and of V, and of Q, that there is room for. OVERLAP: a consumer's exponentials run
// beside its own P V too, for which P takes twice the registers; else beside the other consumers' products alone. MAPS:
// further tensor maps, of a mask of aligned numbers or of the tails of query, key, value and out. GIVEN: the masks, or
// Dropping<masks>, Continuing<masks> or Dividing<masks>.
template <typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES, bool OVERLAP, bool CAUSAL,
          typename GIVEN, typename... MAPS>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    attention(const __grid_constant__ typename GIVEN::Params given, const __grid_constant__ TensorMap query,
              const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
              const __grid_constant__ TensorMap out, const __grid_constant__ MAPS... maps) {
  static_assert(CONSUMERS >= 2 && CONSUMERS <= 4, "the registers of an SM are shared out among two to four consumers");
  using MASKS = typename PoliciesOf<GIVEN>::Masks;
  using Drop = typename PoliciesOf<GIVEN>::Drop;
  using Division = typename PoliciesOf<GIVEN>::Division;
  using Masked = MaskTraits<MASKS>;
  constexpr bool UNALIGNED = ElementOf<typename Masked::Added>::UNALIGNED, MAPPED = Masked::ADDED && !UNALIGNED;
  static_assert(sizeof...(MAPS) == (TAIL<HEAD_DIM> > 0 ? 4 : MAPPED), "a map for each, and no mask with tails");
  using Shape = TileShape<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES>;
  using Shared = SharedOf<Shape, OVERLAP, CAUSAL, MASKS, Division>;
  constexpr bool DIVIDED = Division::CTAS > 1;
  static_assert(!DIVIDED || OVERLAP, "consumers that add up their parts have time for it beside products");
  // Warps of the first warpgroup, beside the one that loads, and those that load masks.
  constexpr int STORERS = UNALIGNED ? 1 : Masked::ADDED ? 2 : 3;
  static_assert(!UNALIGNED || CONSUMERS == 2, "a warp copies the mask of each consumer");
  auto& shared = dynamic_shared<Shared>();
  const typename MASKS::Params& params = PoliciesOf<GIVEN>::masked(given);
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * CONSUMERS;  // warps
#pragma unroll
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      mbarrier_init(shared.query_full[stage], 1);
      mbarrier_init(shared.query_empty[stage], CONSUMERS * WARPGROUP_THREADS);
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared.key_full[stage], 1);
      mbarrier_init(shared.key_empty[stage], READERS);
      mbarrier_init(shared.value_full[stage], 1);
      mbarrier_init(shared.value_empty[stage], READERS);
    }
    if constexpr (Masked::ADDED) {
#pragma unroll
      for (int i = 0; i < Shared::Masks::STAGES * CONSUMERS; ++i) {
        mbarrier_init(shared.full[i / CONSUMERS][i % CONSUMERS], 1);
        mbarrier_init(shared.empty[i / CONSUMERS][i % CONSUMERS], READERS / CONSUMERS);
      }
    }
    if constexpr (DIVIDED) shared.begin_exchanges();
    mbarrier_init_fence();
  }
  if constexpr (DIVIDED) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_THREADS, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS<CONSUMERS>>();
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    const bool issues = warp == 0 && elect_one();
    if (Masked::RANGED ? warp == 0 : issues) {
      prefetch_tensor_map(query);
      prefetch_tensor_map(key);
      prefetch_tensor_map(value);
      // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
      grid_dependency_wait();
      produce<CAUSAL, MASKS, Division>(shared, !Masked::RANGED || issues, params, boxes_of<HEAD_DIM, 0>(query, maps...),
                                       boxes_of<HEAD_DIM, 1>(key, maps...), boxes_of<HEAD_DIM, 2>(value, maps...));
    } else if (Masked::ADDED && warp > STORERS) {
      if constexpr (UNALIGNED) {
        grid_dependency_wait();
        produce_masks<CAUSAL, MASKS>(shared, params, MaskCopies<BLOCK_N, typename MASKS::Mask>(params),
                                     warp - 1 - STORERS);
      } else if constexpr (Masked::ADDED) {
        if (!elect_one()) return;
        const TensorMap& mask = further<0>(maps...);
        prefetch_tensor_map(mask);
        grid_dependency_wait();
        produce_masks<CAUSAL, MASKS>(shared, params, MaskCopies<BLOCK_N, typename MASKS::Mask>(params, mask));
      }
    } else if (!DIVIDED && warp > 0) {
      store<CAUSAL, STORERS>(shared, MASKS::call(params), boxes_of<HEAD_DIM, 3>(out, maps...), warp - 1);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS<CONSUMERS>>();
    if constexpr (Drop::ANY) {
      grid_dependency_wait();  // the kernel ahead may have drawn the seed
      if (blockIdx.x == 0 && threadIdx.x == WARPGROUP_THREADS) keep_state(given.dropout);
    }
    Consumer<Shape, OVERLAP, CAUSAL, GIVEN> consumer(shared, params, Drop(given), warpgroup - 1);
    consumer.run();
  }
}

}  // namespace microsdpa::hopper::throughput
