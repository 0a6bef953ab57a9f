// Gradients of calls that fill the chip: five products, where a kernel without sums in global memory has seven.
//
// With P = 2^(scale S - LSE) and dS = P (dP - delta), where dP = dO V^T: dV = P^T dO, dK = scale dS^T Q, dQ = scale dS
// K. A CTA owns BLOCK_N = 128 keys of a key head, and walks over the tiles of BLOCK_M queries, of all of its query
// heads, that see some of these. Roles: one warp of the first warpgroup issues the loads, two add sums of dQ to global
// memory; each of the two other warpgroups, the consumers, has 64 keys. Pipeline:
//   1. TMA brings K and V once, and fills rings of Q with LSE and delta, and of dO
//   2. S^T = K Q^T and dP^T = V dO^T; P^T and dS^T stay in registers, as A operands of dV and dK
//   3. dS^T also goes to shared memory: a turn later each consumer makes a part of the tile's dQ, of all keys
//   4. dQ goes to shared memory, and is added in FP32 to global memory by bulk copies, in any order or in a fixed one
// The second consumer begins when the first one has P of its first tile. The two then stay half a turn apart: products
// of one run beside exponentials of the other.
// Bound by: shared memory, which S, dP and dQ read both operands from, and power.
#include "../../ptx/address.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace microsdpa::hopper::backward {

// What a consumer does, whose part of dQ has PART_COLUMNS.
template <int PART_COLUMNS, typename C, typename M, bool IN_ORDER, typename Drop>
__device__ __forceinline__ void consume(SharedStorage<C>& shared, const MaskedParams& params,
                                        const Walk<C, M, IN_ORDER>& walk, int warpgroup, const Drop& drop,
                                        const TensorMap& grad_key, const TensorMap& grad_value) {
  Consumer<C, M, IN_ORDER, Drop, PART_COLUMNS> consumer(shared, params, walk, warpgroup, drop);
  consumer.run();
  grid_dependency_wait();
  consumer.finish(grad_key, grad_value);
}

// HEAD_DIM: that of the call, filled up with zeros to a width of wgmma. IN_ORDER: whether sums of dQ are added in an
// order that is always the same. MASK to ALIBI: as of Scoring. MAPS: that of dQ, where one CTA has all keys of a head,
// and dQ is no sum.
template <typename T, int HEAD_DIM, int BLOCK_M, int QUERY_STAGES, int GRAD_STAGES, bool IN_ORDER, typename MASK,
          bool LEFT, bool RIGHT, bool SOFTCAP, bool ALIBI, typename DROPOUT = NoDropout, typename... MAPS>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    gradients(const __grid_constant__ typename DROPOUT::template Params<BackwardParams> given,
              const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap grad_out,
              const __grid_constant__ TensorMap grad_key, const __grid_constant__ TensorMap grad_value,
              const __grid_constant__ MAPS... maps) {
  using C = Tiles<T, HEAD_DIM, BLOCK_M, QUERY_STAGES, GRAD_STAGES, (sizeof...(MAPS) > 0), is_range<MASK>>;
  using M = Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>;
  using Drop = typename DropIf<DROPOUT::ANY, C::BLOCK_M / 2>::Type;
  const BackwardParams& params = DROPOUT::call(given);
  const AttentionParams& call = params.forward.call;
  auto& shared = dynamic_shared<SharedStorage<C>>();
  grid_dependency_launch();
  init_barriers<C>(shared);
  __syncthreads();

  Walk<C, M, IN_ORDER> walk(params);
  if constexpr (M::HIDES_KEYS || M::RANGED) {
    grid_dependency_wait();
    walk.narrow(params.forward);
  }
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
      if constexpr (C::WHOLE) {
        store_queries(shared, walk, warp - 1, maps...);
      } else {
        add_sums(shared, params.forward, walk, warp - 1);
      }
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if constexpr (Drop::ANY || M::ALIBI || M::HIDES_KEYS) grid_dependency_wait();  // lanes read what was made ahead
    constexpr int FIRST = C::part_columns(0), SECOND = C::part_columns(1);
    if constexpr (FIRST == SECOND) {
      consume<FIRST>(shared, params.forward, walk, warpgroup - 1, Drop(given), grad_key, grad_value);
    } else if (warpgroup == 1) {
      consume<FIRST>(shared, params.forward, walk, 0, Drop(given), grad_key, grad_value);
    } else {
      consume<SECOND>(shared, params.forward, walk, 1, Drop(given), grad_key, grad_value);
    }
  }
}

}  // namespace microsdpa::hopper::backward
