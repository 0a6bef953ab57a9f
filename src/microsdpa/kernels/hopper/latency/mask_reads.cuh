// How threads of hopper/latency/kernel.cu come by a mask tensor: straight from global memory, or from shared memory,
// where bulk copies bring it (mask_tiles.cuh).
//
// A thread has two rows, and of every tile of 64 keys the keys 8 n + 2 q + e, where q is its place in the quad.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/masks.cuh"
#include "../../ptx/wgmma.cuh"
#include "mask_tiles.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

// Bits of the bytes of a word that are not zero.
__device__ __forceinline__ uint32 bits_of_bytes(uint32 word) {
  const uint32 highest = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) & 0x80808080u;
  return highest * 0x00204081u >> 28;
}

// MEMORY: what bulk copies bring of a mask tensor; NoMaskTiles where threads read it.
template <typename MASKS, int CLUSTER, typename MEMORY>
struct MaskReads {
  using Mask = typename MASKS::Mask;
  static constexpr bool RANGED = MASKS::RANGED;
  static constexpr bool READS = PRESENT<Mask> && !RANGED, HIDES = is_bool<Mask>, ADDS = READS && !HIDES;
  static constexpr bool BULK = HAS_MASK_TILES<MEMORY>, IN_TURN = COMES_IN_TURN<MEMORY>;
  static constexpr int BYTES = BYTES_OF<Mask>;
  static constexpr int WORDS = READS ? 4 * BYTES : 1;  // of the sixteen elements that a thread reads of a row and tile

  // What a tile's rows have of the mask, as it was read, or settled: KeyBits of a bool mask, or pairs of numbers.
  struct View {
    uint32 words[2][WORDS];
  };
  // Of a thread's rows of the mask, the bytes to them from its first element, or the keys that they see.
  struct Rows {
    int64 start[2];
    bool vectors;
    KeyRange range[2];

    // Keeps the compiler from working it out later.
    __device__ __forceinline__ void hold() {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 words[2] = {static_cast<uint32>(start[half]), static_cast<uint32>(start[half] >> 32)};
        // mutation: it holds back the compiler, and does nothing when the kernel runs
        wgmma_fence_registers(words);
        start[half] = static_cast<int64>(static_cast<uint64>(words[1]) << 32 | words[0]);
      }
    }
  };

  const MaskedParams& params;
  const WorkTile& work;
  const Fragment<CLUSTER>& fragment;
  const MEMORY& memory;

  __device__ __forceinline__ int row(int half) const { return work.first_row + fragment.tile_row(half); }

  // Bytes to a row of the mask, to the last one for those past it.
  __device__ __forceinline__ int64 distance_of_row(int row) const {
    const MaskParams& masks = params.masks;
    return BYTES * (work.batch * masks.mask_strides.batch + work.head * masks.mask_strides.head +
                    min(row, params.call.seqlen_q - 1) * masks.mask_strides.row);
  }
  __device__ __forceinline__ const char* mask() const { return static_cast<const char*>(params.masks.mask); }
  __device__ __forceinline__ static uint32 code(const char* element) {
    if constexpr (BYTES == 1) return *reinterpret_cast<const unsigned char*>(element);
    if constexpr (BYTES == 2) return *reinterpret_cast<const uint16*>(element);
    return *reinterpret_cast<const uint32*>(element);
  }

  // Finds where a thread's rows of the mask are, and whether all rows can be read 16 bytes at a time.
  __device__ __forceinline__ Rows find_rows() const {
    Rows rows{};
    if constexpr (READS && !BULK) {
      const MaskParams& masks = params.masks;
      const int64 distances = reinterpret_cast<int64>(mask() + distance_of_row(0)) | masks.mask_strides.row * BYTES;
      rows.vectors = masks.mask_column_stride == 1 && distances % 16 == 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.start[half] = distance_of_row(row(half));
    }
    return rows;
  }

  // Of four vectors that a row of numbers in FP32 has for a quad, the one that a lane reads.
  __device__ __forceinline__ int place() const {
    return BYTES == 4 ? fragment.quad_lane() % 2 * 2 + fragment.quad_lane() / 2 : fragment.quad_lane();
  }

  // Reads the ends of the keys that rows see.
  __device__ __forceinline__ void read_ranges(Rows& rows) const {
    if constexpr (RANGED) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* ends = reinterpret_cast<const int32*>(mask() + distance_of_row(row(half)));
        rows.range[half] = {max(ends[0], 0), min(ends[params.masks.mask_column_stride], params.call.seqlen_k)};
      }
    }
  }

  // Starts to read the mask for a tile.
  __device__ __forceinline__ void fetch(View& view, const Rows& rows, int first_key) const {
    if constexpr (READS) {
      // mutation: both ways read the same elements
      if (rows.vectors && first_key + BLOCK_N <= params.call.seqlen_k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* from = mask() + rows.start[half] + (first_key * BYTES + 16 * place());
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
            const auto loaded = *reinterpret_cast<const Vector<uint32, 4>*>(from + 16 * w);
#pragma unroll
            for (int i = 0; i < 4; ++i) view.words[half][w + i] = loaded.data[i];
          }
        }
      } else if constexpr (HIDES) {
        fetch_bytes(view, first_key);
      } else {
        fetch_numbers(view, first_key);
      }
    }
  }

  // Takes it from shared memory: of numbers, what belongs to the thread's scores.
  __device__ __forceinline__ void take(View& view, int round, int warpgroup) const {
    if constexpr (HIDES) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* from = memory.chunk(round, warpgroup, fragment.tile_row(half), fragment.quad_lane());
        const auto loaded = *reinterpret_cast<const Vector<uint32, 4>*>(from);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) view.words[half][w] = loaded.data[w];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          Addends<Mask> addends;
          addends.load(memory, round, warpgroup, part, [&](int row) { return fragment.tile_row(half, row); });
