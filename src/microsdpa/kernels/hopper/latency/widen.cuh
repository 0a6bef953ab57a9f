// The third warpgroup of hopper/latency/kernel.cu with 8-bit operands: it fetches scales, and widens V to FP16.
//
// wgmma takes 16-bit values of P V as V lies, and 8-bit ones only when keys are contiguous. So V is widened rather than
// transposed, while Q K^T and the first exponentials run: P then has 11 bits, and V loses none.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "consumer.cuh"

namespace microsdpa::hopper::latency {

constexpr int WIDENERS = WARPGROUP_THREADS;
constexpr int WIDENING_WARPS = WIDENERS / 32;

// Registers of a thread where the consumers need more than three warpgroups can be launched with: these take some of
// the widening one's.
template <typename C>
constexpr bool MOVES_REGISTERS =
    C::HEAD_DIM > 64 || C::ROUNDS > 2 || C::MASKS::ANY || (C::ROUNDS == 2 && (C::MASKED || C::Operands::TERMS > 1));
constexpr int CONSUMER_REGISTERS = 240, WIDENER_REGISTERS = 24, LAUNCHED_REGISTERS = 168;
static_assert(WARPGROUPS * CONSUMER_REGISTERS + WIDENER_REGISTERS <= (WARPGROUPS + 1) * LAUNCHED_REGISTERS,
              "setmaxnreg would wait for ever for more registers than there are");

// C: a Configuration (consumer.cuh).
template <typename C>
struct Widener {
  using Shared = typename C::Shared;
  using Operands = typename C::Operands;
  static constexpr int HEAD_DIM = C::HEAD_DIM, ROUNDS = C::ROUNDS;
  static_assert(HEAD_DIM <= WIDENERS && BLOCK_M <= WIDENERS && WARPGROUPS * BLOCK_N == WIDENERS,
                "a thread has a channel, a query, and a key of each round");

  Shared& shared;
  const typename Operands::template Params<typename C::MASKS::Params>& arguments;
  const WorkTile& work;
  const int thread;

  float value_scale;
  float row_scale;
  float key_scale[ROUNDS];  // or one for all

  __device__ __forceinline__ void set_up() {
    mbarrier_init(shared.scales_full, WIDENING_WARPS);
#pragma unroll
    for (int tile = 0; tile < WARPGROUPS * ROUNDS; ++tile) {
      mbarrier_init(shared.wide_full[tile / WARPGROUPS][tile % WARPGROUPS], WIDENING_WARPS);
    }
  }

  // Keeps the compiler from working an address out later.
  __device__ __forceinline__ static void hold(const float*& address) {
    const uint64 bits = reinterpret_cast<uint64>(address);
    const uint64 low = opaque(static_cast<uint32>(bits)), high = opaque(static_cast<uint32>(bits >> 32));
    address = reinterpret_cast<const float*>(high << 32 | low);
  }

  // Starts to read scales. Those past the tensors are others of the same head. All before the wait overlaps with the
  // kernel ahead: a parameter's first access takes long.
  __device__ __forceinline__ void fetch_scales() {
    constexpr int KEYS = Operands::KEY_SCALES ? ROUNDS : 1;
    const AttentionParams& params = C::MASKS::call(arguments.call);
    const ChannelScales& channels = arguments.value_scale;
    const float* of_value = channels.data + work.batch * channels.batch + work.head_kv * channels.head +
                            min(thread, C::COLUMNS - 1) * channels.channel;
    const int row = min(work.first_row + thread % BLOCK_M, params.seqlen_q - 1);
    const float* of_row = arguments.query_scale.at(work.batch, work.head, row);
    const float* of_key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int key = min(work.first_key(i, thread / BLOCK_N) + thread % BLOCK_N, params.seqlen_k - 1);
      of_key[i] = arguments.key_scale.at(work.batch, work.head_kv, Operands::KEY_SCALES ? key : 0);
      hold(of_key[i]);
    }
    hold(of_value);
    hold(of_row);
    grid_dependency_wait();
    row_scale = *of_row;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) key_scale[i] = *of_key[i];
    value_scale = *of_value;
  }

  // Lets the consumers have what this warp has written.
  __device__ __forceinline__ static void arrive(Mbarrier& barrier) {
    __syncwarp();
    if (elect_one()) mbarrier_arrive(barrier);
    __syncwarp();
  }

  __device__ __forceinline__ void give_scales() {
    if (thread < HEAD_DIM) shared.value_scale[thread] = value_scale;
    // 0 must not meet a masked score of -inf.
    const float factor =
        fabsf(C::MASKS::call(arguments.call).scale_log2) * (Operands::KEY_SCALES ? 1.0f : key_scale[0]);
    const float row_factor = row_scale * factor;
    if (thread < BLOCK_M) shared.row_scale[thread] = row_factor < 1e-30f ? 1e-30f : row_factor;  // NaN stays NaN
    if constexpr (Operands::KEY_SCALES) {
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) shared.key_scale[WIDENERS * round + thread] = key_scale[round];
    }
    arrive(shared.scales_full);
  }

  // Eight values at a time, of which a warp has whole lines on both sides.
  __device__ __forceinline__ void widen_tile(__half* wide, const unsigned char* narrow) const {
    constexpr int CHUNKS = HEAD_DIM / 8;
    constexpr int PIECES = BLOCK_N * CHUNKS / WIDENERS, AT_A_TIME = 4;
#pragma unroll
    for (int first = 0; first < PIECES; first += AT_A_TIME) {
      Vector<uint32, 2> loaded[AT_A_TIME];
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        loaded[i] = reinterpret_cast<const Vector<uint32, 2>*>(narrow)[WIDENERS * (first + i) + thread];
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        const int piece = WIDENERS * (first + i) + thread, row = piece / CHUNKS, chunk = piece % CHUNKS;
        const uint32(&from)[2] = loaded[i].data;
        const uint4 to = {halves_from_e4m3x2(from[0]), halves_from_e4m3x2(from[0] >> 16), halves_from_e4m3x2(from[1]),
                          halves_from_e4m3x2(from[1] >> 16)};
        __half* panel = wide + chunk / 8 * (BLOCK_N * PANEL);
        *reinterpret_cast<uint4*>(panel + row * PANEL + (chunk % 8 ^ row % 8) * 8) = to;
      }
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (MOVES_REGISTERS<C>) setmaxnreg_dec<WIDENER_REGISTERS>();
    give_scales();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
      for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
        if (!Shared::FEW_COPIES || round + warpgroup == 0) mbarrier_wait(shared.value_full(round, warpgroup), 0);
        widen_tile(shared.value[round][warpgroup], shared.narrow_value[round][warpgroup]);
        fence_proxy_async();
        arrive(shared.wide_full[round][warpgroup]);
      }
    }
  }
};

}  // namespace microsdpa::hopper::latency
