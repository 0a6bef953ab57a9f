// Tiles and shared memory of hopper/backward/kernel.cu.
#pragma once

#include "../../common/backward_params.cuh"
#include "../../common/backward_work.cuh"
#include "../../common/masks.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../common/pipeline.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::backward {

using microsdpa::backward::BackwardParams;

constexpr int CONSUMERS = 2;

// Tiles in memory have whole panels of BOX columns. Products have HEAD_DIM columns, which is a multiple of 16.
constexpr int BOX = 64;
template <int HEAD_DIM>
constexpr int PANEL_COLUMNS = (HEAD_DIM + BOX - 1) / BOX * BOX;

// Parts of the sums of dQ of a tile: a consumer makes one at a time.
template <int HEAD_DIM>
constexpr int PARTS_OF = HEAD_DIM > 2 * BOX ? PANEL_COLUMNS<HEAD_DIM> / BOX : CONSUMERS;

// BLOCK_M queries are walked over at a time, and each consumer has 64 of the CTA's keys. WHOLE: a CTA has all keys of
// its head, and what it makes of dQ are no parts of sums. RANGED: queries see ranges of keys.
template <typename T_, int HEAD_DIM_, int BLOCK_M_, int QUERY_STAGES_, int GRAD_STAGES_, bool WHOLE_, bool RANGED_>
struct Tiles {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_M = BLOCK_M_, BLOCK_N = ROWS * CONSUMERS;
  static constexpr int QUERY_STAGES = QUERY_STAGES_, GRAD_STAGES = GRAD_STAGES_;
  static constexpr bool WHOLE = WHOLE_, RANGED = RANGED_;
  static constexpr int COLUMNS = PANEL_COLUMNS<HEAD_DIM>;
  static constexpr bool TRANSPOSED = BLOCK_M % BOX != 0;  // parts of dQ: columns are the rows of a product
  static constexpr int PARTS = PARTS_OF<HEAD_DIM>, PART = BLOCK_M * COLUMNS / PARTS;
  static_assert(BLOCK_M % 16 == 0 && HEAD_DIM % 16 == 0, "products have whole steps");

  // Columns of a part of dQ. A part has 64 queries and all columns, or all queries and up to 64 columns.
  __device__ __forceinline__ static constexpr int part_columns(int part) {
    return BLOCK_M > BOX || part > 0 ? HEAD_DIM - (COLUMNS - BOX) : BOX;
  }
  __device__ __forceinline__ static constexpr int part_bytes(int part) {
    return (TRANSPOSED ? PART : ROWS * part_columns(part)) * static_cast<int>(sizeof(float));
  }
};

// For larger heads: both consumers have the CTA's 64 keys, and one of the sums dK and dV each.
template <typename T_, int HEAD_DIM_, int QUERY_STAGES_, int GRAD_STAGES_, bool RANGED_>
struct WideTiles {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_M = 64, BLOCK_N = ROWS;
  static constexpr int QUERY_STAGES = QUERY_STAGES_, GRAD_STAGES = GRAD_STAGES_;
  static constexpr bool WHOLE = false, RANGED = RANGED_;
  static constexpr int COLUMNS = PANEL_COLUMNS<HEAD_DIM>;
  static constexpr int PARTS = PARTS_OF<HEAD_DIM>, PART = BLOCK_M * BOX;
  static_assert(HEAD_DIM % 16 == 0, "products have whole steps");

  __device__ __forceinline__ static constexpr int part_bytes(int) { return PART * static_cast<int>(sizeof(float)); }
};

// What is known of the ranges of keys that the queries of a tile see: where each begins and where each ends, and of all
// of them the first begin and the last end, the last begin and the first end.
template <int BLOCK_M>
constexpr int RANGE_NUMBERS = 2 * BLOCK_M + 4;

template <typename C, bool = C::RANGED>
struct RangeStorage {};
template <typename C>
struct RangeStorage<C, true> {
  alignas(128) int32 ends[C::QUERY_STAGES][RANGE_NUMBERS<C::BLOCK_M>];
};

// Panels of a tile lie one after another.
template <typename C>
struct SharedStorage {
  using T = typename C::T;
  alignas(1024) T key[C::BLOCK_N * C::COLUMNS];    // at the end dK
  alignas(1024) T value[C::BLOCK_N * C::COLUMNS];  // at the end dV
  alignas(1024) T query[C::QUERY_STAGES][C::BLOCK_M * C::COLUMNS];
  alignas(1024) T grad_out[C::GRAD_STAGES][C::BLOCK_M * C::COLUMNS];
  alignas(1024) T ds[2][C::BLOCK_N * C::BLOCK_M];  // dS^T, the queries contiguous, of every other tile
  alignas(1024) float sums[CONSUMERS][C::PART];    // of dQ, on their way to global memory; or dQ, WHOLE
  alignas(128) float lse[C::QUERY_STAGES][C::BLOCK_M];
  alignas(128) float delta[C::QUERY_STAGES][C::BLOCK_M];
  RangeStorage<C> ranges;
  Mbarrier owned_full;
  Mbarrier query_full[C::QUERY_STAGES], query_empty[C::QUERY_STAGES];
  Mbarrier grad_full[C::GRAD_STAGES], grad_empty[C::GRAD_STAGES];
  Mbarrier ds_full[2], ds_empty[2];
};

