// The warps of hopper/varlen/kernel.cu that bring queries, keys and values.
#pragma once

#include "../../ptx/control.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "../common/boxes.cuh"
#include "scheduler.cuh"

namespace microsdpa::hopper::varlen {

constexpr int QUERY_LOADERS = 2;  // warps

// Where a lane's box of a tile of keys lies.
struct BoxPlace {
  int row;
  int page;        // or batch entry; -1 where nothing is to be read: bulk copies bring zeros from outside a tensor
  bool misplaced;  // the cache does not have such a page
};

template <typename C, bool PAGED>
__device__ __forceinline__ BoxPlace box_place(const VarlenParams& params, const Segment& segment, int tile) {
  const int key = tile * C::BLOCK_N + static_cast<int>(threadIdx.x % 32) % C::BOXES * C::BOX_ROWS;
  if constexpr (!PAGED) return {segment.first_key + key, params.key_offsets != nullptr ? 0 : segment.b, false};
  if (key >= segment.end || key + C::BOX_ROWS <= segment.from) return {0, -1, false};
  const Keys<ANY_PAGES>::Place place = Keys<ANY_PAGES>::place(params, key);
  const int page = params.page_table[segment.b * params.table_stride + place.number];
  const bool exists = static_cast<uint32>(page) < static_cast<uint32>(params.pages);
  return {place.within, exists ? page : -1, !exists};
}

// Starts the copies of a tile of K or V: a lane for each box. One warp.
template <typename C>
__device__ __forceinline__ void load_tile(typename C::T* shared, const Boxes& boxes, Mbarrier& full,
                                          const BoxPlace& place, int head_kv) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (elect_one()) mbarrier_arrive_expect(full, C::TILE_BYTES);
  // mutation: the phase waits for that arrival, whichever copies are done before
  __syncwarp();
#pragma unroll
  for (int i = lane; i < C::BOXES * C::PANELS; i += 32) {
    const int box = i % C::BOXES, panel = i / C::BOXES;
    tma_load(shared + (panel * C::BLOCK_N + box * C::BOX_ROWS) * C::COLUMNS, boxes.panel, full, panel * C::COLUMNS,
             place.row, head_kv, place.page);
  }
  if constexpr (C::TAIL > 0) {
    constexpr int WIDE = C::PANELS * C::COLUMNS;
    if (lane < C::BOXES) {
      tma_load(shared + C::BLOCK_N * WIDE + lane * C::BOX_ROWS * C::TAIL, boxes.tail, full, WIDE, place.row, head_kv,
               place.page);
    }
  }
}

// Whether a segment's last tile reaches past the sequence's keys: V of what lies there must not be multiplied, not even
// by zeros, since it may be NaN.
template <typename C>
__device__ __forceinline__ bool reaches_past(const Segment& segment) {
  // mutation: in a tile that ends with the last key there is nothing to clean
  return (segment.first_tile + segment.tiles) * C::BLOCK_N > segment.keys;
}
// Which of the segment's tiles, in the order in which they are visited, that is.
template <typename MASKS>
__device__ __forceinline__ int last_place(const Segment& segment) {
  return MASKS::BACKWARDS ? 0 : segment.tiles - 1;
}

// Issues the copies of keys and values in the order in which they are needed. One warp.
template <typename C, typename MASKS, bool PAGED>
__device__ __forceinline__ void load_keys(SharedStorage<C>& shared, const VarlenParams& params, const Boxes& key,
                                          const Boxes& value) {
  PipelineState<C::QUERY_STAGES> state;
  PipelineState<C::STAGES> key_state, value_state;
  const bool elected = elect_one();
  for (int segments = 0;; ++segments) {
    mbarrier_wait(shared.described[state.stage], state.phase);
    const Segment segment = shared.segment[segments % SEGMENTS];
    state.advance();
    if (segment.tiles == 0) return;

    const auto place_of = [&](int place) {
      const int last = segment.first_tile + segment.tiles - 1;
      return box_place<C, PAGED>(params, segment, MASKS::BACKWARDS ? last - place : segment.first_tile + place);
    };
    const int to_clean = reaches_past<C>(segment) ? last_place<MASKS>(segment) : -1;
    BoxPlace next = place_of(0), before{};
    for (int tile = 0; tile <= segment.tiles; ++tile) {  // K of a tile is needed before V of the one ahead of it
      const BoxPlace now = next;
      if (tile < segment.tiles) {
        // mutation: a place behind the last tile is not used
        if (tile + 1 < segment.tiles) next = place_of(tile + 1);
        mbarrier_wait(shared.key_empty[key_state.stage], key_state.phase ^ 1);
        load_tile<C>(shared.key[key_state.stage], key, shared.key_full[key_state.stage], now, segment.head_kv);
        key_state.advance();
      }
      if (tile > 0) {
        mbarrier_wait(shared.value_empty[value_state.stage], value_state.phase ^ 1);
        if (PAGED && __any_sync(FULL_WARP, before.misplaced)) {
          if (elected) shared.misplaced[segments % SEGMENTS] = 1;  // whoever waits for the tile sees it
          // mutation: the lane that writes it is the one that arrives
          __syncwarp();
        }
        Mbarrier& full =
            tile - 1 == to_clean ? shared.value_arrived[value_state.stage] : shared.value_full[value_state.stage];
        load_tile<C>(shared.value[value_state.stage], value, full, before, segment.head_kv);
        value_state.advance();
      }
      before = now;
    }
  }
}

