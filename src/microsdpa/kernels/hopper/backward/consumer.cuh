// What a consumer warpgroup of hopper/backward/kernel.cu does with its 64 keys.
#pragma once

#include "../../common/mma_tile.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

// Accumulators of transposed products: a row of S^T is a key's, a column a query's.
template <typename C, bool CAUSAL>
struct Consumer {
  using T = typename C::T;
  using Products = float[C::BLOCK_M / 2];
  using Rounded = uint32[C::BLOCK_M / 16][4];  // A operands
  using Sums = float[C::HEAD_DIM / 2];
  static constexpr int BOX = C::BOX, BLOCK_M = C::BLOCK_M, HEAD_DIM = C::HEAD_DIM;
  static constexpr int EIGHT_ROWS = 8 * BOX * sizeof(T);

  SharedStorage<C>& shared;
  const AttentionParams& call;
  const Walk<C, CAUSAL>& walk;
  const int warpgroup;
  const int thread;     // of the warpgroup
  const int first_key;  // of the warpgroup
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Sums dk = {}, dv = {};
  Products s;

  __device__ __forceinline__ Consumer(SharedStorage<C>& shared, const AttentionParams& call,
                                      const Walk<C, CAUSAL>& walk, int warpgroup)
      : shared(shared),
        call(call),
        walk(walk),
        warpgroup(warpgroup),
        thread(static_cast<int>(threadIdx.x % WARPGROUP_THREADS)),
        first_key(walk.first_key + ROWS * warpgroup) {}

  __device__ __forceinline__ int key_row(int half) const { return thread / 32 * 16 + 8 * half + thread % 32 / 4; }
  // The first of the two columns of eight that this thread has.
  __device__ __forceinline__ int column() const { return thread % 4 * 2; }

  // This warp is done with a tile in shared memory.
  __device__ __forceinline__ static void release(Mbarrier& done) {
    __syncwarp();
    if (elect_one()) mbarrier_arrive(done);
  }

  // Starts d = X Y^T, of the warpgroup's rows of an owned tile and all of a tile that is walked over.
  __device__ __forceinline__ void multiply(Products& d, const T* owned, const T* walked) const {
    const uint64 a = matrix_descriptor(owned + warpgroup * ROWS * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    const uint64 b = matrix_descriptor(walked, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      const int panel = k * 16 / BOX, at = k * 16 % BOX;
      wgmma<T, BLOCK_M>(d, advance(a, (panel * BLOCK_N * BOX + at) * sizeof(T)),
                        advance(b, (panel * BLOCK_M * BOX + at) * sizeof(T)), k > 0);
    }
    wgmma_commit();
  }

  // Starts dV += P^T dO.
  __device__ __forceinline__ void accumulate_values(const Rounded& p, const T* grad_out) {
    const uint64 b = matrix_descriptor(grad_out, BLOCK_M * BOX * sizeof(T), EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(dv);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      wgmma<T, HEAD_DIM, Major::MN>(dv, p[k], advance(b, 16 * BOX * k * sizeof(T)));
    }
    wgmma_commit();
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

  // Starts this warpgroup's part of dQ = dS K: of 64 queries all columns, or of all queries 64 columns.
  __device__ __forceinline__ void multiply_keys(float (&dq)[PART / WARPGROUP_THREADS], const T* ds) const {
    const int query_panel = BLOCK_M > BOX ? warpgroup : 0, key_panel = BLOCK_M > BOX ? 0 : warpgroup;
    const uint64 a = matrix_descriptor(ds + query_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    const uint64 b = matrix_descriptor(shared.key + key_panel * BLOCK_N * BOX, 16, EIGHT_ROWS, Swizzle::BYTES_128);
    wgmma_fence_registers(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      wgmma<T, 64, Major::MN, Major::MN>(dq, advance(a, 16 * BOX * k * sizeof(T)), advance(b, 16 * BOX * k * sizeof(T)),
                                         k > 0);
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

  // Makes P of S. Accumulators keep what wgmma left in them: ptxas takes one that others write to for in use.
  __device__ __forceinline__ void weigh(Products& p, int stage, int first_query) const {
    const float scale = call.scale_log2;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][8 * n + column()]);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[4 * n + e] = ex2_approx(fmaf(s[4 * n + e], scale, e % 2 ? -lse.y : -lse.x));
    }
    const int last_key = first_key + ROWS - 1;
    if (last_key < call.seqlen_k && !(CAUSAL && last_key > first_query + call.diagonal)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + key_row(half);
      // The first column that sees the key.
      int first = CAUSAL ? key - call.diagonal - first_query : 0;
      if (key >= call.seqlen_k) first = BLOCK_M;
      first -= column();
#pragma unroll
      for (int i = 0; i < BLOCK_M / 4; ++i) {
        if (i / 2 * 8 + i % 2 < first) p[i / 2 * 4 + 2 * half + i % 2] = 0.0f;
      }
    }
  }

  // Makes dS of P and dP, in the place of P.
  __device__ __forceinline__ void differentiate(Products& p, const Products& dp, int stage) const {
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[stage][8 * n + column()]);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[4 * n + e] *= dp[4 * n + e] - (e % 2 ? delta.y : delta.x);
    }
  }

