// What consumers of hopper/backward do with accumulators of transposed products: a row of S^T is a key's, a column a
// query's.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/softmax.cuh"
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "../common/masked_scores.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

// Of a warpgroup's rows, those of a thread.
__device__ __forceinline__ int key_row(int thread, int half) { return thread / 32 * 16 + 8 * half + thread % 32 / 4; }
// The first of the two columns of eight that a thread has.
__device__ __forceinline__ int first_column(int thread) { return thread % 4 * 2; }

// Bytes of eight rows of a panel: the stride of a descriptor.
template <typename C>
constexpr int EIGHT_ROWS_BYTES = 8 * BOX * sizeof(typename C::T);

// Starts d = X Y^T of 64 rows of a tile that the CTA owns and all of one that is walked over.
template <typename C>
__device__ __forceinline__ void start_product(float (&d)[C::BLOCK_M / 2], const typename C::T* owned,
                                              const typename C::T* walked) {
  using T = typename C::T;
  const uint64 a = matrix_descriptor(owned, 16, EIGHT_ROWS_BYTES<C>, Swizzle::BYTES_128);
  const uint64 b = matrix_descriptor(walked, 16, EIGHT_ROWS_BYTES<C>, Swizzle::BYTES_128);
  wgmma_fence_registers(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < C::HEAD_DIM / 16; ++k) {
    const int panel = k * 16 / BOX, at = k * 16 % BOX;
    wgmma<T, C::BLOCK_M>(d, advance(a, (panel * C::BLOCK_N * BOX + at) * sizeof(T)),
                         advance(b, (panel * C::BLOCK_M * BOX + at) * sizeof(T)), k > 0);
  }
  wgmma_commit();
}

// Starts sums += F X, of A operands F and a tile that is walked over.
template <typename C>
__device__ __forceinline__ void start_sums(float (&sums)[C::HEAD_DIM / 2], const uint32 (&factors)[C::BLOCK_M / 16][4],
                                           const typename C::T* walked) {
  using T = typename C::T;
  const uint64 b = matrix_descriptor(walked, C::BLOCK_M * BOX * sizeof(T), EIGHT_ROWS_BYTES<C>, Swizzle::BYTES_128);
  wgmma_fence_registers(sums);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < C::BLOCK_M / 16; ++k) {
    wgmma<T, C::HEAD_DIM, Major::MN>(sums, factors[k], advance(b, 16 * BOX * k * sizeof(T)));
  }
  wgmma_commit();
}

// This warp is done with a tile in shared memory.
__device__ __forceinline__ void release(Mbarrier& done) {
  __syncwarp();
  if (elect_one()) mbarrier_arrive(done);
}

// What a query head has of its own: ALiBi's slope, base 2, and which of a lane's two keys its mask shows.
template <typename M>
struct OfHead {
  float slope = 0.0f;
  bool shown[2] = {true, true};

  template <typename Consumer>
  __device__ __forceinline__ OfHead(const Consumer& of, int64 head) {
    if constexpr (M::ALIBI) {
      constexpr float LOG2_E = 1.44269504088896340736f;
      slope = LOG2_E * of.masks.slopes[of.walk.batch * of.masks.slope_batch_stride + head * of.masks.slope_head_stride];
    }
    if constexpr (M::HIDES_KEYS) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = min(of.first_key + key_row(of.thread, half), of.call.seqlen_k - 1);
        shown[half] = shows(of.masks, of.walk.batch, head, key);
      }
    }
  }
};

// Whether a consumer's keys and a tile of queries, all of them, see one another. One answer for a warp.
template <typename M, typename Consumer>
__device__ __forceinline__ bool sees_all(const Consumer& of, int stage, int first_query, const OfHead<M>& of_head) {
  const int last_key = of.first_key + ROWS - 1, last_query = first_query + Consumer::BLOCK_M - 1;
  bool all = last_key < of.call.seqlen_k && !(M::RIGHT && last_key > first_query + of.call.diagonal);
  if constexpr (M::LEFT) all = all && of.first_key >= last_query + of.masks.lowest;
  if constexpr (M::HIDES_KEYS) all = all && __all_sync(FULL_WARP, of_head.shown[0] && of_head.shown[1]);
  if constexpr (M::RANGED) {
    const int32* of_all = of.shared.ranges.ends[stage] + 2 * Consumer::BLOCK_M;
    all = all && of.first_key >= of_all[2] && last_key < of_all[3];
  }
  return all;
}

