// Exact attention on mma.sync for every call that the specialized kernels refuse: masks, windows, soft caps, ALiBi,
// sinks, any head dimension up to 256, rows that do not lie on 16 bytes.
//
// Computes O = softmax(scores) V, where scores are as common/mask_params.cuh has them, and optionally LSE (with the
// sink), for BLOCK_M = 16 ROW_TILES WARPS queries of one head per CTA. What a call does not have is compiled out. With
// CONTINUES, output and LSE go on from those of other keys, which lie where they are written.
// Tiles:    Q [BLOCK_M, D]; each warp owns 16 ROW_TILES of its rows, as accumulators in registers. K and V [BLOCK_N, D]
//           in a ring of two; D is HEAD_DIM, filled up to a multiple of 16 with columns of zeros.
// Pipeline: 1. cp.async fills the ring, one tile ahead     2. each lane reads its part of the mask, one tile ahead; a
//           tile of which the warp sees nothing costs no product     3. S = Q K^T, scores, online softmax in registers
//           4. O += P V, P straight from S's registers
// Bound by: shared memory, as ampere/mma with 16 rows per warp.
#include "../../common/continued.cuh"
#include "../../common/dropout.cuh"
#include "../../common/head.cuh"
#include "../../common/masks.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../common/prologue.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/control.cuh"

namespace microsdpa::ampere::general {

// Whole rows take more addresses than panels, which pays for 80 columns and more.
template <typename T, int ROWS, int COLUMNS>
using GeneralTile = SwizzledRows<T, ROWS, COLUMNS, (COLUMNS > 64 ? 16 : 0)>;

template <typename T, int COLUMNS, int BLOCK_M, int BLOCK_N>
struct GeneralTiles {
  GeneralTile<T, BLOCK_M, COLUMNS> query;
  GeneralTile<T, BLOCK_N, COLUMNS> key[2];
  GeneralTile<T, BLOCK_N, COLUMNS> value[2];
};

// Brings rows of HEAD_DIM elements into a tile that may be wider; what does not exist becomes zeros. Rows on 16 bytes
// are copied asynchronously, others at once.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart
//   order: which of these a row of the tile is
template <int HEAD_DIM, int THREADS, int LOAD_BYTES, typename Tile, typename T, typename Order>
__device__ __forceinline__ void load_rows(Tile& tile, const T* global, int64 row_stride, int valid_rows,
                                          unsigned thread, Order order) {
  Tile::template for_each_chunk<THREADS>(thread, [&](unsigned place, unsigned column) {
    const unsigned row = order(place);
    const bool valid = static_cast<int>(row) < valid_rows && column < HEAD_DIM;
    if constexpr (LOAD_BYTES == 16) {
      // The address of a chunk that does not exist is never read, and still has to be one that does.
      cp_async<16>(tile.at(place, column), valid ? global + row * row_stride + column : global, valid ? 16 : 0);
    } else {
      Vector<T, Tile::CHUNK> chunk;
#pragma unroll
      for (int e = 0; e < Tile::CHUNK; ++e) {
        const bool exists = valid && column + e < HEAD_DIM;
        chunk.data[e] = exists ? global[row * row_stride + column + e] : from_float<T>(0.0f);
      }
      *reinterpret_cast<Vector<T, Tile::CHUNK>*>(tile.at(place, column)) = chunk;
    }
  });
}

// Writes a warp's rows of o * scale, those that exist, by way of its rows of a tile.
//   out: [valid_rows, HEAD_DIM], row_stride elements apart
template <typename T, int HEAD_DIM, int STORE_BYTES, typename Tile, int ROW_TILES, int COLUMNS>
__device__ __forceinline__ void store_tile(Tile& staging, unsigned warp_row,
                                           const float (&o)[ROW_TILES][COLUMNS / 8][4],
                                           const float (&scale)[ROW_TILES][2], T* out, int64 row_stride,
                                           int valid_rows) {
  const unsigned lane = lane_index();
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int t = i / 2, half = i % 2;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      *reinterpret_cast<uint32*>(staging.at(warp_row + 8 * i + lane / 4, 8 * n + lane % 4 * 2)) =
          pack<T>(o[t][n][2 * half] * scale[t][half], o[t][n][2 * half + 1] * scale[t][half]);
    }
  }
  __syncwarp();
  Tile::template WithRows<16 * ROW_TILES>::template for_each_chunk<32>(lane, [&](unsigned row, unsigned column) {
    if (static_cast<int>(row) >= valid_rows || column >= HEAD_DIM) return;
    using Chunk = Vector<T, Tile::CHUNK>;
    const Chunk chunk = *reinterpret_cast<const Chunk*>(staging.at(warp_row + row, column));
    T* place = out + row * row_stride + column;
    if constexpr (STORE_BYTES == 16) {
      *reinterpret_cast<Chunk*>(place) = chunk;
    } else {
#pragma unroll
      for (int e = 0; e < Tile::CHUNK; ++e) {
        if (column + e < HEAD_DIM) place[e] = chunk.data[e];
      }
    }
  });
}

