// Exact attention on mma.sync for problems that do not fill the chip, few queries and large heads among them.
// Those that do are ampere/stream's.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M rows of one key head per CTA. A row is a
// query of one head or, PACK > 1, one of the PACK query heads that share the key head: row r is query r / PACK of head
// r % PACK. A CTA has WARPS_N groups of WARPS_M warps; warps of a group share keys, groups share queries.
// Tiles:    Q [BLOCK_M, COLUMNS]; each warp owns 16 ROW_TILES of its rows, as accumulators in registers. Each group
//           has its own ring of STAGES tiles of K and V [BLOCK_N, COLUMNS] and takes every WARPS_N-th key tile.
//           COLUMNS are HEAD_DIM, filled up to a multiple of 16 with zeros.
// Pipeline: 1. cp.async fills the ring, STAGES - 1 tiles ahead (RESIDENT: all tiles at once, each waited for alone)
//           2. S = Q K^T by ldmatrix and mma     3. masks on the tiles that need one, online softmax in registers
//           4. O += P V, P straight from S's registers
//           The groups' parts are combined through shared memory at the end. SPLIT > 1: the CTAs of a cluster send one
//           another their parts (CLUSTERED, sm_90), or each leaves its part in the workspace, for ampere/combine.
// Bound by: latency: launch, one trip to L2, one tile, one store.
#include "../../common/combine.cuh"
#include "../../common/epilogue.cuh"
#include "../../common/masks.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/control.cuh"
#include "masked.cuh"
#include "shared.cuh"

