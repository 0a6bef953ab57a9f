// What a warpgroup of hopper/latency/kernel.cu does with its keys: S, probabilities, P V, and the rows' state.
#pragma once

#include "../../common/head.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../common/prologue.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../common/eight_bit.cuh"
#include "combine.cuh"
#include "mask.cuh"
#include "score_masks.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

template <typename E, int HEAD_DIM>
constexpr int TILE_BYTES = BLOCK_N * (PANELS<HEAD_DIM> * PANEL + TAIL<HEAD_DIM>)*static_cast<int>(sizeof(E));

// A tensor's boxes: of PANEL columns, and of TAIL where tiles have one.
struct Boxes {
  const TensorMap& panel;
  const TensorMap& tail;
};

// Copies tiles of 64 rows of one head. Rows and columns past the tensor become zeros. ANNOUNCED: `full` expects them
// already.
template <typename E, int HEAD_DIM, int TILES = 1, bool ANNOUNCED = false>
__device__ __forceinline__ void load_tile(E* shared, E* tail, const Boxes& boxes, Mbarrier& full, int row, int head,
                                          int batch) {
  static_assert(TILES == 1 || BOXES<E, HEAD_DIM> == 1, "tiles of one box lie behind one another");
  if (!ANNOUNCED) mbarrier_arrive_expect(full, TILES * TILE_BYTES<E, HEAD_DIM>);
#pragma unroll
  for (int box = 0; box < BOXES<E, HEAD_DIM>; ++box) {
    tma_load(shared + box * BLOCK_N * PANEL, boxes.panel, full, box * PANEL, row, head, batch);
  }
  if constexpr (TAIL<HEAD_DIM> > 0) {
    tma_load(tail, boxes.tail, full, PANELS<HEAD_DIM> * PANEL, row, head, batch);
  }
}

// Whether a call without LSE leaves right behind its output: 0.02 us faster with two rounds and no mask, 0.01 slower
// elsewhere.
template <int CLUSTER, int ROUNDS, bool MASKED>
constexpr bool LSE_LAST = CLUSTER == 2 && ROUNDS == 2 && !MASKED;

// What a kernel is compiled for; kernel.cu says what each is.
template <typename OPERANDS, int HEAD_DIM_, int COLUMNS_, int CLUSTER_, int STAGES_, int ROUNDS_, bool CAUSAL_,
          bool MASKED_, typename MASKS_, int MASK_ROWS_, typename PROLOGUE_>
struct Configuration {
  using Operands = OperandsOf<OPERANDS>;
  using T = typename Operands::Element;
  using MASKS = MASKS_;
  using PROLOGUE = PROLOGUE_;
  using MaskMemory = typename MaskMemoryOf<MASKS_, MASK_ROWS_, ROUNDS_>::Type;
  static constexpr int HEAD_DIM = HEAD_DIM_, COLUMNS = COLUMNS_, CLUSTER = CLUSTER_, STAGES = STAGES_, ROUNDS = ROUNDS_;
  static constexpr bool CAUSAL = CAUSAL_, RAGGED = MASKED_, MASKED = MASKED_ || MASKS::ANY;
  static constexpr bool LATE_LSE = LSE_LAST<CLUSTER, ROUNDS, MASKED>;
  using Shared = SharedStorage<OPERANDS, HEAD_DIM, STAGES, MaskMemory>;
};

// Eight columns of a row of a tile of Q or K, as bulk copies lay them out.
template <int HEAD_DIM, typename T>
__device__ __forceinline__ T* chunk_of(T* tile, T* tail, int row, int column) {
  if constexpr (TAIL<HEAD_DIM> > 0) {
    if (column >= PANELS<HEAD_DIM> * PANEL) {
      return tail + row * TAIL<HEAD_DIM> + (column / 8 % 2 ^ (row / 4 % 2)) * 8;
    }
  }
  return tile + column / PANEL * BLOCK_N * PANEL + row * PANEL + ((column / 8 ^ row) % 8) * 8;
}

