// What the consumer warpgroups of hopper/backward/wide.cu do with the CTA's 64 keys.
#pragma once

#include "products.cuh"

namespace microsdpa::hopper::backward {

// What both have.
template <typename C, typename M, bool IN_ORDER, typename Drop>
struct WideConsumer {
  using T = typename C::T;
  using Products = float[C::BLOCK_M / 2];
  using Rounded = uint32[C::BLOCK_M / 16][4];  // A operands
  using Sums = float[C::HEAD_DIM / 2];
  using Part = float[C::PART / WARPGROUP_THREADS];  // of dQ
  static constexpr int BLOCK_M = C::BLOCK_M, BLOCK_N = C::BLOCK_N, HEAD_DIM = C::HEAD_DIM, COLUMNS = C::COLUMNS;
  static constexpr int EIGHT_ROWS = 8 * BOX * sizeof(T);
  static constexpr int BOTH = CONSUMERS * WARPGROUP_THREADS;

  WideStorage<C>& shared;
  const AttentionParams& call;
  const MaskParams& masks;
  const Walk<C, M, IN_ORDER>& walk;
  const int warpgroup;
  const int thread;     // of the warpgroup
  const int first_key;  // of the CTA
  Drop drop;
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Sums sums = {};

  __device__ __forceinline__ WideConsumer(WideStorage<C>& shared, const MaskedParams& params,
                                          const Walk<C, M, IN_ORDER>& walk, int warpgroup, const Drop& drop)
      : shared(shared),
        call(params.call),
        masks(params.masks),
        walk(walk),
        warpgroup(warpgroup),
        thread(static_cast<int>(threadIdx.x % WARPGROUP_THREADS)),
        first_key(walk.first_key),
        drop(drop) {}

  __device__ __forceinline__ static int rows() { return 0; }

  // Starts d = X Y^T of an owned tile and one that is walked over.
  __device__ __forceinline__ static void multiply(Products& d, const T* owned, const T* walked) {
    start_product<C>(d, owned, walked);
  }

  // Starts dV += P^T dO, or dK += dS^T Q.
  __device__ __forceinline__ void accumulate(const Rounded& factors, const T* walked) {
    start_sums<C>(sums, factors, walked);
  }

  // Starts 64 columns of dQ = dS K.
  __device__ __forceinline__ void multiply_keys(Part& dq, int part) const {
    const uint64 a = matrix_descriptor(shared.ds, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    const uint64 b = matrix_descriptor(shared.key + part * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      wgmma<T, 64, Major::MN, Major::MN>(dq, advance(a, 16 * BOX * k * sizeof(T)), advance(b, 16 * BOX * k * sizeof(T)),
                                         k > 0);
    }
    wgmma_commit();
  }

  // The sums of a warpgroup's accumulators are those of products that other instructions do not write to.
  __device__ __forceinline__ static void take(Products& to, Products& from) {
    wgmma_fence_registers(from);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i) to[i] = from[i];
  }
};

// The first consumer: S, P, dV, and the even parts of dQ.
template <typename C, typename M, bool IN_ORDER, typename Drop>
struct ValueConsumer : WideConsumer<C, M, IN_ORDER, Drop> {
  using Base = WideConsumer<C, M, IN_ORDER, Drop>;
  using Base::Base, Base::call, Base::drop, Base::grad_state, Base::query_state, Base::shared, Base::sums, Base::thread;
  using Base::walk;
  using typename Base::Part, typename Base::Products, typename Base::Rounded;
  static constexpr int BLOCK_M = C::BLOCK_M;
  Products s;

  __device__ __forceinline__ void score(Products& next) const {
    mbarrier_wait(shared.query_full[query_state.stage], query_state.phase);
    this->multiply(next, shared.key, shared.query[query_state.stage]);
  }

  // A turn, of which S is there.
  template <bool LAST>
  __device__ __forceinline__ void step(int turn, const Turn& at) {
    const int query_stage = query_state.stage, grad_stage = grad_state.stage;
    const OfHead<M> of_head(*this, at.head);
    Products p;
    Rounded rounded;
    weigh<M>(*this, p, rounded, query_stage, at.tile * BLOCK_M, of_head);
    if constexpr (Drop::ANY) drop.next.mark(p);
    release(shared.query_empty[query_stage]);
    auto* to = reinterpret_cast<float4*>(shared.p) + thread;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; ++i) {
      to[i * WARPGROUP_THREADS] = make_float4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
    }
    named_barrier_arrive(P_THERE, Base::BOTH);
    if constexpr (M::SOFTCAP) {
      if constexpr (Drop::ANY) drop.next.drop(rounded);
    } else {
      round_kept_to<typename C::T>(rounded, p, drop);
    }
    mbarrier_wait(shared.grad_full[grad_stage], grad_state.phase);
    this->accumulate(rounded, shared.grad_out[grad_stage]);
    query_state.advance();
    Products next;
    if constexpr (!LAST) score(next);
    wgmma_wait<LAST ? 0 : 1>();
    wgmma_fence_registers(sums);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) wgmma_fence_registers(rounded[k]);  // nobody else has had them
    release(shared.grad_empty[grad_stage]);
    grad_state.advance();
    named_barrier_sync(SCORES_THERE, Base::BOTH);
#pragma unroll
    for (int part = 0; part < C::PARTS; part += CONSUMERS) {
      Part dq;
      this->multiply_keys(dq, part);
      wgmma_wait<0>();
      wgmma_fence_registers(dq);
      put_sums(shared.sums[0], dq, 0, thread, part == 0 && turn == 0);
    }
    if constexpr (!LAST) {
      this->take(s, next);
      if constexpr (Drop::ANY) draw_next(at);
    }
  }

  // Draws for the turn behind `at`.
  __device__ __forceinline__ void draw_next(Turn at) {
    at.advance(walk);
    drop.draw(*this, at);
  }

  __device__ __forceinline__ void run() {
    if (walk.turns == 0) return;
    wgmma_fence_registers(sums);
    mbarrier_wait(shared.owned_full, 0);
    {
      Products next;
      score(next);
      if constexpr (Drop::ANY) drop.draw(*this, Turn(walk));
      wgmma_wait<0>();
      this->take(s, next);
    }
    Turn at(walk);
    for (int turn = 0; turn + 1 < walk.turns; ++turn) {
      step<false>(turn, at);
      at.advance(walk);
    }
    step<true>(walk.turns - 1, at);
  }

  // The other consumer has read V for its dP.
  __device__ __forceinline__ void finish(const TensorMap& grad_value) const {
    named_barrier_arrive(KEYS_READ, Base::BOTH);
    float factor = 1.0f;
    if constexpr (Drop::ANY) factor = drop.scale;
    store(*this, grad_value, shared.value, sums, factor);
    if (thread / 32 == 0) tma_store_wait_read<0>();
  }
};