template <typename C>
struct WideStorage {
  using T = typename C::T;
  alignas(1024) T key[C::BLOCK_N * C::COLUMNS];    // at the end dK
  alignas(1024) T value[C::BLOCK_N * C::COLUMNS];  // at the end dV
  alignas(1024) T query[C::QUERY_STAGES][C::BLOCK_M * C::COLUMNS];
  alignas(1024) T grad_out[C::GRAD_STAGES][C::BLOCK_M * C::COLUMNS];
  alignas(1024) T ds[C::BLOCK_N * C::BLOCK_M];     // dS^T, the queries contiguous
  alignas(1024) float p[C::BLOCK_N * C::BLOCK_M];  // P^T as a warpgroup's accumulators have it
  alignas(1024) float sums[CONSUMERS][C::PART];    // of dQ, on their way to global memory
  alignas(128) float lse[C::QUERY_STAGES][C::BLOCK_M];
  alignas(128) float delta[C::QUERY_STAGES][C::BLOCK_M];
  RangeStorage<C> ranges;
  Mbarrier owned_full;
  Mbarrier query_full[C::QUERY_STAGES], query_empty[C::QUERY_STAGES];
  Mbarrier grad_full[C::GRAD_STAGES], grad_empty[C::GRAD_STAGES];
};

// Scratch memory of a call: for each tile of queries of each head the LSE and then delta of its rows, which go on past
// the last one; behind all of these, for each tile, the sums of dQ as the consumers' registers have them, and at last,
// for each of their PARTS, how many tiles of keys have added to it. RANGED, RANGE_NUMBERS of each tile are behind the
// sums.
template <int BLOCK_M, int PARTS, int PART, bool RANGED = false>
struct Workspace {
  int tiles;  // of a head
  float* rows;
  float* sums;
  int32 *ranges, *turns;

  __device__ __forceinline__ explicit Workspace(const AttentionParams& call) {
    tiles = (call.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    rows = static_cast<float*>(call.workspace);
    const int64 all = static_cast<int64>(call.batch) * call.heads * tiles;
    sums = rows + all * 2 * BLOCK_M;
    ranges = reinterpret_cast<int32*>(sums + all * PARTS * PART);
    turns = ranges + (RANGED ? all * RANGE_NUMBERS<BLOCK_M> : 0);
  }

  // `head` counts through the batch.
  __device__ __forceinline__ float* lse(int head, int tile) const {
    return rows + (static_cast<int64>(head) * tiles + tile) * 2 * BLOCK_M;
  }
  __device__ __forceinline__ float* delta(int head, int tile) const { return lse(head, tile) + BLOCK_M; }
  __device__ __forceinline__ float* sum(int head, int tile) const {
    return sums + (static_cast<int64>(head) * tiles + tile) * PARTS * PART;
  }
  __device__ __forceinline__ int32* range(int head, int tile) const {
    return ranges + (static_cast<int64>(head) * tiles + tile) * RANGE_NUMBERS<BLOCK_M>;
  }
  __device__ __forceinline__ int32* turn(int head, int tile) const {
    return turns + (static_cast<int64>(head) * tiles + tile) * PARTS;
  }
};

template <typename C>
using WorkspaceOf = Workspace<C::BLOCK_M, C::PARTS, C::WHOLE ? 0 : C::PART, C::RANGED>;

// What decides about scores, as in MaskParams. MASK: booleans that hide keys from all queries, or KeyRange, or void for
// none. RIGHT: a causal mask, or a window's right end.
template <typename MASK, bool LEFT_, bool RIGHT_, bool SOFTCAP_, bool ALIBI_>
struct Scoring {
  static constexpr bool HIDES_KEYS = is_bool<MASK>, RANGED = is_range<MASK>;
  static constexpr bool LEFT = LEFT_, RIGHT = RIGHT_, SOFTCAP = SOFTCAP_, ALIBI = ALIBI_;
};

// Whether a mask of booleans, the same for all queries, shows a key.
__device__ __forceinline__ bool shows(const MaskParams& masks, int64 batch, int64 head, int64 key) {
  return static_cast<const bool*>(
      masks.mask)[batch * masks.mask_strides.batch + head * masks.mask_strides.head + key * masks.mask_column_stride];
}

// What a CTA walks over: of each query head of a key head the tiles of queries that see one of its keys.
// Where queries see no keys far behind them, a fixed order begins with the last keys: the first tile of queries that
// any CTA has then waits for no other keys. Under a causal mask these CTAs also have the fewest tiles.
template <typename C, typename M, bool IN_ORDER>
struct Walk {
  static constexpr int MANY = 1 << 30;