// Starts the copies of a segment's queries, of all heads of its key head: [D, H, S_q, B]. Rows past the sequence's last
// query are others' queries, or zeros. One thread.
template <typename C, int PACK>
__device__ __forceinline__ void start_queries(SharedStorage<C>& shared, const VarlenParams& params, const Boxes& query,
                                              const Segment& segment, int stage) {
  Mbarrier& full = shared.query_full[stage];
  typename C::T* target = shared.query[stage][0];
  const int head = segment.head_kv * PACK, row = segment.first_query + segment.first_row / PACK;
  const int b = params.query_offsets != nullptr ? 0 : segment.b;
  mbarrier_arrive_expect(full, C::QUERY_BYTES);
#pragma unroll
  for (int panel = 0; panel < C::PANELS; ++panel) {
    tma_load(target + panel * C::PANEL_ROWS * C::COLUMNS, query.panel, full, panel * C::COLUMNS, head, row, b);
  }
  if constexpr (C::TAIL > 0) {
    constexpr int WIDE = C::PANELS * C::COLUMNS;
    tma_load(target + C::PANEL_ROWS * WIDE, query.tail, full, WIDE, head, row, b);
  }
}

// Makes zeros of the rows that no copy of queries writes, in all stages: all of a CTA's threads, before they part.
template <typename C>
__device__ __forceinline__ void clear_rows(SharedStorage<C>& shared) {
  constexpr int LEFT = C::PANEL_ROWS - C::TILE_ROWS, STAGE = C::PANEL_ROWS * C::STORED;
  if constexpr (C::BULK_QUERIES && LEFT > 0) {
    for (int stage = 0; stage < C::QUERY_STAGES; ++stage) {
      for (int i = static_cast<int>(threadIdx.x); i < LEFT * C::STORED / 8; i += static_cast<int>(blockDim.x)) {
        constexpr int CHUNKS = LEFT * C::COLUMNS / 8, WIDE = C::PANELS * C::COLUMNS;
        const int panel = min(i / CHUNKS, C::PANELS), place = i - panel * CHUNKS;
        const int width = panel < C::PANELS ? C::COLUMNS : C::TAIL;
        auto* rows = shared.query[stage][0] + C::PANEL_ROWS * min(panel * C::COLUMNS, WIDE) + C::TILE_ROWS * width;
        reinterpret_cast<uint4*>(rows)[place] = make_uint4(0, 0, 0, 0);
      }
    }
    fence_proxy_async();
  }
}

// Copies a segment's rows of queries: one of two warps, each with every other 32 chunks of 16 bytes. Rows past the
// segment's are zeros, and columns past those of Q.
template <typename C, typename MASKS, int PACK>
__device__ __forceinline__ void load_rows(SharedStorage<C>& shared, const VarlenParams& params, const Segment& segment,
                                          int stage, int loader) {
  using T = typename C::T;
  constexpr int CHUNKS = C::HEAD_DIM / 8, OF_PANEL = C::COLUMNS / 8;  // of a row, and of a panel's row
  // Warpgroups without rows read none.
  const int chunks = (segment.rows + ROWS - 1) / ROWS * ROWS * CHUNKS;
  const T* query = static_cast<const T*>(params.query) + segment.b * params.query_strides.batch +
                   static_cast<int64>(segment.head_kv) * PACK * params.query_strides.head +
                   segment.first_query * params.query_strides.row;
  const int first = 32 * loader + static_cast<int>(threadIdx.x % 32);
  const auto place = [&](int i) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if constexpr (C::TAIL > 0) {
      constexpr int WIDE = C::PANELS * C::COLUMNS, OF_TAIL = C::TAIL / 8;
      if (8 * chunk >= WIDE) {
        const int swizzled = (chunk - WIDE / 8) ^ (row % 8 * OF_TAIL / 8 % OF_TAIL);
        return shared.query[stage][row / ROWS] + ROWS * WIDE + row % ROWS * C::TAIL + 8 * swizzled;
      }
    }
    const int swizzled = chunk % OF_PANEL ^ (row % 8 * OF_PANEL / 8 % OF_PANEL);
    return shared.query[stage][row / ROWS] + (chunk / OF_PANEL * ROWS + row % ROWS) * C::COLUMNS + 8 * swizzled;
  };
