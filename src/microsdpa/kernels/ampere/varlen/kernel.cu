// Exact attention for sequences of many lengths, packed or in pages of a cache: on mma.sync, in one launch.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE. A row is a query of one of the PACK query heads that
// share a key head. Lengths and pages are on the device alone: every CTA finds its part of the call from them.
// Tiles:    Q [BLOCK_M, COLUMNS]; each warp owns 16 ROW_TILES of its rows, as accumulators in registers. A CTA has
//           WARPS_N groups of WARPS_M warps. Each group has its own ring of STAGES tiles of K and V
//           [BLOCK_N, COLUMNS], and takes every WARPS_N-th of them.
// Pipeline: 1. a row's page is read one tile ahead of its copy, two in a cluster
//           2. cp.async fills the ring, STAGES - 1 tiles ahead
//           3. S = Q K^T by ldmatrix and mma, masks, online softmax in registers     4. O += P V
//           The groups' parts are combined through shared memory. Where CTAs share rows, each leaves its part in the
//           workspace, and the one that is ready last combines them, in their order; many parts in two steps
//           (parts.cuh). For few sequences the CTAs of a cluster share the keys of one tile of rows, turn by turn, and
//           send one another their parts (CLUSTER > 1, sm_90): which keys they take does not depend on the lengths, so
//           that pages are looked up before these come.
//           New keys and values, where EMBEDDING is given, do not come from the cache: the CTA that reads their tile
//           takes them from their tensors, normalizes and rotates the keys, and writes them to shared memory and to the
//           cache. Queries are normalized and rotated on their way to shared memory. In a cluster both are asked for
//           ahead of the first tiles of the cache, and wait for their numbers once, in one loop, behind these.
// Bound by: memory where few queries meet many keys; latency where there are few of both.
#include "../../common/combine.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/control.cuh"
#include "cache.cuh"
#include "embedding.cuh"
#include "masks.cuh"
#include "parts.cuh"
#include "rows.cuh"
#include "scheduler.cuh"
#include "shared.cuh"
#include "source.cuh"

namespace microsdpa::ampere::varlen {

template <int THREADS, int GROUPS>
__device__ __forceinline__ void group_sync(int group) {
  if constexpr (GROUPS == 1) {
    __syncthreads();
  } else if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    named_barrier_sync(1 + group, THREADS);
  }
}

// The parameter of a kernel: without an embedding, which is void, it appends and rotates nothing. CACHE is void for
// elements like those of queries.
template <typename EMBEDDING, typename CACHE>
struct Given : AppendGiven<EmbeddingOf<EMBEDDING>::Type::NORM, CACHE> {};
template <>
struct Given<void, void> {
  using Params = VarlenParams;
};
template <typename EMBEDDING, typename CACHE>
using ParamsOf = typename Given<EMBEDDING, CACHE>::Params;
__device__ __forceinline__ const VarlenParams& call_of(const VarlenParams& params) { return params; }
__device__ __forceinline__ const VarlenParams& call_of(const AppendParams& params) { return params.call; }

// Moves every row's stabilizer to its largest score. An update moves those of a warp together, when one of them is far
// behind: after this none is, and no bit of a row depends on the others.
template <int KEYS, int COLUMNS, int ROW_TILES>
__device__ __forceinline__ void follow_maxima(OnlineSoftmax<ROW_TILES>& softmax,
                                              const float (&s)[ROW_TILES][KEYS / 8][4],
                                              float (&o)[ROW_TILES][COLUMNS / 8][4]) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = negative_infinity();
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) largest = fmaxf(largest, fmaxf(s[t][n][2 * half], s[t][n][2 * half + 1]));
      largest = quad_max(largest);
      float& stabilizer = softmax.stabilizer[t][half];
      if (!__any_sync(FULL_WARP, largest > stabilizer)) continue;
      const float next = fmaxf(stabilizer, largest);
      const float factor = next == negative_infinity() ? 1.0f : ex2_approx(stabilizer - next);
      stabilizer = next;
      softmax.sum[t][half] *= factor;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) o[t][n][2 * half] *= factor, o[t][n][2 * half + 1] *= factor;
    }
  }
}

