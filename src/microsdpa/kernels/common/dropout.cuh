// Dropout: which probabilities a call keeps. The random numbers are those of Philox 4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011).
//
// A probability is kept where its random number of 16 bits is below DropoutParams::kept. The number depends on seed,
// offset, head of the batch, query and key alone, so that all kernels agree. One turn of the generator has the numbers
// of eight probabilities in a square of 16 queries and 16 keys: those that a lane has of an mma accumulator's tiles,
// which are queries i and i + 8, and keys j, j + 1, j + 8 and j + 9 for an even j.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "dropout_params.cuh"
#include "mma_tile.cuh"
#include "softmax.cuh"

namespace microsdpa {

// Kernels without dropout, whose parameter has nothing of it.
struct NoDropout {
  static constexpr bool ANY = false;
  template <typename P>
  using Params = P;
  template <typename P>
  __device__ __forceinline__ static const P& call(const P& params) {
    return params;
  }
};

struct Dropout {
  static constexpr bool ANY = true;
  template <typename P>
  using Params = Dropped<P>;
  template <typename P>
  __device__ __forceinline__ static const P& call(const Dropped<P>& params) {
    return params.call;
  }
};

// Numbers of eight probabilities: those of keys j and j + 8, then of j + 1 and j + 9; in each word that of query i is
// the low half, and that of query i + 8 the high one.
struct RandomWords {
  uint32 words[4];
};

// The generator of one call.
struct Philox {
  uint32 key[2];
  uint32 position;  // in the generator's stream: a call takes one place of it

  // Reads the call's seed and offset.
  __device__ __forceinline__ explicit Philox(const DropoutParams& params) {
    const uint64 seed = params.drawn ? params.drawn[0] : params.seed;
    const uint64 offset = params.drawn ? params.drawn[1] : params.offset;
    position = static_cast<uint32>(offset / 4);  // torch counts numbers, of which a turn has four
    key[0] = static_cast<uint32>(seed);
    key[1] = static_cast<uint32>(seed >> 32) ^ static_cast<uint32>(offset / 4 >> 32);
  }

  // The same, of which the compiler sees that all lanes of a warp have one: the lanes meet here.
  __device__ __forceinline__ Philox of_warp() const {
    Philox found = *this;
    found.key[0] = __shfl_sync(FULL_WARP, key[0], 0), found.key[1] = __shfl_sync(FULL_WARP, key[1], 0);
    found.position = __shfl_sync(FULL_WARP, position, 0);
    return found;
  }

  // The numbers of a query and a key of a head of the batch, and of the seven others with them.
  __device__ __forceinline__ RandomWords at(int head, int query, int key_index) const {
    const uint32 i = static_cast<uint32>(query), j = static_cast<uint32>(key_index);
    uint32 c[4] = {j / 16 * 4 + j % 8 / 2, i / 16 * 8 + i % 8, static_cast<uint32>(head), position};
    uint32 k[2] = {key[0], key[1]};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64 a = static_cast<uint64>(0xd2511f53u) * c[0], b = static_cast<uint64>(0xcd9e8d57u) * c[2];
      c[0] = static_cast<uint32>(b >> 32) ^ c[1] ^ k[0];
      c[2] = static_cast<uint32>(a >> 32) ^ c[3] ^ k[1];
      c[1] = static_cast<uint32>(b);
      c[3] = static_cast<uint32>(a);
      k[0] += 0x9e3779b9u, k[1] += 0xbb67ae85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
  }
};

// The generator of a call that may be without dropout.
template <typename DROPOUT>
struct DropoutOf {
  template <typename P>
  __device__ __forceinline__ explicit DropoutOf(const P&) {}
};
template <>
struct DropoutOf<Dropout> : Philox {
  template <typename P>
  __device__ __forceinline__ explicit DropoutOf(const Dropped<P>& params) : Philox(params.dropout) {}
};

// Leaves seed and offset where the backward pass finds them; called by one thread of the grid.
__device__ __forceinline__ void keep_state(const DropoutParams& params) {
  if (params.state == nullptr) return;
  params.state[0] = params.drawn ? params.drawn[0] : params.seed;
  params.state[1] = params.drawn ? params.drawn[1] : params.offset;
}

// What is kept of a lane's probabilities: a bit for each of an mma accumulator's.
//
// Its 16 ROW_TILES rows are queries and its COLUMNS columns are keys, or with BY_KEYS the other way around. The first
// row and column are multiples of 16.
template <bool BY_KEYS, int ROW_TILES, int COLUMNS>
struct KeptProbabilities {
  uint32 bits[ROW_TILES];  // bit 4 n + e is that of element [n][e]
  static_assert(COLUMNS <= 64 && COLUMNS % 16 == 0, "a lane has a bit for each of a row tile's probabilities");

