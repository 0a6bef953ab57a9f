// Attention of 16 queries per warp on mma.sync, from scores to output, all in registers.
#pragma once

#include "epilogue.cuh"
#include "head.cuh"
#include "mma_tile.cuh"
#include "online_softmax.cuh"

namespace microsdpa {

// Writes a warp's rows of o * scale from `first_row` on, those that exist: by way of the staging tile, of which the
// warp owns the rows from `warp_row` on, or, where rows do not lie on 16 bytes, element by element.
template <typename T, int ROW_TILES, int HEAD_DIM, int STORE_BYTES, typename Tile>
__device__ __forceinline__ void store_output(Tile& staging, int warp_row, const float (&o)[ROW_TILES][HEAD_DIM / 8][4],
                                             const float (&scale)[ROW_TILES][2], const Head<T>& head,
                                             const AttentionParams& params, int first_row) {
  if constexpr (STORE_BYTES == 16) {
    __syncwarp();  // every lane has read its queries
    store_rows<T, ROW_TILES, HEAD_DIM>(staging, warp_row, o, scale, [&](unsigned r) -> T* {
      const int row = first_row + static_cast<int>(r);
      return row < params.seqlen_q ? head.out + row * params.out_strides.row : nullptr;
    });
  } else {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 16 * i + 8 * half + lane_index() / 4;
        if (row >= params.seqlen_q) break;
        T* out = head.out + row * params.out_strides.row + lane_index() % 4 * 2;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) out[8 * n + e] = from_float<T>(o[i][n][2 * half + e] * scale[i][half]);
        }
      }
    }
  }
}

// Of a warp's 16 rows, this lane holds parts of two: row lane / 4 and that + 8, two neighbouring columns of every 8.
template <typename T, int HEAD_DIM, int BLOCK_N>
struct MmaRows {
  float max[2] = {negative_infinity(), negative_infinity()};  // m of the lane's two rows
  float sum[2] = {};                                          // the lane's part of l
  float o[1][HEAD_DIM / 8][4] = {};                           // O, not yet divided by l

  // Takes one tile of keys: S = Q K^T, online softmax, O += P V.
  //   query: the warp's rows as an operand   key, value: swizzled [BLOCK_N, HEAD_DIM]
  //   row, first_key: of the lane's first row and of the tile's first key
  template <bool CAUSAL, typename Query, typename Tile>
  __device__ __forceinline__ void attend(const Query& query, const Tile& key, const Tile& value,
                                         const AttentionParams& params, int row, int first_key) {
    float s[1][BLOCK_N / 8][4];
    multiply_query_key<T, 1, HEAD_DIM, BLOCK_N>(s, query, key, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax<CAUSAL>(s[0], half, params, row + 8 * half, first_key);
    multiply_probability_value<T, 1, HEAD_DIM, BLOCK_N>(o, s, value, 0);
  }

  // Turns the scores of one of the lane's two rows into probabilities, and rescales its output to the new maximum.
  template <bool CAUSAL>
  __device__ __forceinline__ void softmax(float (&s)[BLOCK_N / 8][4], int half, const AttentionParams& params, int row,
                                          int first_key) {
    const int visible = keys_seen<CAUSAL>(params, row, 1) - first_key - static_cast<int>(lane_index() % 4 * 2);
    float largest = max[half];
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[n][2 * half + e];
        score = 8 * n + e < visible ? score * params.scale_log2 : negative_infinity();
        largest = fmaxf(largest, score);
      }
    }
    largest = quad_max(largest);
    const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
    const float rescale = exp2f(max[half] - stabilizer);
    max[half] = largest;
    sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = exp2f(s[n][e] - stabilizer);
        sum[half] += s[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      o[0][n][2 * half] *= rescale;
      o[0][n][2 * half + 1] *= rescale;
    }
  }

  // Divides by l and writes the warp's rows and their LSE.
  //   staging, warp_row: a tile of which the warp owns 16 rows, from there on, and that nobody reads any more
  //   first_row: of the warp
  template <int STORE_BYTES, typename Tile>
  __device__ __forceinline__ void store(Tile& staging, int warp_row, const Head<T>& head, const AttentionParams& params,
                                        int first_row) const {
    float scale[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(sum[half]);
      const int row = first_row + lane_index() / 4 + 8 * half;
      scale[0][half] = normalizer(total);
      if (head.lse != nullptr && lane_index() % 4 == 0 && row < params.seqlen_q) {
        head.lse[row] = log_sum_exp(max[half], total);
      }
    }
    store_output<T, 1, HEAD_DIM, STORE_BYTES>(staging, warp_row, o, scale, head, params, first_row);
  }
};

}  // namespace microsdpa
