// A consumer warpgroup of hopper/throughput_8bit/wide.cu: 256 channels of O, summed by the tensor cores.
#pragma once

#include "../../common/mma_tile.cuh"
#include "../../ptx/proxy.cuh"
#include "promoting.cuh"

namespace microsdpa::hopper::throughput_8bit {

constexpr int OUT_COLUMNS = 64;  // of a panel of O on its way out: 128 bytes, a pattern of swizzling
constexpr int OUT_PANEL_BYTES = ROWS * OUT_COLUMNS * 2;  // a warpgroup's

// Shared memory of hopper/throughput_8bit/wide.cu. Where there is room for two query tiles, O leaves through the place
// of its own queries, and through OUT_PANELS more panels.
template <typename FORMAT, int BLOCK_N, int STAGES, int VALUE_STAGES, int QUERY_STAGES, bool KEY_SCALES,
          int PROMOTED_TILES, int OUT_PANELS_>
struct WideStorage
    : SharedStorage<FORMAT, 256, 1, BLOCK_N, 2, STAGES, VALUE_STAGES, QUERY_STAGES, KEY_SCALES, PROMOTED_TILES> {
  using Base =
      SharedStorage<FORMAT, 256, 1, BLOCK_N, 2, STAGES, VALUE_STAGES, QUERY_STAGES, KEY_SCALES, PROMOTED_TILES>;
  static constexpr bool QUERY_STAYS = QUERY_STAGES == 2;
  static constexpr int OUT_PANELS = OUT_PANELS_, QUERY_PANELS = ROWS * Base::HEAD_DIM / OUT_PANEL_BYTES;
  static_assert(QUERY_STAYS || OUT_PANELS == 0, "O is staged where its queries stay, or nowhere");

  alignas(1024) Byte out[Base::CONSUMERS][OUT_PANELS > 0 ? OUT_PANELS : 1][OUT_PANELS > 0 ? OUT_PANEL_BYTES : 16];
};

// O takes 128 registers. What differs from consumers of fewer channels:
//   - exponentials run beside the consumer's own P V: P takes two sets of registers
//   - consumers start products in turn
//   - O of a query tile is written when S of the next one has been started, and leaves by bulk copies
//   - sums that are moved away have no room in shared memory. They go to where the output will be, as BF16: what that
//     leaves of a sum stays in the accumulators, so that nothing is lost
template <typename T, typename Shared, bool CAUSAL, typename MASKS>
struct WidePromotingConsumer : PromotingConsumer<T, Shared, CAUSAL, MASKS> {
  using Base = PromotingConsumer<T, Shared, CAUSAL, MASKS>;
  using Base::BLOCK_N, Base::HEAD_DIM, Base::STEPS, Base::CONSUMERS, Base::LARGEST_SUM;
  using Base::correction, Base::ended, Base::factor, Base::first_row, Base::inverse, Base::masks, Base::o, Base::p;
  using Base::params, Base::query_state, Base::shared, Base::sum, Base::thread, Base::tile, Base::tiles;
  using Base::value_state, Base::warpgroup, Base::work;
  using typename Base::Probabilities, typename Base::Sum;
  using Scores = float[BLOCK_N / 2];
  static constexpr bool PROMOTES = Shared::PROMOTES, STAGED = Shared::QUERY_STAYS;
  static constexpr bool EARLY_FACTORS = STAGED && !MASKS::ANY;              // else there is no register for them
  static constexpr int PANELS = Shared::QUERY_PANELS + Shared::OUT_PANELS;  // that O can leave through at once
  static constexpr int LEFT_BEHIND = 3;  // tiles of keys after which the output before is expected to have left

  const TensorMap& out;
  bool unwritten = false;  // O of the query tile before
  bool leaving = false;    // O of the query tile before, which lies where its queries were
  float key_factor;

  __device__ __forceinline__ WidePromotingConsumer(Shared& shared, const typename Base::Params& given,
                                                   const TensorMap& out, int warpgroup)
      : Base(shared, given, warpgroup), out(out) {}

