// What a CTA of ampere/mma keeps in shared memory, and which part of the problem it computes.
#pragma once

#include "../../common/combine.cuh"
#include "../../common/params.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/mbarrier.cuh"

namespace microsdpa::ampere::mma {

// COLUMNS are HEAD_DIM, up to the next multiple of 16; those past HEAD_DIM are zeros.
template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int ROW_TILES_, int WARPS_M_, int WARPS_N_, int STAGES_>
struct Tiles {
  using T = ELEMENT;
  static constexpr int HEAD_DIM = HEAD_DIM_, COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  static constexpr int BLOCK_N = BLOCK_N_, ROW_TILES = ROW_TILES_;
  static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_M = WARP_ROWS * WARPS_M;
  static constexpr int GROUP_THREADS = 32 * WARPS_M, THREADS = GROUP_THREADS * WARPS_N;
  using QueryTile = SwizzledRows<T, BLOCK_M, COLUMNS, 32>;
  using KeyTile = SwizzledRows<T, BLOCK_N, COLUMNS, 32>;

  // Whether a tensor has a column of a tile, and the column itself, or one that a tensor has.
  __device__ __forceinline__ static constexpr bool exists(unsigned column) {
    return COLUMNS == HEAD_DIM || column < HEAD_DIM;
  }
  __device__ __forceinline__ static constexpr unsigned existing(unsigned column) { return exists(column) ? column : 0; }
};

template <typename Tiles>
struct Streaming {
  typename Tiles::QueryTile query;
  struct {
    typename Tiles::KeyTile key[Tiles::STAGES];
    typename Tiles::KeyTile value[Tiles::STAGES];
  } ring[Tiles::WARPS_N];
};

// The groups' results, over the tiles that nobody needs any more.
template <typename Tiles>
struct Combining {
  // 8 floats of padding: four rows of a quad's eight floats are what half a warp stores at once.
  static constexpr int PITCH = Tiles::COLUMNS + 8;
  alignas(16) float part[Tiles::WARPS_N][Tiles::BLOCK_M * PITCH];
  RowStats stats[Tiles::WARPS_N][Tiles::BLOCK_M];
};

template <typename Tiles, bool COMBINES>
union Phases {
  Streaming<Tiles> streaming;
};

template <typename Tiles>
union Phases<Tiles, true> {
  Streaming<Tiles> streaming;
  Combining<Tiles> combining;
};

// What a CTA gets from those of its cluster: every part of the output that it finishes, four columns per unit.
template <typename Tiles, int PARTS>
struct Exchange {
  static constexpr int UNITS = Tiles::BLOCK_M * Tiles::HEAD_DIM / 4 / PARTS;
  static constexpr int UNIT_BYTES = sizeof(Values4) + sizeof(RowStats);
  Values4 values[PARTS][UNITS];
  RowStats stats[PARTS][UNITS];
  Mbarrier arrived;
};

// PARTS: those that the CTAs of a cluster exchange; 0 for none.
template <typename Tiles, bool COMBINES, int PARTS>
struct Shared {
  Phases<Tiles, COMBINES> phases;
  Exchange<Tiles, PARTS> exchange;
};

template <typename Tiles, bool COMBINES>
struct Shared<Tiles, COMBINES, 0> {
  Phases<Tiles, COMBINES> phases;
};

// Which part of the problem a CTA computes. Rows are those of one key head, PACK to a query.
template <int PACK, int SPLIT>
struct Work {
  int part;       // of the keys
  int first_row;  // of BLOCK_M
  int rows;       // of the key head
  int head;       // the first of the PACK query heads
  int64 batch;

  // CTAs that run side by side have tiles of different heads; under a causal mask the longest tiles come first.
  template <int BLOCK_M>
  __device__ __forceinline__ static Work of_block(const AttentionParams& params) {
    const int heads = params.heads / PACK;
    const int rows = params.seqlen_q * PACK;
    const int tiles = (rows + BLOCK_M - 1) / BLOCK_M;
    const unsigned index = blockIdx.x / SPLIT;
    const unsigned columns = gridDim.x / SPLIT / tiles;  // batch * heads
    const unsigned column = index % columns;
    return {static_cast<int>(blockIdx.x % SPLIT), static_cast<int>(tiles - 1 - index / columns) * BLOCK_M, rows,
            static_cast<int>(column % heads) * PACK, column / heads};
  }

  template <typename Pointer>
  __device__ __forceinline__ Pointer row(Pointer base, const Strides& strides, int r) const {
    return base + batch * strides.batch + (head + r % PACK) * strides.head + r / PACK * strides.row;
  }
  // Of [B, H, S_q] rows.
  __device__ __forceinline__ int64 flat_row(const AttentionParams& params, int r) const {
    return (batch * params.heads + head + r % PACK) * params.seqlen_q + r / PACK;
  }
};

}  // namespace microsdpa::ampere::mma
