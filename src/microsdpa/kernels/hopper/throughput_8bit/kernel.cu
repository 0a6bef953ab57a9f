// All operands in 8 bits, for calls that fill the chip: both products on wgmma.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for tiles of BLOCK_M = 64 CONSUMERS queries of one
// head. Q and K are quantized to E4M3 or INT8, V and P to E4M3. An E4M3 query may have a residual term (TERMS 2), for
// the rounding error of the first.
// One CTA per SM stays and takes one tile after the other. Roles: in the first warpgroup one thread issues all copies,
// two or three warps transpose V, one fetches the scales of keys; each other warpgroup, a consumer, computes 64 rows.
// Pipeline: 1. TMA fills rings of Q, K and V tiles, across query tiles   2. V becomes V^T, its keys in the order in
//           which probabilities lie in registers   3. a consumer starts S of the next tile and P V of this one
//           4. while others multiply it turns scores into probabilities, rounded to E4M3
// E4M3 products keep about 14 bits of their sums. Two consumers have registers to sum P V of each tile by itself and
// add it to O in FP32 among the exponentials; with three or four, or with 256 channels, the tensor cores add to O
// (IN_PLACE), and what those have summed over PROMOTED_TILES tiles is moved away. Bound by: latency: a tile of 192 x 96
// at D = 128 took 2,250 cycles with two tiles of K and V^T, of which the tensor cores and the unit of exponentials need
// 1,152 each; four tiles made it 3 to 6% faster. docs/hopper-8bit.md has the measurements.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "../common/key_scales.cuh"
#include "consumer.cuh"
#include "producer.cuh"
#include "promoting.cuh"
#include "shared.cuh"
#include "wide_consumer.cuh"

namespace microsdpa::hopper::throughput_8bit {

// STAGES: tiles of K and of V^T that there is room for; VALUE_STAGES: of V, waiting to be transposed. KEY_SCALES:
// whether the keys of a head have different scales. IN_PLACE: whether the tensor cores add P V to O. CAUSAL: what a row
// sees has a right end. MASKS: what else decides about scores.
template <typename T, typename FORMAT, int HEAD_DIM, int TERMS, int BLOCK_N, int CONSUMERS, int STAGES,
          int VALUE_STAGES, int QUERY_STAGES, bool KEY_SCALES, bool IN_PLACE, int PROMOTED_TILES, bool CAUSAL,
          typename MASKS = NoMasks>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, 1)
    attention(const __grid_constant__ typename EightBitParamsOf<MASKS>::Type given,
              const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value) {
  using Shared = SharedStorage<FORMAT, HEAD_DIM, TERMS, BLOCK_N, CONSUMERS, STAGES, VALUE_STAGES, QUERY_STAGES,
                               KEY_SCALES, PROMOTED_TILES>;
  // Registers of a thread. What consumers claim, the others must have released of what the CTA was launched with: the
  // most that all its threads can have, in eights.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 4    ? 112
                                     : CONSUMERS == 3  ? 160
                                     : HEAD_DIM == 64  ? 216
                                     : HEAD_DIM == 128 ? 232
                                     : IN_PLACE        ? 224
                                                       : 240;
  constexpr int PRODUCER_REGISTERS = CONSUMERS > 2     ? 32
                                     : HEAD_DIM == 64  ? 72
                                     : HEAD_DIM == 128 ? 40
                                     : IN_PLACE        ? 56
                                                       : 24;
  constexpr int LAUNCHED = 65536 / ((1 + CONSUMERS) * WARPGROUP_THREADS) / 8 * 8;
  static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (1 + CONSUMERS) * LAUNCHED,
                "consumers would wait for registers for ever");
  constexpr int AT_A_TIME = PRODUCER_REGISTERS < 32   ? 1
                            : PRODUCER_REGISTERS < 40 ? 2
                                                      : 4;  // loads of a transposing warp

  static_assert(IN_PLACE || !MASKS::ANY, "masks are known where the tensor cores add to O");
  const EightBitParams& params = EightBitParamsOf<MASKS>::call(given);
  const typename TilesOf<MASKS, BLOCK_N>::Type tiles{given};
  auto& shared = dynamic_shared<Shared>();
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) initialize(shared);
  __syncthreads();
  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();

  if (warp < 4) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (elect_one()) {
        prefetch_tensor_map(query);
        prefetch_tensor_map(key);
        prefetch_tensor_map(value);
        produce<CAUSAL>(shared, params, tiles, query, key, value);
      }
    } else if (warp <= Shared::TRANSPOSERS) {
      transpose<AT_A_TIME>(shared, warp - 1);
    } else if (KEY_SCALES) {
      fetch_key_scales<CAUSAL>(shared, params, tiles);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    if constexpr (IN_PLACE) {
      PromotingConsumer<T, Shared, CAUSAL, MASKS> consumer(shared, given, warp / 4 - 1);
      consumer.run();
    } else if constexpr (HEAD_DIM > 128) {
      WideConsumer<T, Shared, CAUSAL> consumer(shared, params, warp / 4 - 1);
      consumer.run();
    } else {
      Consumer<T, Shared, CAUSAL> consumer(shared, params, warp / 4 - 1);
      consumer.run();
    }
  }
}

}  // namespace microsdpa::hopper::throughput_8bit