// Rows that norms and rotary embedding change, and of which angles and weights are requested ahead of the products.
constexpr int QUERIES_OF_WARP = BLOCK_M / (THREADS / 32), KEYS_OF_WARP = BLOCK_N / (WARPGROUP_THREADS / 32);
template <typename C, bool KEY, int ROWS>
using WarpRows = PrologueRows<typename C::PROLOGUE, KEY, typename C::T, C::COLUMNS,
                              ROWS / PrologueRow<typename C::PROLOGUE, KEY, typename C::T, C::COLUMNS>::AT_ONCE>;
template <typename C, bool ANY = C::PROLOGUE::ANY>
struct FirstRows {};
template <typename C>
struct FirstRows<C, true> {
  using Queries = WarpRows<C, false, QUERIES_OF_WARP>;
  using Keys = WarpRows<C, true, KEYS_OF_WARP>;
  static constexpr int ROUNDS = C::ROUNDS >= 2 && C::COLUMNS <= PANEL ? 2 : 1;

  Queries queries;
  Keys keys[ROUNDS];
};

// A warpgroup's way through its keys.
template <typename C>
struct Consumer : Exchange<C> {
  using Base = Exchange<C>;
  using T = typename C::T;
  using MASKS = typename C::MASKS;
  using PROLOGUE = typename C::PROLOGUE;
  using Rules = ScoreMasks<MASKS, C::CLUSTER, C::CAUSAL, C::RAGGED, typename C::MaskMemory>;
  using Base::fragment, Base::params, Base::stabilizer, Base::shared, Base::sum, Base::warpgroup, Base::work;
  static constexpr int HEAD_DIM = C::HEAD_DIM, CLUSTER = C::CLUSTER, STAGES = C::STAGES, ROUNDS = C::ROUNDS;
  static constexpr bool CAUSAL = C::CAUSAL, MASKED = C::MASKED;
  using Operands = typename C::Operands;
  using QueryKey = typename Operands::QueryKey;
  static constexpr int END = TAIL<HEAD_DIM>;
  static constexpr int STEP = 32 / static_cast<int>(sizeof(QueryKey));  // columns of a step of Q K^T
  static constexpr int TERM_STEPS = (C::COLUMNS + STEP - 1) / STEP, QUERY_STEPS = Operands::TERMS * TERM_STEPS;
  static constexpr int PANEL_STEPS = END > 0 ? (HEAD_DIM - END) / 16 : QUERY_STEPS;
  static constexpr Swizzle TAIL_PATTERN = Swizzle::BYTES_32;
  static constexpr int STEPS = BLOCK_N / 16;           // of P V, 16 keys each
  static constexpr int QUARTER = BLOCK_N / 2 / STEPS;  // a thread's scores of 16 keys
  static constexpr int QUADRUPLES = Base::QUADRUPLES;
  // The last tile's probabilities are made for the peer's rows first.
  static constexpr bool PEER_FIRST = CLUSTER == 2 && ROUNDS > 0;
  // S begins with the mask instead of 0, which is written while the first keys are on their way.
  // Of further masks that are the numbers; what they hide gets no probability, and ALiBi is a part of the exponents.
  static constexpr bool MASK_AHEAD =
      MASKED && (ROUNDS == 1 || ROUNDS == 2) && (!MASKS::ANY || Rules::ADDS) && !Operands::EIGHT_BIT;
  // Mask numbers are added to products: of 8-bit values, S cannot begin with them.
  static constexpr bool ADDED_BEHIND = Operands::EIGHT_BIT && Rules::ADDS;
  // Whether accumulators have become scores when their exponentials are made: base 2, masks and all.
  template <bool EXACT>
  static constexpr bool SCORED = MASKS::ANY && (EXACT || ADDED_BEHIND);
  // The first tile's S comes in two halves; the stabilizer is found in one while the other is computed.
  static constexpr bool FIRST_IN_HALVES = ROUNDS > 0 && (!MASKED || MASK_AHEAD || MASKS::ANY);

  const Boxes key_boxes;
  const Boxes value_boxes;
  const float scale;  // > 0, base 2; 1 where products are scaled already
  const typename MASKS::Params& arguments;
  const typename PROLOGUE::Given given;
  FirstRows<C> first;  // whose norms and rotary embedding begin first

