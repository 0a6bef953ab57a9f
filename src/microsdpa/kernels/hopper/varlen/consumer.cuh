// What a consumer warpgroup of hopper/varlen/kernel.cu does with its 64 rows of each segment.
#pragma once

#include "../../ptx/cluster.cuh"
#include "../../ptx/cluster_load.cuh"
#include "../common/main_loop.cuh"
#include "masks.cuh"

namespace microsdpa::hopper::varlen {

// Where more than MOST_AT_ONCE parts make a sum, warpgroups add so many ahead of all, side by side: parts are read one
// after the other.
constexpr int AHEAD_OF_ALL = 8;
constexpr int MERGE = OUT_FULL;  // from this barrier on, one for every warpgroup

// Whether a warpgroup's rows may see fewer tiles of keys than others' rows do.
template <typename C, typename MASKS>
constexpr bool SKIPS = MASKS::RIGHT && !MASKS::BACKWARDS && C::CONSUMERS > 1;

template <typename C, bool OVERLAP, typename MASKS, int PACK, int VALUE_DIM, int CLUSTER>
struct Consumer
    : MainLoop<Consumer<C, OVERLAP, MASKS, PACK, VALUE_DIM, CLUSTER>, SharedStorage<C>, C, OVERLAP, SKIPS<C, MASKS>> {
  using Loop = MainLoop<Consumer, SharedStorage<C>, C, OVERLAP, SKIPS<C, MASKS>>;
  using Loop::all_tiles, Loop::o, Loop::query_state, Loop::rows, Loop::shared, Loop::skipped, Loop::tile, Loop::tiles,
      Loop::works;
  using Loop::BLOCK_N, Loop::HEAD_DIM;
  using Loop::thread, Loop::tile_row, Loop::warpgroup;
  using typename Loop::Probabilities, typename Loop::Scores, typename Loop::T;

  const VarlenParams& params;
  MaskedRows<MASKS, PACK, BLOCK_N> masks;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared, const VarlenParams& params, int warpgroup)
      : Loop(shared, MASKS::MODIFIED ? 1.0f : params.scale_log2, warpgroup), params(params), masks(params) {}

  // Waits for a segment. False when there is none, or none of its rows is this warpgroup's.
  __device__ __forceinline__ bool begin_query() {
    Loop::wait_query();
    const Segment& segment = shared.segment[works % SEGMENTS];
    all_tiles = segment.tiles;
    if (all_tiles == 0 || ROWS * warpgroup >= segment.rows) return false;
    tile = 0;
    masks.begin(segment, ROWS * warpgroup + tile_row(0));
    tiles = all_tiles;
    if constexpr (SKIPS<C, MASKS>) {
      const int end = masks.end(ROWS * warpgroup + ROWS - 1);
      tiles = min(tiles, max(1, (end + BLOCK_N - 1) / BLOCK_N - segment.first_tile));
    }
    skipped = all_tiles - tiles;
    if constexpr (C::BULK_QUERIES && !MASKS::MODIFIED) {
      if (params.scale_log2 < 0.0f) negate_query();
    }
    return true;
  }
  // A negative scale is a positive one of -Q.
  __device__ __forceinline__ void negate_query() {
    constexpr int CHUNKS = ROWS * C::COLUMNS / 8;
    for (int i = thread; i < ROWS * C::STORED / 8; i += WARPGROUP_THREADS) {
      const int panel = min(i / CHUNKS, C::PANELS);
      auto* rows = Loop::query_panel(panel * C::COLUMNS, panel < C::PANELS ? C::COLUMNS : C::TAIL);
      uint4& chunk = reinterpret_cast<uint4*>(rows)[i - panel * CHUNKS];
      chunk = make_uint4(chunk.x ^ 0x80008000u, chunk.y ^ 0x80008000u, chunk.z ^ 0x80008000u, chunk.w ^ 0x80008000u);
    }
    fence_proxy_async();
    named_barrier_sync((QUERY_NEGATED + warpgroup) % BARRIERS, WARPGROUP_THREADS);
  }

