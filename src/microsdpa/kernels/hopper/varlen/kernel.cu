// Exact attention for sequences of many lengths whose rows fill tiles of wgmma: packed prompts, prompts on a cache, and
// decoding where many query heads share a key head.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE. A row is a query of one of the PACK query heads that
// share a key head. Lengths and pages are on the device alone: every CTA finds its part of the call from them.
// Where all sequences have one length, the host has counted ahead (OneLengthParams).
// One CTA per SM, or two, stay for the whole launch. Roles: of the first warpgroup one warp finds the work and starts
// copies of queries, one issues those of K and V, one makes zeros of values past a sequence's end. Where whole queries
// leave too much of a tile empty, the first and a fourth one copy queries row by row. Each of the other warpgroups, the
// consumers, computes 64 rows with BLOCK_N keys at a time. Pipeline:
//   1. bulk copies fill rings of K and V tiles, in boxes of BOX_ROWS keys: those of a page, or a whole tile
//   2. a consumer starts P V of a tile of keys and S of the next one, also of the next segment's first
//   3. it turns the scores into probabilities while products run
//   4. where CTAs share rows, each leaves its part in the workspace, and the one that is ready last combines them; many
//      parts in two steps. Those of a cluster leave them in shared memory, and each combines some columns
// Bound by: the tensor cores and the exponentials, as hopper/throughput; memory where few rows meet many keys.
#include "../../ptx/address.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "consumer.cuh"
#include "loader.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::varlen {

// Registers of a thread, which the warpgroups share out anew once they know their roles. One consumer: of a CTA that
// shares its SM with another one.
template <int CONSUMERS>
constexpr int CONSUMER_REGISTERS = CONSUMERS == 1   ? 200
                                   : CONSUMERS == 2 ? 232
                                   : CONSUMERS == 3 ? 160
                                                    : 112;
template <int CONSUMERS>
constexpr int PRODUCER_REGISTERS = CONSUMERS == 1   ? 56
                                   : CONSUMERS == 2 ? 40
                                                    : 32;
template <int CONSUMERS, int BLOCK_N>
constexpr int RESIDENT = CONSUMERS == 1 && BLOCK_N == 64 ? 2 : 1;  // CTAs of an SM
// Whether warpgroups share registers out: 256 threads alone on an SM have all that instructions can name.
template <int CONSUMERS, int BLOCK_N>
constexpr bool SHARES_OUT = CONSUMERS > 1 || RESIDENT<CONSUMERS, BLOCK_N> > 1;

// CLUSTER: CTAs that share the keys of a tile of rows, or 1: then lengths say which keys CTAs share. PACKED: whether
// clusters have packed queries of several sequences.
// STAGES, QUERY_STAGES: tiles of K and of V, and of Q, that there is room for. OVERLAP: as in hopper/throughput.
// QUERIES: of a bulk copy of Q; 0 for none. PARAMS: VarlenParams, or OneLengthParams, and then CLUSTER is 1.
// VALUE_DIM, QUERY_DIM: columns of V and O, and of Q and K, at most HEAD_DIM; the others are zeros. MAPS: further
// tensor maps, of the tails of K and V, then of Q, and of its tail.
template <typename T, int HEAD_DIM, int BLOCK_N, int CONSUMERS, int STAGES, int QUERY_STAGES, bool OVERLAP, int PACK,
          int BOX_ROWS, bool PAGED, int CLUSTER, bool PACKED, typename MASKS, int QUERIES, typename PARAMS,
          int VALUE_DIM = HEAD_DIM, int QUERY_DIM = HEAD_DIM, typename... MAPS>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP_THREADS, RESIDENT<CONSUMERS, BLOCK_N>)
    attention(const __grid_constant__ PARAMS params, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value, const __grid_constant__ MAPS... maps) {
  constexpr int TAILS = TAIL<HEAD_DIM> > 0 ? 2 : 0;
  static_assert(sizeof...(MAPS) == TAILS + (QUERIES == 0 ? 0 : TAILS > 0 ? 2 : 1), "a map for each tensor and tail");
  using C = Tiles<T, HEAD_DIM, BLOCK_N, CONSUMERS, STAGES, QUERY_STAGES, BOX_ROWS, QUERIES * PACK, QUERY_DIM>;
  auto& shared = dynamic_shared<SharedStorage<C>>();
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * CONSUMERS;  // warps
#pragma unroll
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      mbarrier_init(shared.described[stage], 1);
      mbarrier_init(shared.query_full[stage], QUERIES > 0 ? 1 : 32 * QUERY_LOADERS);
      mbarrier_init(shared.query_empty[stage], CONSUMERS * WARPGROUP_THREADS + 32);
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared.key_full[stage], 1);
      mbarrier_init(shared.key_empty[stage], READERS);
      mbarrier_init(shared.value_arrived[stage], 1);
      mbarrier_init(shared.value_full[stage], 1);
      mbarrier_init(shared.value_empty[stage], READERS);
    }
    mbarrier_init_fence();
  }
  clear_rows<C>(shared);
  __syncthreads();

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_THREADS, 0);
  if (warpgroup == 0) {
    if constexpr (SHARES_OUT<CONSUMERS, BLOCK_N>) setmaxnreg_dec<PRODUCER_REGISTERS<CONSUMERS>>();
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (elect_one()) {
        prefetch_tensor_map(key);
        prefetch_tensor_map(value);
      }
      // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
      // mutation: the warp that describes segments has waited for that, too, and this one waits for its words
      grid_dependency_wait();
      load_keys<C, MASKS, PAGED>(shared, params, boxes_of<HEAD_DIM, 0>(key, maps...),
                                 boxes_of<HEAD_DIM, 1>(value, maps...));
    } else if (warp == 1) {
      if constexpr (!C::BULK_QUERIES) {
        // mutation: the warp that describes segments has waited for that, too, and this one waits for its words
        grid_dependency_wait();
        load_queries<C, MASKS, PACK>(shared, params);
      }
    } else if (warp == 2) {
      clean_values<C, MASKS>(shared);
    } else {
      const Boxes query = further_boxes_of<HEAD_DIM, TAILS, (QUERIES > 0)>(key, maps...);
      if (C::BULK_QUERIES && elect_one()) prefetch_tensor_map(query.panel);
      grid_dependency_wait();
      describe_segments<C, MASKS, PACK, CLUSTER, PACKED>(shared, params, query);
    }
  } else {
    if constexpr (SHARES_OUT<CONSUMERS, BLOCK_N>) setmaxnreg_inc<CONSUMER_REGISTERS<CONSUMERS>>();
    Consumer<C, OVERLAP, MASKS, PACK, VALUE_DIM, CLUSTER> consumer(shared, params, warpgroup - 1);
    consumer.run();
    if constexpr (CLUSTER > 1) consumer.add_parts_of_cluster();
  }
}

}  // namespace microsdpa::hopper::varlen
