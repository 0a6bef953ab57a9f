// ada/mma_8bit: 8 bits, tuned. Rung 11 with its tiles chosen for the problem, the keys divided among warps, and less
// arithmetic a score.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M rows of one key head per CTA: queries of
// one head, or, of few queries, all heads that share the key head. Operands are those of rung 11. A score costs one
// multiplication with its key's scale and one FMA: the query's scale, the softmax's and the stabilizer go into
// 2^(factor s - m), and O is rescaled only when a maximum has moved by more than SLACK.
// Tiles:    Q [BLOCK_M, TERMS * HEAD_DIM]; every group of warps has STAGES places of its own for K, V and K's scales.
// Roles:    KEY_GROUPS groups of ROW_WARPS warps; a group takes every KEY_GROUPS-th tile of keys, a warp of it owns 16
//           rows. At the end the groups' outputs are combined through shared memory, and written in whole lines.
// Pipeline: 1. K and V of STAGES tiles are on their way from the start, each in a group of its own
//           2. wait for K: S by m16n8k32, K's scales, masks where one cuts the tile, softmax
//           3. wait for V, send for the K that takes this one's place; O += P V; V's place is filled a tile later
// Bound by: latency at the headline shape, (1, 8, 512, 64) (the way of K, then of V, then the combine); tensor cores
//           and exp2 when large.
#include "../../common/async_tile.cuh"
#include "../../common/combine.cuh"
#include "../../common/eight_bit_rows.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"

namespace microsdpa::ada::mma_8bit {

constexpr int WARP_ROWS = 16;

// The PACK query heads whose rows are tiled together; row r is that of query r / PACK in the head r % PACK of them.
template <int PACK>
struct PackedHeads {
  EightBitHead first;

  // Grid: a column of tiles for each key head, or for each head where none are packed.
  __device__ __forceinline__ PackedHeads(const EightBitParams& params, int index) : first(params, index * PACK) {}

  __device__ __forceinline__ static int rows(const EightBitParams& params) { return params.seqlen_q * PACK; }
  __device__ __forceinline__ EightBitHead of_row(int row) const {
    EightBitHead head = first;
    head.head += row % PACK;
    return head;
  }
  // Keys up to the last one that this row sees. Negative is none.
  template <bool CAUSAL>
  __device__ __forceinline__ static int seen(const EightBitParams& params, int row) {
    return keys_seen<CAUSAL>(params, row / PACK, 1);
  }
};

// V as it lies in shared memory: units of two values, or elements.
template <typename Value, int BLOCK_N, int HEAD_DIM>
struct ValueTile {
  using Element = Value;
  using Type = SwizzledTile<Value, BLOCK_N, HEAD_DIM>;
  static constexpr bool CODES = false;
};
template <int BLOCK_N, int HEAD_DIM>
struct ValueTile<E4m3, BLOCK_N, HEAD_DIM> {
  using Element = Unit;
  using Type = SwizzledTile<Unit, BLOCK_N, HEAD_DIM / 2>;
  static constexpr bool CODES = true;
};

template <typename T_, typename Format_, typename Value_, int HEAD_DIM_, int TERMS_, int BLOCK_N_, int ROW_WARPS_,
          int KEY_GROUPS_, int STAGES_>
struct Shape {
  using T = T_;
  using Format = Format_;
  using Value = ValueTile<Value_, BLOCK_N_, HEAD_DIM_>;
  using Probability = Value_;
  static constexpr int HEAD_DIM = HEAD_DIM_, TERMS = TERMS_, BLOCK_N = BLOCK_N_, ROW_WARPS = ROW_WARPS_;
  static constexpr int KEY_GROUPS = KEY_GROUPS_, STAGES = STAGES_, BLOCK_M = WARP_ROWS * ROW_WARPS;
  static constexpr int GROUP_THREADS = 32 * ROW_WARPS, THREADS = GROUP_THREADS * KEY_GROUPS;
};

template <typename Shape>
struct Streaming {
  SwizzledTile<Unit, Shape::BLOCK_M, Shape::TERMS * Shape::HEAD_DIM / 2> query;
  struct {
    SwizzledTile<Unit, Shape::BLOCK_N, Shape::HEAD_DIM / 2> key[Shape::STAGES];
    typename Shape::Value::Type value[Shape::STAGES];
    alignas(16) float key_scale[Shape::STAGES][Shape::BLOCK_N];
  } group[Shape::KEY_GROUPS];
};

template <typename Shape>
struct Combining {
  static constexpr int PITCH = Shape::HEAD_DIM + (Shape::Value::CODES ? 16 : 8);  // floats: stores fill the banks
  alignas(16) float o[Shape::KEY_GROUPS][Shape::BLOCK_M * PITCH];
  RowStats stats[Shape::KEY_GROUPS][Shape::BLOCK_M];
};

template <typename Shape>
union SharedStorage {
  Streaming<Shape> streaming;
  Combining<Shape> combining;  // over tiles that nobody needs any more
};

// What a warp keeps of its rows, of which the lane holds parts of two: row lane / 4 and that + 8.
//
// Probabilities are 2^(factor s - stabilizer + BIAS). The stabilizer is a score that the row has seen, and at most
// SLACK below the largest: as E4M3, which ends at 448, a probability is below 2^(8 + 3/4) = 431, and none saturates.
template <typename Shape>
struct WarpState {
  static constexpr float BIAS = Shape::Value::CODES ? 8.0f : 0.0f;
  static constexpr float SLACK = Shape::Value::CODES ? 0.75f : 8.0f;