template <typename C, int CLUSTER, typename CACHE>
struct Memory {
  using Type = SharedWithScales<C, CLUSTER>;
};
template <typename C, int CLUSTER>
struct Memory<C, CLUSTER, void> {
  using Type = Shared<C, CLUSTER>;
};

// SPLIT: tiles of keys of a part, where a sequence's bits may not depend on the others; 0 where they may. MOST_PARTS:
// those of all sequences that CTAs share. PACKED: whether clusters have packed queries of many sequences. VALUE_DIM:
// columns of V and O, at most HEAD_DIM. RESIDENT: CTAs of an SM that registers leave room for.
template <typename T, int HEAD_DIM, int BLOCK_N, int ROW_TILES, int WARPS_M, int WARPS_N, int STAGES, int KEPT,
          int PACK, Layout LAYOUT, int CLUSTER, bool PACKED, bool PROGRAMMATIC, typename MASKS, typename EMBEDDING,
          int SPLIT, int MOST_PARTS, typename CACHE, int VALUE_DIM = HEAD_DIM, int RESIDENT = 1>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, RESIDENT)
    attention(const __grid_constant__ ParamsOf<EMBEDDING, CACHE> given) {
  // Queries that have a norm, are rotated, or whose products are of another type come through registers.
  constexpr bool APPENDS = PRESENT<EMBEDDING>, NARROW = PRESENT<CACHE>;
  constexpr bool ROTATES = EmbeddingOf<EMBEDDING>::Type::CHANGES || NARROW;
  constexpr bool AT_ONCE = APPENDS && CLUSTER > 1;  // whether queries and new keys are taken together
  // How many tiles ahead of their copies pages are looked up. A CTA of a cluster starts two copies at once: the second
  // need not wait for its pages.
  constexpr int PAGES_AHEAD = CLUSTER > 1 ? 2 : 1;
  // Groups of copies behind that of the segment's queries. In a cluster queries are a group of their own, and come to
  // registers before the first keys are there. Elsewhere they share the group of the first tile.
  constexpr int BEHIND_QUERIES = CLUSTER > 1 ? STAGES - 1 : STAGES - 2;
  const VarlenParams& params = call_of(given);
  using C = Tiles<T, HEAD_DIM, BLOCK_N, ROW_TILES, WARPS_M, WARPS_N, STAGES, CACHE, VALUE_DIM>;
  constexpr int BLOCK_M = C::BLOCK_M, COLUMNS = C::COLUMNS, AHEAD = STAGES - 1;
  auto& shared = dynamic_shared<typename Memory<C, CLUSTER, CACHE>::Type>();
  const int group = WARPS_N == 1 ? 0 : threadIdx.x / C::GROUP_THREADS;
  const int warp_row = threadIdx.x % C::GROUP_THREADS / 32 * C::WARP_ROWS;
  auto& ring = shared.streaming.ring[group];

  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(shared.exchange.arrived, 1);
      mbarrier_init_fence();
    }
  }
  using OwnRows = ClusterRows<C, PACK, typename EmbeddingOf<EMBEDDING>::Type, LAYOUT, CLUSTER>;
  if constexpr (AT_ONCE) OwnRows::prefetch(given);
  if (PROGRAMMATIC) grid_dependency_wait();
  Scheduler<MASKS, PACK, BLOCK_M, C::TILE, SPLIT, MOST_PARTS, CLUSTER, PACKED> scheduler(params);
  WorkTile work;
  if (!scheduler.next(work)) return;
  using OwnSegment = Segment<C, MASKS, PACK, LAYOUT, CLUSTER, APPENDS>;
  using OwnSource = Source<C, LAYOUT>;
  // Tiles are loaded ahead: of `loading`, which is the segment that is computed or, where the ring flows, the next one.
  OwnSegment loading(params, work);
  using OwnScales = TokenScales<C, LAYOUT>;
  typename OwnSource::Pages pages[PAGES_AHEAD];  // of the next tiles that are loaded
  [[maybe_unused]] typename OwnScales::Pages scale_pages;
  int loaded = 0, total = 0;  // tiles of the segment, and of all
  int committed = 0;          // groups of copies since the segment's rows were asked for
  int query_buffer = 0;       // of the segment that is computed
  const auto load_query = [&](int buffer) {
    const Rows<PACK> place(loading.work, loading.sequence, PACK);
    const T* query = static_cast<const T*>(params.query);
    C::QueryTile::template for_each_chunk<C::THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
      const bool valid = static_cast<int>(r) < loading.rows && static_cast<int>(column) < HEAD_DIM;
      cp_async<16>(shared.streaming.query[buffer].at(r, column),
                   valid ? place.at(query, params.query_strides, r) + column : query, valid ? 16 : 0);
    });
  };
  using RotatedQuery = RotatedRows<C, PACK, typename EmbeddingOf<EMBEDDING>::Type>;
  const auto query_scales = [&](int buffer) -> float* {
    if constexpr (NARROW) return shared.query_scale[buffer];
    return nullptr;
  };
  const auto begin_loading = [&](int buffer) {
    loaded = committed = 0;
#pragma unroll
    for (int i = 0; i < PAGES_AHEAD; ++i) OwnSource::fetch(pages[i], params, loading, loading.first_key(i, group));
    if constexpr (C::EACH_TOKEN) OwnScales::fetch(scale_pages, params, loading, loading.first_key(0, group));
    if constexpr (!ROTATES && !AT_ONCE) {
      load_query(buffer);
      if constexpr (CLUSTER > 1) cp_async_commit();
    }
  };
  // New keys that are not among the first tiles go to the cache, once those are on their way, and come from there: a
  // barrier is in between.
  const auto store_ahead = [&]() {
    if constexpr (APPENDS && !AT_ONCE) {
      const int before = (loading.new_from / C::TILE - loading.first_tile) / CLUSTER;
      if (loading.new_from >= loading.end || before < AHEAD) return;
      // mutation: the tile behind the part is another CTA's, which stores the same keys
      for (int i = before; i < loading.count; ++i) {
        OwnSource::template store_new<EMBEDDING>(nullptr, pages[0], given, loading, loading.first_key(i, group));
      }
      loading.new_from = loading.end;
    }
  };
  // Starts copying the next tile of `loading`, as a group of copies; an empty one where there is no further tile.
  const auto load = [&]() {
    if (loaded < loading.count) {
      const int first_key = loading.first_key(loaded, group);
      if constexpr (CLUSTER > 1 && (LAYOUT == CONTIGUOUS || LAYOUT == WHOLE_TILES)) {
        OwnSource::copy_each_row_async(ring[total % STAGES], pages[0], params, loading, first_key);
      } else {
        OwnSource::copy_async(ring[total % STAGES], pages[0], params, loading, first_key);
      }
      if constexpr (C::EACH_TOKEN) OwnScales::copy_async(ring[total % STAGES], scale_pages, given, loading, first_key);
      if constexpr (APPENDS && !AT_ONCE) {
        if (first_key + BLOCK_N > loading.new_from) {
          OwnSource::template store_new<EMBEDDING>(&ring[total % STAGES], pages[0], given, loading, first_key);
        }
      }
      ++loaded, ++total;
#pragma unroll
      for (int i = 1; i < PAGES_AHEAD; ++i) pages[i - 1] = pages[i];
      OwnSource::fetch(pages[PAGES_AHEAD - 1], params, loading, loading.first_key(loaded + PAGES_AHEAD - 1, group));
      if constexpr (C::EACH_TOKEN) OwnScales::fetch(scale_pages, params, loading, loading.first_key(loaded, group));
    }
    cp_async_commit(), ++committed;
  };
  bool more = true, is_ahead = false;  // whether there are further segments, and `loading` is one of them
  const auto go_ahead = [&]() {
    // mutation: a segment that does not begin ahead begins behind this one
    if (QUERY_TILES<C, CLUSTER> == 1 || !more || is_ahead || loaded < loading.count) return;
    more = scheduler.next(work);
    if (!more) return;
    loading = OwnSegment(params, work);
    is_ahead = true;
    begin_loading(1 - query_buffer);
    store_ahead();
    if constexpr (ROTATES) {
      RotatedQuery::copy(shared.streaming.query[1 - query_buffer], query_scales(1 - query_buffer), given, loading, 0);
    }
  };
  begin_loading(0);
  if constexpr (AT_ONCE) {
    C::QueryTile::template for_each_chunk<C::THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
      if (static_cast<int>(r) < loading.rows) return;
      *reinterpret_cast<Chunk<T>*>(shared.streaming.query[0].at(r, column)) = Chunk<T>{};
    });
    int first = 0;
    do {
      const OwnRows own(given, loading, first);
      if (first == 0) {  // the first rows are on their way while keys are asked for
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load();
        if (PROGRAMMATIC) grid_dependency_launch();
      }
      own.store(shared.streaming, params, loading);
      first += OwnRows::AT_ONCE;
      // mutation: a round behind the last row has none
    } while (first < OwnRows::count(params, loading));
    loading.new_from = loading.end;  // those of later tiles come from the cache: a barrier is in between
  } else if constexpr (ROTATES) {
    const auto first_rows = RotatedQuery::load(given, loading, 0);  // on their way while keys are asked for
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load();
    RotatedQuery::store(shared.streaming.query[0], query_scales(0), 0, first_rows);
    RotatedQuery::copy(shared.streaming.query[0], query_scales(0), given, loading, RotatedQuery::ROWS);
  } else {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load();
  }
  store_ahead();
  if (PROGRAMMATIC && !AT_ONCE) grid_dependency_launch();

  int step = 0;  // tiles that were computed
  for (OwnSegment segment = loading;;) {
    const Rows<PACK> place(segment.work, segment.sequence, PACK);
    const int rows = segment.rows;
    const MaskedRows<MASKS, PACK, ROW_TILES> masked(params, segment.sequence, segment.work.b, place.head,
                                                    segment.work.first_row + warp_row);
    // Units of the output that the cluster has, and those that each of its CTAs finishes.
    [[maybe_unused]] const int units_each = (rows * (COLUMNS / 4) + CLUSTER - 1) / CLUSTER;
    [[maybe_unused]] const int own_units =
        max(0, min(units_each, rows * (COLUMNS / 4) - segment.work.part * units_each));
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(shared.exchange.arrived, own_units * CLUSTER * shared.exchange.UNIT_BYTES);
      }
      // mutation: the lanes come together for an aligned instruction, which the emulator does not ask for
      __syncwarp();
      cluster_arrive<false>();  // waited for when there is something to send
    }
    if constexpr (!AT_ONCE) cp_async_wait<BEHIND_QUERIES>();
    __syncthreads();  // the rows are there
    const QueryOperand<typename C::QueryTile, ROW_TILES, COLUMNS, KEPT> fragments(shared.streaming.query[query_buffer],
                                                                                  warp_row);
    auto scales = scales_of<C, CACHE>(given, segment, query_scales(query_buffer), warp_row);
    go_ahead();

    OnlineSoftmax<ROW_TILES> softmax;
    float o[ROW_TILES][COLUMNS / 8][4] = {};
    if constexpr (SPLIT == 0) {
      if (segment.work.part == 0 && group == 0) masked.add_sinks(softmax);
    }
    for (int i = 0; i < segment.count; ++i, ++step) {
      cp_async_wait<AHEAD - 1>();
      group_sync<C::GROUP_THREADS, WARPS_N>(group);  // tile i is there, and nobody reads the one before any more
      load();
      go_ahead();
      const int first_key = segment.first_key(i, group);
      if (first_key >= segment.end || first_key + BLOCK_N <= segment.from) continue;
      const Stage<C>& stage = ring[step % STAGES];
      float s[ROW_TILES][BLOCK_N / 8][4];
      if constexpr (NARROW) {
        multiply_query_narrow_key<typename CACHE::Format, ROW_TILES, COLUMNS, BLOCK_N>(s, fragments, stage.key);
        scales.scale(s, stage);
      } else {
        multiply_query_key<T, ROW_TILES, COLUMNS, BLOCK_N>(s, fragments, stage.key, 0);
      }
      masked.template apply<BLOCK_N>(s, first_key);
      if constexpr (SPLIT > 0) follow_maxima<BLOCK_N, COLUMNS>(softmax, s, o);
      softmax.template update<BLOCK_N, COLUMNS>(s, o, 1.0f);
      if constexpr (NARROW) {
        scales.weigh(s, o, stage);
        multiply_probability_narrow_value<typename CACHE::Format, ROW_TILES, COLUMNS, BLOCK_N>(o, s, stage.value);
      } else {
        multiply_probability_value<T, ROW_TILES, COLUMNS, BLOCK_N>(o, s, stage.value, 0);
      }
    }
    if (!is_ahead) segment.misplaced |= loading.misplaced;
    const int misplaced = __any_sync(FULL_WARP, segment.misplaced);
    if (lane_index() == 0) shared.misplaced[threadIdx.x / 32] = misplaced;
    if constexpr (C::FLOWS) {
      group_sync<C::GROUP_THREADS, WARPS_N>(group);  // the group is done with its last tile
    } else {
      // mutation: groups of copies behind the last tile are empty, and that of the rows has been waited for
      cp_async_wait<0>();
      __syncthreads();  // all groups are done with their tiles
    }

    // The stage of the tile before the next one is free.
    const int free_stage = (step + STAGES - 1) % STAGES;
    const auto part_of = [&](int g) -> float* {
      if constexpr (C::FLOWS) return shared.streaming.ring[g][free_stage].part;
      return shared.combining.part[g];
    };
    constexpr int UNITS = COLUMNS / 4;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row + 16 * t + 8 * half + lane_index() / 4;
        const float sum = softmax.total(t, half);
        if (lane_index() % 4 == 0) shared.stats[group][r] = {softmax.stabilizer[t][half], sum};
        if constexpr (NARROW) {
#pragma unroll
          for (int n = 0; n < COLUMNS / 16; ++n) {
            const int column = 16 * n + lane_index() % 4 * 4;
            *reinterpret_cast<Values4*>(part_of(group) + place_in_part<C>(r, column)) = scales.columns(o[t], n, half);
          }
        } else {
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; ++n) {
            const Vector<float, 2> pair = {{o[t][n][2 * half], o[t][n][2 * half + 1]}};
            *reinterpret_cast<Vector<float, 2>*>(part_of(group) + place_in_part<C>(r, 8 * n + lane_index() % 4 * 2)) =
                pair;
          }
        }
      }
    }
    __syncthreads();
    bool is_wrong = false;
    if constexpr (LAYOUT != CONTIGUOUS) {
#pragma unroll
      for (int w = 0; w < WARPS_M * WARPS_N; ++w) is_wrong |= shared.misplaced[w] != 0;
    }

    const auto store = [&](int r, int column, Values4 values, RowStats stats) {
      if constexpr (SPLIT > 0 && PRESENT<typename MASKS::Sink>) {
        const float logit = masked.sink(segment.work.first_row + r);
        add_part(values, stats, Values4{}, {logit, logit > negative_infinity() ? 1.0f : 0.0f});
      }
      if (column < VALUE_DIM) {
        const float inverse = normalizer(stats.sum);
        const Vector<uint32, 2> packed = {pack<T>(values.data[0] * inverse, values.data[1] * inverse),
                                          pack<T>(values.data[2] * inverse, values.data[3] * inverse)};
        *reinterpret_cast<Vector<uint32, 2>*>(place.at(static_cast<T*>(params.out), params.out_strides, r) + column) =
            packed;
      }
      if (params.lse != nullptr && column == 0) *place.lse(params, r) = log_sum_exp(stats.stabilizer, stats.sum);
    };
    if constexpr (CLUSTER > 1) cluster_wait();  // the others' barriers are set up
    const Partials<C> partials(params);
    const auto slot_of = [&](int part) {
      if constexpr (SPLIT > 0) return segment.work.slot + (segment.work.alone ? part % 2 : part);
      return partials.slot(segment.work.owner, part);
    };
    for (int i = threadIdx.x; i < rows * UNITS; i += C::THREADS) {
      const int r = i / UNITS, column = i % UNITS * 4;
      RowStats stats;
      const Values4 values = combine_parts<WARPS_N>(
          stats, [&](int part) { return shared.stats[part][r]; },
          [&](int part) { return *reinterpret_cast<const Values4*>(part_of(part) + place_in_part<C>(r, column)); });
      if (is_wrong) stats.sum = __uint_as_float(0x7fffffffu);  // NaN: never a value of memory that is not the cache's
      if constexpr (CLUSTER > 1) {
        const int to = i / units_each, unit = i % units_each;
        const ClusterAddress arrived = peer_address(&shared.exchange.arrived, to);
        store_async(peer_address(&shared.exchange.values[segment.work.part][unit], to), values.data[0], values.data[1],
                    values.data[2], values.data[3], arrived);
        store_async(peer_address(&shared.exchange.stats[segment.work.part][unit], to), stats.stabilizer, stats.sum,
                    arrived);
      } else if (segment.work.parts == 1) {
        store(r, column, values, stats);
      } else {
        Values4 total = values;
        if constexpr (SPLIT > 0) {
          if (segment.work.alone && segment.work.part > 0) {  // slots take turns: others still read the statistics
            const int before = segment.work.slot + (segment.work.part - 1) % 2;
            total = *partials.values(before, r, column);
            RowStats combined = *partials.stats(before, r);
            add_part(total, combined, values, stats);
            stats = combined;
          }
          if (segment.work.alone && segment.work.part == segment.work.parts - 1) {
            store(r, column, total, stats);
            continue;
          }
        }
        const int slot = slot_of(segment.work.part);
        *partials.values(slot, r, column) = total;
        if (column == 0) *partials.stats(slot, r) = stats;
      }
    }
    if constexpr (CLUSTER > 1) {
      mbarrier_wait_cluster(shared.exchange.arrived, 0);
      for (int unit = threadIdx.x; unit < own_units; unit += C::THREADS) {
        const int i = segment.work.part * units_each + unit;
        RowStats stats;
        const Values4 values = combine_parts<CLUSTER>(
            stats, [&](int part) { return shared.exchange.stats[part][unit]; },
            [&](int part) { return shared.exchange.values[part][unit]; });
        store(i / UNITS, i % UNITS * 4, values, stats);
      }
      return;
    }
    // Whether this CTA is the last one of `count` that come here. A counter has two halves: the upper one counts those
    // that have combined parts of others.
    const auto arrives_last = [&](int counter, int count, bool combined) {
      __syncthreads();
      if (threadIdx.x == 0) {  // its fences order what the others wrote before the barrier, and read after the next
        const int shift = combined ? 16 : 0;
        uint32& arrivals = params.arrivals[counter];
        __threadfence();
        const uint32 before = atomicAdd(&arrivals, 1u << shift) >> shift & 0xffffu;
        __threadfence();
        shared.is_last = before == static_cast<uint32>(count - 1);
        if (shared.is_last) atomicAdd(&arrivals, ~(static_cast<uint32>(count) << shift) + 1u);  // for the next launch
      }
      __syncthreads();
      return shared.is_last;
    };
    if constexpr (SPLIT > 0) {
      if (segment.work.parts > 1 && !segment.work.alone &&
          arrives_last(segment.work.owner, segment.work.parts, false)) {
        for (int i = threadIdx.x; i < rows * UNITS; i += C::THREADS) {
          const int r = i / UNITS, column = i % UNITS * 4;
          RowStats stats = *partials.stats(slot_of(0), r);
          Values4 values = *partials.values(slot_of(0), r, column);
#pragma unroll 4
          for (int part = 1; part < segment.work.parts; ++part) {
            add_part(values, stats, *partials.values(slot_of(part), r, column), *partials.stats(slot_of(part), r));
          }
          store(r, column, values, stats);
        }
      }
    } else if (segment.work.parts > 1) {
      const int all = segment.work.parts, owner = segment.work.owner;
      if (all <= MOST_AT_ONCE) {
        if (arrives_last(owner, all, false)) {
          for (int i = threadIdx.x; i < rows * UNITS; i += C::THREADS) {
            const int r = i / UNITS, column = i % UNITS * 4;
            RowStats stats;
            const Values4 values = combine_slots<1>(stats, partials, owner, 0, all, r, column);
            store(r, column, values, stats);
          }
        }
      } else {
        const int first = segment.work.part / AHEAD_OF_ALL * AHEAD_OF_ALL, parts = min(AHEAD_OF_ALL, all - first);
        // A CTA that has the last part of its rows may have the first one of others, which count in the same place.
        bool goes_on = parts == 1;
        if (!goes_on && arrives_last(owner + first, parts, false)) {
          goes_on = true;
          // mutation: behind the last row is room of parts that have been added, or of nobody
          for (int i = threadIdx.x; i < rows * UNITS; i += C::THREADS) {
            const int r = i / UNITS, column = i % UNITS * 4;
            RowStats stats;
            const Values4 values = combine_slots<1>(stats, partials, owner, first, parts, r, column);
            *partials.values(slot_of(first), r, column) = values;
            if (column == 0) shared.stats[0][r] = stats;
          }
          __syncthreads();  // nobody reads the parts' statistics any more
          // mutation: behind the last row is room of parts that have been added, or of nobody
          for (int r = threadIdx.x; r < rows; r += C::THREADS) *partials.stats(slot_of(first), r) = shared.stats[0][r];
        }
        const int groups = (all + AHEAD_OF_ALL - 1) / AHEAD_OF_ALL;
        if (goes_on && arrives_last(owner, groups, true)) {
          for (int i = threadIdx.x; i < rows * UNITS; i += C::THREADS) {
            const int r = i / UNITS, column = i % UNITS * 4;
            RowStats stats;
            const Values4 values = combine_slots<AHEAD_OF_ALL>(stats, partials, owner, 0, groups, r, column);
            store(r, column, values, stats);
          }
        }
      }
    }
    __syncthreads();  // before the next tiles come
    if (is_ahead) {
      query_buffer = 1 - query_buffer, is_ahead = false;
    } else {
      if (!more || !scheduler.next(work)) return;
      loading = OwnSegment(params, work);
      begin_loading(query_buffer);
      if constexpr (ROTATES) {
        RotatedQuery::copy(shared.streaming.query[query_buffer], query_scales(query_buffer), given, loading, 0);
      }
    }
    segment = loading;
    // Waiting counts groups: AHEAD of them belong to the segment, empty ones too, from that of its rows and first tile
    // on.
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (committed < AHEAD) load();
    }
    store_ahead();
  }
}

}  // namespace microsdpa::ampere::varlen
