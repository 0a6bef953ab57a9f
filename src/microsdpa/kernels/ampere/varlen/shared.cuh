// Tiles of ampere/varlen, what a CTA keeps in shared memory, and what it leaves in the workspace.
#pragma once

#include "../../common/combine.cuh"
#include "../../common/swizzle.cuh"
#include "../../common/varlen_params.cuh"
#include "../../ptx/mbarrier.cuh"

namespace microsdpa::ampere::varlen {

// Elements of a kernel whose queries are of type T: those of Q in shared memory, those of the cache, and the units that
// tiles of these are made of; and what the columns of tiles are a multiple of.
template <typename T, typename CACHE>
struct Elements {  // two 8-bit values are a unit
  using Query = __half;
  using Cached = unsigned char;
  using Unit = uint16;
  static constexpr int GRAIN = 32;
  static constexpr bool EACH_TOKEN = CACHE::EACH_TOKEN;
};
template <typename T>
struct Elements<T, void> {
  using Query = T;
  using Cached = T;
  using Unit = T;
  static constexpr int GRAIN = 16;
  static constexpr bool EACH_TOKEN = false;
};

// COLUMNS are HEAD_DIM, up to the next multiple of GRAIN; those past HEAD_DIM are zeros, and those of V past VALUE_DIM.
template <typename ELEMENT, int HEAD_DIM_, int BLOCK_N_, int ROW_TILES_, int WARPS_M_, int WARPS_N_, int STAGES_,
          typename CACHE = void, int VALUE_DIM_ = HEAD_DIM_>
struct Tiles {
  using T = ELEMENT;
  using OwnElements = Elements<T, CACHE>;
  using Cached = typename OwnElements::Cached;
  static constexpr int GRAIN = OwnElements::GRAIN;
  static constexpr bool EACH_TOKEN = OwnElements::EACH_TOKEN;  // whether a stage has scales
  static constexpr int UNIT = sizeof(typename OwnElements::Unit) / sizeof(Cached);
  static constexpr bool NARROW = UNIT > 1;  // whether the cache has 8-bit values
  static constexpr int HEAD_DIM = HEAD_DIM_, VALUE_DIM = VALUE_DIM_, COLUMNS = (HEAD_DIM + GRAIN - 1) / GRAIN * GRAIN;
  static constexpr int BLOCK_N = BLOCK_N_, ROW_TILES = ROW_TILES_;
  static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_M = WARP_ROWS * WARPS_M;
  static constexpr int GROUP_THREADS = 32 * WARPS_M, THREADS = GROUP_THREADS * WARPS_N;
  static constexpr int TILE = BLOCK_N * WARPS_N;  // keys of all groups together
  using QueryTile = SwizzledRows<typename OwnElements::Query, BLOCK_M, COLUMNS>;
  using KeyTile = SwizzledRows<typename OwnElements::Unit, BLOCK_N, COLUMNS / UNIT>;
  // Whether a group's result takes the place of one stage of its ring: then the others are filled for the next tile of
  // rows meanwhile.
  static constexpr bool FLOWS = BLOCK_N >= BLOCK_M;
};

// A stage of a ring: keys and their values.
template <typename C, bool EACH_TOKEN = C::EACH_TOKEN>
union Stage {
  struct {
    typename C::KeyTile key, value;
  };
  float part[C::FLOWS ? C::BLOCK_M * C::COLUMNS : 1];  // the group's result, where it takes its place
};
template <typename C>
union Stage<C, true> {
  struct {
    typename C::KeyTile key, value;
    float key_scale[C::BLOCK_N], value_scale[C::BLOCK_N];
  };
  float part[C::FLOWS ? C::BLOCK_M * C::COLUMNS : 1];
};

// Tiles of Q: the next one comes while a group's result is in its ring. A cluster has one alone.
template <typename C, int CLUSTER>
constexpr int QUERY_TILES = C::FLOWS && CLUSTER == 1 ? 2 : 1;

template <typename C, int CLUSTER>
struct Streaming {
  typename C::QueryTile query[QUERY_TILES<C, CLUSTER>];
  Stage<C> ring[C::WARPS_N][C::STAGES];
};

// The groups' results where they do not fit a stage: over the tiles that nobody needs any more.
template <typename C>
struct Combining {
  alignas(16) float part[C::FLOWS ? 1 : C::WARPS_N][C::FLOWS ? 4 : C::BLOCK_M * C::COLUMNS];
};

// Where the column of a row lies in a group's result: four rows of a quad's eight floats, which half a warp stores at
// once, are in different banks.
template <typename C>
__device__ __forceinline__ int place_in_part(int r, int column) {
  return r * C::COLUMNS + (C::COLUMNS % 32 == 0 ? column ^ r % 4 * 8 : column);
}

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
    Streaming<C, CLUSTER> streaming;
    Combining<C> combining;
  };
  RowStats stats[C::WARPS_N][C::BLOCK_M];  // of the groups' results
  Exchange<C, CLUSTER> exchange;
  int misplaced[C::WARPS_M * C::WARPS_N];  // whether a warp met a page that the cache does not have
  int is_last;                             // whether this CTA's part of the rows was the last one to be ready
};

// With what products with the rows of each query tile are to be multiplied, where Q is not as it came.
template <typename C, int CLUSTER>
struct SharedWithScales : Shared<C, CLUSTER> {
  float query_scale[QUERY_TILES<C, CLUSTER>][C::BLOCK_M];
};

// What CTAs leave of rows whose keys they share: O, not divided by l, and the rows' statistics, in a slot of the
// workspace. Unless parts have a fixed size, a CTA has two of them at most: of keys from the first one on, and of keys
// that another CTA has begun with.
template <typename C>
struct Partials {
  static constexpr int FLOATS = C::BLOCK_M * (C::COLUMNS + 2);
  float* const workspace;

  __device__ __forceinline__ explicit Partials(const VarlenParams& params)
      : workspace(static_cast<float*>(params.workspace)) {}
  __device__ __forceinline__ static int slot(int owner, int part) { return 2 * (owner + part) + (part == 0); }
  __device__ __forceinline__ Values4* values(int slot, int r, int column) const {
    return reinterpret_cast<Values4*>(base(slot) + r * C::COLUMNS + column);
  }
  __device__ __forceinline__ RowStats* stats(int slot, int r) const {
    return reinterpret_cast<RowStats*>(base(slot) + C::BLOCK_M * C::COLUMNS) + r;
  }

 private:
  __device__ __forceinline__ float* base(int slot) const { return workspace + static_cast<int64>(slot) * FLOATS; }
};

}  // namespace microsdpa::ampere::varlen
