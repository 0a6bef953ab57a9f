// From four unfinished outputs to one: hopper/latency/kernel.cu's warpgroups and CTAs hold O and l of different keys.
//
// Each warpgroup finishes one half of the columns; of two CTAs each finishes half of the rows. Columns change
// warpgroups through shared memory, then a quarter of O changes CTAs. All that can be known before the last product
// ends is exchanged before it: the peer's rows, then sums and weights.
#pragma once

#include "../../common/accumulator.cuh"
#include "../../common/head.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/control.cuh"
#include "../../ptx/wgmma.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::latency {

// Four consecutive floats of half `half` among a thread's accumulators, from column block `first` on: two pairs. Zeros
// past the last one.
template <int N>
__device__ __forceinline__ Quadruple quadruple(const float (&o)[N], int half, int pair) {
  if (8 * pair >= N) return {0.0f, 0.0f, 0.0f, 0.0f};
  const int i = 8 * pair + 2 * half;
  return {o[i], o[i + 1], o[i + 4], o[i + 5]};
}

__device__ __forceinline__ Quadruple select(bool first, Quadruple a, Quadruple b) {
  return {first ? a.data[0] : b.data[0], first ? a.data[1] : b.data[1], first ? a.data[2] : b.data[2],
          first ? a.data[3] : b.data[3]};
}

// 1 / x of a number that is neither very small nor very large, without the branch for those that are.
__device__ __forceinline__ float reciprocal(float x) {
  float y = __uint_as_float(0x7ef311c7u - __float_as_uint(x));  // within 12%
#pragma unroll
  for (int i = 0; i < 3; ++i) y = fmaf(y, fmaf(-x, y, 1.0f), y);
  return y;
}

// Columns of O that one warpgroup finishes, of one of a thread's rows.
template <int QUADRUPLES>
struct Columns {
  Quadruple part[QUADRUPLES];
};

// How a row's parts of O are put together: the CTA's own, and the peer's.
struct RowWeights {
  float own, peer;
  float stabilizer, sum;  // of all keys
};

// The peer is going to send. One thread.
template <typename Shared>
__device__ __forceinline__ void expect_peer(Shared& shared, int delivery) {
  PeerArrived& arrived = shared.peer_arrived[delivery];
  mbarrier_arrive_expect(arrived.row, sizeof(shared.from_peer[delivery].row));
#pragma unroll
  for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
    mbarrier_arrive_expect(arrived.output[warpgroup], sizeof(shared.from_peer[delivery].output[warpgroup]));
  }
}

// Where a thread's output goes: its first row's columns, and how many rows there are from that one on.
template <typename T>
struct Place {
  T* out;
  int64 row_stride;
  float* lse;  // null when not wanted
  int rows_left;

  // Keeps the compiler from working it out later.
  __device__ __forceinline__ void hold() {
    const uint64 addresses[3] = {reinterpret_cast<uint64>(out), static_cast<uint64>(row_stride),
                                 reinterpret_cast<uint64>(lse)};
    uint32 words[7];
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = static_cast<uint32>(addresses[i / 2] >> 32 * (i % 2));
    words[6] = rows_left;
    wgmma_fence_registers(words);
    out = reinterpret_cast<T*>(static_cast<uint64>(words[1]) << 32 | words[0]);
    row_stride = static_cast<int64>(static_cast<uint64>(words[3]) << 32 | words[2]);
    lse = reinterpret_cast<float*>(static_cast<uint64>(words[5]) << 32 | words[4]);
    rows_left = static_cast<int>(words[6]);
  }
};

// A thread's rows between the last product and the output. `stabilizer` is the same in both warpgroups.
// C: a Configuration (consumer.cuh); LATE_LSE: LSE, when wanted, is written behind the output and not with it.
template <typename C>
struct Exchange {
  using T = typename C::T;
  static constexpr int HEAD_DIM = C::HEAD_DIM, CLUSTER = C::CLUSTER, STAGES = C::STAGES, ROUNDS = C::ROUNDS;
  static constexpr bool LATE_LSE = C::LATE_LSE;
  using Shared = SharedStorage<T, HEAD_DIM, STAGES, typename C::MaskMemory>;
  static constexpr int QUADRUPLES = Shared::QUADRUPLES;
  static constexpr int OWN_ROWS = CLUSTER == 2 ? 1 : 2;  // halves that this CTA finishes
  static constexpr int OWN_COLUMNS = 16 * QUADRUPLES;    // that this warpgroup finishes