// The queries of a tile that see one of a lane's two keys, in columns of eight that begin with the lane's.
template <typename M>
struct SeenColumns {
  int key, first, last;

  template <typename Consumer>
  __device__ __forceinline__ SeenColumns(const Consumer& of, int half, int first_query, const OfHead<M>& of_head)
      : key(of.first_key + key_row(of.thread, half)) {
    first = M::RIGHT ? key - of.call.diagonal - first_query : 0, last = Consumer::BLOCK_M;
    if constexpr (M::LEFT) last = key - of.masks.lowest - first_query;
    if (key >= of.call.seqlen_k || (M::HIDES_KEYS && !of_head.shown[half])) first = Consumer::BLOCK_M;
    first -= first_column(of.thread), last -= first_column(of.thread);
  }

  // `ends`: RANGED, those of the column's query.
  __device__ __forceinline__ bool hides(int column, KeyRange ends) const {
    if (M::RANGED && (key < ends.first || key >= ends.last)) return true;
    return column < first || (M::LEFT && column > last);
  }
};

// Ranges of keys of the two queries that a lane has of eight columns.
template <typename M>
struct PairOfRanges {
  KeyRange of[2];

  template <typename Consumer>
  __device__ __forceinline__ PairOfRanges(const Consumer& consumer, int stage, int n) {
    if constexpr (M::RANGED) {
      const int32* first = consumer.shared.ranges.ends[stage] + 8 * n + first_column(consumer.thread);
      const int2 begins = *reinterpret_cast<const int2*>(first);
      const int2 ends = *reinterpret_cast<const int2*>(first + Consumer::BLOCK_M);
      of[0] = {begins.x, ends.x}, of[1] = {begins.y, ends.y};
    }
  }
};

// Scores of a lane, base 2, less the LSE of their queries.
template <typename M>
struct Exponents {
  float slope;
  float before[2];  // positions by which the lane's first query is before each of its keys

  template <typename Consumer>
  __device__ __forceinline__ Exponents(const Consumer& of, int first_query, float slope) : slope(slope) {
    if constexpr (M::ALIBI) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = of.first_key + key_row(of.thread, half);
        before[half] = static_cast<float>(key - of.masks.position - first_query - first_column(of.thread));
      }
    }
  }

  // Of the score of a column and of one of the two keys, which `factor` is still to multiply.
  __device__ __forceinline__ float operator()(float score, float factor, float lse, int column, int half) const {
    const float x = fmaf(score, factor, -lse);
    if constexpr (!M::ALIBI) return x;
    return fmaf(-slope, fabsf(before[half] - static_cast<float>(column)), x);
  }
};