  // Waits for the next query tile; false when there is none.
  __device__ __forceinline__ bool begin_query() {
    if (!Base::wait_query()) return false;
    Base::count_tiles();
    if (!Shared::INTEGERS && params.scale_log2 < 0.0f) Base::negate_query();
    return true;
  }

  // Asks for the scales of queries and keys, which nothing waits for yet.
  __device__ __forceinline__ void load_factors() {
    const WorkTile& of = shared.work[work % WORK_TILES];
    key_factor = Shared::KEY_SCALES ? 1.0f : *params.key_scale.at(of.batch, shared.head_kv[work % WORK_TILES], 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + Base::tile_row(half), params.seqlen_q - 1);
      factor[half] = *params.query_scale.at(of.batch, of.head, row);
    }
  }
  __device__ __forceinline__ void finish_factors() {
    wgmma_fence_registers(factor);                                           // here the compiler waits for them
    const float all = fmaxf(fabsf(params.scale_log2), 1e-30f) * key_factor;  // 0 must not meet a masked score of -inf
    factor[0] *= all, factor[1] *= all;
    if constexpr (MASKS::ANY) {
      masks.begin(shared.work[work % WORK_TILES], first_row + Base::tile_row(0), factor);
    }
  }

  // The floats that two packed BF16 are.
  __device__ __forceinline__ static float low_of(uint32 pair) { return __uint_as_float(pair << 16); }
  __device__ __forceinline__ static float high_of(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }

