// What a warpgroup of hopper/split/kernel.cu does: its part of the keys for one query tile, and its columns of O.
#pragma once

#include "../../ptx/control.cuh"
#include "../../ptx/tma.cuh"
#include "../common/pipeline.cuh"
#include "../common/tile_softmax.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::split {

// Copies 64 rows of one head. Rows past the tensor become zeros.
template <typename T>
__device__ __forceinline__ void load_tile(T* shared, const TensorMap& map, Mbarrier& full, int row, int head,
                                          int batch) {
  mbarrier_arrive_expect(full, ROWS * HEAD_DIM * static_cast<int>(sizeof(T)));
  tma_load(shared, map, full, 0, row, head, batch);
}

template <typename T, int QUERY_TILES, int STAGES, int GROUP, bool CAUSAL>
struct Consumer : TileSoftmax<T, BLOCK_N> {
  using Base = TileSoftmax<T, BLOCK_N>;
  using Base::rows, Base::scale, Base::STEPS;
  using typename Base::Probabilities, typename Base::Scores;
  using Shared = SharedStorage<T, QUERY_TILES, STAGES>;
  static constexpr int GROUPS = Shared::GROUPS, BLOCKS = Shared::BLOCKS;
  // A place in the ring is filled again so many turns after its tile was read, when the other query tile's warpgroup
  // has read it too.
  static constexpr int LAG = QUERY_TILES - 1;

  Shared& shared;
  const AttentionParams& params;
  const WorkTile<QUERY_TILES, GROUP, CAUSAL>& work;
  const TensorMap& key_map;
  const TensorMap& value_map;
  const int query_tile;  // of the CTA's
  const int group;       // of the keys: tiles group, group + GROUPS, ...
  const int thread;      // of the warpgroup
  const int first_row;
  const int tiles;       // of keys that the query tile sees
  const int rounds;      // those of this warpgroup
  const int all_rounds;  // and of this group for either query tile

  float o[HEAD_DIM / 2];
  PipelineState<STAGES> key_state, value_state;

  __device__ __forceinline__ Consumer(Shared& shared, const AttentionParams& params,
                                      const WorkTile<QUERY_TILES, GROUP, CAUSAL>& work, const TensorMap& key,
                                      const TensorMap& value, int warpgroup)
      : Base(params.scale_log2),
        shared(shared),
        params(params),
        work(work),
        key_map(key),
        value_map(value),
        query_tile(warpgroup % QUERY_TILES),
        group(warpgroup / QUERY_TILES),
        thread(static_cast<int>(threadIdx.x % WARPGROUP_THREADS)),
        first_row(query_tile == 0 ? work.first_row[0] : work.first_row[QUERY_TILES - 1]),
        tiles(query_tile == 0 ? work.tiles[0] : work.tiles[QUERY_TILES - 1]),
        rounds(work.rounds(tiles, group)),
        all_rounds(work.rounds(work.all_tiles, group)) {}

  __device__ __forceinline__ int tile_row(int half) const { return thread / 32 * 16 + 8 * half + thread % 32 / 4; }

  // Synchronizes the warpgroups of a query tile.
  __device__ __forceinline__ void sync_groups() const {
    named_barrier_sync(GROUPS_SYNC + query_tile, GROUPS * WARPGROUP_THREADS);
  }

  // A negative scale is a positive one of -Q.
  __device__ __forceinline__ void negate_query() {
    mbarrier_wait(shared.query_full[query_tile], 0);
    auto* chunks = reinterpret_cast<uint4*>(shared.query[query_tile]);
    for (int i = thread + group * WARPGROUP_THREADS; i < ROWS * HEAD_DIM / 8; i += GROUPS * WARPGROUP_THREADS) {
      const uint4 old = chunks[i];
      chunks[i] = make_uint4(old.x ^ 0x80008000u, old.y ^ 0x80008000u, old.z ^ 0x80008000u, old.w ^ 0x80008000u);
    }
    fence_proxy_async();
    sync_groups();
  }

  __device__ __forceinline__ void wait_key() {
    mbarrier_wait(shared.key_full[group][key_state.stage], key_state.phase);
  }
  __device__ __forceinline__ void wait_value() {
    mbarrier_wait(shared.value_full[group][value_state.stage], value_state.phase);
  }