// Makes P of a consumer's S under a soft cap, rounds it, and multiplies it by the derivative of the cap: dS is made of
// that. The derivative of cap tanh(x / cap) is 1 - tanh(x / cap)^2.
template <typename M, bool PARTIAL, bool EXACT, typename Consumer>
__device__ __forceinline__ void weigh_capped(const Consumer& of, typename Consumer::Products& p,
                                             typename Consumer::Rounded& rounded, int stage, int first_query,
                                             const OfHead<M>& of_head) {
  using T = typename Consumer::T;
  const SoftCap<EXACT> cap(of.masks.softcap_log2);
  const Exponents<M> exponents(of, first_query, of_head.slope);
  const SeenColumns<M> seen[2] = {{of, 0, first_query, of_head}, {of, 1, first_query, of_head}};
#pragma unroll
  for (int n = 0; n < Consumer::BLOCK_M / 8; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(&of.shared.lse[stage][8 * n + first_column(of.thread)]);
    const PairOfRanges<M> ranges(of, stage, n);
    float slant[4];  // the derivative
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + e % 2;
      const float capped = cap(of.s[4 * n + e] * of.call.scale_log2), tanh = capped * cap.inverse;
      slant[e] = fmaf(-tanh, tanh, 1.0f);
      float weight = ex2_approx(exponents(capped, 1.0f, e % 2 ? lse.y : lse.x, column, e / 2));
      if (PARTIAL && seen[e / 2].hides(column, ranges.of[e % 2])) weight = 0.0f;
      p[4 * n + e] = weight;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rounded[n / 2][n % 2 * 2 + half] = pack<T>(p[4 * n + 2 * half], p[4 * n + 2 * half + 1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) p[4 * n + e] *= slant[e];
  }
}

// Makes P of a consumer's S; under a soft cap also rounds it, and leaves what dS is made of in `p`. Accumulators keep
// what wgmma left in them: ptxas takes one that others write to for in use.
template <typename M, typename Consumer>
__device__ __forceinline__ void weigh(const Consumer& of, typename Consumer::Products& p,
                                      typename Consumer::Rounded& rounded, int stage, int first_query,
                                      const OfHead<M>& of_head) {
  constexpr int BLOCK_M = Consumer::BLOCK_M;
  if constexpr (M::SOFTCAP) {
    if (of.masks.softcap_log2 > SoftCap<true>::LARGE) {
      weigh_capped<M, true, true>(of, p, rounded, stage, first_query, of_head);
    } else if (sees_all<M>(of, stage, first_query, of_head)) {
      weigh_capped<M, false, false>(of, p, rounded, stage, first_query, of_head);
    } else {
      weigh_capped<M, true, false>(of, p, rounded, stage, first_query, of_head);
    }
    return;
  }
  const Exponents<M> exponents(of, first_query, of_head.slope);
#pragma unroll
  for (int n = 0; n < BLOCK_M / 8; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(&of.shared.lse[stage][8 * n + first_column(of.thread)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float own = e % 2 ? lse.y : lse.x;
      p[4 * n + e] = ex2_approx(exponents(of.s[4 * n + e], of.call.scale_log2, own, 8 * n + e % 2, e / 2));
    }
  }
  if (sees_all<M>(of, stage, first_query, of_head)) return;
  const SeenColumns<M> seen[2] = {{of, 0, first_query, of_head}, {of, 1, first_query, of_head}};
#pragma unroll
  for (int n = 0; n < BLOCK_M / 8; ++n) {
    const PairOfRanges<M> ranges(of, stage, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (seen[e / 2].hides(8 * n + e % 2, ranges.of[e % 2])) p[4 * n + e] = 0.0f;
    }
  }
}

// Drops nothing.
template <int N>
struct DropsNothing {
  static constexpr bool ANY = false;
  __device__ __forceinline__ explicit DropsNothing(const BackwardParams&) {}
};

// Drops some of N probabilities of a lane. SIGNS: they get a minus sign until P and dS are made of them, by threads of
// their own.
template <int N, bool SIGNS_>
struct Drops {
  static constexpr bool ANY = true, SIGNS = SIGNS_;

  const DropoutParams& given;
  const float scale;  // of what is kept
  DroppedTransposed<N> next;

  __device__ __forceinline__ explicit Drops(const Dropped<BackwardParams>& params)
      : given(params.dropout), scale(given.scale) {}

  // Draws for a tile of queries. The generator is made anew each time, so that it takes no registers in between.
  template <typename Consumer>
  __device__ __forceinline__ void draw(const Consumer& of, const Turn& at) {
    next.draw(Philox(given).of_warp(), KeptNumbers(given.kept), of.walk.batch * of.call.heads + at.head,
              of.first_key + key_row(of.thread, 0), at.tile * Consumer::BLOCK_M);
  }

  // What dP of the i-th probability is multiplied by.
  __device__ __forceinline__ float factor(int i, float p) const {
    return (SIGNS ? p < 0.0f : next.has(i)) ? 0.0f : scale;
  }
};
template <bool DROPS, int N, bool SIGNS = false>
struct DropIf {
  using Type = DropsNothing<N>;
};
template <int N, bool SIGNS>
struct DropIf<true, N, SIGNS> {
  using Type = Drops<N, SIGNS>;
};

// Makes dS of P and dP, in the place of P.
template <int N, typename Drop>
__device__ __forceinline__ void differentiate(float (&p)[N], const float (&dp)[N], const float* delta_of_column,
                                              int thread, const Drop& drop) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    const float2 delta = *reinterpret_cast<const float2*>(&delta_of_column[8 * n + first_column(thread)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float subtract = e % 2 ? delta.y : delta.x;
      if constexpr (Drop::ANY) {
        const float factor = drop.factor(4 * n + e, p[4 * n + e]);
        p[4 * n + e] = fabsf(p[4 * n + e]) * fmaf(dp[4 * n + e], factor, -subtract);
      } else {
        p[4 * n + e] *= dp[4 * n + e] - subtract;
      }
    }
  }
}

// Makes A operands.
template <typename T, int K, int N>
__device__ __forceinline__ void round_to(uint32 (&to)[K][4], const float (&from)[N]) {
  static_assert(N == 8 * K, "eight numbers an operand");
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[k][i] = pack<T>(from[8 * k + 2 * i], from[8 * k + 2 * i + 1]);
  }
}

