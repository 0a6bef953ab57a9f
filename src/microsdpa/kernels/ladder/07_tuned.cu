// Rung 07: tuned. Rung 04 with its tiles chosen for the problem, the keys divided among warps, and no work twice.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, HEAD_DIM]; every group of warps has STAGES places of its own for K and V [BLOCK_N, HEAD_DIM].
// Roles:    KEY_GROUPS groups of ROW_WARPS warps; a group takes every KEY_GROUPS-th tile of keys, a warp of it owns
//           16 * ROW_TILES queries. At the end the groups' outputs are combined through shared memory.
// Pipeline: 1. K and V of STAGES tiles are on their way from the start, each in a group of its own
//           2. wait for K: S = Q K^T, masks where one cuts the tile, softmax with the scale folded into 2^(scale s - m)
//           3. wait for V, send for the K that takes this one's place; O += P V; V's place is filled a tile later
// Bound by: latency at the headline shape, (1, 8, 512, 64) (the way of K, then of V, then the combine); tensor cores
//           and exp2 when large.
#include "../common/async_tile.cuh"
#include "../common/combine.cuh"
#include "../common/mma_rows.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../common/tile_scheduler.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::ladder::rung_07 {

template <typename T_, int HEAD_DIM_, int BLOCK_N_, int ROW_TILES_, int ROW_WARPS_, int KEY_GROUPS_, int STAGES_>
struct Shape {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, BLOCK_N = BLOCK_N_, ROW_TILES = ROW_TILES_, ROW_WARPS = ROW_WARPS_;
  static constexpr int KEY_GROUPS = KEY_GROUPS_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_M = WARP_ROWS * ROW_WARPS;
  static constexpr int GROUP_THREADS = 32 * ROW_WARPS, THREADS = GROUP_THREADS * KEY_GROUPS;
};

template <typename Shape>
struct Streaming {
  using KeyTile = SwizzledTile<typename Shape::T, Shape::BLOCK_N, Shape::HEAD_DIM>;
  SwizzledTile<typename Shape::T, Shape::BLOCK_M, Shape::HEAD_DIM> query;
  struct {
    KeyTile key[Shape::STAGES], value[Shape::STAGES];
  } group[Shape::KEY_GROUPS];
};

template <typename Shape>
struct Combining {
  static constexpr int PITCH = Shape::HEAD_DIM + 8;  // floats: four rows of a quad's eight fill the banks
  alignas(16) float o[Shape::KEY_GROUPS][Shape::BLOCK_M * PITCH];
  RowStats stats[Shape::KEY_GROUPS][Shape::BLOCK_M];
};

template <typename Shape>
union SharedStorage {
  Streaming<Shape> streaming;
  Combining<Shape> combining;  // over tiles that nobody needs any more
};

// What a warp keeps of its rows.
template <typename Shape>
struct WarpState {
  OnlineSoftmax<Shape::ROW_TILES> softmax;
  float o[Shape::ROW_TILES][Shape::HEAD_DIM / 8][4] = {};
};

