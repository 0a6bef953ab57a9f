// Gradients of calls that fill the chip: five products, where a kernel without sums in global memory has seven.
//
// With P = 2^(scale S - LSE) and dS = P (dP - delta), where dP = dO V^T: dV = P^T dO, dK = scale dS^T Q, dQ = scale dS
// K. A CTA owns BLOCK_N = 128 keys of a key head, and walks over the queries of all of its query heads, BLOCK_M at a
// time. Roles: one warp of the first warpgroup issues the loads, two add sums of dQ to global memory; each of the two
// other warpgroups, the consumers, has 64 keys. Pipeline:
//   1. TMA brings K and V once, and fills rings of Q with LSE and delta, and of dO
//   2. S^T = K Q^T and dP^T = V dO^T; P^T and dS^T stay in registers, as A operands of dV and dK
//   3. dS^T also goes to shared memory: each consumer makes half of the tile's dQ of both consumers' keys
//   4. dQ goes to shared memory, and is added in FP32 to global memory by bulk copies, in any order or in a fixed one
// S of the next tile is multiplied before dK of this one, so that its exponentials run beside products.
// Bound by: the tensor cores, and shared memory, which S, dP and dQ read both operands from.
#include "../../ptx/address.cuh"
#include "consumer.cuh"

namespace microsdpa::hopper::backward {

constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;

// Copies TILE_ROWS rows of one head, from `row` on. Rows past the tensor become zeros.
template <typename C, int TILE_ROWS>
__device__ __forceinline__ void load_tile(typename C::T* shared, const TensorMap& map, Mbarrier& full, int row,
                                          int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::HEAD_DIM / C::BOX; ++panel) {
    tma_load(shared + panel * TILE_ROWS * C::BOX, map, full, panel * C::BOX, row, head, batch);
  }
}

// Issues every load of the CTA. One thread.
template <typename C, bool CAUSAL>
__device__ __forceinline__ void produce(SharedStorage<C>& shared, const AttentionParams& call,
                                        const Walk<C, CAUSAL>& walk, const TensorMap& query, const TensorMap& key,
                                        const TensorMap& value, const TensorMap& grad_out) {
  constexpr int OWNED_BYTES = BLOCK_N * C::HEAD_DIM * sizeof(typename C::T);
  constexpr int WALKED_BYTES = C::BLOCK_M * C::HEAD_DIM * sizeof(typename C::T);
  constexpr int ROW_BYTES = C::BLOCK_M * sizeof(float);
  if (walk.turns == 0) return;
  mbarrier_arrive_expect(shared.owned_full, 2 * OWNED_BYTES);
  load_tile<C, BLOCK_N>(shared.key, key, shared.owned_full, walk.first_key, walk.head_kv, walk.batch);
  const Workspace<C::BLOCK_M> workspace(call);
  PipelineState<C::QUERY_STAGES> query_state;
  PipelineState<C::GRAD_STAGES> grad_state;
  Turn at(walk);
  for (int turn = 0; turn < walk.turns; ++turn) {
    const int row = at.tile * C::BLOCK_M, head = walk.batch * call.heads + at.head;
    Mbarrier& query_full = shared.query_full[query_state.stage];
    mbarrier_wait(shared.query_empty[query_state.stage], query_state.phase ^ 1);
    mbarrier_arrive_expect(query_full, WALKED_BYTES + 2 * ROW_BYTES);
    load_tile<C, C::BLOCK_M>(shared.query[query_state.stage], query, query_full, row, at.head, walk.batch);
    bulk_load(shared.lse[query_state.stage], workspace.lse(head, at.tile), ROW_BYTES, query_full);
    bulk_load(shared.delta[query_state.stage], workspace.delta(head, at.tile), ROW_BYTES, query_full);
    query_state.advance();
    if (turn == 0) {
      load_tile<C, BLOCK_N>(shared.value, value, shared.owned_full, walk.first_key, walk.head_kv, walk.batch);
    }
    Mbarrier& grad_full = shared.grad_full[grad_state.stage];
    mbarrier_wait(shared.grad_empty[grad_state.stage], grad_state.phase ^ 1);
    mbarrier_arrive_expect(grad_full, WALKED_BYTES);
    load_tile<C, C::BLOCK_M>(shared.grad_out[grad_state.stage], grad_out, grad_full, row, at.head, walk.batch);
    grad_state.advance();
    at.advance(walk);
  }
}