#pragma unroll 4
  for (int i = first; i < chunks; i += 32 * QUERY_LOADERS) {
    const int row = i / CHUNKS, of_sequence = segment.first_row + row;
    const T* from = query + of_sequence % PACK * params.query_strides.head +
                    of_sequence / PACK * params.query_strides.row + i % CHUNKS * 8;
    const bool valid = row < segment.rows && (C::QUERY_DIM == C::HEAD_DIM || i % CHUNKS * 8 < C::QUERY_DIM);
    cp_async<16>(place(i), valid ? from : query, valid ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  if (!MASKS::MODIFIED && params.scale_log2 < 0.0f) {  // a negative scale is a positive one of -Q
    for (int i = first; i < chunks; i += 32 * QUERY_LOADERS) {
      auto* chunk = reinterpret_cast<uint4*>(place(i));
      const uint4 old = *chunk;
      *chunk = make_uint4(old.x ^ 0x80008000u, old.y ^ 0x80008000u, old.z ^ 0x80008000u, old.w ^ 0x80008000u);
    }
  }
  fence_proxy_async();
  mbarrier_arrive(shared.query_full[stage]);
}

// Copies the rows of queries that the warp which finds the segments leaves. One warp.
template <typename C, typename MASKS, int PACK>
__device__ __forceinline__ void load_queries(SharedStorage<C>& shared, const VarlenParams& params) {
  PipelineState<C::QUERY_STAGES> state;
  for (int segments = 0;; ++segments) {
    mbarrier_wait(shared.described[state.stage], state.phase);
    const Segment segment = shared.segment[segments % SEGMENTS];
    if (segment.tiles == 0) {
      mbarrier_arrive(shared.query_full[state.stage]);
      return;
    }
    load_rows<C, MASKS, PACK>(shared, params, segment, state.stage, 0);
    state.advance();
  }
}

// Says what the CTA computes next, once there is room for its queries, and copies some of these. One warp.
template <typename C, typename MASKS, int PACK, int CLUSTER, bool PACKED, typename PARAMS>
__device__ __forceinline__ void describe_segments(SharedStorage<C>& shared, const PARAMS& params, const Boxes& query) {
  typename SchedulerOf<PARAMS, C, MASKS, PACK, CLUSTER, PACKED>::Type scheduler(params);
  PipelineState<C::QUERY_STAGES> state;
  const bool elected = elect_one();
  for (int segments = 0;; ++segments) {
    const Segment segment = scheduler.next();
    mbarrier_wait(shared.query_empty[state.stage], state.phase ^ 1);
    if (elected) {
      shared.segment[segments % SEGMENTS] = segment;
      shared.misplaced[segments % SEGMENTS] = 0;
      mbarrier_arrive(shared.described[state.stage]);
      if (C::BULK_QUERIES && segment.tiles > 0) start_queries<C, PACK>(shared, params, query, segment, state.stage);
    }
    // mutation: no lane reads what another one wrote
    __syncwarp();
    if (segment.tiles == 0) {
      if (!C::BULK_QUERIES || elected) mbarrier_arrive(shared.query_full[state.stage]);
      return;
    }
    if constexpr (!C::BULK_QUERIES) load_rows<C, MASKS, PACK>(shared, params, segment, state.stage, 1);
    state.advance();
  }
}

// Makes zeros of values that lie past a sequence's last key. One warp.
template <typename C, typename MASKS>
__device__ __forceinline__ void clean_values(SharedStorage<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  PipelineState<C::QUERY_STAGES> state;
  int before = 0;        // tiles of the segments before
  unsigned cleaned = 0;  // of each stage a bit: whether an odd number of times
  for (int segments = 0;; ++segments) {
    mbarrier_wait(shared.described[state.stage], state.phase);
    const Segment segment = shared.segment[segments % SEGMENTS];
    mbarrier_arrive(shared.query_empty[state.stage]);
    state.advance();
    if (segment.tiles == 0) return;
    if (reaches_past<C>(segment)) {
      const int stage = (before + last_place<MASKS>(segment)) % C::STAGES;
      const int left = segment.keys - (segment.first_tile + segment.tiles - 1) * C::BLOCK_N;
      mbarrier_wait(shared.value_arrived[stage], static_cast<int>(cleaned >> stage & 1));
      cleaned ^= 1u << stage;
      constexpr int CHUNKS = C::COLUMNS / 8;
      const int rows = C::BLOCK_N - left;
      for (int i = lane; i < C::PANELS * rows * CHUNKS; i += 32) {
        const int panel = i / (rows * CHUNKS), rest = i % (rows * CHUNKS);
        auto* chunks = reinterpret_cast<uint4*>(shared.value[stage] + (panel * C::BLOCK_N + left) * C::COLUMNS);
        chunks[rest] = make_uint4(0, 0, 0, 0);
      }
      if constexpr (C::TAIL > 0) {
        auto* chunks = reinterpret_cast<uint4*>(shared.value[stage] + C::BLOCK_N * C::PANELS * C::COLUMNS);
        for (int i = left * C::TAIL / 8 + lane; i < C::BLOCK_N * C::TAIL / 8; i += 32) {
          chunks[i] = make_uint4(0, 0, 0, 0);
        }
      }
      fence_proxy_async();
      __syncwarp();
      if (elect_one()) mbarrier_arrive(shared.value_full[stage]);
    }
    before = (before + segment.tiles) % C::STAGES;
  }
}

}  // namespace microsdpa::hopper::varlen
