// Attention of 16 queries per warp through C++ wmma fragments, whose layout is not specified: whatever has to be seen
// by row goes through shared memory. Each warp works in rows of its own, so warps never wait for each other here.
#pragma once

#include <mma.h>

#include "element.cuh"
#include "head.cuh"
#include "softmax.cuh"

namespace microsdpa {

constexpr int WMMA = 16;  // rows, columns and depth of a fragment

// A warp's 16 queries. Lanes r and r + 16 own row r: each holds one half of its output, and both hold its m and l.
template <typename T, int HEAD_DIM, int BLOCK_N, int PITCH>
struct WmmaRows {
  // 16 bytes of padding in each: eight lanes that read 16 bytes of eight rows then touch all 32 banks once.
  static constexpr int SCORE_PITCH = (HEAD_DIM > BLOCK_N ? HEAD_DIM : BLOCK_N) + 4;
  static constexpr int PROBABILITY_PITCH = BLOCK_N + 8;
  static constexpr int HALF_KEYS = BLOCK_N / 2;
  static constexpr int HALF_DIM = HEAD_DIM / 2;

  struct alignas(32) Scratch {
    float scores[WMMA * SCORE_PITCH];           // S of one tile of keys, then its P V
    T probabilities[WMMA * PROBABILITY_PITCH];  // P
  };

  RowState state;
  float acc[HALF_DIM] = {};  // O of the lane's half row, not yet divided by l

  // S = Q K^T.   query: [16, HEAD_DIM]   key: [BLOCK_N, HEAD_DIM], both PITCH elements per row
  static __device__ __forceinline__ void score(Scratch& scratch, const T* query, const T* key) {
    namespace wmma = nvcuda::wmma;
    wmma::fragment<wmma::accumulator, WMMA, WMMA, WMMA, float> sum[BLOCK_N / WMMA];
#pragma unroll
    for (auto& s : sum) wmma::fill_fragment(s, 0.0f);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA) {
      wmma::fragment<wmma::matrix_a, WMMA, WMMA, WMMA, T, wmma::row_major> q;
      wmma::load_matrix_sync(q, query + d, PITCH);
#pragma unroll
      for (int n = 0; n < BLOCK_N / WMMA; ++n) {
        wmma::fragment<wmma::matrix_b, WMMA, WMMA, WMMA, T, wmma::col_major> k;
        wmma::load_matrix_sync(k, key + n * WMMA * PITCH + d, PITCH);
        wmma::mma_sync(sum[n], q, k, sum[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < BLOCK_N / WMMA; ++n) {
      wmma::store_matrix_sync(scratch.scores + n * WMMA, sum[n], SCORE_PITCH, wmma::mem_row_major);
    }
    __syncwarp();
  }

  // Online softmax: takes S, leaves P, and rescales the output to the new maximum.
  //   row, first_key: of the lane's row and of the tile's first key
  template <bool CAUSAL>
  __device__ __forceinline__ void softmax(Scratch& scratch, const AttentionParams& params, int row, int first_key) {
    using Scores = Vector<float, 4>;
    using Probabilities = Vector<T, 8>;
    const int lane_row = threadIdx.x % WMMA;
    const int first = threadIdx.x % 32 / WMMA * HALF_KEYS;
    const int visible = keys_seen<CAUSAL>(params, row, 1) - first_key - first;
    float score[HALF_KEYS];
    float largest = state.max;
#pragma unroll
    for (int n = 0; n < HALF_KEYS; n += 4) {
      const Scores s = *reinterpret_cast<const Scores*>(scratch.scores + lane_row * SCORE_PITCH + first + n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[n + i] = n + i < visible ? s.data[i] * params.scale_log2 : negative_infinity();
        largest = fmaxf(largest, score[n + i]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, WMMA));
    const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
    const float rescale = exp2f(state.max - stabilizer);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < HALF_KEYS; n += 8) {
      Probabilities p;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float probability = exp2f(score[n + i] - stabilizer);
        sum += probability;
        p.data[i] = from_float<T>(probability);
      }
      *reinterpret_cast<Probabilities*>(scratch.probabilities + lane_row * PROBABILITY_PITCH + first + n) = p;
    }
    state.sum = state.sum * rescale + sum + __shfl_xor_sync(FULL_WARP, sum, WMMA);
    state.max = largest;
#pragma unroll
    for (int c = 0; c < HALF_DIM; ++c) acc[c] *= rescale;
    __syncwarp();
  }

  // O += P V.   value: [BLOCK_N, HEAD_DIM], PITCH elements per row
  __device__ __forceinline__ void accumulate(Scratch& scratch, const T* value) {
    namespace wmma = nvcuda::wmma;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA) {
      wmma::fragment<wmma::accumulator, WMMA, WMMA, WMMA, float> sum;
      wmma::fill_fragment(sum, 0.0f);
#pragma unroll
      for (int n = 0; n < BLOCK_N; n += WMMA) {
        wmma::fragment<wmma::matrix_a, WMMA, WMMA, WMMA, T, wmma::row_major> p;
        wmma::fragment<wmma::matrix_b, WMMA, WMMA, WMMA, T, wmma::row_major> v;
        wmma::load_matrix_sync(p, scratch.probabilities + n, PROBABILITY_PITCH);
        wmma::load_matrix_sync(v, value + n * PITCH + d, PITCH);
        wmma::mma_sync(sum, p, v, sum);
      }
      wmma::store_matrix_sync(scratch.scores + d, sum, SCORE_PITCH, wmma::mem_row_major);
    }
    __syncwarp();
    using Sums = Vector<float, 4>;
    const float* mine = scratch.scores + threadIdx.x % WMMA * SCORE_PITCH + threadIdx.x % 32 / WMMA * HALF_DIM;
#pragma unroll
    for (int c = 0; c < HALF_DIM; c += 4) {
      const Sums sum = *reinterpret_cast<const Sums*>(mine + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[c + i] += sum.data[i];
    }
    __syncwarp();  // the next S overwrites what slower lanes still read
  }

  // Divides by l and writes the lane's half row, and the row's LSE.
  template <int STORE_BYTES>
  __device__ __forceinline__ void store(const Head<T>& head, const AttentionParams& params, int row) const {
    if (row >= params.seqlen_q) return;
    constexpr int WIDTH = STORE_BYTES / sizeof(T);
    using Store = Vector<T, WIDTH>;
    const int half = threadIdx.x % 32 / WMMA;
    T* out = head.out + row * params.out_strides.row + half * HALF_DIM;
#pragma unroll
    for (int c = 0; c < HALF_DIM; c += WIDTH) {
      Store values;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values.data[i] = from_float<T>(acc[c + i] * state.normalizer());
      *reinterpret_cast<Store*>(out + c) = values;
    }
    if (head.lse != nullptr && half == 0) head.lse[row] = state.log_sum_exp();
  }
};

}  // namespace microsdpa
