// Exact attention on mma.sync for problems that fill the chip.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M queries of one head per CTA.
// Tiles:    Q [BLOCK_M, COLUMNS]; each warp owns 16 ROW_TILES rows, as accumulators in registers. K and V
//           [BLOCK_N, COLUMNS], two or four of each in shared memory. COLUMNS are HEAD_DIM, filled up to a multiple
//           of 16 with zeros.
// Pipeline: 1. cp.async brings the next tile of K and V while this one is computed with; one barrier per tile, at which
//           with four stages no warp waits that is less than a tile ahead of the slowest
//           2. S = Q K^T for STEP keys   3. P = 2^(scale S - stabilizer), with a score of the first keys as stabilizer
//           4. O += P V, P straight from S's registers
//           Whole tiles have no branch in them, so that the compiler runs the exponentials of some keys beside the
//           products of others; tiles that a mask cuts come last, and look for the maximum. A probability too large
//           for its type makes O infinite or NaN: then the CTA starts again and looks for the maximum in every tile.
// Bound by: the tensor cores and, at D = 64, as much by exp2, which the two warps of a scheduler overlap by a little
//           more than half. At D = 128 a warp's O, S and operands take every register: what is needed once per tile
//           lies in shared memory.
#include "../../common/epilogue.cuh"
#include "../../common/head.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "tile.cuh"

namespace microsdpa::ampere::stream {

template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int ROW_TILES_, int WARPS_>
struct Tiles {
  using T = ELEMENT;
  static constexpr int HEAD_DIM = HEAD_DIM_, COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  static constexpr int BLOCK_N = BLOCK_N_, ROW_TILES = ROW_TILES_, WARPS = WARPS_;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_M = WARP_ROWS * WARPS, THREADS = 32 * WARPS;
  static constexpr bool FULL = HEAD_DIM > 64;  // registers: what is needed once per tile lies in shared memory
  using QueryTile = SwizzledTile<T, BLOCK_M, COLUMNS>;
  using KeyTile = SwizzledTile<T, BLOCK_N, COLUMNS>;
};

template <typename C, int STAGES>
struct Shared {
  typename C::QueryTile query;
  typename C::KeyTile key[STAGES];
  typename C::KeyTile value[STAGES];
  Head<typename C::T> head;
  int64 key_stride, value_stride;  // of rows
  Mbarrier full[2];                // of the even tiles and of the odd ones; with four stages
  int first_row;
  int seen_by_all;  // keys that the CTA's first row sees; negative when every tile has to be looked at for its maximum
  int overflowed[C::WARPS];
  float sum[C::FULL ? 2 * C::ROW_TILES : 1][C::FULL ? C::THREADS : 1];  // each lane's part of l
};

// Which rows a CTA computes. Under a causal mask the longest tiles come first. CTAs that run side by side have tiles
// of different heads, of so many that their K and V stay in L2 until the last tile of these heads.
template <int BLOCK_M, int HEAD_DIM>
struct Work {
  static constexpr int HEADS = 16;                                // at least
  static constexpr int KEYS = 32 * 1024 * 1024 / (4 * HEAD_DIM);  // 32 MB of K and V

  int head;  // through the batch
  int first_row;

  __device__ __forceinline__ explicit Work(const AttentionParams& params) {
    const int tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const int heads = params.batch * params.heads;
    const int together = min(heads, max(HEADS, KEYS / params.seqlen_k));  // so that its tiles fit 32 bits
    const int index = blockIdx.x, first = index / (together * tiles) * together;
    const int in_group = min(together, heads - first), rest = index - first * tiles;
    head = first + rest % in_group;
    first_row = (tiles - 1 - rest / in_group) * BLOCK_M;
  }
};

// Where a thread's first chunk of the next tile of K or V comes from: it copies one chunk of every ROWS-th row of each
// panel.
template <typename C>
struct Source {
  using Tile = typename C::KeyTile;
  static constexpr int ROWS = C::THREADS / Tile::CHUNKS;
  static_assert(C::BLOCK_N % ROWS == 0, "the threads copy whole rows");

  const typename C::T* from;

