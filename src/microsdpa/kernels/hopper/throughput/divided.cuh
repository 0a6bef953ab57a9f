// The keys of a query tile divided among the CTAs of a cluster, and their parts of O added up in shared memory.
//
// Tile t of keys is CTA t % CTAS's. Consumers with the same rows exchange columns in pairs, so that in the end each has
// the sum over all keys of its own columns: half of them with two CTAs, and half of what is left in every exchange
// more.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/element.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/control.cuh"
#include "../common/tile_scheduler.cuh"
#include "../common/warpgroup.cuh"

namespace microsdpa::hopper::throughput {

// Each CTA has all keys of its query tiles.
struct Undivided {
  static constexpr int CTAS = 1;
};

// CTAS share the keys of each query tile, whose output has COLUMNS columns.
template <int CTAS_, int COLUMNS_>
struct DividedKeys {
  static constexpr int CTAS = CTAS_, COLUMNS = COLUMNS_;
  static_assert(CTAS == 2 || CTAS == 4 || CTAS == 8, "columns are halved in each exchange");
  static constexpr int EXCHANGES = CTAS == 2 ? 1 : CTAS == 4 ? 2 : 3;

  // Of `tiles` tiles of keys, those of a CTA; at least one, of which its rows may see no key.
  __device__ __forceinline__ static int share(int tiles, int rank) { return max(1, (tiles - rank + CTAS - 1) / CTAS); }
};

// The tiles of keys that a CTA visits: the number of its i-th one. What lies behind the last key is read as zeros.
template <int CTAS>
struct SharedTiles {
  const int rank = cluster_rank();
  __device__ __forceinline__ int operator[](int i) const { return CTAS * i + rank; }
};

// What is known of a row from a part of its keys: probabilities are 2^(scale (score - stabilizer)) and add up to `sum`.
struct alignas(8) RowPart {
  float stabilizer;
  float sum;
};

// Four accumulators of each thread: those of eight columns.
using Block = Vector<float, 4>;

// STORAGE: SharedStorage, whose tiles of O receive what partners send.
template <typename STORAGE, int CONSUMERS, int EXCHANGES>
struct WithPartner : STORAGE {
  RowPart part[CONSUMERS][ROWS];               // of the partner
  Mbarrier buffer_free[EXCHANGES][CONSUMERS];  // the partner's, of each exchange
  Mbarrier received[CONSUMERS];

  // One thread.
  __device__ __forceinline__ void begin_exchanges() {
#pragma unroll
    for (int i = 0; i < CONSUMERS; ++i) {
#pragma unroll
      for (int exchange = 0; exchange < EXCHANGES; ++exchange) {
        mbarrier_init(buffer_free[exchange][i], WARPGROUP_THREADS / 32);
      }
      mbarrier_init(received[i], 1);
    }
  }
};

template <typename STORAGE, int CONSUMERS, typename DIVISION>
struct Storage {
  using Type = WithPartner<STORAGE, CONSUMERS, DIVISION::EXCHANGES>;
};
template <typename STORAGE, int CONSUMERS>
struct Storage<STORAGE, CONSUMERS, Undivided> {
  using Type = STORAGE;
};
template <typename STORAGE, int CONSUMERS, typename DIVISION>
using StorageOf = typename Storage<STORAGE, CONSUMERS, DIVISION>::Type;

// What a consumer exchanges with those of its rows in the cluster.
template <typename DIVISION, typename Shared, typename T, int HEAD_DIM>
struct Partners {
  static constexpr int CTAS = DIVISION::CTAS, EXCHANGES = DIVISION::EXCHANGES;
  static constexpr int BLOCKS = HEAD_DIM / 8;
  static constexpr int OWN = BLOCKS / CTAS;  // of which a CTA has the sum in the end
  // Blocks that a consumer's receive buffer holds: shared.out of the warpgroup.
  static constexpr int BUFFERED = sizeof(Shared::out[0]) / sizeof(Block) / WARPGROUP_THREADS;
  static_assert(BLOCKS % CTAS == 0, "every CTA finishes as many columns");

  Shared& shared;
  const int warpgroup, thread;
  const int rank = cluster_rank();  // which exchanges ask for anew: their addresses are not to live through main loops