  // Starts S of the next tile.
  __device__ __forceinline__ void score(Scores& s) const {
    const uint64 query = matrix_descriptor(shared.query[query_tile], 16, 8 * HEAD_DIM * sizeof(T), Swizzle::BYTES_128);
    const uint64 key =
        matrix_descriptor(shared.key[group][key_state.stage], 16, 8 * HEAD_DIM * sizeof(T), Swizzle::BYTES_128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      wgmma<T, BLOCK_N>(s, advance(query, 16 * step * sizeof(T)), advance(key, 16 * step * sizeof(T)), step > 0);
    }
    wgmma_commit();
  }

  // Starts O += P V of the tile before.
  __device__ __forceinline__ void accumulate(const Probabilities& p, bool add) {
    const uint64 value = matrix_descriptor(shared.value[group][value_state.stage], BLOCK_N * HEAD_DIM * sizeof(T),
                                           8 * HEAD_DIM * sizeof(T), Swizzle::BYTES_128);
    // mutation: it holds back the compiler, and does nothing when the kernel runs
    wgmma_fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      wgmma<T, HEAD_DIM, Major::MN>(o, p[step], advance(value, 16 * HEAD_DIM * step * sizeof(T)), add || step > 0);
    }
    wgmma_commit();
  }

  // Keys that a row does not see get -inf.
  __device__ __forceinline__ void mask(Scores& s, int round) const {
    const int tile = round * GROUPS + group;
    const int keys = params.seqlen_k - BLOCK_N * tile;
    const int first_visible = CAUSAL ? first_row + params.diagonal - BLOCK_N * tile + 1 : BLOCK_N;
    // mutation: a tile that is seen to its last key has none to hide
    if (min(keys, first_visible) >= BLOCK_N) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Base::hide(s, half, CAUSAL ? min(keys, first_visible + tile_row(half)) : keys);
    }
  }

  // This warpgroup has read the tile of a round. Its place, or that of the round before, takes the tile STAGES ahead.
  __device__ __forceinline__ void release(int round) {
    if (round - LAG + STAGES < all_rounds) {
      // mutation: the wait for the products brought the warp together, and nothing else has read the tile
      __syncwarp();
      if (elect_one()) {
        if (round + STAGES < all_rounds) mbarrier_arrive(shared.tile_empty[group][value_state.stage]);
        if (query_tile == 0 && thread < 32 && round >= LAG) refill(round - LAG);
      }
      // mutation: the lanes come together for aligned instructions, which the emulator does not ask for
      __syncwarp();
    }
    value_state.advance();
  }
  __device__ __forceinline__ void refill(int round) const {
    const int stage = round % STAGES, first_key = BLOCK_N * ((round + STAGES) * GROUPS + group);
    mbarrier_wait(shared.tile_empty[group][stage], round / STAGES % 2);
    load_tile(shared.key[group][stage], key_map, shared.key_full[group][stage], first_key, work.head_kv, work.batch);
    load_tile(shared.value[group][stage], value_map, shared.value_full[group][stage], first_key, work.head_kv,
              work.batch);
  }

  // From P of a round to P of the next: S, then O += P V beside the exponentials.
  __device__ __forceinline__ void step(Scores& s, const Probabilities& p, Probabilities& next_p, int round) {
    wait_key();
    score(s);
    wait_value();
    accumulate(p, round > 0);
    key_state.advance();
    wgmma_wait<1>();
    wgmma_fence_registers(s);
    mask(s, round + 1);
    float factor[2];
    const bool moved = Base::softmax_tile(s, next_p, factor, false);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    release(round);
    if (moved) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= factor[i / 2 % 2];
    }
  }

  // The last P V.
  __device__ __forceinline__ void end(const Probabilities& p, int round) {
    wait_value();
    accumulate(p, round > 0);
    wgmma_wait<0>();
    wgmma_fence_registers(o);
    release(round);
  }

  // O of this warpgroup's keys, and the rows' stabilizers and sums.
  __device__ __forceinline__ void attend() {
    if (params.scale_log2 < 0.0f && tiles > 0) negate_query();
    int round = 0;
    if (rounds > 0) {
      Scores s;
      Probabilities p[2];
      float factor[2];
      mbarrier_wait(shared.query_full[query_tile], 0);
      wait_key();
      score(s);
      key_state.advance();
      wgmma_wait<0>();
      wgmma_fence_registers(s);
      mask(s, 0);
      Base::softmax_tile(s, p[0], factor, true);
      while (true) {  // which registers hold P is known when compiling
        if (round + 1 == rounds) {
          end(p[0], round++);
          break;
        }
        step(s, p[0], p[1], round++);
        if (round + 1 == rounds) {
          end(p[1], round++);
          break;
        }
        step(s, p[1], p[0], round++);
      }
    } else {
      rows.reset();
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.0f;
    }
    // Tiles that only the CTA's other query tile sees pass by.
    while (QUERY_TILES > 1 && round - LAG + STAGES < all_rounds) {
      mbarrier_wait(shared.key_full[group][value_state.stage], value_state.phase);
      release(round++);
    }
  }

  // Gives the other groups their columns, takes this one's, and writes them.
  __device__ __forceinline__ void combine() {
    Block kept[BLOCKS];
#pragma unroll
    for (int to = 0; to < GROUPS; ++to) {
      const int giver = group - (group > to);
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        const float* const mine = o + 4 * (BLOCKS * to + i);
        const Block block = {mine[0], mine[1], mine[2], mine[3]};
        if (to == group) {
          kept[i] = block;
        } else {
          shared.given[query_tile][to][giver][i][thread] = block;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows.sum[half]);
      if (thread % 4 == 0) shared.part[query_tile][group][tile_row(half)] = {rows.stabilizer[half], sum};
    }
    sync_groups();
    // mutation: rows past the last one are not written
    if (first_row >= params.seqlen_q) return;

    float own[2], weight[GROUPS - 1][2];  // of the other groups in their order, as they are given
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowPart part[GROUPS - 1];
      float stabilizer = rows.stabilizer[half], sum = shared.part[query_tile][group][tile_row(half)].sum;
#pragma unroll
      for (int i = 0; i < GROUPS - 1; ++i) {
        part[i] = shared.part[query_tile][i + (i >= group)][tile_row(half)];
        stabilizer = fmaxf(stabilizer, part[i].stabilizer);
      }
      own[half] = ex2_approx((rows.stabilizer[half] - finite(stabilizer)) * Base::scale_of(half));
      sum *= own[half];
#pragma unroll
      for (int i = 0; i < GROUPS - 1; ++i) {
        weight[i][half] = ex2_approx((part[i].stabilizer - finite(stabilizer)) * Base::scale_of(half));
        sum = fmaf(part[i].sum, weight[i][half], sum);
      }
      const float inverse = normalizer(sum);
      own[half] *= inverse;
#pragma unroll
      for (int i = 0; i < GROUPS - 1; ++i) weight[i][half] *= inverse;
      const int row = first_row + tile_row(half);
      if (params.lse != nullptr && group == half && thread % 4 == 0 && row < params.seqlen_q) {
        const int64 head = static_cast<int64>(work.batch) * params.heads + work.head;
        params.lse[head * params.seqlen_q + row] = log_sum_exp(stabilizer * Base::scale_of(half), sum);
      }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[i].data[e] *= own[e / 2];
    }
