// What a consumer warpgroup of hopper/backward/kernel.cu does with its 64 keys.
#pragma once

#include "products.cuh"

namespace microsdpa::hopper::backward {

// Accumulators of transposed products: a row of S^T is a key's, a column a query's. PART_COLUMNS: of its part of dQ.
template <typename C, bool CAUSAL, bool IN_ORDER, typename Drop, int PART_COLUMNS>
struct Consumer {
  using T = typename C::T;
  using Products = float[C::BLOCK_M / 2];
  using Rounded = uint32[C::BLOCK_M / 16][4];  // A operands
  using Sums = float[C::HEAD_DIM / 2];
  using Part = float[PART_COLUMNS / 2];  // of dQ
  static constexpr int BLOCK_M = C::BLOCK_M, BLOCK_N = C::BLOCK_N, HEAD_DIM = C::HEAD_DIM, COLUMNS = C::COLUMNS;
  static constexpr int EIGHT_ROWS = 8 * BOX * sizeof(T);
  static constexpr float LN_2 = 0.693147180559945309417f;

  SharedStorage<C>& shared;
  const AttentionParams& call;
  const Walk<C, CAUSAL, IN_ORDER>& walk;
  const int warpgroup;
  const int thread;     // of the warpgroup
  const int first_key;  // of the warpgroup
  Drop drop;
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Sums dk = {}, dv = {};
  Products s;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared, const AttentionParams& call,
                                      const Walk<C, CAUSAL, IN_ORDER>& walk, int warpgroup, const Drop& drop)
      : shared(shared),
        call(call),
        walk(walk),
        warpgroup(warpgroup),
        thread(static_cast<int>(threadIdx.x % WARPGROUP_THREADS)),
        first_key(walk.first_key + ROWS * warpgroup),
        drop(drop) {}

  __device__ __forceinline__ int rows() const { return warpgroup; }  // of the CTA's keys, 64 at a time

  // Starts d = X Y^T, of the warpgroup's rows of an owned tile and all of a tile that is walked over.
  __device__ __forceinline__ void multiply(Products& d, const T* owned, const T* walked) const {
    start_product<C>(d, owned + warpgroup * ROWS * BOX, walked);
  }

  // Starts dV += P^T dO.
  __device__ __forceinline__ void accumulate_values(const Rounded& p, const T* grad_out) {
    start_sums<C>(dv, p, grad_out);
  }

