// Shared memory of hopper/latency/kernel.cu, and where an accumulator's elements lie in the query tile.
#pragma once

#include "../../common/element.cuh"
#include "../../ptx/mbarrier.cuh"
#include "operands.cuh"

namespace microsdpa::hopper::latency {

constexpr int BLOCK_M = 64;    // queries of a CTA: one wgmma's rows
constexpr int BLOCK_N = 64;    // keys of a tile
constexpr int PANEL = 64;      // columns of a box: 128 bytes, one repetition of the swizzle pattern
constexpr int WARPGROUPS = 2;  // each with its own keys
// Keys of the first tile of which the largest score is the stabilizer. Of 64, a row's largest score would exceed it
// less often by more than FP16 can hold, and the search would take 0.02 us longer.
constexpr int STABILIZER_KEYS = 16;
constexpr int WARPGROUP_THREADS = 128;
constexpr int THREADS = WARPGROUPS * WARPGROUP_THREADS;

// Columns of a row's last box, where it is a narrow one with a pattern of its own; 0 without one.
template <int HEAD_DIM>
constexpr int TAIL = HEAD_DIM % PANEL == 16 ? 16 : 0;
// Panels of a row beside its tail: the last one may be wider than the row.
template <int HEAD_DIM>
constexpr int PANELS = (HEAD_DIM - TAIL<HEAD_DIM> + PANEL - 1) / PANEL;
// A row of 8-bit values is one box.
template <typename E, int HEAD_DIM>
constexpr int BOXES = sizeof(E) == 1 ? 1 : PANELS<HEAD_DIM>;

// Barriers among warps; 0 is __syncthreads'. Those of 4 to 9, and 13, are events of the first warpgroup; the
// second one's follow.
enum NamedBarrier : int {
  STABILIZER_KNOWN = 1,
  TILE_READ_BY_FIRST = 2,
  TILE_READ_BY_SECOND = 3,
  PEER_COLUMNS_GIVEN = 4,
  SUMS_PUBLISHED = 6,
  COLUMNS_GIVEN = 8,
  STABILIZER_SENT = 10,
  MASKS_READ = 11,
  MASKS_SENT = 12,
  KEYS_CHANGED = 13,
  CONSUMERS_MET = 15
};

// The registers of one of the PARTS of a product's columns.
template <int N>
using Accumulators = float[N];
template <int PARTS, int N>
__device__ __forceinline__ Accumulators<N / PARTS>& part_of(float (&d)[N], int part) {
  return *reinterpret_cast<Accumulators<N / PARTS>*>(&d[N / PARTS * part]);
}

// Four floats of each thread, stored so that a warp's accesses are consecutive.
using Quadruple = Vector<float, 4>;

// Sums of probabilities below this hold none that T cannot, and leave room for O in FP32.
template <typename T>
constexpr float LARGEST_SUM = 65504.0f;
template <>
constexpr float LARGEST_SUM<__nv_bfloat16> = 1e9f;
// Probabilities of which a sum is as large as this one are exact enough in T.
template <typename T>
constexpr float LEAST_SUM = 0.015625f;
template <>
constexpr float LEAST_SUM<__nv_bfloat16> = 1e-12f;
// Powers of two by which the largest probability may exceed 1 for the sake of those far below it.
template <typename T>
constexpr float HEADROOM = 4.0f;
template <>
constexpr float HEADROOM<__nv_bfloat16> = 0.0f;

// What is known of a row from a part of its keys: probabilities are 2^(score - stabilizer), and add up to `sum`.
struct alignas(8) RowPart {
  float stabilizer;
  float sum;
};

// What the other CTA sends of the rows that this one finishes: O, not yet divided, as quadruples of each thread.
template <int QUADRUPLES>
struct PeerShare {
  Quadruple output[WARPGROUPS][QUADRUPLES][WARPGROUP_THREADS];
  RowPart row[WARPGROUPS][BLOCK_M / 2];  // of each warpgroup's keys
};
struct PeerArrived {
  Mbarrier output[WARPGROUPS];
  Mbarrier row;
};

// Without a mask tensor that bulk copies bring.
struct NoMaskTiles {};
template <typename MASK_TILES>
constexpr bool HAS_MASK_TILES = true;
template <>
constexpr bool HAS_MASK_TILES<NoMaskTiles> = false;

// Tails of the tiles, apart from the panels, so that one copy can bring those of several tiles.
template <typename T, int COLUMNS, int STAGES>
struct Tails {
  alignas(1024) T query_ends[BLOCK_M * COLUMNS];
  T key_ends[STAGES][WARPGROUPS][BLOCK_N * COLUMNS];
  T value_ends[STAGES][WARPGROUPS][BLOCK_N * COLUMNS];

  __device__ __forceinline__ T* query_tail() { return query_ends; }
  __device__ __forceinline__ T* key_tail(int stage, int warpgroup) { return key_ends[stage][warpgroup]; }
  __device__ __forceinline__ T* value_tail(int stage, int warpgroup) { return value_ends[stage][warpgroup]; }
};
template <typename T, int STAGES>
struct Tails<T, 0, STAGES> {
  __device__ __forceinline__ T* query_tail() { return nullptr; }
  __device__ __forceinline__ T* key_tail(int, int) { return nullptr; }
  __device__ __forceinline__ T* value_tail(int, int) { return nullptr; }
};

// What 8-bit values need beside the tiles that are multiplied: V as it comes, and scales.
template <typename OPERANDS, int HEAD_DIM, int STAGES>
struct ScaledTiles {
  static constexpr int TILES = WARPGROUPS * STAGES;