namespace microsdpa::ampere::mma {

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

// Waits until at most `pending` groups of copies are in flight; `pending`, up to MOST, is known after unrolling.
template <int MOST>
__device__ __forceinline__ void wait_until_pending(int pending) {
  if constexpr (MOST > 0) {
    if (pending < MOST) return wait_until_pending<MOST - 1>(pending);
  }
  cp_async_wait<MOST>();
}

template <typename T, int HEAD_DIM, int BLOCK_N, int ROW_TILES, int WARPS_M, int WARPS_N, int STAGES, bool RESIDENT,
          int KEPT, bool CAUSAL, int PACK, int SPLIT, bool CLUSTERED, bool PROGRAMMATIC, typename MASKS>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, 1)
    attention(const __grid_constant__ typename MASKS::Params arguments) {
  using C = Tiles<T, HEAD_DIM, BLOCK_N, ROW_TILES, WARPS_M, WARPS_N, STAGES>;
  constexpr int BLOCK_M = C::BLOCK_M, WARP_ROWS = C::WARP_ROWS, COLUMNS = C::COLUMNS;
  constexpr bool COMBINES = WARPS_N > 1 || SPLIT > 1;
  static_assert(!CLUSTERED || SPLIT > 1, "the parts are what the CTAs of a cluster have");
  static_assert(!MASKS::ANY || (!RESIDENT && ROW_TILES == 1 && WARPS_M == 1), "a warp decides which keys are loaded");
  const AttentionParams& params = MASKS::call(arguments);
  auto& shared = dynamic_shared<Shared<C, COMBINES, CLUSTERED ? SPLIT : 0>>();
  auto& query_tile = shared.phases.streaming.query;

  const auto work = Work<PACK, SPLIT>::template of_block<BLOCK_M>(params);
  const int group = WARPS_N == 1 ? 0 : threadIdx.x / C::GROUP_THREADS;
  const unsigned thread = threadIdx.x % C::GROUP_THREADS;
  const int warp_row = thread / 32 * WARP_ROWS;
  auto& ring = shared.phases.streaming.ring[group];

  const int head_kv = work.head / (params.heads / params.heads_kv);
  const T* query = static_cast<const T*>(params.query);
  const T* key =
      static_cast<const T*>(params.key) + work.batch * params.key_strides.batch + head_kv * params.key_strides.head;
  const T* value = static_cast<const T*>(params.value) + work.batch * params.value_strides.batch +
                   head_kv * params.value_strides.head;

  // Keys past the last one that the last row sees are never loaded.
  int keys = params.seqlen_k;
  if (CAUSAL) {
    const int last_row = min(work.first_row + BLOCK_M, work.rows) - 1;
    keys = max(0, min(keys, last_row / PACK + params.diagonal + 1));
  }
  int first_seen = 0;
  if constexpr (MASKS::LEFT) first_seen = max(0, work.first_row / PACK + arguments.masks.lowest);
  if constexpr (MASKS::RANGED) {
    if (PROGRAMMATIC) grid_dependency_wait();
    const KeyRange range = MaskedRows<MASKS, CAUSAL, BLOCK_N, PACK>::range_of_rows(arguments, work.batch, work.head,
                                                                                   work.first_row, BLOCK_M, work.rows);
    first_seen = max(first_seen, range.first), keys = min(keys, range.last);
  }
  const int unseen_tiles = first_seen / BLOCK_N;
  const int key_tiles = (keys + BLOCK_N - 1) / BLOCK_N;
  const int per_part = SPLIT == 1 ? key_tiles : (key_tiles - unseen_tiles + SPLIT - 1) / SPLIT;
  const int first_tile = unseen_tiles + work.part * per_part + group;
  const int last_tile = min(key_tiles, unseen_tiles + (work.part + 1) * per_part);
  const int count = (last_tile - first_tile + WARPS_N - 1) / WARPS_N;  // tiles of this group; negative is none

  const auto first_key_of = [&](int i) { return (first_tile + i * WARPS_N) * BLOCK_N; };
  const auto load = [&](typename C::KeyTile& tile, const T* rows, int64 row_stride, int i) {
    const int first = first_key_of(i);
    if constexpr (MASKS::ANY) {
      copy_keys<C>(tile, rows + first * row_stride, row_stride, params.seqlen_k - first);
    } else {
      tile.template copy_columns_async<C::GROUP_THREADS, HEAD_DIM>(rows + first * row_stride, row_stride,
                                                                   params.seqlen_k - first, thread);
    }
  };
  const auto load_key = [&](int i) { load(ring.key[i % STAGES], key, params.key_strides.row, i); };
  const auto load_value = [&](int i) { load(ring.value[i % STAGES], value, params.value_strides.row, i); };

  // Units of the output that the cluster has, and those that each of its CTAs finishes.
  const int units = min(BLOCK_M, work.rows - work.first_row) * (HEAD_DIM / 4);
  const int units_each = (units + SPLIT - 1) / SPLIT;
  const int own_units = max(0, min(units_each, units - work.part * units_each));
  if constexpr (CLUSTERED) {
    if (threadIdx.x == 0) {
      mbarrier_init(shared.exchange.arrived, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(shared.exchange.arrived, own_units * SPLIT * shared.exchange.UNIT_BYTES);
    }
    // mutation: the lanes come together for an aligned instruction, which the emulator does not ask for
    __syncwarp();
    cluster_arrive<false>();  // waited for when there is something to send
  }

  if (PROGRAMMATIC && !MASKS::RANGED) grid_dependency_wait();
  C::QueryTile::template for_each_chunk<C::THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
    const bool valid = work.first_row + static_cast<int>(r) < work.rows && C::exists(column);
    const T* source = work.row(query, params.query_strides, valid ? work.first_row + r : 0) + C::existing(column);
    cp_async<16>(query_tile.at(r, column), source, valid ? 16 : 0);
  });
  cp_async_commit();
  constexpr int AHEAD = RESIDENT ? STAGES : STAGES - 1;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (i < count) load_key(i);
    if (RESIDENT) cp_async_commit();
    if (i < count) load_value(i);
    cp_async_commit();
  }
  if (PROGRAMMATIC) grid_dependency_launch();
  [[maybe_unused]] MaskedKeys<C, MASKS, CAUSAL, PACK> masked_keys(arguments, work, count, first_key_of);
  cp_async_wait<RESIDENT ? 2 * AHEAD : AHEAD>();
  __syncthreads();

  // A negative scale is a positive one of -Q; scale 0 must not meet a masked score of -inf.
  const float scale = fmaxf(fabsf(params.scale_log2), 1e-30f);
  if (!MASKS::ANY && params.scale_log2 < 0.0f) {
    C::QueryTile::template for_each_chunk<C::THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
      auto& chunk = *reinterpret_cast<Vector<uint32, 4>*>(query_tile.at(r, column));
      Vector<uint32, 4> negated = chunk;
#pragma unroll
      for (int w = 0; w < 4; ++w) negated.data[w] ^= 0x80008000u;
      chunk = negated;
    });
    __syncthreads();
  }
  const QueryOperand<typename C::QueryTile, ROW_TILES, COLUMNS, KEPT> fragments(query_tile, warp_row);

  OnlineSoftmax<ROW_TILES> softmax;
  float o[ROW_TILES][COLUMNS / 8][4] = {};
  const int warp_first = work.first_row + warp_row;
  if constexpr (MASKS::ANY) {
    if (work.part == 0 && group == 0) masked_keys.rows.add_sinks(softmax);
    masked_keys.attend(softmax, o, fragments, ring, count, first_key_of, [&](int i) {
      load_key(i);
      load_value(i);
    });
  } else {
    // Query rows of the warp, from its first to its last, see the keys before these.
    const int seen_first = CAUSAL ? warp_first / PACK + params.diagonal + 1 : params.seqlen_k;
    const int seen_last = CAUSAL ? (warp_first + WARP_ROWS - 1) / PACK + params.diagonal + 1 : params.seqlen_k;

    // The keys of tile i: scores to packed probabilities. Stabilizers are maxima only of what
    // was seen when they were set; the maximum is looked for again where scores are masked or a probability grows
    // large.
    using Packed = uint32[ROW_TILES][BLOCK_N / 16][4];
    const auto probabilities = [&](Packed& p, int i) {
      const int first_key = first_key_of(i);
      const bool start = i == 0;
      // mutation: a tile that ends where the first row's keys end has none to hide
      const bool masked = first_key + BLOCK_N > min(seen_first, params.seqlen_k);
      float s[ROW_TILES][BLOCK_N / 8][4];
      const auto& key_tile = ring.key[i % STAGES];
      if (!masked && (RESIDENT || !start)) {
        multiply_query_key<T, ROW_TILES, COLUMNS, BLOCK_N>(s, fragments, key_tile, 0);
        if (start) softmax.template begin<BLOCK_N>(s, scale);
        const bool done = softmax.template try_update<BLOCK_N>(s, scale);
        pack_probabilities<T, ROW_TILES, BLOCK_N>(p, s);
        if (done) return;
      }
      multiply_query_key<T, ROW_TILES, COLUMNS, BLOCK_N>(s, fragments, key_tile, 0);
      if (masked) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = warp_first + 16 * t + 8 * half + lane_index() / 4;
            const int seen = CAUSAL ? min(params.seqlen_k, r / PACK + params.diagonal + 1) : params.seqlen_k;
            mask_row<BLOCK_N>(s[t], half, seen - first_key);
          }
        }
      }
      softmax.template update<BLOCK_N, COLUMNS>(s, o, scale);
      pack_probabilities<T, ROW_TILES, BLOCK_N>(p, s);
    };

    if constexpr (RESIDENT) {
#pragma unroll
      for (int i = 0; i < STAGES; ++i) {
        if (i >= count) break;
        // mutation: a tile without a visible key adds zeros
        const bool visible = first_key_of(i) < seen_last;
        Packed p;
        wait_until_pending<2 * STAGES>(2 * (STAGES - 1 - i) + 1);
        group_sync<C::GROUP_THREADS, WARPS_N>(group);
        if (visible) probabilities(p, i);
        wait_until_pending<2 * STAGES>(2 * (STAGES - 1 - i));
        group_sync<C::GROUP_THREADS, WARPS_N>(group);
        if (visible) multiply_probability_value<T, ROW_TILES, COLUMNS, BLOCK_N>(o, p, ring.value[i], 0);
      }
    } else {
      for (int i = 0; i < count; ++i) {
        cp_async_wait<STAGES - 2>();
        group_sync<C::GROUP_THREADS, WARPS_N>(group);  // tile i is there, and nobody reads tile i - 1 any more
        if (i + STAGES - 1 < count) {
          load_key(i + STAGES - 1);
          load_value(i + STAGES - 1);
        }
        cp_async_commit();
        // mutation: a tile without a visible key adds zeros
        if (first_key_of(i) >= seen_last) continue;
        Packed p;
        probabilities(p, i);
        multiply_probability_value<T, ROW_TILES, COLUMNS, BLOCK_N>(o, p, ring.value[i % STAGES], 0);
      }
    }
  }

  T* out = static_cast<T*>(params.out);
  if constexpr (!COMBINES) {
    float scales[ROW_TILES][2];
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = softmax.total(t, half);
        scales[t][half] = normalizer(sum);
        const int r = warp_first + 16 * t + 8 * half + lane_index() / 4;
        if (params.lse != nullptr && lane_index() % 4 == 0 && r < work.rows) {
          params.lse[work.flat_row(params, r)] = log_sum_exp(softmax.stabilizer[t][half], sum);
        }
      }
    }
    __syncwarp();  // of the query tile the warp reads and writes its own rows only
    store_rows<T, ROW_TILES, COLUMNS, HEAD_DIM>(query_tile, warp_row, o, scales, [&](unsigned r) -> T* {
      return warp_first + static_cast<int>(r) < work.rows ? work.row(out, params.out_strides, warp_first + r) : nullptr;
    });
  } else {
    auto& combining = shared.phases.combining;
    constexpr int PITCH = Combining<C>::PITCH;
    __syncthreads();  // all groups are done with their tiles
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row + 16 * t + 8 * half + lane_index() / 4;
        const float sum = softmax.total(t, half);
        if (lane_index() % 4 == 0) combining.stats[group][r] = {softmax.stabilizer[t][half], sum};
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
          const Vector<float, 2> pair = {{o[t][n][2 * half], o[t][n][2 * half + 1]}};
          *reinterpret_cast<Vector<float, 2>*>(&combining.part[group][r * PITCH + 8 * n + lane_index() % 4 * 2]) = pair;
        }
      }
    }
    __syncthreads();
    const auto store = [&](int r, int column, const Values4& values, const RowStats& stats) {
      const float inverse = normalizer(stats.sum);
      const Vector<uint32, 2> packed = {pack<T>(values.data[0] * inverse, values.data[1] * inverse),
                                        pack<T>(values.data[2] * inverse, values.data[3] * inverse)};
      *reinterpret_cast<Vector<uint32, 2>*>(work.row(out, params.out_strides, work.first_row + r) + column) = packed;
      if (params.lse != nullptr && column == 0) {
        params.lse[work.flat_row(params, work.first_row + r)] = log_sum_exp(stats.stabilizer, stats.sum);
      }
    };
    if constexpr (CLUSTERED) cluster_wait();  // the others' barriers are set up
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += C::THREADS) {
      const int r = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
      if (work.first_row + r >= work.rows) break;
      RowStats stats;
      const Values4 values = combine_parts<WARPS_N>(
          stats, [&](int part) { return combining.stats[part][r]; },
          [&](int part) { return *reinterpret_cast<const Values4*>(&combining.part[part][r * PITCH + column]); });
      if constexpr (SPLIT == 1) {
        store(r, column, values, stats);
      } else if constexpr (CLUSTERED) {
        const int to = i / units_each, unit = i % units_each;
        const ClusterAddress arrived = peer_address(&shared.exchange.arrived, to);
        store_async(peer_address(&shared.exchange.values[work.part][unit], to), values.data[0], values.data[1],
                    values.data[2], values.data[3], arrived);
        store_async(peer_address(&shared.exchange.stats[work.part][unit], to), stats.stabilizer, stats.sum, arrived);
      } else {
        const int64 flat = work.flat_row(params, work.first_row + r);
        const PartialOutputs<HEAD_DIM, SPLIT> partial(params);
        *partial.values(work.part, flat, column) = values;
        if (column == 0) *partial.stats(work.part, flat) = stats;
      }
    }
    if constexpr (CLUSTERED) {
      mbarrier_wait_cluster(shared.exchange.arrived, 0);
      for (int unit = threadIdx.x; unit < own_units; unit += C::THREADS) {
        const int i = work.part * units_each + unit;
        RowStats stats;
        const Values4 values = combine_parts<SPLIT>(
            stats, [&](int part) { return shared.exchange.stats[part][unit]; },
            [&](int part) { return shared.exchange.values[part][unit]; });
        store(i / (HEAD_DIM / 4), i % (HEAD_DIM / 4) * 4, values, stats);
      }
    }
  }
}

}  // namespace microsdpa::ampere::mma