  __device__ __forceinline__ KeptProbabilities(const Philox& philox, uint32 kept, int head, int first_row,
                                               int first_column) {
    const int row = lane_index() / 4, column = lane_index() % 4 * 2, odd = row % 2;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      bits[t] = 0;
#pragma unroll
      for (int m = 0; m < COLUMNS / 16; ++m) {
        const int tile_row = first_row + 16 * t, tile_column = first_column + 16 * m;
        uint32 even_words[2], odd_words[2];
        if constexpr (BY_KEYS) {
          // The numbers of a lane's keys are those of two turns, for even and odd queries: it makes one, and its
          // neighbour, who has the other keys of both, makes the other.
          const RandomWords own = philox.at(head, tile_column + column + odd, tile_row + row);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32 mine = odd ? own.words[2 + i] : own.words[i];
            const uint32 theirs = __shfl_xor_sync(FULL_WARP, odd ? own.words[i] : own.words[2 + i], 4);
            even_words[i] = odd ? theirs : mine;
            odd_words[i] = odd ? mine : theirs;
          }
        } else {
          const RandomWords own = philox.at(head, tile_row + row, tile_column + column);
#pragma unroll
          for (int i = 0; i < 2; ++i) even_words[i] = own.words[i], odd_words[i] = own.words[2 + i];
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int word = BY_KEYS ? e / 2 : n, half = BY_KEYS ? n : e / 2;
            const uint32 number = (e % 2 ? odd_words : even_words)[word] >> 16 * half & 0xffffu;
            bits[t] |= static_cast<uint32>(number < kept) << (8 * m + 4 * n + e);
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool has(int t, int n, int e) const { return bits[t] >> (4 * n + e) & 1; }
};

// The same for kernels that may be without dropout.
template <typename DROPOUT, bool BY_KEYS, int ROW_TILES, int COLUMNS>
struct KeptOf {
  template <typename... Arguments>
  __device__ __forceinline__ explicit KeptOf(const Arguments&...) {}
};
template <bool BY_KEYS, int ROW_TILES, int COLUMNS>
struct KeptOf<Dropout, BY_KEYS, ROW_TILES, COLUMNS> : KeptProbabilities<BY_KEYS, ROW_TILES, COLUMNS> {
  template <typename P>
  __device__ __forceinline__ KeptOf(const Philox& philox, const Dropped<P>& params, int head, int first_row,
                                    int first_column)
      : KeptProbabilities<BY_KEYS, ROW_TILES, COLUMNS>(philox, params.dropout.kept, head, first_row, first_column) {}
};

// Which numbers keep their probabilities, two numbers of 16 bits at once.
struct KeptNumbers {
  uint32 largest;  // that keeps, in both halves. Where none does, the factor of what is kept is 0.

  __device__ __forceinline__ explicit KeptNumbers(uint32 kept) : largest((kept == 0 ? 0 : kept - 1) * 0x10001u) {}

  // The top bit of each half says whether its number keeps. Of the other bits nothing is said.
  __device__ __forceinline__ uint32 operator()(uint32 numbers) const {
    // Whether the lower 15 bits are not over those of the largest: no half borrows from the other one.
    const uint32 lower = (largest | 0x80008000u) - (numbers & 0x7fff7fffu);
    return (lower & largest) | ((lower | largest) & ~numbers);
  }
};

// Drops probabilities that are A operands of wgmma or mma: 16 queries of a warp, and 16 keys a step.
//   row: the lane's first   first_key: of the tile, a multiple of 16
template <int STEPS>
__device__ __forceinline__ void drop_operands(uint32 (&p)[STEPS][4], const Philox& philox, const KeptNumbers& keeps,
                                              int head, int row, int first_key) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const RandomWords own = philox.at(head, row, first_key + 16 * step + static_cast<int>(lane_index()) % 4 * 2);
    uint32 kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) kept[i] = keeps(own.words[i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // of queries i and i + 8 the keys j and j + 1, with n also 8 more
      p[step][2 * n] &= permute_bytes<0xdd99>(kept[n], kept[2 + n]);
      p[step][2 * n + 1] &= permute_bytes<0xffbb>(kept[n], kept[2 + n]);
    }
  }
}

// What is dropped of a lane's probabilities on accumulators of transposed scores: 16 rows of a warp are keys, the
// columns queries.
template <int N>
struct DroppedTransposed {
  uint32 bits[N / 32];  // four of each half are those of a square of 16 queries and 16 keys
  static_assert(N % 32 == 0, "whole words");

