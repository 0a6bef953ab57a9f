// Lists of the tiles of keys that a mask leaves to the query tiles of hopper/throughput, ahead of it.
//
// Each CTA of list_tiles makes the list of one query tile, for all heads and batch entries that share the mask. Tiles
// in which nothing is visible are left out; those in which nothing is hidden are marked. Each warp reads one tile, or
// some of its rows, and packs it: a lane of a wgmma accumulator finds the bits of its keys in one word. Where few lists
// meet many keys, mark_tiles has all SMs read the mask, and list_marked makes the lists of what it finds.
//
// Bound by: the mask's bytes, which are read once.
#include "../../ptx/control.cuh"
#include "masks.cuh"

namespace microsdpa::hopper::throughput {

constexpr int MARK_WARPS = 8, MARK_TILES = 2;

template <int BLOCK_N>
constexpr uint32 ALL_OF_LANE = BLOCK_N == 128 ? 0xffffffffu : (1u << BLOCK_N / 4 % 32) - 1;

// Bits of eight booleans, which are set for every byte but 0.
__device__ __forceinline__ uint32 bits_of_bytes(uint32 low, uint32 high) {
  const uint32 ends[2] = {((low & 0x7f7f7f7fu) + 0x7f7f7f7fu | low) & 0x80808080u,
                          ((high & 0x7f7f7f7fu) + 0x7f7f7f7fu | high) & 0x80808080u};
  return (ends[0] * 0x00204081u >> 28) | (ends[1] * 0x00204081u >> 28) << 4;
}

// What a row of a tile shows: a bit for each of BLOCK_N / 4 keys from this lane's first one on, which follow each
// other. Keys that do not exist count as visible, which lets a tile be whole. Eight keys are one load where they are
// side by side, on eight bytes and ahead of the last key; else eight loads, none of which waits for another.
template <int BLOCK_N>
__device__ __forceinline__ uint32 visible_keys(const MaskParams& masks, const char* row, int first_key, int keys) {
  constexpr int OWN = BLOCK_N / 4;
  const int64 stride = masks.mask_column_stride;
  const int first = first_key + OWN * static_cast<int>(threadIdx.x % 4), left = keys - first;
  const bool aligned = stride == 1 && reinterpret_cast<uint64>(row + first) % 8 == 0;
  uint32 shown = 0;
#pragma unroll
  for (int i = 0; i < OWN; i += 8) {
    uint32 words[2] = {};
    // mutation: both ways read the same elements
    if (aligned && i + 8 <= left) {
      const auto loaded = *reinterpret_cast<const Vector<uint32, 2>*>(row + first + i);
      words[0] = loaded.data[0], words[1] = loaded.data[1];
    } else {
#pragma unroll
      for (int byte = 0; byte < 8; ++byte) {
        const int key = min(first + i + byte, keys - 1);
        words[byte / 4] |= static_cast<uint32>(static_cast<unsigned char>(row[key * stride])) << 8 * (byte % 4);
      }
    }
    shown |= bits_of_bytes(words[0], words[1]) << i;
  }
  return left >= OWN ? shown : (shown | ~0u << max(left, 0)) & ALL_OF_LANE<BLOCK_N>;
}

// The bits of a quad's lanes, whose keys follow each other, in the order of an accumulator: bit 2 n + e of a lane is
// key 8 n + 2 lane + e of the row.
template <int BLOCK_N>
__device__ __forceinline__ uint32 in_order_of_accumulator(uint32 shown) {
  constexpr int OWN = BLOCK_N / 4;
  uint32 word = 0;
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    uint32 pairs = __shfl_sync(FULL_WARP, shown, lane, 4) >> 2 * (threadIdx.x % 4) & 0x03030303u;
    pairs = (pairs | pairs >> 6) & 0x000f000fu;
    word |= ((pairs | pairs >> 12) & 0xffu) << OWN / 4 * lane;
  }
  return word;
}

enum TileState : int { HIDDEN, PARTIAL, WHOLE };

// What a warp has found in its rows of a tile.
struct Found {
  bool any, all;  // visible
};

// What the warps of a CTA have found, which share `tiles` tiles of keys in turn: a bit for each of these.
struct Marks {
  uint32 any, all;

  // `states` are of the CTA's `warps`, a power of two; all threads call it.
  __device__ __forceinline__ Marks(int* states, Found found, int warps, int tiles) {
    if (threadIdx.x % 32 == 0) states[threadIdx.x / 32] = found.any | found.all << 1;
    __syncthreads();
    const int state = states[lane_index() % warps];
    any = __ballot_sync(FULL_WARP, state & 1), all = __ballot_sync(FULL_WARP, state & 2);
    __syncthreads();
    for (int apart = tiles; apart < 32; apart *= 2) any |= any >> apart, all &= all >> apart;
  }
};