  float factor[2];  // softmax scale times the queries', positive
  float stabilizer[2] = {negative_infinity(), negative_infinity()};
  float sum[2] = {};  // the lane's part of l, times 2^BIAS
  float o[1][Shape::HEAD_DIM / 8][4] = {};

  // Turns the scores of a tile, of which each has its key's scale, into probabilities.
  __device__ __forceinline__ void softmax(float (&s)[Shape::BLOCK_N / 8][4]) {
    float largest[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < Shape::BLOCK_N / 8; ++n) m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      largest[half] = quad_max(m) * factor[half];
      moved |= largest[half] > stabilizer[half] + SLACK;
    }
    if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(stabilizer[half], largest[half]);
        // A row that has seen no key has stabilizer -inf, and -inf - (-inf) would be NaN.
        const float rescale = next == negative_infinity() ? 1.0f : ex2_approx(stabilizer[half] - next);
        stabilizer[half] = next;
        sum[half] *= rescale;
#pragma unroll
        for (int n = 0; n < Shape::HEAD_DIM / 8; ++n) {
          o[0][n][2 * half] *= rescale;
          o[0][n][2 * half + 1] *= rescale;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float subtract = (stabilizer[half] == negative_infinity() ? 0.0f : stabilizer[half]) - BIAS;
#pragma unroll
      for (int n = 0; n < Shape::BLOCK_N / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[n][e] = ex2_approx(fmaf(s[n][e], factor[half], -subtract));
          sum[half] += s[n][e];
        }
      }
    }
  }
};

// Takes the group's tiles of keys: first_tile, first_tile + KEY_GROUPS, ... `count` of them.
template <typename Shape, bool CAUSAL, int PACK>
__device__ __forceinline__ void attend(WarpState<Shape>& state, Streaming<Shape>& shared,
                                       const PackedHeads<PACK>& heads, const EightBitParams& params, int first_row,
                                       int count, int group) {
  const EightBitHead& head = heads.first;
  const int rows = heads.rows(params);
  constexpr int BLOCK_N = Shape::BLOCK_N, HEAD_DIM = Shape::HEAD_DIM, STAGES = Shape::STAGES, TERMS = Shape::TERMS;
  using Element = typename Shape::Value::Element;
  const int thread = threadIdx.x % Shape::GROUP_THREADS;
  const int warp_row = thread / 32 * WARP_ROWS;
  auto& ring = shared.group[group];
  const auto first_key_of = [&](int i) { return (i * Shape::KEY_GROUPS + group) * BLOCK_N; };

  // Past the end an empty group is committed, so that the waits mean the same for every tile.
  const auto start_key = [&](int i) {
    const int first_key = first_key_of(i), valid_keys = params.seqlen_k - first_key;
    if (i < count) {
      ring.key[i % STAGES].template copy_async<Shape::GROUP_THREADS>(
          head.key<Unit>(params, first_key), params.key_strides.row_in<Unit>(), valid_keys, thread);
#pragma unroll
      for (int k = thread; k < BLOCK_N; k += Shape::GROUP_THREADS) {
        const bool valid = k < valid_keys;
        cp_async<4>(&ring.key_scale[i % STAGES][k], head.key_scale(params, first_key + (valid ? k : 0)), valid ? 4 : 0);
      }
    }
    cp_async_commit();
  };
  const auto start_value = [&](int i) {
    const int first_key = first_key_of(i);
    if (i < count) {
      ring.value[i % STAGES].template copy_async<Shape::GROUP_THREADS>(head.value<Element>(params, first_key),
                                                                       params.value_strides.row_in<Element>(),
                                                                       params.seqlen_k - first_key, thread);
    }
    cp_async_commit();
  };

  if constexpr (PACK == 1) {
    shared.query.template copy_async<Shape::THREADS>(
        head.query<Unit>(params, first_row), params.query_strides.row_in<Unit>(), rows - first_row, threadIdx.x);
  } else {
    decltype(shared.query)::template for_each_chunk<Shape::THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
      const int row = first_row + static_cast<int>(r);
      const bool valid = row < rows;  // the address of another is never read, and still has to be one that exists
      const Unit* source = heads.of_row(valid ? row : 0).template query<Unit>(params, valid ? row / PACK : 0);
      cp_async<16>(shared.query.at(r, column), source + column, valid ? 16 : 0);
    });
  }
