// Norms and rotary embedding in hopper/latency/kernel.cu: rows of Q and K change where bulk copies have put them,
// before the products read them. Angles and weights are on their way while the copies are.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Q, of which every warp changes as many rows, and each warpgroup's first keys.
template <typename C>
__device__ __forceinline__ void Consumer<C>::change_first() {
  if constexpr (PROLOGUE::ANY) {
    constexpr bool OF_QUERY = PROLOGUE::template CHANGES<false>, OF_KEY = PROLOGUE::template CHANGES<true>;
    constexpr int QUERIES = BLOCK_M / (THREADS / 32);
    using Queries = PrologueRows<PROLOGUE, false, T, C::COLUMNS, QUERIES / ChangedRow<false>::AT_ONCE>;
    using Keys = PrologueRows<PROLOGUE, true, T, C::COLUMNS, KEYS_OF_WARP / ChangedRow<true>::AT_ONCE>;
    const PrologueParams& prologue = given.params;
    Queries queries;
    Keys keys;
    grid_dependency_wait();
    if constexpr (OF_QUERY) {
      queries.fetch(prologue, work.batch, static_cast<int>(threadIdx.x) / 32 * QUERIES, 0, params.seqlen_q,
                    [&](int row) { return work.first_row + row; });
    }
    if constexpr (OF_KEY) {
      keys.fetch(prologue, work.batch, fragment.warp() * KEYS_OF_WARP, 0, params.seqlen_k,
                 [&](int row) { return work.first_key(0, warpgroup) + row; });
    }
    if constexpr (OF_QUERY) {
      mbarrier_wait(shared.query_full(), 0);
      queries.apply(prologue.eps, [&](int row, int column) {
        return chunk_of<HEAD_DIM>(shared.query, shared.query_tail(), row, column);
      });
    }
    mbarrier_wait(shared.key_full(0, warpgroup), 0);
    if constexpr (OF_KEY) {
      keys.apply(prologue.eps, [&](int row, int column) { return key_chunk(0, row, column); });
      fence_proxy_async();
    }
    __syncthreads();
  }
}

// A later tile of keys, when it is there; none past the last round.
template <typename C>
__device__ __forceinline__ void Consumer<C>::change_keys(int round) {
  if constexpr (PROLOGUE::ANY) {
    if (ROUNDS == 0 && round >= work.rounds) return;
    const int stage = round % STAGES;
    if constexpr (PROLOGUE::template CHANGES<true>) {
      // All angles are on their way at once where scores and outputs leave registers for them.
      constexpr int ALL = KEYS_OF_WARP / ChangedRow<true>::AT_ONCE, TURNS = C::COLUMNS <= PANEL ? ALL : 1;
      using Keys = PrologueRows<PROLOGUE, true, T, C::COLUMNS, TURNS>;
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