// Takes the group's tiles of keys: first_tile, first_tile + KEY_GROUPS, ... `count` of them.
template <typename Shape, bool CAUSAL, int LOAD_BYTES, typename T>
__device__ __forceinline__ void attend(WarpState<Shape>& state, Streaming<Shape>& shared, const Head<T>& head,
                                       const AttentionParams& params, int first_row, int count, int group) {
  constexpr int BLOCK_N = Shape::BLOCK_N, HEAD_DIM = Shape::HEAD_DIM, STAGES = Shape::STAGES;
  constexpr int ROW_TILES = Shape::ROW_TILES;
  const int thread = threadIdx.x % Shape::GROUP_THREADS;
  const int warp_row = thread / 32 * Shape::WARP_ROWS;
  auto& ring = shared.group[group];

  const auto start = [&](typename Streaming<Shape>::KeyTile& tile, const T* rows, int64 stride, int i) {
    const int first_key = (i * Shape::KEY_GROUPS + group) * BLOCK_N;
    if (i < count) {
      start_rows<BLOCK_N, HEAD_DIM, Shape::GROUP_THREADS, LOAD_BYTES>(tile, 0, rows + first_key * stride, stride,
                                                                      params.seqlen_k - first_key, thread);
    }
    cp_async_commit();  // an empty group past the end, so that the waits mean the same for every tile
  };
  const auto start_key = [&](int i) { start(ring.key[i % STAGES], head.key, params.key_strides.row, i); };
  const auto start_value = [&](int i) { start(ring.value[i % STAGES], head.value, params.value_strides.row, i); };

  start_rows<Shape::BLOCK_M, HEAD_DIM, Shape::THREADS, LOAD_BYTES>(
      shared.query, 0, head.query + first_row * params.query_strides.row, params.query_strides.row,
      params.seqlen_q - first_row, threadIdx.x);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) start_key(i), start_value(i);
  cp_async_wait<2 * STAGES - 1>();  // the queries and the first keys
  __syncthreads();

  // Every query of the warp sees the keys before `all_see`, none of them those from `none_sees` on.
  const int warp_first = first_row + warp_row;
  const int all_see = keys_seen<CAUSAL>(params, warp_first, 1);
  const int none_sees = keys_seen<CAUSAL>(params, warp_first, Shape::WARP_ROWS);

  // The softmax wants a positive scale: a negative one is a positive one of -Q, and 0 must not meet a score of -inf.
  const float scale = fmaxf(fabsf(params.scale_log2), 1e-30f);
  QueryOperand<decltype(shared.query), ROW_TILES, HEAD_DIM, HEAD_DIM / 16> query(shared.query, warp_row);
  if (params.scale_log2 < 0.0f) {
#pragma unroll
    for (auto& tile : query.kept) {
#pragma unroll
      for (auto& fragment : tile) {
#pragma unroll
        for (uint32& pair : fragment) pair ^= 0x80008000u;
      }
    }
  }

  for (int i = 0; i < count; ++i) {
    const int first_key = (i * Shape::KEY_GROUPS + group) * BLOCK_N;
    float s[ROW_TILES][BLOCK_N / 8][4];
    if (i > 0) {
      cp_async_wait<2 * STAGES - 2>();
      named_barrier_sync(1 + group, Shape::GROUP_THREADS);  // K is there, and nobody reads the last V any more
      start_value(i - 1 + STAGES);
    }
    if (first_key < none_sees) {
      multiply_query_key<T, ROW_TILES, HEAD_DIM, BLOCK_N>(s, query, ring.key[i % STAGES], 0);
      if (first_key + BLOCK_N > all_see) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = warp_first + 16 * t + 8 * half + lane_index() / 4;
            mask_row<BLOCK_N>(s[t], half, keys_seen<CAUSAL>(params, row, 1) - first_key);
          }
        }
      }
      state.softmax.template update<BLOCK_N, HEAD_DIM, true>(s, state.o, scale);
    }
    cp_async_wait<2 * STAGES - 2>();
    named_barrier_sync(1 + group, Shape::GROUP_THREADS);  // V is there, and nobody reads this K any more
    start_key(i + STAGES);
    if (first_key < none_sees) {
      multiply_probability_value<T, ROW_TILES, HEAD_DIM, BLOCK_N>(state.o, s, ring.value[i % STAGES], 0);
    }
  }
}

// Writes the rows of a warp that has seen all keys.
template <typename Shape, int STORE_BYTES, typename T>
__device__ __forceinline__ void finish(const WarpState<Shape>& state, Streaming<Shape>& shared, const Head<T>& head,
                                       const AttentionParams& params, int first_row) {
  const int warp_row = threadIdx.x / 32 * Shape::WARP_ROWS;
  float scale[Shape::ROW_TILES][2];
#pragma unroll
  for (int t = 0; t < Shape::ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = state.softmax.total(t, half);
      const int row = first_row + warp_row + 16 * t + 8 * half + lane_index() / 4;
      scale[t][half] = normalizer(sum);
      if (head.lse != nullptr && lane_index() % 4 == 0 && row < params.seqlen_q) {
        head.lse[row] = log_sum_exp(state.softmax.stabilizer[t][half], sum);
      }
    }
  }
  store_output<T, Shape::ROW_TILES, Shape::HEAD_DIM, STORE_BYTES>(shared.query, warp_row, state.o, scale, head, params,
                                                                  first_row + warp_row);
}