  // Starts dK += dS^T Q. Of dS^T it reads the warpgroup's rows in shared memory: there are no registers to keep them in
  // until a turn later.
  __device__ __forceinline__ void accumulate_keys(const T* ds, const T* query) {
    const uint64 a = matrix_descriptor(ds + warpgroup * ROWS * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    const uint64 b = matrix_descriptor(query, BLOCK_M * BOX * sizeof(T), EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(dk);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      const int panel = k * 16 / BOX, at = k * 16 % BOX;
      wgmma<T, HEAD_DIM, Major::K, Major::MN>(dk, advance(a, (panel * BLOCK_N * BOX + at) * sizeof(T)),
                                              advance(b, 16 * BOX * k * sizeof(T)));
    }
    wgmma_commit();
  }

  // Starts this warpgroup's part of dQ = dS K: of 64 queries all columns, or of all queries those of a panel.
  __device__ __forceinline__ void multiply_keys(Part& dq, const T* ds) const {
    const int query_panel = BLOCK_M > BOX ? warpgroup : 0, key_panel = BLOCK_M > BOX ? 0 : warpgroup;
    const uint64 a = matrix_descriptor(ds + query_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    const uint64 b = matrix_descriptor(shared.key + key_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      wgmma<T, PART_COLUMNS, Major::MN, Major::MN>(dq, advance(a, 16 * BOX * k * sizeof(T)),
                                                   advance(b, 16 * BOX * k * sizeof(T)), k > 0);
    }
    wgmma_commit();
  }

  // Starts S^T of the next tile of queries.
  __device__ __forceinline__ void score(Products& next) const {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    multiply(next, shared.key, shared.query[query_state.stage]);
  }
  // Takes it when it is there. Between the two the registers of the S before are free.
  __device__ __forceinline__ void take(Products& next) {
    wgmma_fence_registers(next);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i) s[i] = next[i];
  }

  // A turn, of which S is there; dK of the turn before is on its way.
  template <bool LAST>
  __device__ __forceinline__ void step(int turn, const Turn& at) {
    const int query_stage = query_state.stage, grad_stage = grad_state.stage;
    const int before = query_stage == 0 ? C::QUERY_STAGES - 1 : query_stage - 1;
    T* const ds = shared.ds[turn % 2];
    mbarrier_wait(shared.grad_full[grad_stage], grad_state.phase);
    Products dp;
    if constexpr (C::DP_FIRST) multiply(dp, shared.value, shared.grad_out[grad_stage]);
    Products p;
    weigh<CAUSAL>(*this, p, query_stage, at.tile * BLOCK_M);
    Rounded rounded;
    round_kept_to<T>(rounded, p, drop);
    if constexpr (!C::DP_FIRST) multiply(dp, shared.value, shared.grad_out[grad_stage]);
    accumulate_values(rounded, shared.grad_out[grad_stage]);
    wgmma_wait<1>();
    wgmma_fence_registers(dp);
    wgmma_fence_registers(dk);
    if (turn > 0) release(shared.query_empty[before]);
    differentiate(p, dp, shared.delta[query_stage], thread, drop);
    Rounded words;
    round_to<T>(words, p);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) stmatrix(place(*this, ds, k), words[k]);
    fence_proxy_async();
    named_barrier_sync(SCORES_THERE, CONSUMERS * WARPGROUP_THREADS);
    Part dq;
    multiply_keys(dq, ds);
    query_state.advance();
    Products next;
    if constexpr (!LAST) score(next);
    accumulate_keys(ds, shared.query[query_stage]);
    wgmma_wait<LAST ? 1 : 2>();
    wgmma_fence_registers(dv);
    wgmma_fence_registers(dq);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) wgmma_fence_registers(rounded[k]);  // nobody else has had them
    release(shared.grad_empty[grad_stage]);
    grad_state.advance();
    if constexpr (C::WHOLE) {
      put_queries(reinterpret_cast<T*>(shared.sums[warpgroup]), dq, call.scale_log2 * LN_2, warpgroup, thread,
                  turn == 0);
    } else {
      put_sums(shared.sums[warpgroup], dq, warpgroup, thread, turn == 0);
    }
    if constexpr (!LAST) {
      if constexpr (Drop::ANY) draw_next(at);
      wgmma_wait<1>();
      take(next);
    }
  }

  // Draws for the turn behind `at`, while its S is multiplied.
  __device__ __forceinline__ void draw_next(Turn at) {
    at.advance(walk);
    drop.draw(*this, at);
  }

  __device__ __forceinline__ void run() {
    if (walk.turns == 0) return;
    wgmma_fence_registers(dk);
    wgmma_fence_registers(dv);
    mbarrier_wait(shared.owned_full, 0);
    {
      Products next;
      score(next);
      if constexpr (Drop::ANY) drop.draw(*this, Turn(walk));
      wgmma_wait<0>();
      take(next);
    }
    Turn at(walk);
    for (int turn = 0; turn + 1 < walk.turns; ++turn) {
      step<false>(turn, at);
      at.advance(walk);
    }
    step<true>(walk.turns - 1, at);
    wgmma_wait<0>();
    wgmma_fence_registers(dk);
  }

  __device__ __forceinline__ void finish(const TensorMap& grad_key, const TensorMap& grad_value) const {
    float factor = 1.0f;
    if constexpr (Drop::ANY) factor = drop.scale;
    store(*this, grad_value, shared.value, dv, factor);
    // The other warpgroup has read K for its dQ.
    named_barrier_sync(SCORES_THERE, CONSUMERS * WARPGROUP_THREADS);
    store(*this, grad_key, shared.key, dk, call.scale_log2 * LN_2);
    if (thread / 32 == 0) tma_store_wait_read<0>();
  }
};

}  // namespace microsdpa::hopper::backward