  __device__ __forceinline__ Partners(Shared& shared, int warpgroup, int thread)
      : shared(shared), warpgroup(warpgroup), thread(thread) {
    release_buffer(0);
  }

  // Whether this CTA keeps the later half of the columns in an exchange.
  __device__ __forceinline__ static bool keeps_later(int rank, int exchange) { return rank >> exchange & 1; }
  __device__ __forceinline__ static int partner(int rank, int exchange) { return rank ^ 1 << exchange; }
  // The first of the columns that the CTA finishes.
  __device__ __forceinline__ int first_column() const {
    const int cta = cluster_rank();
    int first = 0;
#pragma unroll
    for (int exchange = 0; exchange < EXCHANGES; ++exchange) {
      first += keeps_later(cta, exchange) ? HEAD_DIM >> (exchange + 1) : 0;
    }
    return first;
  }

  // Lets the partner of an exchange fill this consumer's receive buffer, which this warp has read.
  __device__ __forceinline__ void release_buffer(int exchange) const {
    __syncwarp();
    if (elect_one()) {
      const int peer = partner(cluster_rank(), exchange);
      mbarrier_arrive_peer(peer_address(&shared.buffer_free[exchange][warpgroup], peer));
    }
    // mutation: the lanes come together for aligned instructions, which the emulator does not ask for
    __syncwarp();
  }

  // Blocks that either side gives in an exchange, and the chunks in which a receive buffer takes them.
  __device__ __forceinline__ static constexpr int given_blocks(int exchange) { return BLOCKS >> (exchange + 1); }
  __device__ __forceinline__ static constexpr int chunks(int exchange) {
    return (given_blocks(exchange) + BUFFERED - 1) / BUFFERED;
  }
  // The same in all exchanges before one of a query tile.
  __device__ __forceinline__ static constexpr int chunks_before(int exchange) {
    int before = 0;
    for (int i = 0; i < exchange; ++i) before += chunks(i);
    return before;
  }

  // The parity of a barrier's phase at the `chunk`-th of `each` chunks of a query tile, `before` tiles after the first.
  __device__ __forceinline__ static int phase(int before, int each, int chunk) {
    return (each % 2 != 0 ? before + chunk : chunk) & 1;
  }

