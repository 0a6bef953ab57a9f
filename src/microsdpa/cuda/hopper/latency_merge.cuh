// From four unfinished outputs to one: hopper/fwd_latency.cu's warpgroups and CTAs hold O and l of different keys.
//
// Each warpgroup finishes one half of the columns; of two CTAs each finishes half of the rows. One exchange through
// shared memory inside the CTA, then one of a quarter of O between CTAs: the bytes that cross are what costs.
#pragma once

#include "../core/accumulator.cuh"
#include "../core/head.cuh"
#include "../core/mma_tile.cuh"
#include "../core/online_softmax.cuh"
#include "../ptx/cluster.cuh"
#include "latency_shared.cuh"

namespace microsdpa {

// Four consecutive floats of half `half` among a thread's accumulators, from column block `first` on: two pairs.
template <int N>
__device__ __forceinline__ Quadruple quadruple(const float (&o)[N], int half, int pair) {
  const int i = 8 * pair + 2 * half;
  return {o[i], o[i + 1], o[i + 4], o[i + 5]};
}

// Two parts of a row as one: the common reference, the sum, and what the parts' outputs are multiplied by.
struct MergedRow {
  float reference;
  float sum;
  float weight[2];

  __device__ __forceinline__ MergedRow(RowPart first, RowPart second) {
    reference = fmaxf(first.reference, second.reference);
    weight[0] = ex2_approx(first.reference - finite(reference));
    weight[1] = ex2_approx(second.reference - finite(reference));
    sum = fmaf(first.sum, weight[0], second.sum * weight[1]);
  }
};

// Gives the other warpgroup the columns of o that it finishes. They are there after a barrier.
template <int OTHER, int HEAD_DIM, typename Shared>
__device__ __forceinline__ void give_columns(Shared& shared, int thread, const float (&o)[HEAD_DIM / 2]) {
  constexpr int QUADRUPLES = Shared::QUADRUPLES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
      shared.from_neighbour[OTHER][half][i][thread] = quadruple(o, half, QUADRUPLES * OTHER + i);
    }
  }
}

// Finishes this warpgroup's columns of the CTA's rows and writes them, and gives the peer what it finishes.
//   o: [64, HEAD_DIM] accumulator of this warpgroup's keys; row: its rows, merged with the other warpgroup's (own
//   first)
template <typename T, int WARPGROUP, int CLUSTER, int HEAD_DIM, typename Shared>
__device__ __forceinline__ void finish(Shared& shared, const Fragment<CLUSTER>& fragment,
                                       const float (&o)[HEAD_DIM / 2], const MergedRow (&row)[2],
                                       const AttentionParams& params, const Work& work) {
  constexpr int QUADRUPLES = Shared::QUADRUPLES;
  constexpr int OWN_ROWS = CLUSTER == 2 ? 1 : 2;  // halves that this CTA finishes
  const int thread = fragment.thread;

  // This warpgroup's columns of one half of the rows, over both warpgroups' keys, times `factor`.
  auto merged = [&](int half, int i, float factor) {
    Quadruple sum = quadruple(o, half, QUADRUPLES * WARPGROUP + i);
    const Quadruple theirs = shared.from_neighbour[WARPGROUP][half][i][thread];
    const float weights[2] = {row[half].weight[0] * factor, row[half].weight[1] * factor};
#pragma unroll
    for (int e = 0; e < 4; ++e) sum.data[e] = fmaf(theirs.data[e], weights[1], sum.data[e] * weights[0]);
    return sum;
  };

  if constexpr (CLUSTER == 2) {
    const ClusterAddress arrived = peer_address(&shared.peer_output_arrived[WARPGROUP], 1 - fragment.rank);
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) {
      const Quadruple given = merged(1, i, 1.0f);
      store_async(peer_address(&shared.from_peer[WARPGROUP][i][thread], 1 - fragment.rank), given.data[0],
                  given.data[1], given.data[2], given.data[3], arrived);
    }
  }

  T* out = static_cast<T*>(params.out) + work.batch * params.out_strides.batch + work.head * params.out_strides.head +
           work.first_row * params.out_strides.row + HEAD_DIM / 2 * WARPGROUP + 8 * fragment.quad_lane();
  const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;

#pragma unroll
  for (int half = 0; half < OWN_ROWS; ++half) {
    RowPart part{row[half].reference, row[half].sum};
    float weight = 1.0f, peer_weight = 0.0f;
    if constexpr (CLUSTER == 2) {
      mbarrier_wait_cluster(shared.peer_part_arrived, 0);
      const MergedRow both(part, shared.peer_part[fragment.row_of_half()]);
      part = {both.reference, both.sum};
      weight = both.weight[0];
      peer_weight = both.weight[1];
    }
    const float inverse = normalizer(part.sum);
    weight *= inverse;
    peer_weight *= inverse;

    Quadruple result[QUADRUPLES];
#pragma unroll
    for (int i = 0; i < QUADRUPLES; ++i) result[i] = merged(half, i, weight);
    if constexpr (CLUSTER == 2) {
      mbarrier_wait_cluster(shared.peer_output_arrived[WARPGROUP], 0);
#pragma unroll
      for (int i = 0; i < QUADRUPLES; ++i) {
        const Quadruple received = shared.from_peer[WARPGROUP][i][thread];
#pragma unroll
        for (int e = 0; e < 4; ++e) result[i].data[e] = fmaf(received.data[e], peer_weight, result[i].data[e]);
      }
    }

    const int tile_row = fragment.tile_row(half);
    const bool valid = work.first_row + tile_row < params.seqlen_q;
    if (WARPGROUP == 0 && params.lse != nullptr && valid && fragment.quad_lane() == 0) {
      params.lse[head * params.seqlen_q + work.first_row + tile_row] = log_sum_exp(part.reference, part.sum);
    }
#pragma unroll
    for (int i = 0; i < QUADRUPLES; i += 2) {
      // A thread's pairs of columns become 16 consecutive bytes.
      const uint4 chunk = transpose_quad(
          pack<T>(result[i].data[0], result[i].data[1]), pack<T>(result[i].data[2], result[i].data[3]),
          pack<T>(result[i + 1].data[0], result[i + 1].data[1]), pack<T>(result[i + 1].data[2], result[i + 1].data[3]));
      if (valid) *reinterpret_cast<uint4*>(out + tile_row * params.out_strides.row + 16 * i) = chunk;
    }
  }
}

}  // namespace microsdpa