  __device__ __forceinline__ const Segment& previous_work() const { return shared.segment[(works - 1) % SEGMENTS]; }

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
      return Loop::softmax_tile(s, p, factor, false, __any_sync(FULL_WARP, blind));
    }
    if (tile == 0) Loop::guess_stabilizers(s);
    return Loop::softmax_tile(s, p, factor, false);
  }

  // Writes O and LSE of a finished segment, or its part of them.
  __device__ __forceinline__ void finish(const Segment& segment, const Rows& done) {
    float sum[2], stabilizer[2];
    const bool misplaced = shared.misplaced[(works - 1) % SEGMENTS] != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // NaN: never a value of memory that is not the cache's.
      sum[half] = misplaced ? __uint_as_float(0x7fffffffu) : quad_sum(done.sum[half]);
      stabilizer[half] = done.stabilizer[half] * Loop::scale_of(half);
    }
    if constexpr (CLUSTER > 1) {
      leave_in_cluster(sum, stabilizer);
    } else {
      if (segment.parts > 1 && !merge(segment, sum, stabilizer)) return;
      float inverse[2];
      normalize(segment, sum, stabilizer, inverse);
      store(segment, inverse);
    }
  }

  // Finds what O is to be multiplied by, once all keys and sinks are counted, and writes LSE.
  __device__ __forceinline__ void normalize(const Segment& segment, float (&sum)[2], float (&stabilizer)[2],
                                            float (&inverse)[2]) const {
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
      if (params.lse != nullptr && own_row < segment.rows && thread % 4 == 0 && (CLUSTER == 1 || segment.part == 0)) {
        const Strides strides{params.lse_batch_stride, params.lse_head_stride, 1};
        params.lse[offset(segment, row, strides)] = log_sum_exp(stabilizer[half], sum[half]);
      }
    }
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
      constexpr int CHUNKS = (HEAD_DIM + 31) / 32;
      uint4 chunk[CHUNKS];
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 4) {
        uint32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && n + i < HEAD_DIM / 8; ++i) {
          const int at = 4 * (n + i) + 2 * half;
          word[i] = pack<T>(o[at] * factor[half], o[at + 1] * factor[half]);
        }
        chunk[n / 4] = transpose_quad(word[0], word[1], word[2], word[3]);
      }
      if (own_row < segment.rows) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
          const int column = 8 * (4 * i + thread % 4);
          if (VALUE_DIM == 32 * CHUNKS || column < VALUE_DIM) *reinterpret_cast<uint4*>(out + column) = chunk[i];
        }
      }
      // Without it ptxas takes the whole loop for divergent, with 150 moves into uniform registers.
      // mutation: it holds back the compiler, and does nothing when the kernel runs
      __syncwarp();
    }
  }

  // O as its threads hold it, in place of keys, and the rows' statistics, in place of values: this thread's.
  __device__ __forceinline__ float4* of_cluster(int four) const {
    static_assert(CLUSTER == 1 || C::CONSUMERS == 1, "what one warpgroup leaves fits the ring of keys");
    static_assert(C::STAGES >= 2 && C::BLOCK_N >= ROWS, "what one warpgroup leaves fits the ring of keys");
    return reinterpret_cast<float4*>(shared.key[0]) + four * WARPGROUP_THREADS + thread;
  }
  __device__ __forceinline__ float4* statistics_of_cluster() const {
    return reinterpret_cast<float4*>(shared.value[0]) + thread;
  }
  // Leaves them where the cluster's CTAs find them.
  __device__ __forceinline__ void leave_in_cluster(const float (&sum)[2], const float (&stabilizer)[2]) const {
    named_barrier_sync(MERGE, WARPGROUP_THREADS);  // products have read keys and values
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
      *of_cluster(i) = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    *statistics_of_cluster() = make_float4(stabilizer[0], sum[0], stabilizer[1], sum[1]);
  }

  // Adds what the cluster's CTAs have left, in their order, and writes some columns of O.
  __device__ __forceinline__ void add_parts_of_cluster() {
    const Segment& segment = shared.segment[0];
    if (works == 0) {  // there were no keys for this CTA
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.0f;
      leave_in_cluster({0.0f, 0.0f}, {negative_infinity(), negative_infinity()});
    }
    cluster_arrive();
    cluster_wait();
    float weight[CLUSTER][2], sum[2] = {0.0f, 0.0f}, stabilizer[2] = {negative_infinity(), negative_infinity()};
    float4 found[CLUSTER];
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part) {
      found[part] = load_peer4(peer_address(statistics_of_cluster(), part));
      stabilizer[0] = fmaxf(stabilizer[0], found[part].x), stabilizer[1] = fmaxf(stabilizer[1], found[part].z);
    }
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part) {
      weight[part][0] = ex2_approx(found[part].x - finite(stabilizer[0]));
      weight[part][1] = ex2_approx(found[part].z - finite(stabilizer[1]));
      sum[0] += weight[part][0] * found[part].y, sum[1] += weight[part][1] * found[part].w;
    }
    float inverse[2];
    normalize(segment, sum, stabilizer, inverse);
    for (int i = segment.part; i < VALUE_DIM / 8; i += CLUSTER) {
      float4 four[CLUSTER];
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part) four[part] = load_peer4(peer_address(of_cluster(i), part));
      float total[4] = {};