// Adds what a consumer leaves in shared memory to the sums of dQ: with IN_ORDER, after the tiles of keys ahead. These
// have CTAs of lower numbers, which begin earlier. One warp.
template <bool IN_ORDER, typename C, bool CAUSAL>
__device__ __forceinline__ void add_sums(SharedStorage<C>& shared, const AttentionParams& call,
                                         const Walk<C, CAUSAL>& walk, int consumer) {
  const Workspace<C::BLOCK_M> workspace(call);
  const bool elected = elect_one();
  Turn at(walk);
  for (int turn = 0; turn < walk.turns; ++turn) {
    named_barrier_sync(SUMS_FULL + consumer, SUMS_THREADS);
    if (elected) {
      float* const sum = workspace.sum(walk.batch * call.heads + at.head, at.tile) + consumer * PART;
      if constexpr (IN_ORDER) {
        const int tile = walk.first_key / BLOCK_N;
        int32* const turn_of = workspace.turn(walk.batch * call.heads + at.head, at.tile) + consumer;
        wait_for_turn(turn_of, tile);
        bulk_reduce_add(sum, shared.sums[consumer], PART * sizeof(float));
        tma_store_commit();
        tma_store_wait();
        end_turn(turn_of, tile + 1);
      } else {
        bulk_reduce_add(sum, shared.sums[consumer], PART * sizeof(float));
        tma_store_commit();
        tma_store_wait_read<0>();
      }
    }
    __syncwarp();
    if (turn + 1 < walk.turns) named_barrier_arrive(SUMS_EMPTY + consumer, SUMS_THREADS);
    at.advance(walk);
  }
}

// IN_ORDER: whether sums of dQ are added in an order that is always the same.
template <typename T, int HEAD_DIM, int BLOCK_M, int QUERY_STAGES, int GRAD_STAGES, bool DP_FIRST, bool IN_ORDER,
          bool CAUSAL>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    gradients(const __grid_constant__ BackwardParams params, const __grid_constant__ TensorMap query,
              const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
              const __grid_constant__ TensorMap grad_out, const __grid_constant__ TensorMap grad_key,
              const __grid_constant__ TensorMap grad_value) {
  using C = Tiles<T, HEAD_DIM, BLOCK_M, QUERY_STAGES, GRAD_STAGES, DP_FIRST>;
  constexpr int READERS = 4 * CONSUMERS;  // warps
  const AttentionParams& call = params.forward.call;
  auto& shared = dynamic_shared<SharedStorage<C>>();
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    mbarrier_init(shared.owned_full, 1);
#pragma unroll
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      mbarrier_init(shared.query_full[stage], 1);
      mbarrier_init(shared.query_empty[stage], READERS);
    }
#pragma unroll
    for (int stage = 0; stage < GRAD_STAGES; ++stage) {
      mbarrier_init(shared.grad_full[stage], 1);
      mbarrier_init(shared.grad_empty[stage], READERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const Walk<C, CAUSAL> walk(params);
  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_THREADS, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    // What comes before the wait overlaps with the kernel ahead; what follows reads and adds to what that one writes.
    if (warp == 0 && elect_one()) {
      prefetch_tensor_map(query);
      prefetch_tensor_map(key);
      prefetch_tensor_map(value);
      prefetch_tensor_map(grad_out);
      grid_dependency_wait();
      produce(shared, call, walk, query, key, value, grad_out);
    } else if (warp == 1 || warp == 2) {
      grid_dependency_wait();
      add_sums<IN_ORDER>(shared, call, walk, warp - 1);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer<C, CAUSAL> consumer(shared, call, walk, warpgroup - 1);
    consumer.run();
    grid_dependency_wait();
    consumer.finish(grad_key, grad_value);
  }
}

}  // namespace microsdpa::hopper::backward