  // `row`: the lane's first one. `first_column`: of the tile. Both tiles begin at multiples of 16.
  __device__ __forceinline__ void draw(const Philox& philox, const KeptNumbers& keeps, int head, int row,
                                       int first_column) {
    // The numbers of a lane's keys are those of two turns of the generator, for even and odd queries: it makes one, and
    // its neighbour, who has the other keys of both, makes the other.
    const int odd = row % 2, column = lane_index() % 4 * 2;
#pragma unroll
    for (int m = 0; m < N / 8; ++m) {
      const RandomWords own = philox.at(head, first_column + 16 * m + column + odd, row);
      uint32 flags[2];  // of keys j and j + 8 together, then of j + 1 and j + 9
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        flags[i] = (keeps(own.words[2 * i]) & 0x80008000u) | (keeps(own.words[2 * i + 1]) >> 1 & ~0x80008000u);
      }
      const uint32 mine = odd ? flags[1] : flags[0];
      const uint32 theirs = __shfl_xor_sync(FULL_WARP, odd ? flags[0] : flags[1], 4);
      const uint32 even_queries = odd ? theirs : mine, odd_queries = odd ? mine : theirs;
      const uint32 kept = (even_queries & 0xc000c000u) | (odd_queries >> 2 & ~0xc000c000u);
      const uint32 dropped = (~kept & 0xf000f000u) >> 4 * (m % 4);
      bits[m / 4] = m % 4 == 0 ? dropped : bits[m / 4] | dropped;
    }
  }

  // The bit of element i.
  __device__ __forceinline__ static constexpr int place(int i) {
    return 15 + 16 * (i / 4 % 2) - 4 * (i / 8 % 4) - 2 * (i % 2) - i / 2 % 2;
  }
  __device__ __forceinline__ bool has(int i) const { return bits[i / 32] >> place(i) & 1; }

  // Gives what is dropped a minus sign.
  __device__ __forceinline__ void mark(float (&p)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      p[i] = __uint_as_float(__float_as_uint(p[i]) | (bits[i / 32] << (31 - place(i)) & 0x80000000u));
    }
  }

  // Drops probabilities that are A operands, pairs of queries in a word.
  __device__ __forceinline__ void drop(uint32 (&p)[N / 8][4]) const {
#pragma unroll
    for (int m = 0; m < N / 8; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to_top = 4 * (m % 4) + half;
        const uint32 even_queries = bits[m / 4] << to_top, odd_queries = bits[m / 4] << (to_top + 2);
        p[m][half] &= ~permute_bytes<0xdd99>(even_queries, odd_queries);
        p[m][2 + half] &= ~permute_bytes<0xffbb>(even_queries, odd_queries);
      }
    }
  }
};

// Drops probabilities of a lane whose keys follow one another, as those of masked tiles do (masks.cuh).
//   row: the lane's first   first_key: of the tile
template <int ROW_TILES, int BLOCK_N>
__device__ __forceinline__ void drop_probabilities(float (&p)[ROW_TILES][BLOCK_N / 8][4], const Philox& philox,
                                                   uint32 kept, int head, int row, int first_key) {
  constexpr int KEYS = BLOCK_N / 4;
  static_assert(KEYS == 8 || KEYS == 16, "a lane has half a square's keys, or all");
  const int start = first_key + static_cast<int>(lane_index()) % 4 * KEYS;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const RandomWords own = philox.at(head, row + 16 * t, start + 2 * pair);
#pragma unroll
      for (int j = 2 * pair; j < KEYS; j += j % 2 ? 7 : 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int first = j % 2 * 2, second = start / 8 % 2;
          const uint32 word = KEYS == 16 ? own.words[first + j / 8] : second ? own.words[first + 1] : own.words[first];
          if ((word >> 16 * half & 0xffffu) >= kept) p[t][j / 2][2 * half + j % 2] = 0.0f;
        }
      }
    }
  }
}

}  // namespace microsdpa
