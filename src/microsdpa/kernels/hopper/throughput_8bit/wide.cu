// All operands in 8 bits with 256 channels, for calls that fill the chip: hopper/throughput_8bit/kernel.cu with what
// only so wide a head wants.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for tiles of 128 queries of one head. Q and K are
// quantized to E4M3 or INT8, of one term; V and P to E4M3.
// One CTA per SM stays and takes one tile after the other. Roles are those of kernel.cu, with two consumers in turn.
// Pipeline: 1. TMA fills rings of Q, K and V tiles, across query tiles   2. V becomes V^T in shared memory
//           3. a consumer starts S of the next tile and P V of this one, and turns S into P while P V runs
//           4. O goes through the place of its queries into bulk copies, while S of the next query tile runs
// The tensor cores add to O. What they have summed over PROMOTED_TILES tiles is moved away (wide_promoting.cuh). Bound
// by: tensor cores, 1,536 cycles for 96 keys, beside transposing; writing O, the power limit. docs/hopper-8bit.md has
// the measurements.
#include "../../ptx/address.cuh"
#include "../common/key_scales.cuh"
#include "producer.cuh"
#include "wide_promoting.cuh"

namespace microsdpa::hopper::throughput_8bit {

// STAGES: tiles of K and of V^T that there is room for; VALUE_STAGES: of V, waiting to be transposed. KEY_SCALES:
// whether the keys of a head have different scales. OUT_PANELS: room for O beside the queries'. CAUSAL: what a row sees
// has a right end. MASKS: what else decides about scores.
template <typename T, typename FORMAT, int BLOCK_N, int STAGES, int VALUE_STAGES, int QUERY_STAGES, bool KEY_SCALES,
          int PROMOTED_TILES, int OUT_PANELS, bool CAUSAL, typename MASKS = NoMasks>
__global__ void __launch_bounds__(3 * WARPGROUP_THREADS, 1)
    wide_attention(const __grid_constant__ typename EightBitParamsOf<MASKS>::Type given,
                   const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                   const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap out) {
  using Shared =
      WideStorage<FORMAT, BLOCK_N, STAGES, VALUE_STAGES, QUERY_STAGES, KEY_SCALES, PROMOTED_TILES, OUT_PANELS>;
  constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;  // of a thread: together three times 168
  constexpr int AT_A_TIME = 4;                                      // loads of a transposing warp

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
        prefetch_tensor_map(out);
        produce<CAUSAL>(shared, params, tiles, query, key, value);
      }
    } else if (warp <= Shared::TRANSPOSERS) {
      transpose<AT_A_TIME>(shared, warp - 1);
    } else if (KEY_SCALES) {
      fetch_key_scales<CAUSAL>(shared, params, tiles);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    WidePromotingConsumer<T, Shared, CAUSAL, MASKS> consumer(shared, given, out, warp / 4 - 1);
    consumer.run();
  }
}

}  // namespace microsdpa::hopper::throughput_8bit