// Norms and rotary embedding of ROWS rows of a tile, a multiple of eight, by a warp. Row i of the tile is row
// first + order(i) of Q or K, of `rows` that there are.
template <typename PROLOGUE, bool KEY, int HEAD_DIM, int ROWS, typename T, typename Tile, typename Order>
__device__ __forceinline__ void change_rows(Tile& tile, int tile_row, const PrologueParams& params, int batch,
                                            int first, int rows, Order order) {
  if constexpr (PROLOGUE::template CHANGES<KEY>) {
    using Changed = PrologueRows<PROLOGUE, KEY, T, HEAD_DIM, 1>;
#pragma unroll 1
    for (int i = 0; i < ROWS; i += Changed::ROWS) {
      Changed changed;
      changed.fetch(params, batch, tile_row, i, rows, [&](int row) { return first + order(row); });
      changed.apply(params.eps, [&](int row, int column) { return tile.at(row, column); });
    }
  }
}

template <typename T, int HEAD_DIM, int BLOCK_N, int ROW_TILES, int WARPS, int LOAD_BYTES, typename MASK, bool LEFT,
          bool RIGHT, bool SOFTCAP, bool ALIBI, typename SINK, bool PROGRAMMATIC, typename DROPOUT,
          typename PROLOGUE = NoPrologue, bool CONTINUES = false>
