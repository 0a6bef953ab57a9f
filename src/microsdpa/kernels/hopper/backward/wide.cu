// hopper/backward/kernel.cu for head dimensions over 128, whose dK and dV do not fit the registers of one warpgroup.
//
// A CTA owns 64 keys, and walks over 64 queries at a time. Both consumers have the same keys: one makes S^T, P^T and
// dV, the other dP^T, dS^T and dK. So each has one sum of 64 x D, and both have as many products. Pipeline:
//   1. TMA brings K and V once, and fills rings of Q with LSE and delta, and of dO
//   2. S^T = K Q^T by one consumer, dP^T = V dO^T by the other
//   3. P^T goes to the other consumer by way of shared memory, in FP32, and is the A operand of dV in registers
//   4. dS^T goes to shared memory for dQ, and is the A operand of dK in registers
//   5. dQ = dS K, 64 columns at a time by turns, is added in FP32 to global memory by bulk copies
// While one consumer makes P or dS, the other one's products run.
// Bound by: shared memory, which S, dP and dQ read both operands from, and the tensor cores.
#include "../../ptx/address.cuh"
#include "producer.cuh"
#include "wide_consumer.cuh"

namespace microsdpa::hopper::backward {

// HEAD_DIM, IN_ORDER and MASK to ALIBI: as in kernel.cu.
template <typename T, int HEAD_DIM, int QUERY_STAGES, int GRAD_STAGES, bool IN_ORDER, typename MASK, bool LEFT,
          bool RIGHT, bool SOFTCAP, bool ALIBI, typename DROPOUT = NoDropout>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    gradients_wide(const __grid_constant__ typename DROPOUT::template Params<BackwardParams> given,
                   const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                   const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap grad_out,
                   const __grid_constant__ TensorMap grad_key, const __grid_constant__ TensorMap grad_value) {
  using C = WideTiles<T, HEAD_DIM, QUERY_STAGES, GRAD_STAGES, is_range<MASK>>;
  using M = Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>;
  using Drop = typename DropIf<DROPOUT::ANY, C::BLOCK_M / 2, true>::Type;
  const BackwardParams& params = DROPOUT::call(given);
  const AttentionParams& call = params.forward.call;
  auto& shared = dynamic_shared<WideStorage<C>>();
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
      add_sums(shared, params.forward, walk, warp - 1);
    }
  } else if (warpgroup == 1) {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if constexpr (Drop::ANY || M::ALIBI || M::HIDES_KEYS) grid_dependency_wait();  // lanes read what was made ahead
    ValueConsumer<C, M, IN_ORDER, Drop> consumer(shared, params.forward, walk, 0, Drop(given));
    consumer.run();
    grid_dependency_wait();
    consumer.finish(grad_value);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if constexpr (Drop::ANY || M::ALIBI || M::HIDES_KEYS) grid_dependency_wait();  // lanes read what was made ahead
    KeyConsumer<C, M, IN_ORDER, Drop> consumer(shared, params.forward, walk, 1, Drop(given));
    consumer.run();
    grid_dependency_wait();
    consumer.finish(grad_key);
  }
}

}  // namespace microsdpa::hopper::backward
