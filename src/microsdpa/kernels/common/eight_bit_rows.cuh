// Attention of 16 queries per warp on 8-bit operands, from scores to output, all in registers.
#pragma once

#include "eight_bit_params.cuh"
#include "eight_bit_tile.cuh"
#include "online_softmax.cuh"

namespace microsdpa {

template <typename A, typename B>
constexpr bool same_type = false;
template <typename A>
constexpr bool same_type<A, A> = true;

// Of a warp's 16 rows, this lane holds parts of two: row lane / 4 and that + 8.
//   Format: of the quantized values of Q and K, E4m3 or Int8   TERMS: terms of Q that are added up
//   Value: of V: E4m3, __half or __nv_bfloat16      Probability: what P is rounded to: E4m3, or a 16-bit type
template <typename Format, typename Value, typename Probability, int HEAD_DIM, int TERMS, int BLOCK_N>
struct EightBitRows {
  static constexpr bool VALUE_CODES = same_type<Value, E4m3>;
  static constexpr bool PROBABILITY_CODES = same_type<Probability, E4m3>;
  // Probabilities are 2^(score - m + BIAS): at most 256 as E4M3, which ends at 448, so that none saturates; of its
  // range, 2^-14 of the largest probability is the smallest that keeps full precision, 2^-17 the smallest at all.
  static constexpr float BIAS = PROBABILITY_CODES ? 8.0f : 0.0f;

  float factor[2];                                            // softmax scale times the scale of the lane's queries
  float max[2] = {negative_infinity(), negative_infinity()};  // m of the lane's two rows
  float sum[2] = {};                                          // the lane's part of l, times 2^BIAS
  float o[1][HEAD_DIM / 8][4] = {};                           // O, times 2^BIAS, not yet divided by l

  //   first_row: of the warp
  __device__ __forceinline__ EightBitRows(const EightBitParams& params, const EightBitHead& head, int first_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first_row + static_cast<int>(lane_index() / 4) + 8 * half, params.seqlen_q - 1);
      factor[half] = params.scale_log2 * *head.query_scale(params, row);
    }
  }

  // Takes one tile of keys: S = Q K^T, online softmax, O += P V.
  //   query: the warp's values   key, value: swizzled tiles of BLOCK_N rows   key_scale: [BLOCK_N] in shared memory
  //   row, first_key: of the lane's first row and of the tile's first key
  template <bool CAUSAL, typename Query, typename KeyTile, typename ValueTile>
  __device__ __forceinline__ void attend(const Query& query, const KeyTile& key, const ValueTile& value,
                                         const float* key_scale, const EightBitParams& params, int row, int first_key) {
    float s[1][BLOCK_N / 8][4];
    multiply_quantized<Format, HEAD_DIM, TERMS, BLOCK_N>(s[0], query, key);
    scale_scores(s[0], key_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax(s[0], half, keys_seen<CAUSAL>(params, row + 8 * half, 1) - first_key);
    }
    if constexpr (PROBABILITY_CODES) {
      multiply_e4m3_value<HEAD_DIM, BLOCK_N>(o[0], s[0], value);
    } else if constexpr (VALUE_CODES) {
      multiply_half_value<HEAD_DIM, BLOCK_N>(o[0], s[0], value);
    } else {
      multiply_probability_value<Value, 1, HEAD_DIM, BLOCK_N>(o, s, value, 0);
    }
  }

  __device__ __forceinline__ void scale_scores(float (&s)[BLOCK_N / 8][4], const float* key_scale) const {
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
      using Pair = Vector<float, 2>;
      const Pair scale = *reinterpret_cast<const Pair*>(key_scale + 8 * n + lane_index() % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= scale.data[e % 2] * factor[e / 2];
    }
  }

  // Turns the scores of one of the lane's two rows into probabilities, and rescales its output to the new maximum.
  // Keys from `visible` on, counted from the tile's first, are not seen.
  __device__ __forceinline__ void softmax(float (&s)[BLOCK_N / 8][4], int half, int visible) {
    mask_row<BLOCK_N>(s, half, visible);
    float largest = max[half];
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    largest = quad_max(largest);
    // A row that has seen no key keeps m = -inf: the stabilizer is then 0, because -inf - (-inf) would be NaN.
    const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
    const float rescale = ex2_approx(max[half] - stabilizer);
    max[half] = largest;
    sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = ex2_approx(s[n][e] - stabilizer + BIAS);
        sum[half] += s[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      o[0][n][2 * half] *= rescale;
      o[0][n][2 * half + 1] *= rescale;
    }
  }

  // Divides by l, multiplies with V's scales and writes the warp's rows and their LSE.
  template <typename T>
  __device__ __forceinline__ void store(const EightBitParams& params, const EightBitHead& head, int first_row) const {
    const int t = lane_index() % 4;
    const float totals[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = totals[half];
      const int row = first_row + static_cast<int>(lane_index() / 4) + 8 * half;
      if (row >= params.seqlen_q) break;
      if (params.lse != nullptr && t == 0) *head.lse(params, row) = log_sum_exp(max[half] - BIAS, total);
      const float inverse = normalizer(total);
      T* out = head.out<T>(params, row);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; ++n) {
        const float (&first)[4] = o[0][2 * n];
        const float (&second)[4] = o[0][2 * n + 1];
        if constexpr (VALUE_CODES) {  // four neighbours: even and odd channels in turn
          Vector<T, 4> four;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float x = (i % 2 ? second : first)[2 * half + i / 2];
            four.data[i] = from_float<T>(x * inverse * head.value_scale(params, 16 * n + 4 * t + i));
          }
          *reinterpret_cast<Vector<T, 4>*>(out + 16 * n + 4 * t) = four;
        } else {
          using Pair = Vector<T, 2>;
          *reinterpret_cast<Pair*>(out + 16 * n + 2 * t) = {from_float<T>(first[2 * half] * inverse),
                                                            from_float<T>(first[2 * half + 1] * inverse)};
          *reinterpret_cast<Pair*>(out + 16 * n + 8 + 2 * t) = {from_float<T>(second[2 * half] * inverse),
                                                                from_float<T>(second[2 * half + 1] * inverse)};
        }
      }
    }
  }
};

}  // namespace microsdpa
