// What a consumer warpgroup of hopper/backward/kernel.cu does with its 64 keys.
#pragma once

#include "products.cuh"

namespace microsdpa::hopper::backward {

// Accumulators of transposed products: a row of S^T is a key's, a column a query's. PART_COLUMNS: of its part of dQ.
template <typename C, typename M, bool IN_ORDER, typename Drop, int PART_COLUMNS>
struct Consumer {
  using T = typename C::T;
  using Products = float[C::BLOCK_M / 2];
  using Rounded = uint32[C::BLOCK_M / 16][4];  // A operands
  using Sums = float[C::HEAD_DIM / 2];
  using Part = float[(C::TRANSPOSED ? C::BLOCK_M : PART_COLUMNS) / 2];  // of dQ
  static constexpr int BLOCK_M = C::BLOCK_M, BLOCK_N = C::BLOCK_N, HEAD_DIM = C::HEAD_DIM, COLUMNS = C::COLUMNS;
  static constexpr int EIGHT_ROWS = 8 * BOX * sizeof(T);
  // Of the large tiles some turns take more registers than there are: with WHOLE, mask tensors, or dropout under a soft
  // cap, dP is multiplied after P and not while P is made. With dropout dV is waited for ahead of dS.
  static constexpr bool LARGE = BLOCK_M == 2 * ROWS, DV_AHEAD = LARGE && Drop::ANY;
  static constexpr bool DP_BESIDE_P = !(LARGE && (C::WHOLE || M::RANGED || M::HIDES_KEYS || (M::SOFTCAP && Drop::ANY)));
  static constexpr float LN_2 = 0.693147180559945309417f;

  SharedStorage<C>& shared;
  const AttentionParams& call;
  const MaskParams& masks;
  const Walk<C, M, IN_ORDER>& walk;
  const int warpgroup;
  const int thread;     // of the warpgroup
  const int first_key;  // of the warpgroup
  Drop drop;
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Sums dk = {}, dv = {};
  Products s;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared, const MaskedParams& params,
                                      const Walk<C, M, IN_ORDER>& walk, int warpgroup, const Drop& drop)
      : shared(shared),
        call(params.call),
        masks(params.masks),
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

  // Starts dK += dS^T Q.
  __device__ __forceinline__ void accumulate_keys(const Rounded& ds, const T* query) { start_sums<C>(dk, ds, query); }

  // Starts this consumer's part of dQ = dS K: of 64 queries all columns, or of all queries those of a panel. Where
  // queries are no whole panels it is transposed, and dS^T has panels of 16 queries.
  __device__ __forceinline__ void multiply_keys(Part& dq, const T* ds) const {
    wgmma_fence_registers(dq);
    wgmma_fence();
    if constexpr (C::TRANSPOSED) {
      const T* const columns = shared.key + warpgroup * BLOCK_N * BOX;
      const uint64 a = matrix_descriptor(columns, 16, EIGHT_ROWS, Swizzle::BYTES_128);
      const uint64 b = matrix_descriptor(ds, BLOCK_N * 16 * sizeof(T), 8 * 16 * sizeof(T), Swizzle::BYTES_32);
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        wgmma<T, BLOCK_M, Major::MN, Major::MN>(dq, advance(a, 16 * BOX * k * sizeof(T)),
                                                advance(b, 16 * 16 * k * sizeof(T)), k > 0);
      }
    } else {
      const int query_panel = BLOCK_M > BOX ? warpgroup : 0, key_panel = BLOCK_M > BOX ? 0 : warpgroup;
      const uint64 a = matrix_descriptor(ds + query_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
      const uint64 b = matrix_descriptor(shared.key + key_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        wgmma<T, PART_COLUMNS, Major::MN, Major::MN>(dq, advance(a, 16 * BOX * k * sizeof(T)),
                                                     advance(b, 16 * BOX * k * sizeof(T)), k > 0);
      }
    }
    wgmma_commit();
  }