#pragma unroll
          for (int w = 0; w < WORDS / 2; ++w) view.words[half][WORDS / 2 * part + w] = addends.words[w];
        }
      }
    }
  }

  // Half of a tile's numbers, as far as they belong to a thread's rows: the largest one of each. Those that are none do
  // not count.
  __device__ __forceinline__ void sample(float (&largest)[2], int round, int warpgroup) const {
    static_assert(ADDS && IN_TURN, "others are taken");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = negative_infinity();
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        Addends<Mask> addends;
        addends.sample(memory, round, warpgroup, part, [&](int row) { return fragment.tile_row(half, row); });
#pragma unroll
        for (int w = 0; w < 4; ++w) largest[half] = fmaxf(largest[half], __uint_as_float(addends.words[w]));
      }
    }
  }

  // The same of a bool mask with any strides: a warp reads its rows one after another.
  __device__ __forceinline__ void fetch_bytes(View& view, int first_key) const {
    const int64 step = params.masks.mask_column_stride;
    const int last = params.call.seqlen_k - 1, lane = fragment.lane();
    const int64 low = min(first_key + lane, last) * step, high = min(first_key + 32 + lane, last) * step;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32 own = 0;
#pragma unroll 4
      for (int i = 0; i < 8; ++i) {
        const char* from = mask() + distance_of_row(work.first_row + fragment.tile_row(half, i));
        const uint32 first = __ballot_sync(FULL_WARP, code(from + low) != 0);
        const uint32 second = __ballot_sync(FULL_WARP, code(from + high) != 0);
        if (lane / 4 == i) own = (fragment.quad_lane() < 2 ? first : second) >> fragment.quad_lane() % 2 * 16;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) view.words[half][w] = (own >> 4 * w & 15) * 0x00204081u & 0x01010101u;
    }
  }

  // Numbers with any strides, a few at a time: the addresses of all would take too many registers.
  __device__ __forceinline__ void fetch_numbers(View& view, int first_key) const {
    constexpr int PER_VECTOR = 16 / BYTES, PER_WORD = 4 / BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) view.words[half][w] = 0;
    }
#pragma unroll 1
    for (int w = 0; w < WORDS; w += 2) {
      const int key = first_key + (w / 4 * 4 + place()) * PER_VECTOR + w % 4 * PER_WORD;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        const char* from = mask() + distance_of_row(row(half));
        uint32 loaded[2 * PER_WORD];
#pragma unroll
        for (int e = 0; e < 2 * PER_WORD; ++e) {
          loaded[e] = code(from + min(key + e, params.call.seqlen_k - 1) * params.masks.mask_column_stride * BYTES);
        }
#pragma unroll
        for (int i = 0; i + 2 < WORDS; ++i) words[i] = words[i + 2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[WORDS - 2 + i] = BYTES == 4 ? loaded[i] : loaded[2 * i] | loaded[2 * i + 1] << 16;
        }
      }
    }
  }

  // Gives each lane of a quad what belongs to its scores: of a bool mask the bits of all keys, of numbers its own
  // pairs.
  __device__ __forceinline__ void settle(View& view) const {
    if constexpr (READS && !(ADDS && BULK)) {
      const bool odd = fragment.quad_lane() % 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32(&words)[WORDS] = view.words[half];
        if constexpr (HIDES) {
          uint32 own = 0;
#pragma unroll
          for (int w = 0; w < 4; ++w) own |= bits_of_bytes(words[w]) << 4 * w;
          const uint32 next = __shfl_xor_sync(FULL_WARP, own, 1);
          const uint32 pair = odd ? next | own << 16 : own | next << 16;
          const uint32 other = __shfl_xor_sync(FULL_WARP, pair, 2);
          words[0] = fragment.quad_lane() < 2 ? pair : other;
          words[1] = fragment.quad_lane() < 2 ? other : pair;
        } else if constexpr (BYTES == 2) {
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
            const uint4 pairs = transpose_quad(words[w], words[w + 1], words[w + 2], words[w + 3]);
            words[w] = pairs.x, words[w + 1] = pairs.y, words[w + 2] = pairs.z, words[w + 3] = pairs.w;
          }
        } else {
#pragma unroll
          for (int w = 0; w < WORDS; w += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32 given = __shfl_xor_sync(FULL_WARP, odd ? words[w + i] : words[w + 2 + i], 1);
              words[w + i] = odd ? given : words[w + i];
              words[w + 2 + i] = odd ? words[w + 2 + i] : given;
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ static Mask element(const uint32 (&words)[WORDS], int n, int e) {
    if constexpr (BYTES == 4) {
      return __uint_as_float(words[2 * n + e]);
    } else {
      const uint16 bits = static_cast<uint16>(words[n] >> 16 * e);
      return *reinterpret_cast<const Mask*>(&bits);
    }
  }
};

}  // namespace microsdpa::hopper::latency