#pragma unroll
      for (int part = 0; part < CLUSTER; ++part) {
        total[0] += weight[part][0] * four[part].x, total[1] += weight[part][0] * four[part].y;
        total[2] += weight[part][1] * four[part].z, total[3] += weight[part][1] * four[part].w;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (tile_row(half) >= segment.rows) continue;
        T* out = static_cast<T*>(params.out) + offset(segment, segment.first_row + tile_row(half), params.out_strides);
        *reinterpret_cast<uint32*>(out + 8 * i + thread % 4 * 2) =
            pack<T>(total[2 * half] * inverse[half], total[2 * half + 1] * inverse[half]);
      }
    }
    // A CTA's shared memory stays until all have read it.
    cluster_arrive();
    cluster_wait();
  }

  // Leaves O and the rows' statistics in the workspace. The warpgroup that is the last one to do so goes on with the
  // sum of all parts, which are added in their order; false for the others.
  __device__ __forceinline__ bool merge(const Segment& segment, float (&sum)[2], float (&stabilizer)[2]) {
    leave(segment, segment.part, sum, stabilizer);
    if (segment.parts <= MOST_AT_ONCE) {
      if (!arrives_last(segment.owner, segment.parts, false)) return false;
      add<1>(segment, 0, segment.parts, sum, stabilizer);
      return true;
    }
    const int first = segment.part / AHEAD_OF_ALL * AHEAD_OF_ALL, parts = min(AHEAD_OF_ALL, segment.parts - first);
    if (parts > 1) {  // a CTA that has the last part of its rows may have others' first one, which counts in its place
      if (!arrives_last(segment.owner + first, parts, false)) return false;
      add<1>(segment, first, parts, sum, stabilizer);
      leave(segment, first, sum, stabilizer);
    }
    const int groups = (segment.parts + AHEAD_OF_ALL - 1) / AHEAD_OF_ALL;
    if (!arrives_last(segment.owner, groups, true)) return false;
    add<AHEAD_OF_ALL>(segment, 0, groups, sum, stabilizer);
    return true;
  }

  // Stores O and the rows' statistics as a part of the segment's rows.
  __device__ __forceinline__ void leave(const Segment& segment, int part, const float (&sum)[2],
                                        const float (&stabilizer)[2]) const {
    const Partials<C> partials(params);
    float4* own = partials.at(segment, part, warpgroup, thread, 0);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
      own[i * WARPGROUP_THREADS] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    own[C::HEAD_DIM / 8 * WARPGROUP_THREADS] = make_float4(stabilizer[0], sum[0], stabilizer[1], sum[1]);
    __threadfence();
  }

  // Whether this warpgroup is the last one of `count` that come here. A counter has two halves: the upper one counts
  // those that have added parts of others.
  __device__ __forceinline__ bool arrives_last(int owner, int count, bool added) const {
    named_barrier_sync(MERGE + warpgroup, WARPGROUP_THREADS);
    if (thread == 0) {
      uint32& arrivals = params.arrivals[owner * C::CONSUMERS + warpgroup];
      const int shift = added ? 16 : 0;
      const bool is_last = (atomicAdd(&arrivals, 1u << shift) >> shift & 0xffffu) == static_cast<uint32>(count - 1);
      __threadfence();
      if (is_last) atomicAdd(&arrivals, ~(static_cast<uint32>(count) << shift) + 1u);  // for the next launch
      shared.is_last[warpgroup] = is_last;
    }
    named_barrier_sync(MERGE + warpgroup, WARPGROUP_THREADS);
    return shared.is_last[warpgroup];
  }

  // Takes the sum of so many parts from `first` on, of which every STEP-th counts, in their order.
  template <int STEP>
  __device__ __forceinline__ void add(const Segment& segment, int first, int parts, float (&sum)[2],
                                      float (&stabilizer)[2]) {
    const Partials<C> partials(params);
    const auto statistics = [&](int part) {
      return *partials.at(segment, first + part * STEP, warpgroup, thread, Partials<C>::STATISTICS);
    };
    stabilizer[0] = stabilizer[1] = negative_infinity();
    for (int part = 0; part < parts; ++part) {
      const float4 found = statistics(part);
      stabilizer[0] = fmaxf(stabilizer[0], found.x), stabilizer[1] = fmaxf(stabilizer[1], found.z);
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.0f;
    // A part's loads fill the registers that are left: repeated code would be a third of the kernel's, and not faster.
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float4 found = statistics(part);
      const float weight[2] = {ex2_approx(found.x - finite(stabilizer[0])),
                               ex2_approx(found.z - finite(stabilizer[1]))};
      sum[0] += weight[0] * found.y, sum[1] += weight[1] * found.w;
      const float4* values = partials.at(segment, first + part * STEP, warpgroup, thread, 0);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i) {
        const float4 four = values[i * WARPGROUP_THREADS];
        o[4 * i] += weight[0] * four.x, o[4 * i + 1] += weight[0] * four.y;
        o[4 * i + 2] += weight[1] * four.z, o[4 * i + 3] += weight[1] * four.w;
      }
    }
  }
};

}  // namespace microsdpa::hopper::varlen