  __device__ __forceinline__ static void round(Rounded& to, const Products& from) {
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[k][i] = pack<T>(from[8 * k + 2 * i], from[8 * k + 2 * i + 1]);
    }
  }

  // Where 16 bytes of one of the warpgroup's rows lie in a tile of BLOCK_N rows.
  __device__ __forceinline__ T* place(T* tile, int block) const {
    const int lane = thread % 32, row = warpgroup * ROWS + thread / 32 * 16 + lane % 16;
    const int chunk = (2 * block % 8 + lane / 16) ^ row % 8;
    return tile + 16 * block / BOX * BLOCK_N * BOX + row * BOX + 8 * chunk;
  }

  // Leaves this warpgroup's part of dQ where it is added to global memory.
  __device__ __forceinline__ void put(const float (&dq)[PART / WARPGROUP_THREADS], bool first) const {
    if (!first) named_barrier_sync(SUMS_EMPTY + warpgroup, SUMS_THREADS);
    auto* to = reinterpret_cast<float4*>(shared.sums[warpgroup]) + thread;
#pragma unroll
    for (int i = 0; i < PART / WARPGROUP_THREADS / 4; ++i) {
      to[i * WARPGROUP_THREADS] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_proxy_async();
    named_barrier_arrive(SUMS_FULL + warpgroup, SUMS_THREADS);
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
    weigh(p, query_stage, at.tile * BLOCK_M);
    Rounded rounded;
    round(rounded, p);
    if constexpr (!C::DP_FIRST) multiply(dp, shared.value, shared.grad_out[grad_stage]);
    accumulate_values(rounded, shared.grad_out[grad_stage]);
    wgmma_wait<1>();
    wgmma_fence_registers(dp);
    wgmma_fence_registers(dk);
    if (turn > 0) release(shared.query_empty[before]);
    differentiate(p, dp, query_stage);
    Rounded words;
    round(words, p);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) stmatrix(place(ds, k), words[k]);
    fence_proxy_async();
    named_barrier_sync(SCORES_THERE, CONSUMERS * WARPGROUP_THREADS);
    float dq[PART / WARPGROUP_THREADS];
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
    put(dq, turn == 0);
    if constexpr (!LAST) {
      wgmma_wait<1>();
      take(next);
    }
  }

  __device__ __forceinline__ void run() {
    if (walk.turns == 0) return;
    wgmma_fence_registers(dk);
    wgmma_fence_registers(dv);
    mbarrier_wait(shared.owned_full, 0);
    {
      Products next;
      score(next);
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

  // Writes the warpgroup's rows of a sum, which lie in a tile that nobody reads any more.
  __device__ __forceinline__ void store(const TensorMap& map, T* tile, const Sums& sums, float factor) const {
#pragma unroll
    for (int block = 0; block < HEAD_DIM / 16; ++block) {
      uint32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = pack<T>(sums[8 * block + 2 * i] * factor, sums[8 * block + 2 * i + 1] * factor);
      }
      stmatrix(place(tile, block), word);
    }
    fence_proxy_async();
    named_barrier_sync(CONSUMER + warpgroup, WARPGROUP_THREADS);
    if (thread / 32 == 0 && elect_one()) {
#pragma unroll
      for (int panel = 0; panel < HEAD_DIM / BOX; ++panel) {
        tma_store(map, tile + (panel * BLOCK_N + warpgroup * ROWS) * BOX, panel * BOX, first_key, walk.head_kv,
                  walk.batch);
      }
      tma_store_commit();
    }
  }

  __device__ __forceinline__ void finish(const TensorMap& grad_key, const TensorMap& grad_value) const {
    constexpr float LN_2 = 0.693147180559945309417f;
    store(grad_value, shared.value, dv, 1.0f);
    // The other warpgroup has read K for its dQ.
    named_barrier_sync(SCORES_THERE, CONSUMERS * WARPGROUP_THREADS);
    store(grad_key, shared.key, dk, call.scale_log2 * LN_2);
    if (thread / 32 == 0) tma_store_wait_read<0>();
  }
};

}  // namespace microsdpa::hopper::backward