  //   head: [S_k, HEAD_DIM], rows `stride` elements apart
  __device__ __forceinline__ Source(const typename C::T* head, int64 stride)
      : from(head + threadIdx.x / Tile::CHUNKS * stride + threadIdx.x % Tile::CHUNKS * Tile::CHUNK) {}

  // Starts copying the next BLOCK_N rows; those from `valid` on become zeros, as do columns past HEAD_DIM.
  //   anywhere: an address that exists, for what does not; it is never read
  __device__ __forceinline__ void copy_async(Tile& tile, int64 stride, int valid, const void* anywhere) {
    const unsigned thread = opaque(threadIdx.x);  // its place in a tile is not worth a register all the time
    const unsigned row = thread / Tile::CHUNKS, column = thread % Tile::CHUNKS * Tile::CHUNK;
    if (valid >= C::BLOCK_N) {
#pragma unroll
      for (int r = 0; r < C::BLOCK_N; r += ROWS, from += ROWS * stride) {
#pragma unroll
        for (int c = 0; c < C::COLUMNS; c += Tile::PANEL) {
          const bool exists = C::COLUMNS == C::HEAD_DIM || static_cast<int>(column) + c < C::HEAD_DIM;
          cp_async<16>(tile.at(row, column + c, r), exists ? from + c : anywhere, exists ? 16 : 0);
        }
      }
      return;
    }
    valid -= row;
#pragma unroll
    for (int r = 0; r < C::BLOCK_N; r += ROWS, from += ROWS * stride) {
#pragma unroll
      for (int c = 0; c < C::COLUMNS; c += Tile::PANEL) {
        const bool exists = r < valid && (C::COLUMNS == C::HEAD_DIM || static_cast<int>(column) + c < C::HEAD_DIM);
        cp_async<16>(tile.at(row, column + c, r), exists ? from + c : anywhere, exists ? 16 : 0);
      }
    }
  }
};

// Turns every element of the tile into its negative.
template <int THREADS, typename Tile>
__device__ __forceinline__ void negate(Tile& tile) {
  Tile::template for_each_chunk<THREADS>(threadIdx.x, [&](unsigned r, unsigned column) {
    auto& chunk = *reinterpret_cast<Vector<uint32, 4>*>(tile.at(r, column));
    Vector<uint32, 4> negated = chunk;
#pragma unroll
    for (int w = 0; w < 4; ++w) negated.data[w] ^= 0x80008000u;
    chunk = negated;
  });
}

template <typename T, int HEAD_DIM, int BLOCK_N, int ROW_TILES, int WARPS, int STAGES, int KEPT, int STEP, int CTAS,
          int LATE, bool CAUSAL, bool PROGRAMMATIC>
__global__ void __launch_bounds__(32 * WARPS, CTAS) attention(const __grid_constant__ AttentionParams params) {
  using C = Tiles<T, HEAD_DIM, BLOCK_N, ROW_TILES, WARPS>;
  using Softmax = OnlineSoftmax<ROW_TILES>;
  constexpr int BLOCK_M = C::BLOCK_M, WARP_ROWS = C::WARP_ROWS, COLUMNS = C::COLUMNS;
  constexpr int MASKED_STEP = STAGES == 4 && STEP > 32 ? 32 : STEP;  // masks take registers
  constexpr int AHEAD = STAGES / 2;  // tiles that are on their way while one is computed with
  static_assert(STAGES == 2 || STAGES == 4, "a barrier a tile, or two that take turns");
  auto& shared = dynamic_shared<Shared<C, STAGES>>();

  const Work<BLOCK_M, HEAD_DIM> work(params);
  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);  // so that the compiler knows it is one for all lanes
  // Keys past the last one that the last row sees are never loaded.
  const int keys = keys_seen<CAUSAL>(params, work.first_row, min(BLOCK_M, params.seqlen_q - work.first_row));
  const int count = max(0, (keys + BLOCK_N - 1) / BLOCK_N);
  const float scale = fmaxf(fabsf(params.scale_log2), 1e-30f);  // scale 0 must not meet a masked score of -inf

