// One attention call in the time that a memory round trip takes: small problems, wgmma and TMA, no second launch.
//
// Computes O = softmax(scale Q K^T + mask) V, and optionally LSE, for BLOCK_M = 64 queries of one head per cluster. The
// keys are dealt in tiles of BLOCK_N = 64 to the 2 CLUSTER warpgroups of the cluster, so that a whole chip takes part
// in a problem of few queries: in turn, or, where one copy brings V, so that those of a CTA are consecutive.
// Roles: one thread of warp 0 issues every copy, all warps compute; a warpgroup's rows meet its own keys, and the parts
// are combined at the end (combine.cuh). With 8-bit operands a third warpgroup fetches scales and widens V (widen.cuh).
// Pipeline: 1. all copies are issued, in the order in which they are needed   2. S of tile t + 1 while the exponentials
//           of tile t run, relative to one stabilizer per row
//           3. of the last tile the peer's rows first: their P V and their way to the peer beside the exponentials of
//           the others   4. O's columns change warpgroups; 16-byte stores
// Bound by: latencies one after another. Launch and first bytes take longer than the arithmetic, of which the
// exponentials (16 per clock) and the products take the same; docs/hopper-latency.md has the time line.
#include "../../common/head.cuh"
#include "../../ptx/address.cuh"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "consumer.cuh"
#include "online.cuh"
#include "prologue.cuh"
#include "shared.cuh"
#include "unrolled.cuh"
#include "widen.cuh"

namespace microsdpa::hopper::latency {

// Grid: CLUSTER * heads, query tiles, batch. ROUNDS: as many for every CTA, or 0 for what the keys that it sees ask
// for.
template <typename MASKS, int CLUSTER, int GROUP, bool CAUSAL, int ROUNDS, bool CONSECUTIVE>
__device__ __forceinline__ WorkTile work_of_cta(const typename MASKS::Params& arguments) {
  const AttentionParams& params = MASKS::call(arguments);
  WorkTile work;
  work.rank = CLUSTER == 1 ? 0 : static_cast<int>(blockIdx.x % CLUSTER);
  work.head = static_cast<int>(blockIdx.x / CLUSTER);
  work.head_kv = work.head / GROUP;
  work.batch = static_cast<int>(blockIdx.z);
  // Tiles that see the most keys first: they take longest.
  work.first_row = BLOCK_M * static_cast<int>(CAUSAL ? gridDim.y - 1 - blockIdx.y : blockIdx.y);
  work.rounds = ROUNDS;
  int unseen_tiles = 0;  // before a window
  if constexpr (ROUNDS == 0) {
    constexpr int KEYS_A_ROUND = BLOCK_N * WARPGROUPS * CLUSTER;
    int keys = keys_seen<CAUSAL>(params, work.first_row, BLOCK_M);
    if constexpr (MASKS::LEFT) {
      unseen_tiles = max(0, work.first_row + arguments.masks.lowest) / BLOCK_N;
      keys -= unseen_tiles * BLOCK_N;
    }
    work.rounds = max(1, (keys + KEYS_A_ROUND - 1) / KEYS_A_ROUND);
  }
  work.first_tile = WARPGROUPS * work.rank * (CONSECUTIVE ? ROUNDS : 1) + unseen_tiles;
  work.round_tiles = WARPGROUPS * (CONSECUTIVE ? 1 : CLUSTER);
  return work;
}

// Barriers of what the peer sends, once or, after an overflow, twice.
template <int CLUSTER, int ROUNDS, typename Shared>
__device__ __forceinline__ void set_up_exchange(Shared& shared) {
  if (CLUSTER == 1) return;
#pragma unroll
  for (int delivery = 0; delivery < (ROUNDS > 0 ? 2 : 1); ++delivery) {
    PeerArrived& arrived = shared.peer_arrived[delivery];
    mbarrier_init(arrived.row, 1);
#pragma unroll
    for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
      mbarrier_init(arrived.output[warpgroup], 1);
    }
  }
}

// Sets up what the peer's messages need. One thread.
template <int CLUSTER, int ROUNDS, typename Shared>
__device__ __forceinline__ void begin_exchange(Shared& shared) {
  set_up_exchange<CLUSTER, ROUNDS>(shared);
  mbarrier_init_fence();
  if (CLUSTER == 2) expect_peer(shared, 0);
}