  // Makes O, of which sum and stabilizer are the rows', that of all keys, in blocks 0 to OWN - 1. `before`: query tiles
  // of which this consumer did so. `scale`: of scores.
  __device__ __forceinline__ void add_up(float (&o)[HEAD_DIM / 2], float (&stabilizer)[2], float (&sum)[2], int before,
                                         float scale, const int (&row)[2]) const {
    const bool blind = fminf(stabilizer[0], stabilizer[1]) == negative_infinity();
    if (__any_sync(FULL_WARP, blind)) {  // no key counts, whatever its value is
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = stabilizer[i / 2 % 2] == negative_infinity() ? 0.0f : o[i];
    }
#pragma unroll
    for (int exchange = 0; exchange < EXCHANGES; ++exchange) {
      const int half = given_blocks(exchange);
      float own[2], theirs[2];
#pragma unroll
      for (int chunk = 0; chunk < chunks(exchange); ++chunk) {
        const int first = chunk * BUFFERED, blocks = half - first < BUFFERED ? half - first : BUFFERED;
        const int free_phase = phase(before, chunks(exchange), chunk);
        send(o, first, blocks, half, exchange, free_phase, chunk == 0 ? stabilizer : nullptr, sum, row);
        mbarrier_wait_cluster(shared.received[warpgroup],
                              phase(before, chunks_before(EXCHANGES), chunks_before(exchange) + chunk));
        if (chunk == 0) weigh(own, theirs, stabilizer, sum, scale, row);
        const auto* buffer = reinterpret_cast<const Block*>(shared.out[warpgroup]);
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
          const Block found = buffer[i * WARPGROUP_THREADS + thread];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& x = o[4 * (first + i) + e];
            x = fmaf(found.data[e], theirs[e / 2], x * own[e / 2]);
          }
        }
        // The buffer is the next exchange's, of this query tile or the next one.
        release_buffer(chunk + 1 < chunks(exchange) ? exchange : exchange + 1 < EXCHANGES ? exchange + 1 : 0);
      }
    }
  }

 private:
  // Sends blocks of the half that the partner keeps, and with the first ones what is known of the rows. Those that this
  // CTA keeps move to blocks `first` and on.
  __device__ __forceinline__ void send(float (&o)[HEAD_DIM / 2], int first, int blocks, int half, int exchange,
                                       int free_phase, const float* stabilizer, const float (&sum)[2],
                                       const int (&row)[2]) const {
    const int cta = cluster_rank(), peer = partner(cta, exchange);
    const ClusterAddress barrier = peer_address(&shared.received[warpgroup], peer);
    const bool later = keeps_later(cta, exchange);
    if (thread == 0) {
      mbarrier_arrive_expect(shared.received[warpgroup],
                             blocks * WARPGROUP_THREADS * static_cast<int>(sizeof(Block)) +
                                 (stabilizer != nullptr ? ROWS * static_cast<int>(sizeof(RowPart)) : 0));
    }
    // mutation: lanes that come together wait and send as one; each could do so alone
    __syncwarp();
    mbarrier_wait_cluster(shared.buffer_free[exchange][warpgroup], free_phase);
    if (stabilizer != nullptr && thread % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store_async(peer_address(&shared.part[warpgroup][row[i]], peer), stabilizer[i], sum[i], barrier);
      }
    }
    // mutation: lanes that come together wait and send as one; each could do so alone
    __syncwarp();
    const ClusterAddress buffer = peer_address(reinterpret_cast<const Block*>(shared.out[warpgroup]) + thread, peer);
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
      float* const early = o + 4 * (first + i);
      float* const late = early + 4 * half;
      float given[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        given[e] = later ? early[e] : late[e];
        early[e] = later ? late[e] : early[e];
      }
      store_async(buffer + i * WARPGROUP_THREADS * static_cast<int>(sizeof(Block)), given[0], given[1], given[2],
                  given[3], barrier);
    }
  }

  // Both parts of the rows together, and what either's O is to be multiplied by.
  __device__ __forceinline__ void weigh(float (&own)[2], float (&theirs)[2], float (&stabilizer)[2], float (&sum)[2],
                                        float scale, const int (&row)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowPart part = shared.part[warpgroup][row[i]];
      const float larger = fmaxf(stabilizer[i], part.stabilizer);
      own[i] = ex2_approx((stabilizer[i] - finite(larger)) * scale);
      theirs[i] = ex2_approx((part.stabilizer - finite(larger)) * scale);
      sum[i] = fmaf(part.sum, theirs[i], sum[i] * own[i]), stabilizer[i] = larger;
    }
  }
};
// Of a CTA that has all keys.
template <typename Shared, typename T, int HEAD_DIM>
struct Partners<Undivided, Shared, T, HEAD_DIM> {
  __device__ __forceinline__ Partners(Shared&, int, int) {}
};

// Writes BLOCKS blocks of eight columns of a thread's two rows, from `first` on, as far as the output has them.
template <typename T, int BLOCKS, int COLUMNS>
__device__ __forceinline__ void store_blocks(T* out, int64 row_stride, const float* o, const float (&factor)[2],
                                             int first, int first_row, int rows) {
  const int thread = static_cast<int>(threadIdx.x % WARPGROUP_THREADS), lane = thread % 4;
  const int own_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int block = 0; block < BLOCKS; block += 2) {
    uint32 word[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2;
      if (block + i % 2 < BLOCKS) {
        const float* const pair = o + 4 * (block + i % 2) + 2 * half;
        word[i] = pack<T>(pair[0] * factor[half], pair[1] * factor[half]);
      }
    }
    // Lanes 0 and 1 of a quad get 16 bytes of the first row's two blocks, the others of the second one's.
    const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3]);
    const int row = first_row + own_row + 8 * (lane / 2), column = first + 8 * (block + lane % 2);
    if (row < rows && column < COLUMNS && block + lane % 2 < BLOCKS) {
      *reinterpret_cast<uint4*>(out + row * row_stride + column) = chunk;
    }
    // mutation: lanes that come together exchange the next words; in the emulator they meet there in any case
    __syncwarp();
  }
}

}  // namespace microsdpa::hopper::throughput