// The second consumer: dP, dS, dK, and the odd parts of dQ.
template <typename C, typename M, bool IN_ORDER, typename Drop>
struct KeyConsumer : WideConsumer<C, M, IN_ORDER, Drop> {
  using Base = WideConsumer<C, M, IN_ORDER, Drop>;
  using Base::Base, Base::call, Base::drop, Base::grad_state, Base::query_state, Base::shared, Base::sums, Base::thread;
  using Base::walk;
  using typename Base::Part, typename Base::Products, typename Base::Rounded;
  static constexpr int BLOCK_M = C::BLOCK_M;
  Products dp;

  __device__ __forceinline__ void differentiate_output(Products& next) const {
    mbarrier_wait(shared.grad_full[grad_state.stage], grad_state.phase);
    this->multiply(next, shared.value, shared.grad_out[grad_state.stage]);
  }

  // A turn, of which dP is there.
  template <bool LAST>
  __device__ __forceinline__ void step(int turn) {
    const int query_stage = query_state.stage;
    release(shared.grad_empty[grad_state.stage]);
    grad_state.advance();
    mbarrier_wait(shared.query_full[query_stage], query_state.phase);
    named_barrier_sync(P_THERE, Base::BOTH);
    Products p;
    const auto* from = reinterpret_cast<const float4*>(shared.p) + thread;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; ++i) {
      const float4 four = from[i * WARPGROUP_THREADS];
      p[4 * i] = four.x, p[4 * i + 1] = four.y, p[4 * i + 2] = four.z, p[4 * i + 3] = four.w;
    }
    differentiate(p, dp, shared.delta[query_stage], thread, drop);
    Rounded words;
    round_to<typename C::T>(words, p);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) stmatrix(place(*this, shared.ds, k), words[k]);
    fence_proxy_async();
    named_barrier_arrive(SCORES_THERE, Base::BOTH);
    named_barrier_sync(CONSUMER + 1, WARPGROUP_THREADS);
    this->accumulate(words, shared.query[query_stage]);
    Part dq;
    this->multiply_keys(dq, 1);
    wgmma_wait<0>();
    wgmma_fence_registers(sums);
    wgmma_fence_registers(dq);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) wgmma_fence_registers(words[k]);  // nobody else has had them
    release(shared.query_empty[query_stage]);
    query_state.advance();
    Products next;
    if constexpr (!LAST) differentiate_output(next);  // not earlier, or the registers would not do
    put_sums(shared.sums[1], dq, 1, thread, turn == 0);
#pragma unroll
    for (int part = 1 + CONSUMERS; part < C::PARTS; part += CONSUMERS) {
      Part more;
      this->multiply_keys(more, part);
      wgmma_wait<0>();
      wgmma_fence_registers(more);
      put_sums(shared.sums[1], more, 1, thread, false);
    }
    if constexpr (!LAST) {
      wgmma_wait<0>();
      this->take(dp, next);
    }
  }

  __device__ __forceinline__ void run() {
    if (walk.turns == 0) return;
    wgmma_fence_registers(sums);
    mbarrier_wait(shared.owned_full, 0);
    {
      Products next;
      differentiate_output(next);
      wgmma_wait<0>();
      this->take(dp, next);
    }
    for (int turn = 0; turn + 1 < walk.turns; ++turn) step<false>(turn);
    step<true>(walk.turns - 1);
  }

  __device__ __forceinline__ void finish(const TensorMap& grad_key) const {
    constexpr float LN_2 = 0.693147180559945309417f;
    named_barrier_sync(KEYS_READ, Base::BOTH);  // the other consumer has read K for its dQ
    store(*this, grad_key, shared.key, sums, call.scale_log2 * LN_2);
    if (thread / 32 == 0) tma_store_wait_read<0>();
  }
};

}  // namespace microsdpa::hopper::backward