// A mask of a query tile, as one warp reads it.
template <int BLOCK_M, int BLOCK_N>
struct MaskReader {
  using List = TileList<BLOCK_M, BLOCK_N>;
  static constexpr int ROWS_AT_ONCE = 8;  // one for each quad

  const MaskedParams& params;
  const List& list;
  const char* mask;  // its row of the query tile's first one
  int rows;          // that it has for the query tile

  __device__ __forceinline__ MaskReader(const MaskedParams& params, const List& list, int index, int first_row)
      : params(params), list(list) {
    const MaskParams& masks = params.masks;
    const int heads = masks.mask_strides.head != 0 ? params.call.heads : 1;
    mask = static_cast<const char*>(masks.mask) + index / heads * masks.mask_strides.batch +
           index % heads * masks.mask_strides.head + first_row * masks.mask_strides.row;
    rows = List::has_rows(params) ? min(BLOCK_M, params.call.seqlen_q - first_row) : 1;
  }

  // What the mask leaves of a tile of keys, and its words for those that will read them: of every `parts`-th group of
  // rows from `part` on. All lanes get the same.
  __device__ __forceinline__ Found read(int tile, bool store, int part = 0, int parts = 1) const {
    const int quad = static_cast<int>(threadIdx.x % 32 / 4), own = BLOCK_N / 4;
    const int left = params.call.seqlen_k - BLOCK_N * tile - own * static_cast<int>(threadIdx.x % 4);
    const uint32 existing = left >= own ? ALL_OF_LANE<BLOCK_N> : (1u << max(left, 0)) - 1;
    // Rows past the last one get its words: what a warp decides for all its rows must not depend on old memory.
    const int stored = List::has_rows(params) ? BLOCK_M : 1;
    bool any = false, all = true;
#pragma unroll 2
    for (int begin = ROWS_AT_ONCE * part; begin < stored; begin += ROWS_AT_ONCE * parts) {
      const int row = min(begin + quad, rows - 1);
      const char* from = mask + row * params.masks.mask_strides.row;
      const uint32 shown = visible_keys<BLOCK_N>(params.masks, from, BLOCK_N * tile, params.call.seqlen_k);
      any |= (shown & existing) != 0, all &= shown == ALL_OF_LANE<BLOCK_N>;
      const uint32 word = in_order_of_accumulator<BLOCK_N>(shown);
      if (store && begin + quad < stored) list.words_of(params, tile, begin + quad)[threadIdx.x % List::WORDS] = word;
    }
    return {static_cast<bool>(__any_sync(FULL_WARP, any)), static_cast<bool>(__all_sync(FULL_WARP, all))};
  }
};

// A query tile of a mask, and the tiles of keys that it may see.
template <int BLOCK_M, int BLOCK_N, bool CAUSAL, bool LEFT>
struct ListWork {
  using MASKS = Masks<bool, LEFT, false, false, void>;
  int mask, query_tile, first_row;
  int first, last;  // tiles

  __device__ __forceinline__ ListWork(const MaskedParams& params, int number) {
    const int query_tiles = TileList<BLOCK_M, BLOCK_N>::query_tiles(params);
    mask = number / query_tiles, query_tile = number % query_tiles, first_row = BLOCK_M * query_tile;
    first = first_key_tile<MASKS, BLOCK_N>(params, first_row);
    last = first + key_tiles_from<MASKS, CAUSAL, BLOCK_N>(first, params, first_row, BLOCK_M);
  }
};

// Grid: masks * query tiles, tiles of keys / MARK_TILES. Leaves the states of a query tile's tiles in place of its
// list.
template <int BLOCK_M, int BLOCK_N, bool CAUSAL, bool LEFT>
__global__ void __launch_bounds__(32 * MARK_WARPS) mark_tiles(const __grid_constant__ MaskedParams params) {
  __shared__ int states[MARK_WARPS];

  grid_dependency_launch();
  const ListWork<BLOCK_M, BLOCK_N, CAUSAL, LEFT> work(params, static_cast<int>(blockIdx.x));
  const TileList<BLOCK_M, BLOCK_N> list(params, work.mask, work.query_tile);
  const MaskReader<BLOCK_M, BLOCK_N> reader(params, list, work.mask, work.first_row);
  const int first = MARK_TILES * static_cast<int>(blockIdx.y), warp = static_cast<int>(threadIdx.x / 32);
  const int tile = first + warp % MARK_TILES;
  Found found = {false, false};
  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();
  if (tile >= work.first && tile < work.last) {
    found = reader.read(tile, true, warp / MARK_TILES, MARK_WARPS / MARK_TILES);
  }
  const Marks marks(states, found, MARK_WARPS, MARK_TILES);
  const int own = static_cast<int>(threadIdx.x);
  if (own < MARK_TILES && first + own >= work.first && first + own < work.last) {
    list.entries[first + own] = marks.any >> own & 1 ? (marks.all >> own & 1 ? WHOLE : PARTIAL) : HIDDEN;
  }
}