constexpr uint32 MAX_BATCH = 65535;  // CTAs along z

// The tiles of K and V that shared memory has room for, in the order in which they are needed: issue and arrival are in
// order, and the first tile of keys decides when the first product begins. A warpgroup needs K 0, K 1, V 0, K 2, V 1,
// ... The second one starts a tile later than the first, which gives both their stabilizer.
template <int STAGES>
struct Tile {
  int number;
  __device__ __forceinline__ int warpgroup() const { return number % WARPGROUPS; }
  __device__ __forceinline__ int turn() const { return number / WARPGROUPS; }
  __device__ __forceinline__ bool is_key() const { return turn() == 0 || (turn() % 2 == 1 && turn() < 2 * STAGES - 1); }
  __device__ __forceinline__ int round() const { return is_key() ? (turn() + 1) / 2 : (turn() - 1) / 2; }
};
// Whether the copy of another tile brings this one too.
template <typename Shared, int STAGES>
__device__ __forceinline__ bool comes_along(const Shared&, const Tile<STAGES>& tile) {
  return Shared::FEW_COPIES && !tile.is_key() && tile.warpgroup() + tile.round() > 0;
}
template <int FIRST, int LAST, int STAGES, typename Shared>
__device__ __forceinline__ void set_up_tiles(Shared& shared) {
#pragma unroll
  for (int number = FIRST; number < LAST; ++number) {
    const Tile<STAGES> tile{number};
    if (comes_along(shared, tile)) continue;
    mbarrier_init(tile.is_key() ? shared.key_full(tile.round(), tile.warpgroup())
                                : shared.value_full(tile.round(), tile.warpgroup()),
                  1);
  }
  mbarrier_init_fence();
}
template <int FIRST, int LAST, int ROUNDS, bool ANNOUNCED = false, int HEAD_DIM, int STAGES, typename T,
          typename MASK_TILES>
__device__ __forceinline__ void copy_tiles(SharedStorage<T, HEAD_DIM, STAGES, MASK_TILES>& shared, const WorkTile& work,
                                           const Boxes& key, const Boxes& value) {
  constexpr int VALUE_TILES = SharedStorage<T, HEAD_DIM, STAGES, MASK_TILES>::VALUE_TILES;
  using QueryKey = typename OperandsOf<T>::QueryKey;
#pragma unroll
  for (int number = FIRST; number < LAST; ++number) {
    const Tile<STAGES> tile{number};
    const int warpgroup = tile.warpgroup(), round = tile.round();
    if (comes_along(shared, tile) || (ROUNDS < STAGES && round >= work.rounds)) continue;
    const int first_key = work.first_key(round, warpgroup);
    if constexpr (OperandsOf<T>::EIGHT_BIT) {  // a row is one box
      if (tile.is_key()) {
        load_tile<QueryKey, HEAD_DIM, 1, ANNOUNCED>(shared.key[round][warpgroup], nullptr, key,
                                                    shared.key_full(round, warpgroup), first_key, work.head_kv,
                                                    work.batch);
      } else {
        load_tile<unsigned char, HEAD_DIM, VALUE_TILES>(shared.narrow_value[round][warpgroup], nullptr, value,
                                                        shared.value_full(round, warpgroup), first_key, work.head_kv,
                                                        work.batch);
      }
    } else if (tile.is_key()) {
      load_tile<T, HEAD_DIM, 1, ANNOUNCED>(shared.key[round][warpgroup], shared.key_tail(round, warpgroup), key,
                                           shared.key_full(round, warpgroup), first_key, work.head_kv, work.batch);
    } else {
      load_tile<T, HEAD_DIM, VALUE_TILES>(shared.value[round][warpgroup], shared.value_tail(round, warpgroup), value,
                                          shared.value_full(round, warpgroup), first_key, work.head_kv, work.batch);
    }
  }
}

template <int NUMBER, typename First, typename... Others>
__device__ __forceinline__ const First& further(const First& first, const Others&... others) {
  if constexpr (NUMBER == 0) {
    return first;
  } else {
    return further<NUMBER - 1>(others...);
  }
}