  // A turn: dK and dV of a tile of queries, and dQ of the tile before, whose dS both consumers have left by now. So
  // neither waits long for the other, and the second one, which begins later, stays half a turn behind.
  template <bool FIRST>
  __device__ __forceinline__ void step(int turn, const Turn& at) {
    const int query_stage = query_state.stage, grad_stage = grad_state.stage;
    const OfHead<M> of_head(*this, at.head);
    mbarrier_wait(shared.query_full[query_stage], query_state.phase);
    if (FIRST && warpgroup == 1) named_barrier_sync(FIRST_THERE, CONSUMERS * WARPGROUP_THREADS);
    multiply(s, shared.key, shared.query[query_stage]);
    mbarrier_wait(shared.grad_full[grad_stage], grad_state.phase);
    Products dp;
    if constexpr (DP_BESIDE_P) multiply(dp, shared.value, shared.grad_out[grad_stage]);
    wgmma_wait<DP_BESIDE_P ? 1 : 0>();
    wgmma_fence_registers(s);
    Products p;
    Rounded rounded;
    weigh<M>(*this, p, rounded, query_stage, at.tile * BLOCK_M, of_head);
    if constexpr (M::SOFTCAP) {
      if constexpr (Drop::ANY) drop.next.drop(rounded);
    } else {
      round_kept_to<T>(rounded, p, drop);
    }
    if constexpr (!DP_BESIDE_P) multiply(dp, shared.value, shared.grad_out[grad_stage]);
    if (FIRST && warpgroup == 0) named_barrier_arrive(FIRST_THERE, CONSUMERS * WARPGROUP_THREADS);
    wgmma_wait<0>();
    wgmma_fence_registers(dp);
    accumulate_values(rounded, shared.grad_out[grad_stage]);
    if constexpr (DV_AHEAD) {
      wgmma_wait<0>();
      wgmma_fence_registers(dv);
#pragma unroll
      for (int k = 0; k < BLOCK_M / 16; ++k) wgmma_fence_registers(rounded[k]);
    }
    differentiate(p, dp, shared.delta[query_stage], thread, drop);
    Rounded ds;
    round_to<T>(ds, p);
    put_scores(turn, ds);
    Part dq;
    if constexpr (!FIRST) start_queries(turn - 1, dq);
    accumulate_keys(ds, shared.query[query_stage]);
    if constexpr (!FIRST && !C::WHOLE) {
      wgmma_wait<1>();
      put(turn - 1, dq);
    }
    wgmma_wait<0>();
    wgmma_fence_registers(dv);
    wgmma_fence_registers(dk);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {  // nobody else has had them
      if constexpr (!DV_AHEAD) wgmma_fence_registers(rounded[k]);
      wgmma_fence_registers(ds[k]);
    }
    release(shared.grad_empty[grad_stage]);
    release(shared.query_empty[query_stage]);
    if constexpr (!FIRST && C::WHOLE) put(turn - 1, dq);  // it takes more registers
    if constexpr (Drop::ANY) draw_next(at);
    grad_state.advance();
    query_state.advance();
  }

  // Draws for the turn behind `at`, while little else is in registers.
  __device__ __forceinline__ void draw_next(Turn at) {
    at.advance(walk);
    drop.draw(*this, at);
  }

  // Leaves dS^T where both consumers read it.
  __device__ __forceinline__ void put_scores(int turn, const Rounded& ds) const {
    mbarrier_wait(shared.ds_empty[turn % 2], turn / 2 % 2 ^ 1);
    T* const to = shared.ds[turn % 2];
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      stmatrix(C::TRANSPOSED ? place_in_sixteens(*this, to, k) : place(*this, to, k), ds[k]);
    }
    fence_proxy_async();
    release(shared.ds_full[turn % 2]);
  }

  // Starts this consumer's part of dQ of a turn.
  __device__ __forceinline__ void start_queries(int turn, Part& dq) const {
    mbarrier_wait(shared.ds_full[turn % 2], turn / 2 % 2);
    multiply_keys(dq, shared.ds[turn % 2]);
  }
  // Leaves it, when it is there, where it is added to global memory or stored from.
  __device__ __forceinline__ void put(int turn, Part& dq) const {
    wgmma_fence_registers(dq);
    release(shared.ds_empty[turn % 2]);
    if constexpr (C::WHOLE) {
      put_queries(reinterpret_cast<T*>(shared.sums[warpgroup]), dq, call.scale_log2 * LN_2, warpgroup, thread,
                  turn == 0);
    } else {
      put_sums(shared.sums[warpgroup], dq, warpgroup, thread, turn == 0);
    }
  }

  __device__ __forceinline__ void run() {
    if (walk.turns == 0) return;
    wgmma_fence_registers(dk);
    wgmma_fence_registers(dv);
    mbarrier_wait(shared.owned_full, 0);
    Turn at(walk);
    if constexpr (Drop::ANY) drop.draw(*this, at);
    step<true>(0, at);
    for (int turn = 1; turn < walk.turns; ++turn) {
      at.advance(walk);
      step<false>(turn, at);
    }
    Part dq;
    start_queries(walk.turns - 1, dq);
    wgmma_wait<0>();
    put(walk.turns - 1, dq);
  }

  __device__ __forceinline__ void finish(const TensorMap& grad_key, const TensorMap& grad_value) const {
    float factor = 1.0f;
    if constexpr (Drop::ANY) factor = drop.scale;
    store(*this, grad_value, shared.value, dv, factor);
    // The other consumer has read K for its dQ.
    named_barrier_sync(KEYS_READ, CONSUMERS * WARPGROUP_THREADS);
    store(*this, grad_key, shared.key, dk, call.scale_log2 * LN_2);
    if (thread / 32 == 0) tma_store_wait_read<0>();
  }
};

}  // namespace microsdpa::hopper::backward
