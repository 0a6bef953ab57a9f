// Norms and rotary embedding in hopper/latency/kernel.cu: rows of Q and K change where bulk copies have put them,
// before the products read them. Angles and weights are on their way while the copies are.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Requests the angles and weights of Q's rows and of the keys of up to two rounds, which are then on their way beside
// the copies.
template <typename C>
__device__ __forceinline__ void Consumer<C>::fetch_first() {
  if constexpr (PROLOGUE::ANY) {
    const PrologueParams& prologue = given.params;
    grid_dependency_wait();
    if constexpr (PROLOGUE::template CHANGES<false>) {
      first.queries.fetch(prologue, work.batch, static_cast<int>(threadIdx.x) / 32 * QUERIES_OF_WARP, 0,
                          params.seqlen_q, [&](int row) { return work.first_row + row; });
    }
    if constexpr (PROLOGUE::template CHANGES<true>) {
#pragma unroll
      for (int round = 0; round < FirstRows<C>::ROUNDS; ++round) {
        first.keys[round].fetch(prologue, work.batch, fragment.warp() * KEYS_OF_WARP, 0, params.seqlen_k,
                                [&](int row) { return work.first_key(round, warpgroup) + row; });
      }
    }
  }
}

// Q, of which every warp changes as many rows, and each warpgroup's first keys.
template <typename C>
__device__ __forceinline__ void Consumer<C>::change_first() {
  if constexpr (PROLOGUE::ANY) {
    constexpr bool OF_QUERY = PROLOGUE::template CHANGES<false>, OF_KEY = PROLOGUE::template CHANGES<true>;
    if constexpr (OF_QUERY) {
      mbarrier_wait(shared.query_full(), 0);
      first.queries.apply(given.params.eps, [&](int row, int column) {
        return chunk_of<HEAD_DIM>(shared.query, shared.query_tail(), row, column);
      });
    }
    mbarrier_wait(shared.key_full(0, warpgroup), 0);
    if constexpr (OF_KEY) {
      first.keys[0].apply(given.params.eps, [&](int row, int column) { return key_chunk(0, row, column); });
      fence_proxy_async();
    }
    __syncthreads();
  }
}

// Rows of keys that a warp changes at once.
template <typename C>
constexpr int ONE_TURN = PrologueRow<typename C::PROLOGUE, true, typename C::T, C::COLUMNS>::AT_ONCE;

// A later tile of keys, when it is there; none past the last round.
template <typename C>
__device__ __forceinline__ void Consumer<C>::change_keys(int round) {
  if constexpr (PROLOGUE::ANY) {
    if (ROUNDS == 0 && round >= work.rounds) return;
    const int stage = round % STAGES;
    if constexpr (PROLOGUE::template CHANGES<true>) {
      if (round < FirstRows<C>::ROUNDS) {
        mbarrier_wait(shared.key_full(stage, warpgroup), 0);
        first.keys[round].apply(given.params.eps, [&](int row, int column) { return key_chunk(stage, row, column); });
        fence_proxy_async();
        named_barrier_sync(KEYS_CHANGED + warpgroup, WARPGROUP_THREADS);
        return;
      }
      // All angles are on their way at once where scores and outputs leave registers for them.
      using Keys = WarpRows<C, true, C::COLUMNS <= PANEL ? KEYS_OF_WARP : ONE_TURN<C>>;
#pragma unroll
      for (int i = 0; i < KEYS_OF_WARP; i += Keys::ROWS) {
        Keys keys;
        keys.fetch(given.params, work.batch, fragment.warp() * KEYS_OF_WARP, i, params.seqlen_k,
                   [&](int row) { return work.first_key(round, warpgroup) + row; });
        if (i == 0) mbarrier_wait(shared.key_full(stage, warpgroup), round / STAGES % 2);
        keys.apply(given.params.eps, [&](int row, int column) { return key_chunk(stage, row, column); });
      }
      fence_proxy_async();
      named_barrier_sync(KEYS_CHANGED + warpgroup, WARPGROUP_THREADS);
    } else {
      mbarrier_wait(shared.key_full(stage, warpgroup), round / STAGES % 2);
    }
  }
}

}  // namespace microsdpa::hopper::latency
