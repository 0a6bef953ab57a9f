// Norms and rotary embedding in hopper/latency/kernel.cu: rows of Q and K change where bulk copies have put them,
// before the products read them. Angles and weights are on their way while the copies are.
#pragma once

#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Q, of which both warpgroups change half of the rows, and each warpgroup's first keys: four lanes a row, and two.
template <typename C>
__device__ __forceinline__ void Consumer<C>::change_first() {
  if constexpr (PROLOGUE::ANY) {
    constexpr int QUERY_LANES = THREADS / BLOCK_M, KEY_LANES = WARPGROUP_THREADS / BLOCK_N;
    constexpr bool OF_QUERY = PROLOGUE::template CHANGES<false>, OF_KEY = PROLOGUE::template CHANGES<true>;
    const PrologueParams& prologue = given.params;
    const int row = row_of_lanes<QUERY_LANES>(static_cast<int>(threadIdx.x) / QUERY_LANES);
    const int key_row = row_of_lanes<KEY_LANES>(fragment.thread / KEY_LANES);
    PrologueRow<PROLOGUE, false, T, C::COLUMNS, QUERY_LANES> of_query;
    PrologueRow<PROLOGUE, true, T, C::COLUMNS, KEY_LANES> of_key;
    grid_dependency_wait();
    const int query_index = work.first_row + row, last_query = params.seqlen_q - 1;
    const int key_index = work.first_key(0, warpgroup) + key_row, last_key = params.seqlen_k - 1;
    if constexpr (OF_QUERY) {
      of_query.fetch(prologue, PROLOGUE::template position<false>(prologue, work.batch, min(query_index, last_query)));
    }
    if constexpr (OF_KEY) {
      of_key.fetch(prologue, PROLOGUE::template position<true>(prologue, work.batch, min(key_index, last_key)));
    }
    if constexpr (OF_QUERY) {
      mbarrier_wait(shared.query_full(), 0);
      of_query.apply(prologue.eps, query_index <= last_query,
                     [&](int column) { return chunk_of(shared.query, row, column); });
    }
    mbarrier_wait(shared.key_full(0, warpgroup), 0);
    if constexpr (OF_KEY) {
      of_key.apply(prologue.eps, key_index <= last_key,
                   [&](int column) { return chunk_of(shared.key[0][warpgroup], key_row, column); });
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
    constexpr int LANES = WARPGROUP_THREADS / BLOCK_N;
    const int stage = round % STAGES;
    if constexpr (PROLOGUE::template CHANGES<true>) {
      const PrologueParams& prologue = given.params;
      const int row = row_of_lanes<LANES>(fragment.thread / LANES);
      const int index = work.first_key(round, warpgroup) + row, last = params.seqlen_k - 1;
      PrologueRow<PROLOGUE, true, T, C::COLUMNS, LANES> of_key;
      of_key.fetch(prologue, PROLOGUE::template position<true>(prologue, work.batch, min(index, last)));
      mbarrier_wait(shared.key_full(stage, warpgroup), round / STAGES % 2);
      of_key.apply(prologue.eps, index <= last,
                   [&](int column) { return chunk_of(shared.key[stage][warpgroup], row, column); });
      fence_proxy_async();
      named_barrier_sync(KEYS_CHANGED + warpgroup, WARPGROUP_THREADS);
    } else {
      mbarrier_wait(shared.key_full(stage, warpgroup), round / STAGES % 2);
    }
  }
}

}  // namespace microsdpa::hopper::latency
