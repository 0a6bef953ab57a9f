// The tiles of keys that a boolean mask leaves to each query tile: in scratch memory, where list_tiles.cu writes them,
// or in the memory of a table of blocks, which has them ahead of all calls.
#pragma once

#include "../../common/masks.cuh"

namespace microsdpa::hopper::throughput {

// One tile of a list: its number among the tiles of keys, and whether the mask hides nothing in it.
struct ListEntry {
  int32 value;

  __device__ __forceinline__ explicit ListEntry(int32 value) : value(value) {}
  __device__ __forceinline__ ListEntry(int tile, bool whole) : value(2 * tile + whole) {}
  __device__ __forceinline__ int tile() const { return value >> 1; }
  __device__ __forceinline__ bool whole() const { return value & 1; }
};

// Heads and batch entries that share the mask share a list. A mask without rows of its own has one row of words.
template <int BLOCK_M, int BLOCK_N>
struct TileList {
  static constexpr int WORDS =
      4;  // of a row of a tile, one for each lane of a quad: bit 2 n + e is key 8 n + 2 lane + e
  static_assert(BLOCK_N <= 128, "a lane has a bit for each of its keys");

  int32* count;
  int32* entries;  // of the query tile, in ascending order
  uint32* words;   // of the query tile's rows in all tiles of keys, also those not in the list

  __device__ __forceinline__ static int query_tiles(const MaskedParams& p) {
    return (p.call.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  }
  __device__ __forceinline__ static int key_tiles(const MaskedParams& p) {
    return (p.call.seqlen_k + BLOCK_N - 1) / BLOCK_N;
  }
  __device__ __forceinline__ static bool has_rows(const MaskedParams& p) { return p.masks.mask_strides.row != 0; }
  __device__ __forceinline__ static int masks(const MaskedParams& p) {
    return (p.masks.mask_strides.batch != 0 ? p.call.batch : 1) * (p.masks.mask_strides.head != 0 ? p.call.heads : 1);
  }
  // Words from a tile's first row to the one `row` further, and from the first tile to another one.
  __device__ __forceinline__ static int words_to_row(const MaskedParams& p, int row) {
    return has_rows(p) ? WORDS * row : 0;
  }
  __device__ __forceinline__ static int64 words_to(const MaskedParams& p, int tile) {
    return static_cast<int64>(tile) * (has_rows(p) ? WORDS * BLOCK_M : WORDS);
  }
  __device__ __forceinline__ static int mask_of(const MaskedParams& p, int batch, int head) {
    const bool heads = p.masks.mask_strides.head != 0;
    return (p.masks.mask_strides.batch != 0 ? batch : 0) * (heads ? p.call.heads : 1) + (heads ? head : 0);
  }

  __device__ __forceinline__ TileList(const MaskedParams& p, int batch, int head, int first_row)
      : TileList(p, mask_of(p, batch, head), first_row / BLOCK_M) {}
  // By the number of the mask among masks().
  __device__ __forceinline__ TileList(const MaskedParams& p, int mask, int query_tile) {
    const int64 lists = static_cast<int64>(masks(p)) * query_tiles(p);
    const int64 list = static_cast<int64>(mask) * query_tiles(p) + query_tile;
    int32* numbers = static_cast<int32*>(p.call.workspace);
    count = numbers + list;
    entries = numbers + lists + list * key_tiles(p);
    const int64 heads = lists * (1 + key_tiles(p));  // numbers ahead of the words
    uint32* all = static_cast<uint32*>(p.call.workspace) + (heads + WORDS - 1) / WORDS * WORDS;
    words = all + (has_rows(p) ? list : mask) * words_to(p, key_tiles(p));
  }

  // Words of the query tile's row `row` in a tile of keys.
  __device__ __forceinline__ uint32* words_of(const MaskedParams& p, int tile, int row) const {
    return words + words_to(p, tile) + words_to_row(p, row);
  }

  // A lane's words of the rows `row` and `row` + 8 of the query tile.
  struct LaneWords {
    const uint32* first;  // in the first tile of keys

    __device__ __forceinline__ void read(const MaskedParams& p, int tile, int, uint32 (&seen)[2]) const {
      const uint32* from = first + words_to(p, tile);
      seen[0] = from[0], seen[1] = from[words_to_row(p, 8)];
    }
  };
  __device__ __forceinline__ LaneWords lane_words(const MaskedParams& p, int row) const {
    return {words_of(p, 0, row) + threadIdx.x % WORDS};
  }
};

// The same of a table of blocks: every row of its memory has the words of all tiles, in the order of an accumulator,
// and the first row of a query tile has its lists, one for each size of tiles (call/summary.py).
template <int BLOCK_M, int BLOCK_N>
struct TableList {
  static_assert(BLOCK_M == SummedBool::TILE_ROWS, "lists are of these query tiles");
  static constexpr int OWN = BLOCK_N / 4;  // keys of a lane

  int count;
  const int32* entries;  // ascending, one at least
  const char* mask;      // of the head: its first row

  __device__ __forceinline__ TableList(const MaskedParams& p, int batch, int head, int first_row)
      : mask(static_cast<const char*>(p.masks.mask) + batch * p.masks.mask_strides.batch +
             head * p.masks.mask_strides.head) {
    const char* row = mask + first_row * p.masks.mask_strides.row;
    const int32* list = reinterpret_cast<const int32*>(row + SummedBool::list<BLOCK_N>(p.call.seqlen_k));
    count = list[0], entries = list + 1;
  }

  // Leaves out what comes before the tile `first`; one entry stays.
  __device__ __forceinline__ void begin_at(int first) {
    const int ahead = min(before(first), count - 1);
    entries += ahead, count -= ahead;
  }
  // Leaves out the tiles from `last` on; one entry stays.
  __device__ __forceinline__ void end_at(int last) { count = max(1, before(last)); }

  // How many entries come before a tile.
  __device__ __forceinline__ int before(int tile) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ListEntry(entries[middle]).tile() < tile) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // A lane's words of two rows. Rows past the last one have its words, as a warp decides for all its rows.
  struct LaneWords {
    const char* bits;  // of the head's first row

    __device__ __forceinline__ void read(const MaskedParams& p, int tile, int first_row, uint32 (&seen)[2]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(first_row + 8 * half, p.call.seqlen_q - 1), bit = OWN * tile;
        const char* from = bits + row * p.masks.mask_strides.row + bit / 32 * SummedBool::GROUP_BYTES;
        const uint32 word = *reinterpret_cast<const uint32*>(from);
        if constexpr (32 % OWN == 0) {
          seen[half] = word >> bit % 32;
        } else {
          const uint64 next = *reinterpret_cast<const uint32*>(from + SummedBool::GROUP_BYTES);
          seen[half] = static_cast<uint32>((next << 32 | word) >> bit % 32);
        }
      }
    }
  };
  __device__ __forceinline__ LaneWords lane_words(const MaskedParams& p, int) const {
    return {mask + SummedBool::bits(p.call.seqlen_k) + 4 * (threadIdx.x % 4)};
  }
};

}  // namespace microsdpa::hopper::throughput