// The same of probabilities, less what is dropped.
template <typename T, int K, int N, typename Drop>
__device__ __forceinline__ void round_kept_to(uint32 (&to)[K][4], const float (&p)[N], const Drop& drop) {
  if constexpr (!Drop::ANY) {
    round_to<T>(to, p);
  } else if constexpr (Drop::SIGNS) {
    float kept[N];
#pragma unroll
    for (int i = 0; i < N; ++i) kept[i] = p[i] < 0.0f ? 0.0f : p[i];
    round_to<T>(to, kept);
  } else {
    round_to<T>(to, p);
    drop.next.drop(to);
  }
}

// Where 16 bytes of one of a consumer's rows lie in a tile of all keys of the CTA.
template <typename Consumer, typename T>
__device__ __forceinline__ T* place(const Consumer& of, T* tile, int block) {
  constexpr int BLOCK_N = Consumer::BLOCK_N;
  const int lane = of.thread % 32, row = of.rows() * ROWS + of.thread / 32 * 16 + lane % 16;
  const int chunk = (2 * block % 8 + lane / 16) ^ row % 8;
  return tile + 16 * block / BOX * BLOCK_N * BOX + row * BOX + 8 * chunk;
}

// The same in panels of 16 columns, with a pattern of 32 bytes.
template <typename Consumer, typename T>
__device__ __forceinline__ T* place_in_sixteens(const Consumer& of, T* tile, int block) {
  const int lane = of.thread % 32, row = of.rows() * ROWS + of.thread / 32 * 16 + lane % 16;
  return tile + (block * Consumer::BLOCK_N + row) * 16 + 8 * (lane / 16 ^ row / 4 % 2);
}

// Leaves a consumer's part of dQ where it is added to global memory.
template <int N>
__device__ __forceinline__ void put_sums(float* sums, const float (&dq)[N], int warpgroup, int thread, bool first) {
  if (!first) named_barrier_sync(SUMS_EMPTY + warpgroup, SUMS_THREADS);
  auto* to = reinterpret_cast<float4*>(sums) + thread;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    to[i * WARPGROUP_THREADS] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
  fence_proxy_async();
  named_barrier_arrive(SUMS_FULL + warpgroup, SUMS_THREADS);
}

// Leaves a consumer's part of dQ, which is whole, where it is stored from.
template <typename T, int N>
__device__ __forceinline__ void put_queries(T* tile, const float (&dq)[N], float factor, int warpgroup, int thread,
                                            bool first) {
  if (!first) named_barrier_sync(SUMS_EMPTY + warpgroup, SUMS_THREADS);
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    uint32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = pack<T>(dq[8 * block + 2 * i] * factor, dq[8 * block + 2 * i + 1] * factor);
    stmatrix(tile + row * BOX + 8 * ((2 * block + lane / 16) ^ row % 8), word);
  }
  fence_proxy_async();
  named_barrier_arrive(SUMS_FULL + warpgroup, SUMS_THREADS);
}

// Writes a consumer's rows of a sum, which lie in a tile that nobody reads any more.
template <typename Consumer>
__device__ __forceinline__ void store(const Consumer& of, const TensorMap& map, typename Consumer::T* tile,
                                      const typename Consumer::Sums& sums, float factor) {
  using T = typename Consumer::T;
  constexpr int BLOCK_N = Consumer::BLOCK_N, HEAD_DIM = Consumer::HEAD_DIM;
#pragma unroll
  for (int block = 0; block < HEAD_DIM / 16; ++block) {
    uint32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = pack<T>(sums[8 * block + 2 * i] * factor, sums[8 * block + 2 * i + 1] * factor);
    }
    stmatrix(place(of, tile, block), word);
  }
  fence_proxy_async();
  named_barrier_sync(CONSUMER + of.warpgroup, WARPGROUP_THREADS);
  if (of.thread / 32 == 0 && elect_one()) {
#pragma unroll
    for (int panel = 0; panel < Consumer::COLUMNS / BOX; ++panel) {
      tma_store(map, tile + (panel * BLOCK_N + of.rows() * ROWS) * BOX, panel * BOX, of.first_key, of.walk.head_kv,
                of.walk.batch);
    }
    tma_store_commit();
  }
}

}  // namespace microsdpa::hopper::backward