// Of the tensor whose tail, where tiles have one, is the NUMBER-th of further maps.
template <int HEAD_DIM, int NUMBER, typename... MAPS>
__device__ __forceinline__ Boxes boxes_of(const TensorMap& panel, const MAPS&... maps) {
  if constexpr (TAIL<HEAD_DIM> > 0) {
    return {panel, further<NUMBER>(maps...)};
  } else {
    return {panel, panel};
  }
}
// Number of a mask's map: behind those of the tails of query, key and value.
template <int HEAD_DIM>
constexpr int MASK_MAP = TAIL<HEAD_DIM> > 0 ? 3 : 0;

// A mask tensor's head and batch entry for a CTA, 0 where there is but one.
struct MaskOrigin {
  int head, batch;

  // Worked out here, and not where it is used: a parameter's first access takes long.
  __device__ __forceinline__ MaskOrigin(const AttentionParams&, const WorkTile&) {}
  __device__ __forceinline__ MaskOrigin(const MaskedParams& params, const WorkTile& work)
      : head(opaque(params.masks.mask_strides.head != 0 ? work.head : 0)),
        batch(opaque(params.masks.mask_strides.batch != 0 ? work.batch : 0)) {}
};

// Copies the mask's tiles of some rounds for the query tile, as far as the kernel has them from bulk copies. They come
// ahead of Q, there being much to do with them before there are products; but numbers in FP32, which take longer than
// Q and its products, come in turn with the keys.
template <int FIRST, int LAST, int MAP, typename Shared, typename... MAPS>
__device__ __forceinline__ void copy_masks(Shared& shared, const WorkTile& work, const MaskOrigin& origin,
                                           const MAPS&... maps) {
  if constexpr (sizeof...(MAPS) > MAP) {
    using Tiles = typename Shared::Masks;
    const TensorMap& map = further<MAP>(maps...);
    const int row = Tiles::ROWS == 1 ? 0 : work.first_row;
#pragma unroll
    for (int round = FIRST; round < LAST; ++round) {
      Mbarrier& full = shared.mask_full[Tiles::IN_TURN ? round : 0];
#pragma unroll
      for (int panel = 0; panel < Tiles::PANELS_OF_ROUND; ++panel) {
        tma_load(shared.mask[round][panel], map, full, work.first_key(round, 0) + panel * Tiles::PANEL_KEYS, row,
                 origin.head, origin.batch);
      }
    }
  }
}

// Sets the barriers up, and issues the copies. One thread: two warps that issue them hold each other up. With few
// copies, what is ahead of the first ones counts, also when the kernel before has not ended: the barriers of Q and of
// one tile alone are set up and told their bytes first, and the exchange is set up by another warp.
template <int CLUSTER, int ROUNDS, int COLUMNS, int HEAD_DIM, int STAGES, typename T, typename MASK_TILES,
          typename PARAMS, typename... MAPS>
