// Combining attention over parts of the keys: each part has, of a row, an unnormalized O, a stabilizer and a sum.
#pragma once

#include "../ptx/arithmetic.cuh"
#include "params.cuh"
#include "softmax.cuh"

namespace microsdpa {

// What one part knows of a row, in base 2: its probabilities are relative to `stabilizer`, `sum` is their sum.
struct alignas(8) RowStats {
  float stabilizer;  // -inf when the part has no visible key
  float sum;
};

struct alignas(16) Values4 {
  float data[4];
};

// What the CTAs of a split problem leave in the workspace: for each part O [B, H, S_q, HEAD_DIM], then for each part
// the rows' statistics.
template <int HEAD_DIM, int PARTS>
struct PartialOutputs {
  float* workspace;
  int64 rows;

  __device__ __forceinline__ explicit PartialOutputs(const AttentionParams& params)
      : workspace(static_cast<float*>(params.workspace)),
        rows(static_cast<int64>(params.batch) * params.heads * params.seqlen_q) {}
  __device__ __forceinline__ Values4* values(int part, int64 row, int column) const {
    return reinterpret_cast<Values4*>(workspace + (part * rows + row) * HEAD_DIM + column);
  }
  __device__ __forceinline__ RowStats* stats(int part, int64 row) const {
    return reinterpret_cast<RowStats*>(workspace + PARTS * rows * HEAD_DIM) + part * rows + row;
  }
};

// Gives four columns of the row's O, and its statistics, relative to the largest stabilizer. The parts are added in
// their order, so the result does not depend on which was ready first.
//   stats(part) gives RowStats, values(part) the part's Values4
template <int PARTS, typename Stats, typename Values>
__device__ __forceinline__ Values4 combine_parts(RowStats& combined, Stats stats, Values values) {
  float weight[PARTS];
  float largest = negative_infinity();
#pragma unroll
  for (int part = 0; part < PARTS; ++part) largest = fmaxf(largest, stats(part).stabilizer);
  const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
  combined = {largest, 0.0f};
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const RowStats mine = stats(part);
    weight[part] = ex2_approx(mine.stabilizer - stabilizer);
    combined.sum += weight[part] * mine.sum;
  }
  Values4 total{};
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const Values4 mine = values(part);
#pragma unroll
    for (int c = 0; c < 4; ++c) total.data[c] += weight[part] * mine.data[c];
  }
  return total;
}

}  // namespace microsdpa