  // Adds what was moved to the output, if anything, to O, and with MOVE moves all of it there.
  template <bool MOVE>
  __device__ __forceinline__ void exchange(bool has_moved) {
    constexpr int BLOCKS = HEAD_DIM / 16;
    const WorkTile& of = shared.work[work % WORK_TILES];
    uint2* place[2];  // four channels each
    bool real[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = of.first_row + ROWS * warpgroup + Base::tile_row(half);
      real[half] = row < params.seqlen_q;
      place[half] = reinterpret_cast<uint2*>(
          const_cast<T*>(params.out_strides.template at<T>(params.out, of.batch, of.head, row)) + 4 * (thread % 4));
    }
    if (has_moved) {
      uint2 before[2][BLOCKS];  // all loads are under way together
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) before[half][i] = real[half] ? place[half][4 * i] : make_uint2(0, 0);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
          channel_of_quad(o, i, half, 0) += low_of(before[half][i].x);
          channel_of_quad(o, i, half, 1) += high_of(before[half][i].x);
          channel_of_quad(o, i, half, 2) += low_of(before[half][i].y);
          channel_of_quad(o, i, half, 3) += high_of(before[half][i].y);
        }
      }
    }
    if constexpr (MOVE) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
          uint32 sums[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float &low = channel_of_quad(o, i, half, 2 * j), &high = channel_of_quad(o, i, half, 2 * j + 1);
            sums[j] = pack<__nv_bfloat16>(low, high);
            low -= low_of(sums[j]), high -= high_of(sums[j]);
          }
          if (real[half]) place[half][4 * i] = make_uint2(sums[0], sums[1]);
        }
      }
    }
    __syncwarp();
  }

  // Whether sums have been moved away: ahead of tile PROMOTED_TILES + 1 for the first time.
  __device__ __forceinline__ bool has_promoted() const { return PROMOTES && tile > Shared::PROMOTED_TILES; }

  // Stabilizers have moved.
  __device__ __forceinline__ void correct() {
    if (has_promoted()) exchange<false>(true);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
    if (has_promoted()) exchange<true>(false);
  }

  // Turns scores of a tile but the first into probabilities, while P V of the tile before may run, of which P is
  // elsewhere.
  __device__ __forceinline__ void softmax_tile(const Scores& s, Probabilities& p) {
    float added[2];
    Base::exponentiate(s, p, added);
    if (!__all_sync(FULL_WARP, added[0] <= LARGEST_SUM && added[1] <= LARGEST_SUM)) {
      wgmma_wait<0>();
      wgmma_fence_registers(o);
      Base::update_stabilizer(s);
      sum[0] *= correction[0];
      sum[1] *= correction[1];
      Base::exponentiate(s, p, added);
      sum[0] += added[0];
      sum[1] += added[1];
      correct();
      return;
    }
    sum[0] += added[0];
    sum[1] += added[1];
  }

  // Moves O away if it has as many products in it as it may.
  __device__ __forceinline__ void promote_if_due() {
    if constexpr (PROMOTES) {
      if ((tile - 1) % Shared::PROMOTED_TILES == 0 && has_promoted()) exchange<true>(tile > Shared::PROMOTED_TILES + 1);
    }
  }

  // From P of a tile to P of the next one; false when there is none.
  __device__ __forceinline__ bool step(Sum (&sums)[BLOCK_N / 2], Scores& s, const Probabilities& p,
                                       Probabilities& next_p) {
    if (tile + 1 == tiles) return false;
    ++tile;
    promote_if_due();
    Base::wait_key();
    Base::pingpong_wait();
    Base::score(sums);
    Base::wait_value();
    Base::multiply_value(p);
    Base::pingpong_arrive();
    wgmma_wait<1>();
    Base::take_scores(sums, s);
    softmax_tile(s, next_p);
    Base::end_value();
    if (STAGED && tile == LEFT_BEHIND) release_query();
    return true;
  }

  // P V of the last tile.
  __device__ __forceinline__ void end(const Probabilities& p) {
    if (STAGED && tile < LEFT_BEHIND) release_query();
    Base::wait_value();
    Base::pingpong_wait();
    Base::multiply_value(p);
    Base::pingpong_arrive();
    Base::end_value();
    if (has_promoted()) exchange<false>(true);
  }

  // Takes a query tile from its first tile of keys to the last.
  __device__ __forceinline__ void run_query(Sum (&sums)[BLOCK_N / 2], Scores& s) {
    Base::wait_key();
    Base::pingpong_wait();
    wgmma_wait<0>();  // of nothing: the compiler would wait for S ahead of O otherwise
    wgmma_fence_registers(o);
    Base::score(sums);
    Base::pingpong_arrive();
    if (EARLY_FACTORS) load_factors();
    write();
    if (!EARLY_FACTORS) load_factors();
    finish_factors();
    wgmma_wait<0>();
    Base::take_scores(sums, s);
    Base::begin(s);
    Probabilities other;
    while (true) {  // which registers hold P is known when compiling
      if (!step(sums, s, p, other)) {
        end(p);
        break;
      }
      if (!step(sums, s, other, p)) {
        end(other);
        break;
      }
    }
    if (STAGED) query_state.advance();
    unwritten = true;
  }

  // Goes past a query tile of which no row is this warpgroup's.
  __device__ __forceinline__ void skip_query() {
    if constexpr (STAGED) release_query();
    Base::end_query();
    Base::pingpong_wait();
    Base::pingpong_arrive();
  }

  // Goes past the query tile's tiles of keys that none of this warpgroup's rows sees.
  __device__ __forceinline__ void skip_keys() {
    for (int i = tiles; i < shared.work[work % WORK_TILES].tiles; ++i) {
      Base::pingpong_wait();
      Base::pingpong_arrive();
      Base::wait_key();
      __syncwarp();
      Base::end_key();
      Base::wait_value();
      __syncwarp();
      Base::release(shared.transposed_empty[value_state.stage]);
      value_state.advance();
    }
  }

  // Writes O and LSE of the query tile before, if that has not been done, and empties O.
  __device__ __forceinline__ void write() {
    if (!unwritten) return;
    unwritten = false;
    Base::end_sums();
    if constexpr (STAGED) {
      named_barrier_sync(OUT_EMPTY + warpgroup, WARPGROUP_THREADS);  // all its warps are done with the queries
      const ChannelScales& scale = params.value_scale;
      const int batch = shared.work[ended % WORK_TILES].batch, head_kv = shared.head_kv[ended % WORK_TILES];
      const float* scales = scale.data + batch * scale.batch + head_kv * scale.head;
      if (scale.channel == 0) {
        const float all = *scales;
        stage([all](int) { return all; });
      } else {
        stage([&](int channel) { return scales[channel * scale.channel]; });
      }
      __syncwarp();  // O is emptied here, not ahead of a branch, for which it would be copied for every tile
      Base::clear(o);
      leaving = true;
    } else {
      Base::store();
    }
  }

  // The i-th panel of O in shared memory.
  __device__ __forceinline__ Byte* panel_at(int i) const {
    if (i >= Shared::QUERY_PANELS) return shared.out[warpgroup][i - Shared::QUERY_PANELS];
    return shared.query[query_state.stage ^ 1][warpgroup][0] + i * OUT_PANEL_BYTES;
  }

  // Sends O on its way, panel after panel: each warp its 16 rows.
  template <typename Scale>
  __device__ __forceinline__ void stage(Scale scale) {
    constexpr int ROW_BYTES = 2 * OUT_COLUMNS, BLOCKS = OUT_COLUMNS / 16;
    const WorkTile& of = shared.work[ended % WORK_TILES];
    const int warp_row = thread / 32 * 16, row = thread % 32 / 4, lane = thread % 4;
    const bool odd = row % 2;
    if constexpr (PROMOTES) fence_proxy_async_global();  // sums have been there
#pragma unroll
    for (int panel = 0; panel < HEAD_DIM / OUT_COLUMNS; ++panel) {
      if (panel >= PANELS) {
        tma_store_wait_read<PANELS - 1>();
        __syncwarp();
      }
      Byte* const rows = panel_at(panel % PANELS) + warp_row * ROW_BYTES;
      uint32 words[2][BLOCKS][2];  // of each row, four channels each
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        const int block = BLOCKS * panel + i;
        float by[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) by[j] = scale(16 * block + 4 * lane + j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = channel_of_quad(o, block, half, j) * (inverse[half] * by[j]);
          words[half][i][0] = pack<T>(x[0], x[1]);
          words[half][i][1] = pack<T>(x[2], x[3]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {  // odd rows begin in the middle: so no two lanes meet in a bank
          const uint32(&four)[2] = words[half][i], (&other)[2] = words[half][i ^ 2];
          const int chunk = 2 * (i ^ (odd ? 2 : 0)) + lane / 2;
          auto* const to = reinterpret_cast<uint2*>(rows + swizzled<ROW_BYTES>(8 * half + row, chunk) + 8 * (lane % 2));
          *to = make_uint2(odd ? other[0] : four[0], odd ? other[1] : four[1]);
        }
      }
      fence_proxy_async();
      __syncwarp();
      if (elect_one()) {
        tma_store(out, rows, OUT_COLUMNS * panel, of.first_row + ROWS * warpgroup + warp_row, of.head, of.batch);
        tma_store_commit();
      }
    }
  }

  // Lets go of the queries before, whose place O of them has left.
  __device__ __forceinline__ void release_query() {
    if (!leaving) return;
    leaving = false;
    tma_store_wait_read<0>();
    mbarrier_arrive(shared.query_empty[query_state.stage ^ 1]);
  }

  __device__ __forceinline__ void run() {
    Sum sums[BLOCK_N / 2];
    float converted[Shared::INTEGERS ? BLOCK_N / 2 : 1];
    Scores& s = Base::scores_of(sums, converted);
    Base::clear(o);
    Base::clear_sums();
    if (warpgroup == CONSUMERS - 1) Base::pingpong_arrive();
    while (true) {
      const bool more = begin_query();
      if (more && tiles > 0) {
        run_query(sums, s);
      } else {
        write();
        if (!more) break;
        skip_query();
      }
      skip_keys();
      ++work;
    }
    if (warpgroup == 0) Base::pingpong_wait();  // nobody else takes the last one
    if constexpr (STAGED) tma_store_wait_read<0>();
  }
};

}  // namespace microsdpa::hopper::throughput_8bit