__device__ __forceinline__ void begin(SharedStorage<T, HEAD_DIM, STAGES, MASK_TILES>& shared, const WorkTile& work,
                                      const PARAMS& arguments, const TensorMap& query, const TensorMap& key,
                                      const TensorMap& value, const MAPS&... maps) {
  constexpr bool FEW = SharedStorage<T, HEAD_DIM, STAGES, MASK_TILES>::FEW_COPIES;
  constexpr bool BRINGS_MASK = sizeof...(MAPS) > MASK_MAP<HEAD_DIM>;
  constexpr bool IN_TURN = COMES_IN_TURN<MASK_TILES>;
  using QueryKey = typename OperandsOf<T>::QueryKey;
  constexpr int TILES = 2 * WARPGROUPS * STAGES, FIRST_TILES = FEW ? 1 : IN_TURN ? WARPGROUPS : TILES;
  const Boxes query_boxes = boxes_of<HEAD_DIM, 0>(query, maps...), key_boxes = boxes_of<HEAD_DIM, 1>(key, maps...),
              value_boxes = boxes_of<HEAD_DIM, 2>(value, maps...);
  prefetch_tensor_map(query);
  prefetch_tensor_map(key);
  if (!FEW) prefetch_tensor_map(value);
  mbarrier_init(shared.query_full(), 1);
  if constexpr (BRINGS_MASK) {
#pragma unroll
    for (Mbarrier& full : shared.mask_full) mbarrier_init(full, 1);
  }
  set_up_tiles<0, FEW ? FIRST_TILES : TILES, STAGES>(shared);
  const MaskOrigin origin(arguments, work);
  if constexpr (BRINGS_MASK) {
#pragma unroll
    for (Mbarrier& full : shared.mask_full) mbarrier_arrive_expect(full, MASK_TILES::COPIED_BYTES);
  }
  if (FEW) {
    mbarrier_arrive_expect(shared.query_full(), OperandsOf<T>::TERMS * TILE_BYTES<QueryKey, HEAD_DIM>);
    mbarrier_arrive_expect(shared.key_full(0, 0), TILE_BYTES<QueryKey, HEAD_DIM>);
  }

  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  grid_dependency_wait();
  constexpr int MAP = MASK_MAP<HEAD_DIM>, MASK_ROUNDS = IN_TURN ? 1 : ROUNDS;  // that come ahead of Q
  copy_masks<0, MASK_ROUNDS, MAP>(shared, work, origin, maps...);
  if constexpr (OperandsOf<T>::EIGHT_BIT) {
    if (!FEW) mbarrier_arrive_expect(shared.query_full(), OperandsOf<T>::TERMS * TILE_BYTES<QueryKey, HEAD_DIM>);
#pragma unroll
    for (int term = 0; term < OperandsOf<T>::TERMS; ++term) {
      tma_load(shared.query + term * BLOCK_M * HEAD_DIM, query, shared.query_full(), term * COLUMNS, work.first_row,
               work.head, work.batch);
    }
  } else {
    load_tile<T, HEAD_DIM, 1, FEW>(shared.query, shared.query_tail(), query_boxes, shared.query_full(), work.first_row,
                                   work.head, work.batch);
  }
  copy_tiles<0, FIRST_TILES, ROUNDS, FEW>(shared, work, key_boxes, value_boxes);
  if constexpr (FEW) {
    // Never true. Behind a branch that ptxas cannot decide it works out what later copies need after the first ones.
    if (opaque(work.batch) > MAX_BATCH) return;
    set_up_tiles<FIRST_TILES, TILES, STAGES>(shared);
    if constexpr (IN_TURN) {
      copy_tiles<FIRST_TILES, WARPGROUPS, ROUNDS>(shared, work, key_boxes, value_boxes);
      copy_masks<MASK_ROUNDS, ROUNDS, MAP>(shared, work, origin, maps...);
    }
    copy_tiles<IN_TURN ? WARPGROUPS : FIRST_TILES, TILES, ROUNDS>(shared, work, key_boxes, value_boxes);
  } else {
    if constexpr (IN_TURN) {
      copy_masks<MASK_ROUNDS, ROUNDS, MAP>(shared, work, origin, maps...);
      copy_tiles<FIRST_TILES, TILES, ROUNDS>(shared, work, key_boxes, value_boxes);
    }
    begin_exchange<CLUSTER, ROUNDS>(shared);
  }
}

// 8-bit values have a third warpgroup (widen.cuh).
template <typename OPERANDS>
constexpr int THREADS_OF = THREADS + (OperandsOf<OPERANDS>::EIGHT_BIT ? WIDENERS : 0);
template <typename OPERANDS, typename MASKS>
using ParamsOf = typename OperandsOf<OPERANDS>::template Params<typename MASKS::Params>;

// OPERANDS: __half or __nv_bfloat16, or 8-bit values (operands.cuh).
// HEAD_DIM: columns of the tiles, of which the tensors have the first COLUMNS. ROUNDS: tiles of each warpgroup when
// known, at most STAGES; 0: STAGES tiles are a ring. GROUP: query heads of a key head. CAUSAL: what a row sees has a
// right end. MASKED: keys do not fill the tiles, or have such an end. MASKS: what else decides about scores.
// MASK_ROWS: rows of the boxes in which bulk copies bring a mask tensor, 1 where queries share one. 0: threads read it,
// if there is one. PROLOGUE: norms and rotary embedding of Q and K, in 16 bits. MAPS: further tensor maps, of the tails
// of query, key and value where tiles have them, and of a mask that bulk copies bring.
template <typename OPERANDS, int HEAD_DIM, int COLUMNS, int CLUSTER, int STAGES, int ROUNDS, int GROUP, bool CAUSAL,
          bool MASKED, typename MASKS, int MASK_ROWS = 0, typename PROLOGUE = NoPrologue, typename... MAPS>
