// Tiles of a mask of numbers in shared memory, each a consumer's own.
#pragma once

#include "../../common/masks.cuh"
#include "../../ptx/mma.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::throughput {

// In the place of a mask's type: that of one whose rows need not start on 16 bytes.
template <typename T>
struct Unaligned {
  T element;
};

template <typename Mask>
struct ElementOf {
  using Type = Mask;
  static constexpr bool UNALIGNED = false;
};
template <typename T>
struct ElementOf<Unaligned<T>> {
  using Type = T;
  static constexpr bool UNALIGNED = true;
};

// Where a row of the mask is, of a query and from the first key on.
template <typename T>
__device__ __forceinline__ const T* mask_row(const MaskParams& masks, int batch, int head, int query) {
  const Strides& strides = masks.mask_strides;
  return static_cast<const T*>(masks.mask) + batch * strides.batch + head * strides.head + query * strides.row;
}

// Elements of an unaligned row ahead of its first one, down to 16 bytes: of both rows of a lane.
template <typename Mask>
struct RowShifts {
  __device__ __forceinline__ void find(const MaskParams&, int, int, int) {}
};
template <typename T>
struct RowShifts<Unaligned<T>> {
  int of[2];

  __device__ __forceinline__ static int shift(const T* row) {
    return static_cast<int>(reinterpret_cast<uint64>(row) % 16 / sizeof(T));
  }
  __device__ __forceinline__ void find(const MaskParams& masks, int batch, int head, int query) {
#pragma unroll
    for (int half = 0; half < 2; ++half) of[half] = shift(mask_row<T>(masks, batch, head, query + 8 * half));
  }
};

// A tile of a mask of numbers in shared memory, as bulk copies bring it: panels of 128 bytes of the warpgroup's rows,
// swizzled; or one row for all.
template <typename Mask, int KEYS>
struct AddedTile {
  using T = Mask;
  static constexpr int PANEL_COLUMNS = 128 / sizeof(Mask), CHUNK = 16 / sizeof(Mask), COLUMNS = KEYS;
  // Elements of the keys of two columns of the accumulator, 16 bits or 32.
  struct Elements {
    uint32 words[4 * sizeof(Mask) / 2];

    __device__ __forceinline__ Mask at(int half, int column, int e) const {
      if constexpr (sizeof(Mask) == 4) {
        return __uint_as_float(words[4 * column + 2 * half + e]);
      } else {
        const uint16 bits = static_cast<uint16>(words[2 * column + half] >> 16 * e);
        return *reinterpret_cast<const Mask*>(&bits);
      }
    }
  };

  const Mask* tile;
  unsigned all_rows;  // of the bits of a row's number, those that count: none where there is one row

  __device__ __forceinline__ AddedTile(const Mask* tile, const Strides& strides, const RowShifts<Mask>&)
      : tile(tile), all_rows(opaque(strides.row != 0 ? ROWS - 1 : 0)) {}

  __device__ __forceinline__ const Mask* chunk(int row, int number) const {
    const int place = row & all_rows;
    constexpr int CHUNKS = PANEL_COLUMNS / CHUNK;
    return tile + number / CHUNKS * (ROWS * PANEL_COLUMNS) + place * PANEL_COLUMNS +
           (number % CHUNKS ^ place % CHUNKS) * CHUNK;
  }

  __device__ __forceinline__ Elements load(int pair) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warp_row = static_cast<int>(threadIdx.x % 128 / 32 * 16);
    Elements found;
    if constexpr (sizeof(Mask) == 2) {
      ldmatrix(found.words, chunk(warp_row + lane % 16, pair + lane / 16));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * (pair + i / 2) + 2 * (lane % 4);
        const Mask* from = chunk(warp_row + lane / 4 + 8 * (i % 2), key / CHUNK) + key % CHUNK;
        const auto both = *reinterpret_cast<const Vector<uint32, 2>*>(from);
        found.words[2 * i] = both.data[0], found.words[2 * i + 1] = both.data[1];
      }
    }
    return found;
  }
};

// The same where rows need not start on 16 bytes: each one lies as far behind 16 bytes as in the mask. Rows are 16
// bytes longer than their keys take, so that neighbouring ones are in other banks.
template <typename Mask, int KEYS>
struct AddedTile<Unaligned<Mask>, KEYS> {
  using T = Mask;
  using Elements = typename AddedTile<Mask, KEYS>::Elements;
  static constexpr int COLUMNS = KEYS + 16 / sizeof(T);

  const T* rows[2];  // this lane's, from its first column on

  __device__ __forceinline__ AddedTile(const T* tile, const Strides& strides, const RowShifts<Unaligned<T>>& shifts) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp_row = static_cast<int>(threadIdx.x % 128 / 32 * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = strides.row != 0 ? warp_row + lane / 4 + 8 * half : 0;
      rows[half] = tile + row * COLUMNS + shifts.of[half] + 2 * (lane % 4);
    }
  }

  __device__ __forceinline__ Elements load(int pair) const {
    Elements found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const from = rows[i % 2] + 8 * (pair + i / 2);
      if constexpr (sizeof(T) == 2) {
        const auto* const two = reinterpret_cast<const uint16*>(from);
        found.words[i] = two[0] | static_cast<uint32>(two[1]) << 16;
      } else {
        found.words[2 * i] = __float_as_uint(from[0]), found.words[2 * i + 1] = __float_as_uint(from[1]);
      }
    }
    return found;
  }
};

}  // namespace microsdpa::hopper::throughput