#pragma unroll
  for (int i = 0; i < STAGES; ++i) start_key(i), start_value(i);

  const int warp_first = first_row + warp_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(warp_first + static_cast<int>(lane_index() / 4) + 8 * half, rows - 1);
    // A negative scale is a positive one of -S, and 0 must not meet a score of -inf.
    const float factor = fabsf(params.scale_log2) * *heads.of_row(row).query_scale(params, row / PACK);
    state.factor[half] = factor < 1e-30f ? 1e-30f : factor;  // NaN stays NaN
  }
  cp_async_wait<2 * STAGES - 1>();  // the queries and the first keys
  __syncthreads();

  // Every query of the warp sees the keys before `all_see`, none of them those from `none_sees` on.
  const int all_see = heads.template seen<CAUSAL>(params, warp_first);
  const int none_sees = heads.template seen<CAUSAL>(params, warp_first + WARP_ROWS - 1);
  constexpr int STEPS = TERMS * HEAD_DIM / 32, KEPT = STEPS > 4 ? 4 : STEPS;  // in registers; eight would spill
  const QueryOperand<decltype(shared.query), 1, TERMS * HEAD_DIM / 2, KEPT> query(shared.query, warp_row);

  for (int i = 0; i < count; ++i) {
    const int first_key = first_key_of(i), stage = i % STAGES;
    float s[1][BLOCK_N / 8][4];
    if (i > 0) {
      cp_async_wait<2 * STAGES - 2>();
      named_barrier_sync(1 + group, Shape::GROUP_THREADS);  // K is there, and nobody reads the last V any more
      start_value(i - 1 + STAGES);
    }
    if (first_key < none_sees) {
      multiply_quantized<typename Shape::Format, HEAD_DIM, TERMS, BLOCK_N>(s[0], query, ring.key[stage]);
      const float* key_scale = ring.key_scale[stage] + lane_index() % 4 * 2;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
        const Vector<float, 2> scale = *reinterpret_cast<const Vector<float, 2>*>(key_scale + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][n][e] *= scale.data[e % 2];
      }
      if (params.scale_log2 < 0.0f) {
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][n][e] = -s[0][n][e];
        }
      }
      if (first_key + BLOCK_N > all_see) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_first + 8 * half + lane_index() / 4;
          mask_row<BLOCK_N>(s[0], half, heads.template seen<CAUSAL>(params, row) - first_key);
        }
      }
      state.softmax(s[0]);
    }
    cp_async_wait<2 * STAGES - 2>();
    named_barrier_sync(1 + group, Shape::GROUP_THREADS);  // V is there, and nobody reads this K any more
    start_key(i + STAGES);
    if (first_key < none_sees) {
      if constexpr (Shape::Value::CODES) {
        multiply_e4m3_value<HEAD_DIM, BLOCK_N>(state.o[0], s[0], ring.value[stage]);
      } else {
        multiply_probability_value<typename Shape::Probability, 1, HEAD_DIM, BLOCK_N>(state.o, s, ring.value[stage], 0);
      }
    }
  }
}

// Puts a warp's rows where the combine finds them, with their channels in order.
template <typename Shape>
__device__ __forceinline__ void keep(const WarpState<Shape>& state, Combining<Shape>& shared, int group) {
  const int warp_row = threadIdx.x % Shape::GROUP_THREADS / 32 * WARP_ROWS, t = lane_index() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp_row + 8 * half + lane_index() / 4;
    const float sum = quad_sum(state.sum[half]);
    if (t == 0) shared.stats[group][r] = {state.stabilizer[half], sum};
    float* row = &shared.o[group][r * Combining<Shape>::PITCH];
#pragma unroll
    for (int n = 0; n < Shape::HEAD_DIM / 16; ++n) {
      const float (&first)[4] = state.o[0][2 * n];
      const float (&second)[4] = state.o[0][2 * n + 1];
      const float a = first[2 * half], b = first[2 * half + 1], c = second[2 * half], d = second[2 * half + 1];
      if constexpr (Shape::Value::CODES) {  // even and odd channels in turn
        const Values4 four = {{a, c, b, d}};
        *reinterpret_cast<Values4*>(row + 16 * n + 4 * t) = four;
      } else {
        const Vector<float, 2> low = {{a, b}}, high = {{c, d}};
        *reinterpret_cast<Vector<float, 2>*>(row + 16 * n + 2 * t) = low;
        *reinterpret_cast<Vector<float, 2>*>(row + 16 * n + 8 + 2 * t) = high;
      }
    }
  }
}