  alignas(1024) unsigned char narrow_value[STAGES][WARPGROUPS][BLOCK_N * HEAD_DIM];
  float row_scale[BLOCK_M];  // of products: Q's, the softmax's in base 2, and K's if there is one; > 0
  float key_scale[OperandsOf<OPERANDS>::KEY_SCALES ? TILES * BLOCK_N : 4];
  float value_scale[HEAD_DIM];
  Mbarrier scales_full;
  Mbarrier wide_full[STAGES][WARPGROUPS];  // V has been widened
};
struct NoScaledTiles {};
template <typename OPERANDS, int HEAD_DIM, int STAGES, bool EIGHT_BIT = OperandsOf<OPERANDS>::EIGHT_BIT>
struct ScaledTilesOf {
  using Type = NoScaledTiles;
};
template <typename OPERANDS, int HEAD_DIM, int STAGES>
struct ScaledTilesOf<OPERANDS, HEAD_DIM, STAGES, true> {
  using Type = ScaledTiles<OPERANDS, HEAD_DIM, STAGES>;
};

template <typename OPERANDS, int HEAD_DIM, int STAGES, typename MASK_TILES = NoMaskTiles>
struct SharedStorage : MASK_TILES,
                       Tails<typename OperandsOf<OPERANDS>::Element, TAIL<HEAD_DIM>, STAGES>,
                       ScaledTilesOf<OPERANDS, HEAD_DIM, STAGES>::Type {
  using Masks = MASK_TILES;
  using Operands = OperandsOf<OPERANDS>;
  // What the thread that issues the copies does is everybody's time where there are few of them: then one brings all
  // tiles of V. Of K it would make the first product wait.
  static constexpr bool FEW_COPIES = BOXES<typename Operands::QueryKey, HEAD_DIM> == 1 && STAGES <= 2;
  static constexpr int VALUE_TILES = FEW_COPIES ? WARPGROUPS * STAGES : 1;  // of a copy
  // Columns of O that one warpgroup finishes, as quadruples: for each of a thread's two rows. Of an odd number the
  // second warpgroup has one that is not there.
  static constexpr int QUADRUPLES = (HEAD_DIM / 16 + WARPGROUPS - 1) / WARPGROUPS;

  alignas(1024) typename Operands::QueryKey query[Operands::TERMS * BLOCK_M * PANELS<HEAD_DIM> * PANEL];
  alignas(1024) typename Operands::QueryKey key[STAGES][WARPGROUPS][BLOCK_N * PANELS<HEAD_DIM> * PANEL];
  alignas(1024) typename Operands::Element value[STAGES][WARPGROUPS][BLOCK_N * PANELS<HEAD_DIM> * PANEL];
  // Columns of O that the other warpgroup gives to the one that finishes them.
  Quadruple from_neighbour[WARPGROUPS][2][QUADRUPLES][WARPGROUP_THREADS];
  PeerShare<QUADRUPLES> from_peer[2];  // [1]: sent again, after an overflow
  float stabilizer[WARPGROUPS][2][BLOCK_M / 2];
  float sum[WARPGROUPS][2][BLOCK_M / 2];
  Vector<int32, 4> overflow[WARPGROUPS];  // of each warp: in which half of its rows probabilities left the range of T
  Mbarrier full[1 + WARPGROUPS * STAGES + WARPGROUPS * STAGES / VALUE_TILES];  // Q, tiles of K, copies of V
  PeerArrived peer_arrived[2];

  __device__ __forceinline__ Mbarrier& query_full() { return full[0]; }
  __device__ __forceinline__ Mbarrier& key_full(int stage, int warpgroup) {
    return full[1 + WARPGROUPS * stage + warpgroup];
  }
  __device__ __forceinline__ Mbarrier& value_full(int stage, int warpgroup) {
    return full[1 + WARPGROUPS * STAGES + (FEW_COPIES ? 0 : WARPGROUPS * stage + warpgroup)];
  }
};

// What a thread of a warpgroup holds of a 64-row accumulator: two rows, and pairs of columns of every eight.
//
// wgmma gives warp w the rows 16 w to 16 w + 15, a thread one of the upper (half 0) and one of the lower eight. When
// two CTAs share the tile, Q's rows are dealt so that half 0 of every thread is a row that its own CTA finishes.
template <int CLUSTER>
struct Fragment {
  int rank;    // CTA of the cluster
  int thread;  // of the warpgroup

  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int quad_lane() const { return thread % 4; }

  // Number, 0 to 31, of the thread's rows among those of one half.
  __device__ __forceinline__ int row_of_half() const { return 8 * warp() + lane() / 4; }

  // Row of the query tile in which row `row` of eight lies, of the warp's half.
  __device__ __forceinline__ int tile_row(int half, int row) const {
    return CLUSTER == 2 ? BLOCK_M / 2 * (half ^ rank) + 8 * warp() + row : 16 * warp() + 8 * half + row;
  }
  __device__ __forceinline__ int tile_row(int half) const { return tile_row(half, lane() / 4); }
};

// The part of the problem that a CTA computes.
struct WorkTile {
  int rank;                     // CTA of the cluster
  int head;                     // of Q and O
  int head_kv;                  // of K and V
  int batch;                    //
  int first_row;                // of the query tile
  int rounds;                   // tiles of each warpgroup
  int first_tile, round_tiles;  // of the CTA, and from one round to the next

  // Keys from here on are tile `round` of a warpgroup.
  __device__ __forceinline__ int first_key(int round, int warpgroup) const {
    return BLOCK_N * (first_tile + round * round_tiles + warpgroup);
  }
};

}  // namespace microsdpa::hopper::latency