  uint32 query[QUERY_STEPS][4];
  float o[HEAD_DIM / 2];
  // The stabilizers, finite; then, of 8-bit values, what products of each row are multiplied with, base 2: > 0.
  float subtract[Operands::EIGHT_BIT ? 4 : 2];
  MaskState<Rules, ROUNDS == 0 ? 1 : ROUNDS> masks;
  float rest[HEAD_DIM / 2];  // PEER_FIRST: what the last tile adds to this CTA's own rows

  // Norms and rotary embedding of Q, and of this warpgroup's keys (prologue.cuh).
  __device__ __forceinline__ void fetch_first();
  __device__ __forceinline__ void change_first();
  __device__ __forceinline__ void change_keys(int round);
  __device__ __forceinline__ T* key_chunk(int stage, int row, int column) const {
    return chunk_of<HEAD_DIM>(shared.key[stage][warpgroup], shared.key_tail(stage, warpgroup), row, column);
  }

  // Q's fragments. A negative scale is a positive one of -Q.
  __device__ __forceinline__ void load_query() {
    const int lane = fragment.lane();
    const int row = fragment.tile_row(lane / 8 % 2, lane % 8);
    mbarrier_wait(shared.query_full(), 0);
#pragma unroll
    for (int step = 0; step < PANEL_STEPS; ++step) {
      if constexpr (Operands::EIGHT_BIT) {
        const QueryKey* tile = shared.query + step / TERM_STEPS * BLOCK_M * HEAD_DIM;
        ldmatrix(query[step], tile + swizzled<HEAD_DIM>(row, step % TERM_STEPS * 2 + lane / 16));
      } else {
        const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
        ldmatrix(query[step], shared.query + step / 4 * BLOCK_M * PANEL + row * PANEL + chunk * 8);
      }
    }
    if constexpr (END > 0) {
      ldmatrix(query[PANEL_STEPS], shared.query_tail() + row * END + ((lane / 16) ^ (row / 4 % 2)) * 8);
    }
    if (Operands::INTEGERS) return;  // sums get the sign
    if (params.scale_log2 < 0.0f) {
#pragma unroll
      for (int step = 0; step < QUERY_STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) query[step][i] ^= Operands::EIGHT_BIT ? 0x80808080u : 0x80008000u;
      }
    }
  }

  // Starts S of a round, added to what is there when it is BEGUN, in PARTS groups of consecutive keys.
  template <bool BEGUN = false, int PARTS = 1>
  __device__ __forceinline__ void score(float (&s)[BLOCK_N / 2], int round) {
    constexpr int KEYS = BLOCK_N / PARTS;
    const int stage = round % STAGES;
    if constexpr (Operands::EIGHT_BIT) {
      score_eight_bit<BEGUN, PARTS>(s, stage);
      return;
    }
    const uint64 key = matrix_descriptor(shared.key[stage][warpgroup], 16, 8 * PANEL * sizeof(T), Swizzle::BYTES_128);
    if constexpr (!PROLOGUE::ANY) mbarrier_wait(shared.key_full(stage, warpgroup), round / STAGES % 2);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < PANEL_STEPS; ++step) {
        const int offset = step / 4 * BLOCK_N * PANEL + step % 4 * 16 + part * KEYS * PANEL;
        wgmma<T, KEYS>(part_of<PARTS>(s, part), query[step], advance(key, offset * sizeof(T)), BEGUN || step > 0);
      }
      if constexpr (END > 0) {
        const uint64 tail = matrix_descriptor(shared.key_tail(stage, warpgroup), 16, 8 * END * sizeof(T), TAIL_PATTERN);
        wgmma<T, KEYS>(part_of<PARTS>(s, part), query[PANEL_STEPS], advance(tail, part * KEYS * END * sizeof(T)));
      }
      wgmma_commit();
    }
  }

  // The same of 8-bit values.
  template <bool BEGUN, int PARTS>
  __device__ __forceinline__ void score_eight_bit(float (&s)[BLOCK_N / 2], int stage) {
    constexpr int KEYS = BLOCK_N / PARTS;
    const uint64 key = matrix_descriptor(shared.key[stage][warpgroup], 16, 8 * HEAD_DIM, PATTERN_OF_ROWS<HEAD_DIM>);
    mbarrier_wait(shared.key_full(stage, warpgroup), 0);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < QUERY_STEPS; ++step) {
        const uint64 place = advance(key, part * KEYS * HEAD_DIM + step % TERM_STEPS * STEP);
        if constexpr (Operands::INTEGERS) {
          wgmma<QueryKey, KEYS>(reinterpret_cast<int32(&)[KEYS / 2]>(part_of<PARTS>(s, part)), query[step], place,
                                BEGUN || step > 0);
        } else {
          wgmma<QueryKey, KEYS>(part_of<PARTS>(s, part), query[step], place, BEGUN || step > 0);
        }
      }
      wgmma_commit();
    }
  }

  // Makes products of what the tensor cores have left in accumulators FIRST to LAST - 1 of a tile: for 8-bit values.
  // Under masks these are scores of base 2, since masks know no scale of a row.
  template <int FIRST = 0, int LAST = BLOCK_N / 2>
  __device__ __forceinline__ void take_products(float (&s)[BLOCK_N / 2], int round) const {
    if constexpr (Operands::INTEGERS) {
#pragma unroll
      for (int i = FIRST; i < LAST; ++i) s[i] = static_cast<float>(__float_as_int(s[i]));
      if (params.scale_log2 < 0.0f) {
#pragma unroll
        for (int i = FIRST; i < LAST; ++i) s[i] = -s[i];
      }
    }
    if constexpr (Operands::KEY_SCALES) {
      const float* scales = shared.key_scale + BLOCK_N * (WARPGROUPS * round + warpgroup) + 2 * fragment.quad_lane();
#pragma unroll
      for (int n = FIRST / 4; n < LAST / 4; ++n) {
        const auto both = *reinterpret_cast<const Vector<float, 2>*>(scales + 8 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          s[4 * n + 2 * half] *= both.data[0];
          s[4 * n + 2 * half + 1] *= both.data[1];
        }
      }
    }
    if constexpr (Operands::EIGHT_BIT && MASKS::ANY) {
#pragma unroll
      for (int i = FIRST; i < LAST; ++i) s[i] *= subtract[2 + i / 2 % 2];
    }
  }

  __device__ __forceinline__ float factor_of(int half) const {
    if constexpr (Operands::EIGHT_BIT && !MASKS::ANY) return subtract[2 + half];
    return scale;
  }
  __device__ __forceinline__ void read_factors() {
    if constexpr (Operands::EIGHT_BIT) {
      mbarrier_wait(shared.scales_full, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) subtract[2 + half] = shared.row_scale[fragment.tile_row(half)];
    }
  }

  // Adds P V of 16-key steps FIRST to LAST - 1 to `output`, which begins with them unless `begun`. The first of several
  // calls for a tile WAITs for it: a wait takes some 60 clocks, also when there is nothing to wait for.
  template <int FIRST, int LAST, bool WAIT = FIRST == 0>
  __device__ __forceinline__ void accumulate(float (&output)[HEAD_DIM / 2], const uint32 (&p)[STEPS][4], int round,
                                             bool begun) {
    const int stage = round % STAGES;
    const uint64 value = matrix_descriptor(shared.value[stage][warpgroup], BLOCK_N * PANEL * sizeof(T),
                                           8 * PANEL * sizeof(T), Swizzle::BYTES_128);
    if constexpr (Operands::EIGHT_BIT) {
      if (WAIT) mbarrier_wait(shared.wide_full[stage][warpgroup], 0);
    } else if (WAIT && !(Base::Shared::FEW_COPIES && round > 0)) {
      mbarrier_wait(shared.value_full(stage, warpgroup), round / STAGES % 2);
    }
    wgmma_fence();
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
      const uint64 place = advance(value, 16 * PANEL * step * sizeof(T));
      if constexpr (END == 0) {
        wgmma<T, HEAD_DIM, Major::MN>(output, p[step], place, begun || step > FIRST);
      } else {
        constexpr int WIDE = HEAD_DIM - END;
        wgmma<T, WIDE, Major::MN>(reinterpret_cast<Accumulators<WIDE / 2>&>(output), p[step], place,
                                  begun || step > FIRST);
        const uint64 tail =
            matrix_descriptor(shared.value_tail(stage, warpgroup), 16, 8 * END * sizeof(T), TAIL_PATTERN);
        wgmma<T, END, Major::MN>(reinterpret_cast<Accumulators<END / 2>&>(output[WIDE / 2]), p[step],
                                 advance(tail, 16 * END * step * sizeof(T)), begun || step > FIRST);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ TileMask<CLUSTER, CAUSAL> mask_of(int round) const {
    return {params, fragment, work.first_row, work.first_key(round, warpgroup)};
  }
  __device__ __forceinline__ Rules score_masks() const { return {{arguments, work, fragment, shared}, scale}; }
  // What masks ask for (masked_rounds.cuh).
  __device__ __forceinline__ void mask(float (&s)[BLOCK_N / 2], int round);
  __device__ __forceinline__ void mask_behind(float (&s)[BLOCK_N / 2], int round);
  __device__ __forceinline__ void fetch_mask(int round, typename Rules::View& view) const;
  __device__ __forceinline__ void read_masks();
  __device__ __forceinline__ void look_at_rows();
  __device__ __forceinline__ void look_at_samples(float (&found)[2]);
  __device__ __forceinline__ void see_keys(int round);
  // Whether a row sees key 8 n + e of the thread's own.
  __device__ __forceinline__ bool sees(int round, int half, int n, int e) const {
    if constexpr (!Rules::SOME_HIDDEN) return true;
    return masks.seen[round][half].word[n / 4] >> (n % 4 * 8 + e) & 1;
  }

  // How far below its stabilizer a row's largest score is expected. Where all that masks do is to hide keys, and one of
  // the first is visible, that cannot be the largest one's place.
  __device__ __forceinline__ float headroom(int half) const {
    return !Rules::ADDS && !Rules::ALIBI && masks.sees_first[half] ? 0.0f : HEADROOM<T>;
  }

  // What a row's sum begins with, in one thread: its sink's part.
  __device__ __forceinline__ float sink_part(int half) const {
    if constexpr (MASKS::ANY) {
      if (Rules::SINKS && work.rank == 0 && warpgroup == 0 && fragment.quad_lane() == 0) {
        return ex2_approx(masks.sink - finite(stabilizer[half]));
      }
    }
    return 0.0f;
  }

  // The largest scores of the thread's rows among the first KEYS of a tile, scaled, or what they were before.
  template <int KEYS = BLOCK_N, bool EXACT = KEYS == BLOCK_N, int N>
  __device__ __forceinline__ void maxima(const float (&s)[N], float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = s[2 * half], odd = s[2 * half + 1];
#pragma unroll
      for (int n = 1; n < KEYS / 8; ++n) {
        even = fmaxf(even, s[4 * n + 2 * half]);
        odd = fmaxf(odd, s[4 * n + 2 * half + 1]);
      }
      const float factor = SCORED<EXACT> || IS_CAPPED<MASKS> ? 1.0f : factor_of(half);
      largest[half] = fmaxf(largest[half], quad_max(fmaxf(even, odd)) * factor);
    }
  }

  // Exponent of a probability. EXACT, its product with the scale is rounded as the stabilizer was, which then may be as
  // large as it likes.
  template <int HALF, bool EXACT>
  __device__ __forceinline__ float exponent(float score) const {
    const float factor = factor_of(HALF);
    return EXACT ? __fmul_rn(score, factor) - subtract[HALF] : fmaf(score, factor, -subtract[HALF]);
  }
  // Probability of accumulator `i` of a tile.
  template <int HALF, bool EXACT>
  __device__ __forceinline__ float probability(float score, int i, int round) const {
    if constexpr (!MASKS::ANY) {
      return ex2_approx(exponent<HALF, EXACT>(score));
    } else if constexpr (SCORED<EXACT>) {
      return ex2_approx(score - subtract[HALF]);
    } else {
      float added = -subtract[HALF];
      if constexpr (MASKS::ALIBI && !Rules::ADDS) {
        const float away = score_masks().distance(HALF, work.first_key(round, warpgroup));
        added = fmaf(-masks.slope, fabsf(away - static_cast<float>(i / 4 * 8 + i % 2)), added);
      }
      const float found = ex2_approx(IS_CAPPED<MASKS> ? score + added : fmaf(score, scale, added));
      return sees(round, HALF, i / 4, i % 2) ? found : 0.0f;
    }
  }

  // P of 16-key steps FIRST to LAST - 1 of one half of the rows, as A's fragments.
  template <int HALF, int FIRST, int LAST, bool EXACT>
  __device__ __forceinline__ void half_exponentials(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4], int round) {
    constexpr int PAIRS = QUARTER / 4 * (LAST - FIRST);
    float sums[PAIRS];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int i = QUARTER * FIRST + 4 * pair + 2 * HALF;
      s[i] = probability<HALF, EXACT>(s[i], i, round);
      s[i + 1] = probability<HALF, EXACT>(s[i + 1], i + 1, round);
      sums[pair] = s[i] + s[i + 1];
      p[i / QUARTER][i / 2 % 4] = pack<T>(s[i], s[i + 1]);
    }
    // A tree: additions that wait for one another would take as long as the exponentials.