#pragma unroll
    for (int giver = 0; giver < GROUPS - 1; ++giver) {
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        const Block theirs = shared.given[query_tile][group][giver][i][thread];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          kept[i].data[e] = fmaf(theirs.data[e], weight[giver][e / 2], kept[i].data[e]);
        }
      }
    }
    store(kept);
  }

  // Writes this warpgroup's columns: a thread's pairs of columns become 16 consecutive bytes.
  __device__ __forceinline__ void store(const Block (&columns)[BLOCKS]) const {
    const int lane = thread % 4;
    T* const out = static_cast<T*>(params.out) + work.batch * params.out_strides.batch +
                   work.head * params.out_strides.head + 8 * BLOCKS * group;
    constexpr int HALVES_A_TURN = 4 / BLOCKS;  // four words of a thread are BLOCKS blocks of so many halves
#pragma unroll
    for (int first = 0; first < 2; first += HALVES_A_TURN) {
      uint32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const data = columns[i % BLOCKS].data + 2 * (first + i / BLOCKS);
        word[i] = pack<T>(data[0], data[1]);
      }
      const uint4 chunk = transpose_quad(word[0], word[1], word[2], word[3]);
      const int row = first_row + tile_row(first + lane / BLOCKS);
      if (row < params.seqlen_q) {
        *reinterpret_cast<uint4*>(out + row * params.out_strides.row + 8 * (lane % BLOCKS)) = chunk;
      }
    }
  }
};

}  // namespace microsdpa::hopper::split