// Combines what the groups made of their keys, divides by l, multiplies with V's scales, and writes rows and LSE.
template <typename Shape, int PACK>
__device__ __forceinline__ void combine_and_store(const Combining<Shape>& shared, const PackedHeads<PACK>& heads,
                                                  const EightBitParams& params, int first_row) {
  using T = typename Shape::T;
  constexpr int COLUMNS = 4, IN_ROW = Shape::HEAD_DIM / COLUMNS, STEP = Shape::THREADS / IN_ROW;
  static_assert(Shape::THREADS % IN_ROW == 0, "a thread keeps its channels");
  const int column = threadIdx.x % IN_ROW * COLUMNS;
  float scale[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) scale[c] = Shape::Value::CODES ? heads.first.value_scale(params, column + c) : 1.0f;
#pragma unroll
  for (int r = threadIdx.x / IN_ROW; r < Shape::BLOCK_M; r += STEP) {
    const int row = first_row + r;
    if (row >= heads.rows(params)) break;
    RowStats stats;
    const Values4 values = combine_parts<Shape::KEY_GROUPS>(
        stats, [&](int part) { return shared.stats[part][r]; },
        [&](int part) {
          return *reinterpret_cast<const Values4*>(&shared.o[part][r * Combining<Shape>::PITCH + column]);
        });
    const float inverse = normalizer(stats.sum);
    Vector<T, COLUMNS> rounded;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) rounded.data[c] = from_float<T>(values.data[c] * inverse * scale[c]);
    const EightBitHead head = heads.of_row(row);
    *reinterpret_cast<Vector<T, COLUMNS>*>(head.out<T>(params, row / PACK) + column) = rounded;
    if (params.lse != nullptr && column == 0) {
      *head.lse(params, row / PACK) = log_sum_exp(stats.stabilizer - WarpState<Shape>::BIAS, stats.sum);
    }
  }
}

template <typename T, typename Format, typename Value, int HEAD_DIM, int TERMS, int BLOCK_N, int ROW_WARPS,
          int KEY_GROUPS, int STAGES, int CTAS, bool CAUSAL, int PACK = 1>
__global__ void __launch_bounds__(32 * ROW_WARPS * KEY_GROUPS, CTAS)
    attention(const __grid_constant__ EightBitParams params) {
  using S = Shape<T, Format, Value, HEAD_DIM, TERMS, BLOCK_N, ROW_WARPS, KEY_GROUPS, STAGES>;
  auto& shared = dynamic_shared<SharedStorage<S>>();
  // Under a causal mask the longest tiles come first, of all heads, so that the short ones fill the gaps at the end.
  const int q_tiles = (PackedHeads<PACK>::rows(params) + S::BLOCK_M - 1) / S::BLOCK_M;
  const int columns = params.batch * params.heads / PACK;
  const int index = blockIdx.x;
  const PackedHeads<PACK> heads(params, CAUSAL ? index % columns : index / q_tiles);
  const int first_row = (CAUSAL ? q_tiles - 1 - index / columns : index % q_tiles) * S::BLOCK_M;
  const int group = KEY_GROUPS == 1 ? 0 : threadIdx.x / S::GROUP_THREADS;
  const int seen = PackedHeads<PACK>::template seen<CAUSAL>(params, first_row + S::BLOCK_M - 1);
  const int tiles = (max(seen, 0) + BLOCK_N - 1) / BLOCK_N;

  WarpState<S> state;
  attend<S, CAUSAL>(state, shared.streaming, heads, params, first_row, (tiles - group + KEY_GROUPS - 1) / KEY_GROUPS,
                    group);
  cp_async_wait<0>();
  __syncthreads();  // all groups are done with their tiles
  keep(state, shared.combining, group);
  __syncthreads();
  combine_and_store(shared.combining, heads, params, first_row);
}

}  // namespace microsdpa::ada::mma_8bit