__global__ void __launch_bounds__(THREADS_OF<OPERANDS>, 1)
    attention(const __grid_constant__ typename PROLOGUE::template Params<ParamsOf<OPERANDS, MASKS>> given,
              const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
              const __grid_constant__ TensorMap value, const __grid_constant__ MAPS... maps) {
  using Operands = OperandsOf<OPERANDS>;
  const typename MASKS::Params& arguments =
      Operands::unscaled(PROLOGUE::template call<ParamsOf<OPERANDS, MASKS>>(given));
  const AttentionParams& params = MASKS::call(arguments);
  static_assert(CLUSTER == 1 || CLUSTER == 2, "a tile of queries is shared by at most two CTAs");
  static_assert(HEAD_DIM == 64 || HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 128, "whole panels, or with a tail");
  static_assert(ROUNDS <= STAGES && (MASKED || !CAUSAL), "what is known must fit, what is causal is masked");
  using C =
      Configuration<OPERANDS, HEAD_DIM, COLUMNS, CLUSTER, STAGES, ROUNDS, CAUSAL, MASKED, MASKS, MASK_ROWS, PROLOGUE>;
  using Shared = typename C::Shared;
  static_assert(!Operands::EIGHT_BIT || (ROUNDS > 0 && HEAD_DIM % 64 == 0), "V is widened once, in rows of one box");
  static_assert(!Operands::EIGHT_BIT || !PROLOGUE::ANY, "norms and rotary embedding are of 16 bits");
  static_assert(!Shared::FEW_COPIES || ROUNDS == STAGES, "few copies are all there are");
  auto& shared = dynamic_shared<Shared>();
  // The next kernel's CTAs may take an SM as soon as one of ours leaves it; they wait for our end themselves.
  grid_dependency_launch();
  const WorkTile work = work_of_cta<MASKS, CLUSTER, GROUP, CAUSAL, ROUNDS, Shared::FEW_COPIES>(arguments);
  if (threadIdx.x < 32 && elect_one()) {
    begin<CLUSTER, ROUNDS, COLUMNS>(shared, work, arguments, query, key, value, maps...);
  }
  if (Shared::FEW_COPIES && threadIdx.x / 32 == WARPGROUP_THREADS / 32 && elect_one()) {
    prefetch_tensor_map(value);
    if constexpr (sizeof...(MAPS) > MASK_MAP<HEAD_DIM>) prefetch_tensor_map(further<MASK_MAP<HEAD_DIM>>(maps...));
    begin_exchange<CLUSTER, ROUNDS>(shared);
  }
  // mutation: the lanes come together for aligned instructions, which the emulator does not ask for
  __syncwarp();
  const auto consumer_of_thread = [&] {
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP_THREADS, 0);
    // 0 must not meet a masked score of -inf.
    const float scale = Operands::EIGHT_BIT && MASKS::ANY ? 1.0f : fmaxf(fabsf(params.scale_log2), 1e-30f);
    return Consumer<C>{
        {shared, params, work, warpgroup, {work.rank, static_cast<int>(threadIdx.x % WARPGROUP_THREADS)}},
        boxes_of<HEAD_DIM, 1>(key, maps...),
        boxes_of<HEAD_DIM, 2>(value, maps...),
        scale,
        arguments,
        PROLOGUE::given(given)};
  };
  // The barriers are fenced already; a release would cost a device-wide memory barrier. The peer is waited for when
  // there is something to send.
  const auto meet = [] {
    if constexpr (CLUSTER == 2) cluster_arrive<false>();
    __syncthreads();
  };
  if constexpr (Operands::EIGHT_BIT) {
    if (threadIdx.x >= THREADS) {
      Widener<C> widener{shared, given, work, static_cast<int>(threadIdx.x) - THREADS};
      if (widener.thread == 0) widener.set_up();
      widener.fetch_scales();
      meet();
      widener.run();
      return;
    }
  }
  const auto get_registers = [] {
    if constexpr (Operands::EIGHT_BIT) {
      if constexpr (MOVES_REGISTERS<C>) setmaxnreg_inc<CONSUMER_REGISTERS>();
    }
  };
  if constexpr (MASKS::ANY || PROLOGUE::ANY) {
    auto consumer = consumer_of_thread();
    consumer.fetch_first();
    if constexpr (MASKS::ANY) consumer.read_masks();
    meet();
    get_registers();
    consumer.run();
  } else {
    meet();
    get_registers();
    auto consumer = consumer_of_thread();
    consumer.run();
  }
}

}  // namespace microsdpa::hopper::latency
