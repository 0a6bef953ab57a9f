// Tiles of a mask tensor in shared memory, where bulk copies bring them, for hopper/latency/kernel.cu.
//
// The rows of a query tile, or the one that all queries share, lie in panels. Two tiles of keys, those of a round,
// follow one another in the mask. Rows of 64 booleans, or one of 128, are a panel; numbers have panels of 128 bytes,
// whose 16-byte chunks are exchanged as Q's are.
#pragma once

#include "../../common/masks.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/mma.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

// MASK: of the elements. ROWS_OF_BOX: BLOCK_M, or 1 where queries share a row.
template <typename MASK, int ROWS_OF_BOX, int ROUNDS>
struct MaskTiles {
  static constexpr int BYTES = BYTES_OF<MASK>, ROWS = ROWS_OF_BOX;
  static constexpr int PANEL_BYTES = BYTES == 1 && ROWS > 1 ? 64 : 128, PANEL_KEYS = PANEL_BYTES / BYTES;
  static constexpr int PANELS_OF_ROUND = WARPGROUPS * BLOCK_N / PANEL_KEYS;
  static constexpr int PLACES = ROWS == 1 ? 8 : ROWS;      // of rows: the exchange of chunks repeats after eight
  static constexpr bool IN_TURN = BYTES == 4 && ROWS > 1;  // with the keys, under a barrier for each round
  static constexpr int BARRIERS = IN_TURN ? ROUNDS : 1;
  static constexpr int COPIED_BYTES = ROUNDS / BARRIERS * PANELS_OF_ROUND * ROWS * PANEL_BYTES;  // of a barrier

  alignas(1024) unsigned char mask[ROUNDS][PANELS_OF_ROUND][PLACES][PANEL_BYTES];
  Mbarrier mask_full[BARRIERS];

  // A row's chunk of 16 bytes, by its number in a warpgroup's tile of keys.
  __device__ __forceinline__ const unsigned char* chunk(int round, int warpgroup, int row, int number) const {
    constexpr int CHUNKS = PANEL_BYTES / 16;
    const int first = warpgroup * (BLOCK_N * BYTES / 16), place = ROWS == 1 ? 0 : row;
    // A tile is one or more panels, or half of one.
    const int panel = first / CHUNKS + number / CHUNKS, within = (first + number) % CHUNKS;
    return &mask[round][panel][place][(BYTES == 1 ? within : within ^ place % 8) * 16];
  }
};

// What a kernel keeps of a mask tensor in shared memory, with boxes of so many rows.
template <typename MASKS, int ROWS_OF_BOX, int ROUNDS>
struct MaskMemoryOf {
  using Type = MaskTiles<typename MASKS::Mask, ROWS_OF_BOX, ROUNDS>;
};
template <typename MASKS, int ROUNDS>
struct MaskMemoryOf<MASKS, 0, ROUNDS> {
  using Type = NoMaskTiles;
};

template <typename TILES>
constexpr bool COMES_IN_TURN = TILES::IN_TURN;
template <>
constexpr bool COMES_IN_TURN<NoMaskTiles> = false;

// Numbers that are added to scores of a thread's row of one half, of 32 keys: those of its columns.
template <typename MASK>
struct Addends {
  static constexpr int BYTES = BYTES_OF<MASK>, KEYS = 32;
  uint32 words[2 * BYTES];

  // Part `part` of a warpgroup's tile. `rows`: the row of the tile that is number `row` of eight of the half.
  template <typename TILES, typename RowOf>
  __device__ __forceinline__ void load(const TILES& tiles, int round, int warpgroup, int part, RowOf row_of) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (BYTES == 2) {
      ldmatrix(words, tiles.chunk(round, warpgroup, row_of(lane % 8), 4 * part + lane / 8));
    } else {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) load_pair(tiles, round, warpgroup, 4 * part + (n ^ shift<TILES>()), n, row_of);
      // Lanes of odd rows have read the pairs in another order: in the same one, two rows would share their banks.
#pragma unroll
      for (int i = 0; i < BYTES; ++i) {
        const uint32 first = words[i], second = words[BYTES + i];
        words[i] = shift<TILES>() ? second : first, words[BYTES + i] = shift<TILES>() ? first : second;
      }
    }
  }
  // Half of the part: every second eight keys, so that both ends of the tile are among them.
  template <typename TILES, typename RowOf>
  __device__ __forceinline__ void sample(const TILES& tiles, int round, int warpgroup, int part, RowOf row_of) {
    static_assert(BYTES == 4, "others are read at once");
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      load_pair(tiles, round, warpgroup, 4 * part + (n ^ shift<TILES>()) + part, n / 2, row_of);
    }
  }

 private:
  template <typename TILES>
  __device__ __forceinline__ static int shift() {
    return TILES::ROWS == 1 ? 0 : threadIdx.x / 4 % 2 * 2;
  }
  // Of eight keys `from` those of the lane, as pair `to`.
  template <typename TILES, typename RowOf>
  __device__ __forceinline__ void load_pair(const TILES& tiles, int round, int warpgroup, int from, int to,
                                            RowOf row_of) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto* chunk = tiles.chunk(round, warpgroup, row_of(lane / 4), 2 * from + lane % 4 / 2);
    const auto both = *reinterpret_cast<const Vector<uint32, 2>*>(chunk + lane % 2 * 8);
    words[2 * to] = both.data[0], words[2 * to + 1] = both.data[1];
  }
};

}  // namespace microsdpa::hopper::latency