  Shared& shared;
  const AttentionParams& params;
  const WorkTile& work;
  const int warpgroup;
  const Fragment<CLUSTER> fragment;

  float stabilizer[2];  // base 2; a score that the row has seen
  float sum[2];         // this warpgroup's part of l; until it is published, this thread's
  int overflow = 0;     // bits: halves of the warp's rows of which probabilities left the range of T
  bool sends = true;    // to the peer
  int received = 0;     // delivery from the peer that counts
  bool sends_again, received_again;
  Place<T> place;
  RowWeights row[OWN_ROWS];  // of the rows that this CTA finishes

  __device__ __forceinline__ void arrive(int event) const { named_barrier_arrive(event + warpgroup, THREADS); }
  __device__ __forceinline__ void await(int event) const { named_barrier_sync(event + 1 - warpgroup, THREADS); }

  // Gives the other warpgroup its columns of one half of the rows, and keeps this one's.
  template <int HALF>
  __device__ __forceinline__ void give(const float (&o)[HEAD_DIM / 2], Columns<QUADRUPLES>& kept) const {
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
      const Quadruple first = quadruple(o, HALF, i), second = quadruple(o, HALF, QUADRUPLES + i);
      kept.part[i] = select(warpgroup == 0, first, second);
      shared.from_neighbour[1 - warpgroup][HALF][i][fragment.thread] = select(warpgroup == 0, second, first);
    }
  }

  // Adds what the other warpgroup has given.
  template <int HALF>
  __device__ __forceinline__ void take(Columns<QUADRUPLES>& kept) const {
    Quadruple theirs[QUADRUPLES];
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) theirs[i] = shared.from_neighbour[warpgroup][HALF][i][fragment.thread];
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept.part[i].data[e] += theirs[i].data[e];
    }
  }

  // This warpgroup's l of one half of the rows; notes an overflow.
  template <int HALF>
  __device__ __forceinline__ bool finish_sum() {
    sum[HALF] = quad_sum(sum[HALF]);
    const bool wrong = ROUNDS > 0 && !(sum[HALF] < LARGEST_SUM<T>);
    if (ROUNDS > 0 && __any_sync(FULL_WARP, wrong)) overflow |= 1 << HALF;
    return wrong;
  }

  // Sends the peer this warpgroup's part of its rows' l, infinity when it comes again; what then comes is the sum,
  // which may be no number. Under masks the peer judges by the sums themselves.
  template <bool AGAIN>
  __device__ __forceinline__ void send_sum() {
    const bool wrong = finish_sum<1>();
    if (sends && fragment.quad_lane() == 0) {
      const int peer = 1 - work.rank;
      store_async(peer_address(&shared.from_peer[AGAIN].row[warpgroup][fragment.row_of_half()], peer), stabilizer[1],
                  wrong && !AGAIN && !C::MASKS::ANY ? -negative_infinity() : sum[1],
                  peer_address(&shared.peer_arrived[AGAIN].row, peer));
    }
    // mutation: the lanes come together for aligned instructions, which the emulator does not ask for
    __syncwarp();
  }

  // Sends the peer its rows of this warpgroup's columns, over both warpgroups' keys.
  template <bool AGAIN>
  __device__ __forceinline__ void send_columns(Columns<QUADRUPLES>& kept) const {
    await(PEER_COLUMNS_GIVEN);
    take<1>(kept);
    if (!sends) return;
    const int peer = 1 - work.rank;
    const ClusterAddress barrier = peer_address(&shared.peer_arrived[AGAIN].output[warpgroup], peer);
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
      const Quadruple& part = kept.part[i];
      store_async(peer_address(&shared.from_peer[AGAIN].output[warpgroup][i][fragment.thread], peer), part.data[0],
                  part.data[1], part.data[2], part.data[3], barrier);
    }
  }

  // Shows the other warpgroup this one's part of l of the rows that this CTA finishes.
  __device__ __forceinline__ void publish_sums() {
    finish_sum<0>();
    if (CLUSTER == 1) finish_sum<1>();
    if (fragment.quad_lane() == 0) {
#pragma unroll
      for (int half = 0; half < (C::MASKS::ANY ? 2 : OWN_ROWS); ++half)
        shared.sum[warpgroup][half][fragment.row_of_half()] = sum[half];
    }
    if (ROUNDS > 0 && fragment.lane() == 0) shared.overflow[warpgroup].data[fragment.warp()] = overflow;
    arrive(SUMS_PUBLISHED);
  }

  __device__ __forceinline__ RowWeights weights(int half) const {
    RowWeights row{1.0f, 0.0f, stabilizer[half], 0.0f};
    RowPart peer[WARPGROUPS];
    if constexpr (CLUSTER == 2) {
      mbarrier_wait_cluster(shared.peer_arrived[received].row, 0);
#pragma unroll
      for (int i = 0; i < WARPGROUPS; ++i) peer[i] = shared.from_peer[received].row[i][fragment.row_of_half()];
      row.stabilizer = fmaxf(stabilizer[half], peer[0].stabilizer);
      row.own = ex2_approx(stabilizer[half] - finite(row.stabilizer));
      row.peer = ex2_approx(peer[0].stabilizer - finite(row.stabilizer));
    }
    row.sum = (sum[half] + shared.sum[1 - warpgroup][half][fragment.row_of_half()]) * row.own;
    if constexpr (CLUSTER == 2) row.sum = fmaf(peer[0].sum + peer[1].sum, row.peer, row.sum);
    const float inverse = row.sum == 0.0f ? 0.0f : reciprocal(row.sum);
    row.own *= inverse;
    row.peer *= inverse;
    return row;
  }

  // Adds the peer's part of this warpgroup's columns: for one half of the rows, weighted.
  __device__ __forceinline__ void receive(const RowWeights& row, Columns<QUADRUPLES>& peer) const {
    mbarrier_wait_cluster(shared.peer_arrived[received].output[warpgroup], 0);
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
      const Quadruple theirs = shared.from_peer[received].output[warpgroup][i][fragment.thread];
#pragma unroll
      for (int e = 0; e < 4; ++e) peer.part[i].data[e] = theirs.data[e] * row.peer;
      wgmma_fence_registers(peer.part[i].data);
    }
  }

  // Works out where this thread's output goes. Done early, while the first keys are on their way: a parameter's first
  // access takes long.
  __device__ __forceinline__ void find_place() {
    const int row = work.first_row + fragment.tile_row(0);
    const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;
    place = {static_cast<T*>(params.out) + work.batch * params.out_strides.batch + work.head * params.out_strides.head +
                 row * params.out_strides.row + OWN_COLUMNS * warpgroup + 8 * fragment.quad_lane(),
             params.out_strides.row, params.lse == nullptr ? nullptr : params.lse + head * params.seqlen_q + row,
             params.seqlen_q - row};
    if (ROUNDS < 4) place.hold();  // four rounds leave no registers for it
  }

  // Rows that a thread's row of one half lies below its first one.
  __device__ __forceinline__ int rows_below(int half) const {
    return LATE_LSE && half == 0 ? 0 : fragment.tile_row(half) - fragment.tile_row(0);
  }

  // Whether the tensors have one of this warpgroup's columns.
  __device__ __forceinline__ bool exists(int column) const {
    return C::COLUMNS == WARPGROUPS * OWN_COLUMNS || OWN_COLUMNS * warpgroup + column < C::COLUMNS;
  }

  // Writes this warpgroup's columns of one half of the rows; columns past the tensors' are none.
  __device__ __forceinline__ void store(int half, const Columns<QUADRUPLES>& columns) const {
    const int below = rows_below(half);
    const bool valid = below < place.rows_left;
    T* const out = half == 0 ? place.out : place.out + below * place.row_stride;
#pragma unroll
    for (int i = 0; i + 1 < QUADRUPLES; i += 2) {
      // A thread's pairs of columns become 16 consecutive bytes.
      const Quadruple &a = columns.part[i], &b = columns.part[i + 1];
      const uint4 chunk = transpose_quad(pack<T>(a.data[0], a.data[1]), pack<T>(a.data[2], a.data[3]),
                                         pack<T>(b.data[0], b.data[1]), pack<T>(b.data[2], b.data[3]));
      if (valid && exists(16 * i + 8 * fragment.quad_lane())) *reinterpret_cast<uint4*>(out + 16 * i) = chunk;
    }
    if constexpr (QUADRUPLES % 2 == 1) {
      // The last two pairs, as they are.
      constexpr int FIRST = 16 * (QUADRUPLES - 1);
      const Quadruple& last = columns.part[QUADRUPLES - 1];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        T* const place = out + FIRST + 8 * pair - 6 * fragment.quad_lane();
        if (valid && exists(FIRST + 8 * pair)) {
          *reinterpret_cast<uint32*>(place) = pack<T>(last.data[2 * pair], last.data[2 * pair + 1]);
        }
      }
    }
    if (!LATE_LSE) store_lse(half);
  }

  // Writes LSE of one half of the rows, if it is wanted.
  __device__ __forceinline__ void store_lse(int half) const {
    const int below = rows_below(half);
    if (place.lse != nullptr && warpgroup == 0 && below < place.rows_left && fragment.quad_lane() == 0) {
      place.lse[below] = log_sum_exp(row[half].stabilizer, row[half].sum);
    }
  }

  // The larger ones of the warpgroups' stabilizers, which are told each other.
  __device__ __forceinline__ void larger_stabilizers(float (&larger)[2]) const {
    const int row = fragment.row_of_half();
    if (fragment.quad_lane() == 0) {
      shared.stabilizer[warpgroup][0][row] = stabilizer[0];
      shared.stabilizer[warpgroup][1][row] = stabilizer[1];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      larger[half] = fmaxf(stabilizer[half], shared.stabilizer[1 - warpgroup][half][row]);
    }
  }

  // Whether probabilities of this CTA, or of the peer for this CTA's rows, have overflowed; then also what is sent and
  // received again. All threads of the CTA get the same.
  __device__ __forceinline__ bool overflowed() {
    int any = 0;
#pragma unroll
    for (int i = 0; i < WARPGROUPS; ++i) {
      const Vector<int32, 4> warps = shared.overflow[i];
      any |= warps.data[0] | warps.data[1] | warps.data[2] | warps.data[3];
    }
    if constexpr (CLUSTER == 2) {
      const RowPart first = shared.from_peer[0].row[0][fragment.lane()];
      const RowPart second = shared.from_peer[0].row[1][fragment.lane()];
      sends_again = any & 2;
      received_again = __any_sync(FULL_WARP, first.sum + second.sum == -negative_infinity());
      any |= received_again;
    }
    return any != 0;
  }

  // The same under masks, of which the stabilizers are only near the largest scores: whether probabilities are out of
  // the range of T on either side. Both CTAs judge by the same sums.
  __device__ __forceinline__ bool out_of_range() {
    const int row = fragment.lane();
    bool wrong[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wrong[half] = is_wrong(shared.stabilizer[0][half][row], shared.sum[0][half][row] + shared.sum[1][half][row]);
    }
    bool any = wrong[0] | wrong[1];
    if constexpr (CLUSTER == 2) {
      const RowPart first = shared.from_peer[0].row[0][row], second = shared.from_peer[0].row[1][row];
      sends_again = __any_sync(FULL_WARP, wrong[1]);
      received_again = __any_sync(FULL_WARP, is_wrong(first.stabilizer, first.sum + second.sum));
      any |= received_again;
    }
    return __any_sync(FULL_WARP, any);
  }
  // Of a row that sees no key the stabilizer is -inf, and the sum is 0.
  __device__ __forceinline__ static bool is_wrong(float stabilizer, float sum) {
    return !(sum < LARGEST_SUM<T>) | ((sum < LEAST_SUM<T>)&(stabilizer != negative_infinity()));
  }

  // Begins the second delivery, to and from the peer, of what has overflowed.
  __device__ __forceinline__ void deliver_again() {
    overflow = 0;
    if constexpr (CLUSTER == 2) {
      sends = sends_again;
      received = received_again;
      if (received_again && threadIdx.x == 0) expect_peer(shared, 1);
    }
  }
};

}  // namespace microsdpa::hopper::latency