  const Head<T> head(params, work.head);
  if (threadIdx.x == 0) {
    shared.head = head;
    shared.key_stride = params.key_strides.row;
    shared.value_stride = params.value_strides.row;
    shared.first_row = work.first_row;
    shared.seen_by_all = CAUSAL ? work.first_row + params.diagonal + 1 : params.seqlen_k;
    if (STAGES == 4) {
#pragma unroll
      for (Mbarrier& full : shared.full) mbarrier_init(full, WARPS);
    }
  }
  if (STAGES == 4) named_barrier_sync(1, C::THREADS);
  // CTAs of equal work that begin together end together: neither then computes while the other loads and stores. So of
  // the first two of an SM the second begins later; LATE is how many SMs there are.
  if (LATE > 0 && blockIdx.x >= LATE && blockIdx.x < 2 * LATE) pause(64 * HEAD_DIM);
  if (PROGRAMMATIC) grid_dependency_wait();
  shared.query.template copy_columns_async<C::THREADS, HEAD_DIM>(head.query + work.first_row * params.query_strides.row,
                                                                 params.query_strides.row,
                                                                 params.seqlen_q - work.first_row, threadIdx.x);
  Source<C> key(head.key, params.key_strides.row), value(head.value, params.value_strides.row);
  const auto load = [&](int i) {
    if (i == 0 || i < count) {
      const int valid = params.seqlen_k - i * BLOCK_N;
      const bool read = STAGES == 4;  // each time: otherwise multiples of the strides are kept in registers
      const int64 key_stride = read ? shared.key_stride : params.key_strides.row;
      const int64 value_stride = read ? shared.value_stride : params.value_strides.row;
      key.copy_async(shared.key[i % STAGES], key_stride, valid, params.key);
      value.copy_async(shared.value[i % STAGES], value_stride, valid, params.value);
    }
    cp_async_commit();
  };
  // With four stages: tells the other warps that this one's copies of tile i have landed, and that it is done with all
  // tiles before i - 1; and waits until all warps have told so.
  const auto arrive = [&](int i) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(shared.full[i % 2]);
  };
  const auto wait = [&](int i) { mbarrier_wait(shared.full[i % 2], i / 2 % 2); };
  // Waits for tile i, and loads another in the place of one that all warps are done with. With two stages that is the
  // tile before, for which the warps wait for one another; with four the one before that, and they may drift apart.
  const auto begin_tile = [&](int i) {
    cp_async_wait<0>();
    if constexpr (STAGES == 2) {
      named_barrier_sync(1, C::THREADS);
    } else {
      arrive(i + 1);
      wait(i);
    }
    load(i + AHEAD);
  };

  Softmax softmax;
  float o[ROW_TILES][COLUMNS / 8][4];
  for (bool again = false;; again = true) {
    load(0);
    if (STAGES == 4) load(1);
    if (PROGRAMMATIC && !again) grid_dependency_launch();
    softmax = Softmax();
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[t][n][e] = 0.0f;
      }
    }
    if constexpr (STAGES == 4) {
      if (again) {  // tile 0 was told of before it was loaded
        cp_async_wait<0>();
        named_barrier_sync(1, C::THREADS);
      } else {
        cp_async_wait<1>();
        arrive(0);
      }
    }
    begin_tile(0);
    if (params.scale_log2 < 0.0f && !again) {  // a negative scale is a positive one of -Q
      negate<C::THREADS>(shared.query);
      named_barrier_sync(1, C::THREADS);
    }
    Operands<C, STAGES, KEPT> operands(shared.query, shared.key[0], shared.value[0], warp * WARP_ROWS);
    int i = 0;
    const auto next_tile = [&]() {
      if (++i < count) {
        operands.next_tile(i);
        begin_tile(i);
      }
    };
    // Tiles that no mask cuts, for any row of the warp.
    const auto whole_tiles = [&]() {
      const int warp_row = CAUSAL ? opaque(threadIdx.x) / 32 * WARP_ROWS : 0;
      return min(params.seqlen_k, shared.seen_by_all + warp_row) / BLOCK_N;
    };
    const int counted = whole_tiles();
    const auto is_whole = [&]() { return i < (C::FULL ? whole_tiles() : counted); };

    if (is_whole()) {
      float s[ROW_TILES][2][4];
      operands.template scores<16>(s, 0);
      softmax.template begin<16>(s, scale);
    }
    if (C::FULL) {
#pragma unroll
      for (int j = 0; j < 2 * ROW_TILES; ++j) shared.sum[j][threadIdx.x] = 0.0f;
    }
    while (is_whole()) {
      float sum[ROW_TILES][2] = {};
#pragma unroll
      for (int first = 0; first < BLOCK_N; first += STEP) {
        float s[ROW_TILES][STEP / 8][4];
        operands.template scores<STEP>(s, first);
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& l = C::FULL ? sum[t][half] : softmax.sum[t][half];
            Softmax::template exponentiate<STEP>(s[t], half, scale, softmax.stabilizer[t][half], l);
          }
        }
        operands.template accumulate<STEP>(o, s, first);
      }
      if (C::FULL) {
#pragma unroll
        for (int j = 0; j < 2 * ROW_TILES; ++j) shared.sum[j][threadIdx.x] += sum[j / 2][j % 2];
      }
      next_tile();
    }
    if (C::FULL) {
#pragma unroll
      for (int j = 0; j < 2 * ROW_TILES; ++j) softmax.sum[j / 2][j % 2] = shared.sum[j][threadIdx.x];
    }

    while (i < count) {
      const int warp_first = shared.first_row + warp * WARP_ROWS;
#pragma unroll
      for (int first = 0; first < BLOCK_N; first += MASKED_STEP) {
        const int first_key = i * BLOCK_N + first;
        if (first_key >= keys_seen<CAUSAL>(params, warp_first, WARP_ROWS)) break;
        float s[ROW_TILES][MASKED_STEP / 8][4];
        operands.template scores<MASKED_STEP>(s, first);
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = warp_first + 16 * t + 8 * half + lane_index() / 4;
            mask_row<MASKED_STEP>(s[t], half, keys_seen<CAUSAL>(params, row, 1) - first_key);
          }
        }
        softmax.template update<MASKED_STEP, COLUMNS>(s, o, scale);
        operands.template accumulate<MASKED_STEP>(o, s, first);
      }
      next_tile();
    }
    if (again) break;

    bool overflowed = false;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // An infinite probability makes every column of its row infinite or NaN.
        overflowed |=
            !(fabsf(o[t][0][2 * half]) + softmax.sum[t][half] < 3e38f) || is_large(softmax.stabilizer[t][half]);
      }
    }
    overflowed = __any_sync(FULL_WARP, overflowed);
    if (lane_index() == 0) shared.overflowed[warp] = overflowed;
    named_barrier_sync(1, C::THREADS);
    bool any = false;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) any |= shared.overflowed[w] != 0;
    if (!any) break;
    if constexpr (STAGES == 4) {  // the barriers' phases begin again at a multiple of four tiles
      for (; i % 4 != 0; ++i) {
        arrive(i + 1);
        wait(i);
      }
    }
    if (threadIdx.x == 0) shared.seen_by_all = -BLOCK_M;
    key = Source<C>(shared.head.key, params.key_strides.row);
    value = Source<C>(shared.head.value, params.value_strides.row);
  }

  const int warp_first = shared.first_row + warp * WARP_ROWS;
  float scales[ROW_TILES][2];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(t, half);
      scales[t][half] = normalizer(sum);
      const int row = warp_first + 16 * t + 8 * half + lane_index() / 4;
      if (shared.head.lse != nullptr && lane_index() % 4 == 0 && row < params.seqlen_q) {
        shared.head.lse[row] = log_sum_exp(softmax.stabilizer[t][half], sum);
      }
    }
  }
  __syncwarp();  // of the query tile the warp reads and writes its own rows only
  T* out = shared.head.out;
  store_rows<T, ROW_TILES, COLUMNS, HEAD_DIM>(shared.query, warp * WARP_ROWS, o, scales, [&](unsigned r) -> T* {
    const int row = warp_first + static_cast<int>(r);
    return row < params.seqlen_q ? out + row * params.out_strides.row : nullptr;
  });
}

}  // namespace microsdpa::ampere::stream
