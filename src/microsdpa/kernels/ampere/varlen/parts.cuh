// The sum of the parts that several CTAs have of the same rows.
#pragma once

#include "../../common/combine.cuh"
#include "../../common/softmax.cuh"
#include "shared.cuh"

namespace microsdpa::ampere::varlen {

// Parts of a row that are on their way at a time. Where more than MOST_AT_ONCE share a row, CTAs combine some ahead of
// all, side by side: each round of loads takes its time.
constexpr int AT_ONCE = 8, AHEAD_OF_ALL = 16, MOST_AT_ONCE = 48;

// Gives four columns of the row's O, and its statistics, of any number of parts, in their order.
template <typename Stats, typename Values>
__device__ __forceinline__ Values4 combine_many(RowStats& combined, int parts, Stats stats, Values values) {
  Values4 total{};
  combined = {negative_infinity(), 0.0f};
  for (int first = 0; first < parts; first += AT_ONCE) {
    RowStats some;
    const Values4 added = combine_parts<AT_ONCE>(
        some, [&](int i) { return first + i < parts ? stats(first + i) : RowStats{negative_infinity(), 0.0f}; },
        [&](int i) { return first + i < parts ? values(first + i) : Values4{}; });
    const float largest = fmaxf(combined.stabilizer, some.stabilizer);
    const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
    const float before = ex2_approx(combined.stabilizer - stabilizer), now = ex2_approx(some.stabilizer - stabilizer);
    combined = {largest, combined.sum * before + some.sum * now};
#pragma unroll
    for (int c = 0; c < 4; ++c) total.data[c] = total.data[c] * before + added.data[c] * now;
  }
  return total;
}

// The same of so many parts of the workspace from `first` on, of which every STEP-th counts.
template <int STEP, typename C>
__device__ __forceinline__ Values4 combine_slots(RowStats& combined, const Partials<C>& partials, int owner, int first,
                                                 int parts, int r, int column) {
  return combine_many(
      combined, parts, [&](int i) { return *partials.stats(partials.slot(owner, first + i * STEP), r); },
      [&](int i) { return *partials.values(partials.slot(owner, first + i * STEP), r, column); });
}

// Adds a part's four columns and statistics of a row to those of the parts before it. A part that the row does not see
// changes no bit, and no other order of operations is allowed: parts of a fixed size give the same in every call.
__device__ __forceinline__ void add_part(Values4& total, RowStats& combined, const Values4& values,
                                         const RowStats& stats) {
  const float largest = fmaxf(combined.stabilizer, stats.stabilizer);
  const float stabilizer = largest == negative_infinity() ? 0.0f : largest;
  const float before = ex2_approx(combined.stabilizer - stabilizer), now = ex2_approx(stats.stabilizer - stabilizer);
  combined = {largest, fmaf(combined.sum, before, __fmul_rn(stats.sum, now))};
#pragma unroll
  for (int c = 0; c < 4; ++c) total.data[c] = fmaf(total.data[c], before, __fmul_rn(values.data[c], now));
}

}  // namespace microsdpa::ampere::varlen