  int batch, head_kv, first_key;
  int first_head, first_tile, tiles, turns;

  __device__ __forceinline__ explicit Walk(const BackwardParams& params) {
    const AttentionParams& call = params.forward.call;
    const int tiles_of_head = (call.seqlen_k + C::BLOCK_N - 1) / C::BLOCK_N;
    const microsdpa::backward::Work work(blockIdx.x, tiles_of_head, call.batch * call.heads_kv, params.key_heads);
    const int group = call.heads / call.heads_kv;
    batch = work.head / call.heads_kv, head_kv = work.head % call.heads_kv;
    first_head = head_kv * group;
    first_key = (M::RIGHT && IN_ORDER ? tiles_of_head - 1 - work.tile : work.tile) * C::BLOCK_N;
    // The queries that see one of the keys.
    const int begin = M::RIGHT ? max(0, first_key - call.diagonal) : 0;
    int end = call.seqlen_q;
    if constexpr (M::LEFT) {
      end = min(end, min(first_key + C::BLOCK_N, call.seqlen_k) - params.forward.masks.lowest);
    }
    first_tile = begin / C::BLOCK_M;
    tiles = begin < end ? (end + C::BLOCK_M - 1) / C::BLOCK_M - first_tile : 0;
    turns = tiles * group;
  }

  // Leaves out tiles of queries whose mask hides all of the CTA's keys; all threads. The kernel ahead is done.
  __device__ __forceinline__ void narrow(const MaskedParams& params) {
    // mutation: what is left out adds nothing, but a fixed order counts it, and a whole dQ is stored
    if constexpr (IN_ORDER || C::WHOLE) return;
    const AttentionParams& call = params.call;
    const bool of_head = params.masks.mask_strides.head != 0;
    int first = MANY, last = -1;  // tiles that see one of the keys
    if constexpr (M::HIDES_KEYS) {
      const int key = first_key + threadIdx.x;
      const bool exists = threadIdx.x < C::BLOCK_N && key < call.seqlen_k;
      if (of_head || (exists && shows(params.masks, batch, first_head, key))) {
        first = first_tile, last = first_tile + tiles - 1;
      }
    } else {
      const WorkspaceOf<C> workspace(call);
      const int count = of_head ? turns : tiles;
      for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int tile = first_tile + i % tiles;
        const int32* ends = workspace.range(batch * call.heads + first_head + i / tiles, tile) + 2 * C::BLOCK_M;
        if (ends[0] < first_key + C::BLOCK_N && ends[1] > first_key) first = min(first, tile), last = max(last, tile);
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      first = min(first, __shfl_xor_sync(FULL_WARP, first, distance));
      last = max(last, __shfl_xor_sync(FULL_WARP, last, distance));
    }
    constexpr int WARPS = (1 + CONSUMERS) * WARPGROUP_THREADS / 32;
    __shared__ int32 of_warps[WARPS][2];
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) of_warps[warp][0] = first, of_warps[warp][1] = last;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) first = min(first, of_warps[i][0]), last = max(last, of_warps[i][1]);
    tiles = max(0, last - first + 1), turns = tiles * (call.heads / call.heads_kv);
    first_tile = tiles ? first : 0;
  }

  // How many tiles of keys have added to a tile of queries before this one.
  __device__ __forceinline__ int keys_before(const MaskedParams& params, int tile) const {
    const AttentionParams& call = params.call;
    if constexpr (M::RIGHT) {
      const int last_query = min((tile + 1) * C::BLOCK_M, call.seqlen_q) - 1;
      return (min(last_query + call.diagonal, call.seqlen_k - 1) - first_key) / C::BLOCK_N;
    }
    int tiles_before = first_key / C::BLOCK_N;
    if constexpr (M::LEFT) tiles_before -= max(0, tile * C::BLOCK_M + params.masks.lowest) / C::BLOCK_N;
    return tiles_before;
  }
};

// The query head and the tile of a turn.
struct Turn {
  int head, tile;

  template <typename W>
  __device__ __forceinline__ explicit Turn(const W& walk) : head(walk.first_head), tile(walk.first_tile) {}

  template <typename W>
  __device__ __forceinline__ void advance(const W& walk) {
    if (++tile == walk.first_tile + walk.tiles) tile = walk.first_tile, ++head;
  }
};

// Barriers among warps.
enum BackwardBarrier : int {
  SCORES_THERE = 1,
  SUMS_FULL = 2,
  SUMS_EMPTY = 4,
  CONSUMER = 6,
  P_THERE = 8,
  KEYS_READ = 9,
  FIRST_THERE = 10
};
constexpr int SUMS_THREADS = WARPGROUP_THREADS + 32;  // of a consumer, and the warp that stores for it

}  // namespace microsdpa::hopper::backward