// Combines what the groups made of their keys, and writes it.
template <typename Shape, int STORE_BYTES, typename T>
__device__ __forceinline__ void combine_and_finish(const WarpState<Shape>& state, Combining<Shape>& shared,
                                                   const Head<T>& head, const AttentionParams& params, int first_row,
                                                   int group) {
  constexpr int PITCH = Combining<Shape>::PITCH, COLUMNS = 4;
  const int warp_row = threadIdx.x % Shape::GROUP_THREADS / 32 * Shape::WARP_ROWS;
  __syncthreads();  // all groups are done with their tiles
#pragma unroll
  for (int t = 0; t < Shape::ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_row + 16 * t + 8 * half + lane_index() / 4;
      const float sum = state.softmax.total(t, half);
      if (lane_index() % 4 == 0) shared.stats[group][r] = {state.softmax.stabilizer[t][half], sum};
#pragma unroll
      for (int n = 0; n < Shape::HEAD_DIM / 8; ++n) {
        const Vector<float, 2> pair = {{state.o[t][n][2 * half], state.o[t][n][2 * half + 1]}};
        *reinterpret_cast<Vector<float, 2>*>(&shared.o[group][r * PITCH + 8 * n + lane_index() % 4 * 2]) = pair;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < Shape::BLOCK_M * Shape::HEAD_DIM / COLUMNS; i += Shape::THREADS) {
    const int r = i / (Shape::HEAD_DIM / COLUMNS), column = i % (Shape::HEAD_DIM / COLUMNS) * COLUMNS;
    const int row = first_row + r;
    if (row >= params.seqlen_q) break;
    RowStats stats;
    const Values4 values = combine_parts<Shape::KEY_GROUPS>(
        stats, [&](int part) { return shared.stats[part][r]; },
        [&](int part) { return *reinterpret_cast<const Values4*>(&shared.o[part][r * PITCH + column]); });
    const float scale = normalizer(stats.sum);
    Vector<T, COLUMNS> rounded;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) rounded.data[c] = from_float<T>(values.data[c] * scale);
    T* out = head.out + row * params.out_strides.row + column;
    if constexpr (STORE_BYTES == 16) {
      *reinterpret_cast<Vector<T, COLUMNS>*>(out) = rounded;
    } else {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) out[c] = rounded.data[c];
    }
    if (head.lse != nullptr && column == 0) head.lse[row] = log_sum_exp(stats.stabilizer, stats.sum);
  }
}

template <typename T, int HEAD_DIM, int BLOCK_N, int ROW_TILES, int ROW_WARPS, int KEY_GROUPS, int STAGES, int CTAS,
          bool CAUSAL, int LOAD_BYTES>
__global__ void __launch_bounds__(32 * ROW_WARPS * KEY_GROUPS, CTAS)
    attention(const __grid_constant__ AttentionParams params) {
  using S = Shape<T, HEAD_DIM, BLOCK_N, ROW_TILES, ROW_WARPS, KEY_GROUPS, STAGES>;
  auto& shared = dynamic_shared<SharedStorage<S>>();
  const TileScheduler<CAUSAL, S::BLOCK_M> work(params);
  const Head<T> head(params, work.head());
  const int first_row = work.first_row();
  const int group = KEY_GROUPS == 1 ? 0 : threadIdx.x / S::GROUP_THREADS;
  const int tiles = (max(keys_seen<CAUSAL>(params, first_row, S::BLOCK_M), 0) + BLOCK_N - 1) / BLOCK_N;

  WarpState<S> state;
  attend<S, CAUSAL, LOAD_BYTES>(state, shared.streaming, head, params, first_row,
                                (tiles - group + KEY_GROUPS - 1) / KEY_GROUPS, group);
  if constexpr (KEY_GROUPS == 1) {
    finish<S, LOAD_BYTES>(state, shared.streaming, head, params, first_row);
  } else {
    combine_and_finish<S, LOAD_BYTES>(state, shared.combining, head, params, first_row, group);
  }
}

}  // namespace microsdpa::ladder::rung_07
