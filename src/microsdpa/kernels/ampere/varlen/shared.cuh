// Tiles of ampere/varlen, what a CTA keeps in shared memory, and what it leaves in the workspace.
#pragma once

#include "../../common/combine.cuh"
#include "../../common/swizzle.cuh"
#include "../../common/varlen_params.cuh"
#include "../../ptx/mbarrier.cuh"

namespace microsdpa::ampere::varlen {

// COLUMNS are HEAD_DIM, up to the next multiple of 16; those past HEAD_DIM are zeros.
template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int ROW_TILES_, int WARPS_M_, int WARPS_N_, int STAGES_>
struct Tiles {
  using T = ELEMENT;
  static constexpr int HEAD_DIM = HEAD_DIM_, COLUMNS = (HEAD_DIM + 15) / 16 * 16;
  static constexpr int BLOCK_N = BLOCK_N_, ROW_TILES = ROW_TILES_;
  static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_M = WARP_ROWS * WARPS_M;
  static constexpr int GROUP_THREADS = 32 * WARPS_M, THREADS = GROUP_THREADS * WARPS_N;
  static constexpr int TILE = BLOCK_N * WARPS_N;  // keys of all groups together
  using QueryTile = SwizzledTile<T, BLOCK_M, COLUMNS>;
  using KeyTile = SwizzledTile<T, BLOCK_N, COLUMNS>;
};

template <typename C>
struct Streaming {
  typename C::QueryTile query;
  struct {
    typename C::KeyTile key[C::STAGES];
    typename C::KeyTile value[C::STAGES];
  } ring[C::WARPS_N];
};

// The groups' results, over the tiles that nobody needs any more.
template <typename C>
struct Combining {
  // 8 floats of padding: four rows of a quad's eight floats are what half a warp stores at once.
  static constexpr int PITCH = C::COLUMNS + 8;
  alignas(16) float part[C::WARPS_N][C::BLOCK_M * PITCH];
  RowStats stats[C::WARPS_N][C::BLOCK_M];
};

// What a CTA gets from those of its cluster: every part of the output that it finishes, four columns per unit.
template <typename C, int PARTS>
struct Exchange {
  static constexpr int UNITS = C::BLOCK_M * C::COLUMNS / 4 / PARTS;
  static constexpr int UNIT_BYTES = sizeof(Values4) + sizeof(RowStats);
  Values4 values[PARTS][UNITS];
  RowStats stats[PARTS][UNITS];
  Mbarrier arrived;
};

template <typename C>
struct Exchange<C, 1> {};

template <typename C, int CLUSTER>
struct Shared {
  union {
    Streaming<C> streaming;
    Combining<C> combining;
  };
  Exchange<C, CLUSTER> exchange;
  int misplaced[C::WARPS_M * C::WARPS_N];  // whether a warp met a page that the cache does not have
  int is_last;                             // whether this CTA's part of the rows was the last one to be ready
};

// What CTAs leave of rows whose keys they share: O, not divided by l, and the rows' statistics. A CTA has two of them
// at most: of keys from the first one on, and of keys that another CTA has begun with.
template <typename C>
struct Partials {
  static constexpr int FLOATS = C::BLOCK_M * (C::COLUMNS + 2);
  float* const workspace;

  __device__ __forceinline__ explicit Partials(const VarlenParams& params)
      : workspace(static_cast<float*>(params.workspace)) {}
  __device__ __forceinline__ Values4* values(int owner, int part, int r, int column) const {
    return reinterpret_cast<Values4*>(base(owner, part) + r * C::COLUMNS + column);
  }
  __device__ __forceinline__ RowStats* stats(int owner, int part, int r) const {
    return reinterpret_cast<RowStats*>(base(owner, part) + C::BLOCK_M * C::COLUMNS) + r;
  }

 private:
  __device__ __forceinline__ float* base(int owner, int part) const {
    return workspace + static_cast<int64>(2 * (owner + part) + (part == 0)) * FLOATS;
  }
};

}  // namespace microsdpa::ampere::varlen