// Grid: masks * query tiles. One warp, which overtakes no state with its list.
template <int BLOCK_M, int BLOCK_N, bool CAUSAL, bool LEFT>
__global__ void __launch_bounds__(32) list_marked(const __grid_constant__ MaskedParams params) {
  grid_dependency_launch();
  const ListWork<BLOCK_M, BLOCK_N, CAUSAL, LEFT> work(params, static_cast<int>(blockIdx.x));
  const TileList<BLOCK_M, BLOCK_N> list(params, work.mask, work.query_tile);
  grid_dependency_wait();
  int count = 0;
  // mutation: a round past the last tile finds none
  for (int begin = work.first; begin < work.last; begin += 32) {
    const int tile = begin + lane_index();
    const int state = tile < work.last ? list.entries[tile] : HIDDEN;
    const uint32 visible = __ballot_sync(FULL_WARP, state != HIDDEN);
    if (state != HIDDEN) {
      list.entries[count + __popc(visible & ((1u << lane_index()) - 1))] = ListEntry(tile, state == WHOLE).value;
    }
    count += __popc(visible);
    // mutation: a later write depends on a ballot, and each lane has read before it
    __syncwarp();
  }
  if (lane_index() == 0) {
    if (count == 0) list.entries[0] = ListEntry(work.first, false).value;  // rows without keys are written too
    *list.count = max(count, 1);
  }
}

// Grid: masks * query tiles.
template <int BLOCK_M, int BLOCK_N, bool CAUSAL, bool LEFT, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) list_tiles(const __grid_constant__ MaskedParams params) {
  using List = TileList<BLOCK_M, BLOCK_N>;
  __shared__ int states[WARPS];

  grid_dependency_launch();
  const ListWork<BLOCK_M, BLOCK_N, CAUSAL, LEFT> work(params, static_cast<int>(blockIdx.x));
  const int warp = static_cast<int>(threadIdx.x / 32), first = work.first, last = work.last;
  const List list(params, work.mask, work.query_tile);
  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();
  const MaskReader<BLOCK_M, BLOCK_N> reader(params, list, work.mask, work.first_row);
  const bool has_rows = List::has_rows(params);
  if (!has_rows) {  // all query tiles share the words: each CTA makes those of some tiles of keys
    const int query_tiles = List::query_tiles(params);
    for (int64 tile = work.query_tile + static_cast<int64>(query_tiles) * warp; tile < List::key_tiles(params);
         tile += static_cast<int64>(query_tiles) * WARPS) {
      reader.read(static_cast<int>(tile), true);
    }
  }
  // Where there are fewer tiles than warps, several warps share the rows of each.
  int at_once = WARPS;
  // mutation: how many warps share a tile changes no list
  while (at_once > 1 && at_once / 2 >= last - first) at_once /= 2;
  const int turn = warp % at_once;
  int count = 0;  // the same in all threads
  // mutation: a round past the last tile finds none
  for (int begin = first; begin < last; begin += at_once) {
    Found found = {false, false};
    if (begin + turn < last) found = reader.read(begin + turn, has_rows, warp / at_once, WARPS / at_once);
    const Marks marks(states, found, WARPS, at_once);
    const int own = static_cast<int>(threadIdx.x);
    const uint32 listed = marks.any & (1u << at_once) - 1;
    if (own < at_once && listed >> own & 1) {
      list.entries[count + __popc(listed & (1u << own) - 1)] = ListEntry(begin + own, marks.all >> own & 1).value;
    }
    count += __popc(listed);
  }
  if (threadIdx.x == 0) {
    if (count == 0) list.entries[0] = ListEntry(first, false).value;  // rows without keys are written too
    *list.count = max(count, 1);
  }
}

}  // namespace microsdpa::hopper::throughput