#pragma unroll
    for (int width = PAIRS / 2; width > 0; width /= 2) {
#pragma unroll
      for (int pair = 0; pair < width; ++pair) sums[pair] += sums[pair + width];
    }
    sum[HALF] += sums[0];
  }
  template <int FIRST, int LAST, bool EXACT>
  __device__ __forceinline__ void exponentials(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4], int round) {
    half_exponentials<0, FIRST, LAST, EXACT>(s, p, round);
    half_exponentials<1, FIRST, LAST, EXACT>(s, p, round);
  }

  // What the rows of the other half are multiplied with beside those of HALF.
  template <int HALF>
  __device__ __forceinline__ static void clear_other(uint32 (&p)[STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) p[step][1 - HALF] = p[step][3 - HALF] = 0;
  }

  // Moves to new stabilizers; O follows when the products that add to it have ended.
  __device__ __forceinline__ void update_stabilizer(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = ex2_approx(stabilizer[half] - (MASKED ? finite(largest[half]) : largest[half]));
      sum[half] *= factor[half];
      stabilizer[half] = largest[half];
    }
  }
  __device__ __forceinline__ void subtract_stabilizers() {
#pragma unroll
    for (int half = 0; half < 2; ++half) subtract[half] = MASKED ? finite(stabilizer[half]) : stabilizer[half];
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= factor[i / 2 % 2];
  }

  // ROUNDS rounds with one stabilizer per row (unrolled.cuh).
  template <bool KNOWN>
  __device__ __forceinline__ void run_unrolled();
  __device__ __forceinline__ void begin_first(float (&s)[BLOCK_N / 2]);
  __device__ __forceinline__ void look_at_masks(float (&s)[2][BLOCK_N / 2]);
  __device__ __forceinline__ void begin_later(float (&s)[2][BLOCK_N / 2]);
  __device__ __forceinline__ void look_at_rows_later();
  __device__ __forceinline__ bool shows_first(int half, int n, int e) const;
  __device__ __forceinline__ void find_masked_stabilizer(const float (&s)[BLOCK_N / 2]);
  template <int N>
  __device__ __forceinline__ void find_stabilizer(const float (&s)[N]);
  __device__ __forceinline__ void know_stabilizer();
  template <bool KNOWN>
  __device__ __forceinline__ void last_round(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4]);
  template <bool KNOWN>
  __device__ __forceinline__ void last_round_peer_first(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4]);

  // Any number of rounds, with the running maximum as stabilizer (online.cuh).
  __device__ __forceinline__ void run_online();
  __device__ __forceinline__ void advance_round(float (&s)[BLOCK_N / 2], float (&next)[BLOCK_N / 2],
                                                uint32 (&p)[STEPS][4], float (&factor)[2], int round);
  __device__ __forceinline__ void last_round(float (&s)[BLOCK_N / 2], uint32 (&p)[STEPS][4], const float (&factor)[2],
                                             int round);
  __device__ __forceinline__ void refill(int key_round, int value_round);
  template <typename Ring>
  __device__ __forceinline__ void refill_place(Ring& ring, const Boxes& boxes, bool is_key, int round);

  // The warpgroups' stabilizers are their own: the larger ones become both's.
  __device__ __forceinline__ void share_stabilizer() {
    float larger[2], factor[2];
    this->larger_stabilizers(larger);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    update_stabilizer(larger, factor);
    rescale(factor);
  }

  // From the products in flight to the output. Gives whether it is wrong, because probabilities have overflowed.
  __device__ __forceinline__ bool combine() {
    this->publish_sums();
    this->await(SUMS_PUBLISHED);
#pragma unroll
    for (int half = 0; half < Base::OWN_ROWS; ++half) this->row[half] = this->weights(half);
    bool wrong = false;  // known ahead of the output, acted on behind it
    if constexpr (!MASKS::ANY) wrong = ROUNDS > 0 && this->overflowed();
    Columns<QUADRUPLES> scales;
    if constexpr (Operands::EIGHT_BIT) this->read_value_scales(scales);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    Columns<QUADRUPLES> columns[2];
    if constexpr (PEER_FIRST) {
      // mutation: it holds back the compiler, and does nothing when the kernel runs
      wgmma_fence_registers(rest);
      if constexpr (ROUNDS > 1) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) rest[i] += o[i];  // the peer's rows are not used any more
      }
      this->template give<0>(rest, columns[0]);
    } else {
      this->template give<0>(o, columns[0]);
    }
    if constexpr (CLUSTER == 1) this->template give<1>(o, columns[1]);
    this->arrive(COLUMNS_GIVEN);
    Columns<QUADRUPLES> peer;
    if constexpr (CLUSTER == 2) this->receive(this->row[0], peer);
    this->await(COLUMNS_GIVEN);
    finish<0>(columns[0], peer, scales);
    if constexpr (CLUSTER == 1) finish<1>(columns[1], peer, scales);
    if constexpr (MASKS::ANY && ROUNDS > 0) wrong = this->out_of_range();  // while the output is on its way
    return wrong;
  }
  template <int HALF>
  __device__ __forceinline__ void finish(Columns<QUADRUPLES>& columns, const Columns<QUADRUPLES>& peer,
                                         const Columns<QUADRUPLES>& scales) const {
    const RowWeights& weights = this->row[HALF];
    this->template take<HALF>(columns);
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = columns.part[i].data[e];
        x = CLUSTER == 2 ? fmaf(x, weights.own, peer.part[i].data[e]) : x * weights.own;
        if constexpr (Operands::EIGHT_BIT) x *= scales.part[i].data[e];
      }
    }
    this->store(HALF, columns);
  }

  __device__ __forceinline__ void run() {
    this->find_place();
    change_first();
    if constexpr (ROUNDS == 0) {
      load_query();
      run_online();
      share_stabilizer();
      if constexpr (CLUSTER == 2) {
        Columns<QUADRUPLES> columns;
        this->template give<1>(o, columns);
        this->arrive(PEER_COLUMNS_GIVEN);
        cluster_wait();
        this->template send_columns<false>(columns);
        this->template send_sum<false>();
      }
      combine();
    } else {
      run_unrolled<false>();
      const bool wrong = combine();
      if (C::LATE_LSE && !wrong && this->place.lse == nullptr) return;
      // Behind the output, so that the common case need not jump over it.
      if (wrong) run_again();
      if (C::LATE_LSE) this->store_lse(0);
    }
  }

  // Again, right for any scores: with each row's largest one as stabilizer, at about twice the time.
  __device__ __forceinline__ void run_again() {
    this->meet_consumers();
    this->deliver_again();
    load_query();
    know_stabilizer();
    run_unrolled<true>();
    combine();
  }
};

}  // namespace microsdpa::hopper::latency
