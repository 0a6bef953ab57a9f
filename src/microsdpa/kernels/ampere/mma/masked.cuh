// The keys of one warp of ampere/mma under masks.
#pragma once

#include "../../common/masks.cuh"
#include "../../common/mma_tile.cuh"
#include "../../ptx/cp_async.cuh"

namespace microsdpa::ampere::mma {

// Starts copying keys, or their values, in the order of masked tiles, with one warp; those from `valid_rows` on become
// zeros.
//   global: [valid_rows, HEAD_DIM], row_stride elements apart
template <typename C, typename Tile, typename T>
__device__ __forceinline__ void copy_keys(Tile& tile, const T* global, int64 row_stride, int valid_rows) {
  Tile::template for_each_chunk<32>(lane_index(), [&](unsigned place, unsigned column) {
    const unsigned row = key_in_row<C::BLOCK_N>(place);
    const bool valid = static_cast<int>(row) < valid_rows && C::exists(column);
    // An invalid row's address is never read, and still has to be one that exists.
    const T* source = global + (valid ? row : 0) * row_stride + C::existing(column);
    cp_async<16>(tile.at(place, column), source, valid ? 16 : 0);
  });
}

// What masks say of a warp's tiles of keys, of which the first STAGES - 1 are on their way. A tile's mask is read one
// tile before its keys are: those that no row sees are not loaded. The first tiles are loaded whatever their masks say,
// which come no sooner.
template <typename C, typename MASKS, bool RIGHT, int PACK>
struct MaskedKeys {
  static constexpr int STAGES = C::STAGES;
  using Rows = MaskedRows<MASKS, RIGHT, C::BLOCK_N, PACK>;

  const Rows rows;
  typename Rows::View views[STAGES];  // of tile i and those after it; the last one is looked at when i is reached
  bool visible[STAGES] = {};

  //   work: of the CTA, whose rows the warp has all of   count: tiles   first_key_of(i): of tile i
  template <typename Work, typename FirstKey>
  __device__ __forceinline__ MaskedKeys(const MaskedParams& params, const Work& work, int count, FirstKey first_key_of)
      : rows(params, work.batch, work.head, work.first_row, work.rows) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      if (i < count) rows.fetch(views[i], first_key_of(i));  // mutation: nobody looks at tiles behind the last one
    }
#pragma unroll
    // mutation: what is said of a tile behind the last one is never asked for
    for (int i = 0; i < STAGES - 1; ++i) visible[i] = i < count && rows.look(views[i], first_key_of(i));
  }

  // Attention of the rows to the tiles.
  //   load(i): starts copying the keys and values of tile i
  template <typename Query, typename Ring, typename FirstKey, typename Load>
  __device__ __forceinline__ void attend(OnlineSoftmax<1>& softmax, float (&o)[1][C::COLUMNS / 8][4],
                                         const Query& query, const Ring& ring, int count, FirstKey first_key_of,
                                         Load load) {
    // mutation: nothing is visible of a tile behind the last one
    for (int i = 0; i < count; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();  // tile i is there, and nobody reads tile i - 1 any more
      const int last = i + STAGES - 1;
      // mutation: a tile behind the last one would be copied and not be read; rows behind the last key are zeros
      visible[STAGES - 1] = last < count && rows.look(views[STAGES - 1], first_key_of(last));
      if (visible[STAGES - 1]) load(last);
      cp_async_commit();
      const typename Rows::View view = views[0];
      const bool needed = visible[0];
#pragma unroll
      for (int next = 0; next < STAGES - 1; ++next) views[next] = views[next + 1], visible[next] = visible[next + 1];
      // mutation: nobody looks at tiles behind the last one
      if (last + 1 < count) rows.fetch(views[STAGES - 1], first_key_of(last + 1));
      if (!needed) continue;
      float s[1][C::BLOCK_N / 8][4];
      multiply_query_key<typename C::T, 1, C::COLUMNS, C::BLOCK_N>(s, query, ring.key[i % STAGES], 0);
      rows.apply(s, view, first_key_of(i));
      softmax.template update<C::BLOCK_N, C::COLUMNS>(s, o, 1.0f);
      multiply_probability_value<typename C::T, 1, C::COLUMNS, C::BLOCK_N>(o, s, ring.value[i % STAGES], 0);
    }
  }
};

template <typename C, bool RIGHT, int PACK>
struct MaskedKeys<C, NoMasks, RIGHT, PACK> {
  template <typename... Arguments>
  __device__ __forceinline__ explicit MaskedKeys(const Arguments&...) {}
};

}  // namespace microsdpa::ampere::mma