__global__ void __launch_bounds__(32 * WARPS, 1)
    attention(const __grid_constant__
              typename PROLOGUE::template Params<typename DROPOUT::template Params<MaskedParams>>
                  prologued) {
  using Given = typename DROPOUT::template Params<MaskedParams>;
  const Given& given = PROLOGUE::template call<Given>(prologued);
  constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16, BLOCK_M = 16 * ROW_TILES * WARPS, THREADS = 32 * WARPS;
  const MaskedParams& params = DROPOUT::call(given);
  const AttentionParams& call = params.call;
  auto& tiles = dynamic_shared<GeneralTiles<T, COLUMNS, BLOCK_M, BLOCK_N>>();

  // CTAs that run side by side have tiles of different heads; under a causal mask the longest tiles come first.
  const int heads = call.batch * call.heads;
  const int head_index = blockIdx.x % heads, head_of_batch = head_index % call.heads;
  const int first_row = ((call.seqlen_q + BLOCK_M - 1) / BLOCK_M - 1 - static_cast<int>(blockIdx.x / heads)) * BLOCK_M;
  const Head<T> head(call, head_index);
  const int warp_row = threadIdx.x / 32 * 16 * ROW_TILES;
  const int warp_first = first_row + warp_row;

  using Rows = MaskedRows<Masks<MASK, LEFT, SOFTCAP, ALIBI, SINK>, RIGHT, BLOCK_N, 1, ROW_TILES>;
  if (PROGRAMMATIC) grid_dependency_wait();
  const Rows rows(params, head_index / call.heads, head_of_batch, warp_first, call.seqlen_q);
  // Keys that no row of the CTA sees, before and after those that one does, are never loaded.
  int first_seen = LEFT ? max(0, first_row + params.masks.lowest) : 0;
  int last_seen = max(0, Rows::last_seen(params, min(first_row + BLOCK_M, call.seqlen_q) - 1));
  if constexpr (Rows::RANGED) {
    const KeyRange range =
        Rows::range_of_rows(params, head_index / call.heads, head_of_batch, first_row, BLOCK_M, call.seqlen_q);
    first_seen = max(first_seen, range.first), last_seen = min(last_seen, range.last);
  }
  const int first_tile = first_seen / BLOCK_N, last_tile = (last_seen + BLOCK_N - 1) / BLOCK_N;

  // The first tile from `tile` on of which some row of the CTA sees a key, as far as that is known ahead; every warp
  // finds the same one.
  const auto next_tile = [&](int tile) {
    if constexpr (is_summed<MASK>) {
      const MaskParams& masks = params.masks;
      const char* first = static_cast<const char*>(masks.mask) + SummedBool::summary(call.seqlen_k) +
                          head_index / call.heads * masks.mask_strides.batch + head_of_batch * masks.mask_strides.head;
      for (; tile < last_tile; ++tile) {
        const int key =
            tile * BLOCK_N + static_cast<int>(lane_index()) % (BLOCK_N / SummedBool::GRANULE) * SummedBool::GRANULE;
        bool any = false;
        for (int row = first_row + static_cast<int>(lane_index()) / (BLOCK_N / SummedBool::GRANULE);
             row < min(first_row + BLOCK_M, call.seqlen_q); row += 32 * SummedBool::GRANULE / BLOCK_N) {
          if (key < call.seqlen_k) {
            any |= first[row * masks.mask_strides.row + key / SummedBool::GRANULE] != SummedBool::NONE;
          }
        }
        if (__any_sync(FULL_WARP, any)) break;
      }
    }
    return tile;
  };
  const auto load = [&](int tile, int stage) {
    // Where a thread's rows begin is found again for every tile: registers are scarcer than instructions.
    const int first = opaque(tile * BLOCK_N), own = opaque(static_cast<int>(threadIdx.x));
    load_rows<HEAD_DIM, THREADS, LOAD_BYTES>(tiles.key[stage], head.key + first * call.key_strides.row,
                                             call.key_strides.row, call.seqlen_k - first, own, key_in_row<BLOCK_N>);
    load_rows<HEAD_DIM, THREADS, LOAD_BYTES>(tiles.value[stage], head.value + first * call.value_strides.row,
                                             call.value_strides.row, call.seqlen_k - first, own, key_in_row<BLOCK_N>);
  };
  load_rows<HEAD_DIM, THREADS, LOAD_BYTES>(tiles.query, head.query + first_row * call.query_strides.row,
                                           call.query_strides.row, call.seqlen_q - first_row, threadIdx.x,
                                           [](unsigned row) { return row; });
  cp_async_commit();
  int tile = next_tile(first_tile), stage = first_tile % 2;
  // mutation: a tile past the last one is filled with zeros, and not read
  if (tile < last_tile) load(tile, stage);
  cp_async_commit();
  if (PROGRAMMATIC) grid_dependency_launch();
  typename Rows::View view;
  rows.fetch(view, tile * BLOCK_N);
  cp_async_wait<1>();
  __syncthreads();
  if constexpr (PROLOGUE::ANY) {
    change_rows<PROLOGUE, false, HEAD_DIM, 16 * ROW_TILES, T>(tiles.query, warp_row, prologued.prologue,
                                                              head_index / call.heads, first_row, call.seqlen_q,
                                                              [](int row) { return row; });
    __syncwarp();
  }

  constexpr int KEPT = COLUMNS <= 64 ? COLUMNS / 16 : 0;
  const QueryOperand<GeneralTile<T, BLOCK_M, COLUMNS>, ROW_TILES, COLUMNS, KEPT> query(tiles.query, warp_row);
  OnlineSoftmax<ROW_TILES> softmax;
  rows.add_sinks(softmax);
  const DropoutOf<DROPOUT> philox(given);
  if constexpr (DROPOUT::ANY) {
    if (blockIdx.x == 0 && threadIdx.x == 0) keep_state(given.dropout);
  }
  float o[ROW_TILES][COLUMNS / 8][4] = {};

  // mutation: a tile past the last one has no visible key
  for (int following; tile < last_tile; tile = following, stage ^= 1) {
    following = next_tile(tile + 1);
    cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (following < last_tile) load(following, stage ^ 1);
    cp_async_commit();
    const int first_key = tile * BLOCK_N;
    if constexpr (PROLOGUE::ANY && PROLOGUE::template CHANGES<true>) {
      constexpr int ROWS = BLOCK_N / WARPS;
      change_rows<PROLOGUE, true, HEAD_DIM, ROWS, T>(
          tiles.key[stage], static_cast<int>(threadIdx.x) / 32 * ROWS, prologued.prologue, head_index / call.heads,
          first_key, call.seqlen_k, [](int row) { return static_cast<int>(key_in_row<BLOCK_N>(row)); });
      __syncthreads();
    }
    const bool visible = rows.look(view, first_key);
    uint32 p[ROW_TILES][BLOCK_N / 16][4];
    if (visible) {
      float s[ROW_TILES][BLOCK_N / 8][4];
      multiply_query_key<T, ROW_TILES, COLUMNS, BLOCK_N>(s, query, tiles.key[stage], 0);
      rows.apply(s, view, first_key);
      softmax.template update<BLOCK_N, COLUMNS>(s, o, 1.0f);
      // The sum is that of all probabilities.
      if constexpr (DROPOUT::ANY) {
        drop_probabilities<ROW_TILES, BLOCK_N>(s, philox, given.dropout.kept, head_index, rows.first, first_key);
      }
      pack_probabilities<T, ROW_TILES, BLOCK_N>(p, s);
    }
    // mutation: elements past the last key are not read, and what they say hides nothing more
    if (following < last_tile) rows.fetch(view, following * BLOCK_N);
    if (visible) multiply_probability_value<T, ROW_TILES, COLUMNS, BLOCK_N>(o, p, tiles.value[stage], 0);
  }

  float scale[ROW_TILES][2];
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.total(t, half);
      const int row = warp_first + 16 * t + 8 * half + lane_index() / 4;
      scale[t][half] = normalizer(sum);
      if constexpr (DROPOUT::ANY) scale[t][half] *= given.dropout.scale;
      if constexpr (CONTINUES) {
        const bool exists = row < call.seqlen_q;
        const Shares shares =
            continue_row(exists ? head.lse[row] : negative_infinity(), softmax.stabilizer[t][half], sum);
        __syncwarp();  // all lanes of the row have read what one writes
        if (exists && lane_index() % 4 == 0) head.lse[row] = log_sum_exp(softmax.stabilizer[t][half], sum);
        const T* out = head.out + row * call.out_strides.row;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            const int column = 8 * n + lane_index() % 4 * 2 + e % 2;
            const bool counts = exists && column < HEAD_DIM && shares.before != 0.0f;
            o[t][n][e] =
                o[t][n][e] * (scale[t][half] * shares.own) + (counts ? to_float(out[column]) * shares.before : 0.0f);
          }
        }
        scale[t][half] = 1.0f;
        continue;
      }
      if (head.lse != nullptr && lane_index() % 4 == 0 && row < call.seqlen_q) {
        head.lse[row] = log_sum_exp(softmax.stabilizer[t][half], sum);
      }
    }
  }
  __syncwarp();  // of the query tile the warp reads and writes its own rows only
  store_tile<T, HEAD_DIM, LOAD_BYTES, GeneralTile<T, BLOCK_M, COLUMNS>, ROW_TILES, COLUMNS>(
      tiles.query, warp_row, o, scale, head.out + warp_first * call.out_strides.row, call.out_strides.row,
      call.seqlen_q - warp_first);
}

}  // namespace microsdpa::ampere::general
