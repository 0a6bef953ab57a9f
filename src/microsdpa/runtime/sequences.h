// Rules of kernels for sequences of many lengths, and their parameter for a call whose sequences have one length each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../kernels/common/varlen_params.cuh"
#include "plan.h"

namespace microsdpa {

// Work that the kernel's 32 bits have room for, as in kernels/ampere/varlen/spec.py.
constexpr std::int64_t MOST_WORK = (std::int64_t(1) << 31) - (1 << 20);

// Tiles of rows, for each CTA that stays, up to which CTAs may share keys; as in kernels/hopper/varlen/spec.py.
constexpr std::int64_t WAVES = 4;

// Whether CTAs may share the keys of a tile of `block_m` rows: of few tiles, `most_tiles` at most, or sequences of one.
// `most` are the queries of a sequence at most, `queries` those of all. divides_keys() of the kernels' spec.py says the
// same.
inline bool divides_keys(const VarlenParams& p, std::int64_t queries, std::int64_t most, std::int64_t block_m,
                         std::int64_t most_tiles) {
  const std::int64_t pack = p.heads / p.heads_kv, tiles = (queries * pack + block_m - 1) / block_m;
  const std::int64_t rows = (queries * p.heads + 15) / 16 + std::int64_t(p.batch) * p.heads_kv;
  if (rows * ((p.most_keys + std::int64_t(15)) / 16) > MOST_WORK) return false;
  return most * pack <= block_m || tiles * p.heads_kv <= most_tiles;
}

// The parameter of a kernel for sequences of many lengths whose keys follow one another, from the key of a call that
// has one length of all.
inline VarlenParams sequence_params(const KernelLaunch& launch, const CallKey& k) {
  const auto strides = [&](Operand operand) {
    const std::int64_t (&found)[4] = k.tensors[operand].strides;
    return Strides{found[0], found[1], found[2]};
  };
  const std::int64_t (&query)[4] = k.tensors[QUERY].shape, (&key)[4] = k.tensors[KEY].shape;
  VarlenParams p{};
  p.query_strides = strides(QUERY), p.out_strides = strides(OUT);
  p.key_strides = strides(KEY), p.value_strides = strides(VALUE);
  p.lse_batch_stride = query[1] * query[2], p.lse_head_stride = query[2];
  if (k.given) {
    p.slope_batch_stride = k.tensors[SLOPES].strides[2], p.slope_head_stride = k.tensors[SLOPES].strides[3];
    p.sink_head_stride = k.tensors[SINKS].strides[3];
  }
  p.page_factor = std::uint64_t(1) << 32, p.page_shift = 32, p.page_size = 1;
  p.pages = p.batch = static_cast<int32>(query[0]);
  p.heads = static_cast<int32>(query[1]), p.heads_kv = static_cast<int32>(key[1]);
  p.most_queries = static_cast<int32>(query[2]), p.most_keys = static_cast<int32>(key[2]);
  p.left = static_cast<int32>(std::min(k.left, key[2]));
  p.right = k.causal() ? 0 : static_cast<int32>(std::min(k.right, key[2]));
  if (launch.cluster > 1) return p;
  const std::int64_t ctas = launch.grid[0];
  if (divides_keys(p, query[0] * query[2], query[2], launch.sequence_rows, WAVES * ctas)) {
    p.part_heads = static_cast<int32>(std::max<std::int64_t>(1, key[1] / ctas));
  }
  return p;
}

// Fills that parameter.
inline void fill_sequences(PlannedKernel& kernel, const CallKey& k) {
  const VarlenParams params = sequence_params(kernel.launch, k);
  kernel.params.assign(reinterpret_cast<const char*>(&params), sizeof(params));
  kernel.pointers = {{offsetof(VarlenParams, query), QUERY, 0},       {offsetof(VarlenParams, key), KEY, 0},
                     {offsetof(VarlenParams, value), VALUE, 0},       {offsetof(VarlenParams, out), OUT, 0},
                     {offsetof(VarlenParams, lse), LSE, 0},           {offsetof(VarlenParams, workspace), WORKSPACE, 0},
                     {offsetof(VarlenParams, arrivals), COUNTERS, 0}, {offsetof(VarlenParams, slopes), SLOPES, 0},
                     {offsetof(VarlenParams, sinks), SINKS, 0}};
  kernel.numbers = {{offsetof(VarlenParams, scale_log2), SCALE_LOG2},
                    {offsetof(VarlenParams, softcap_log2), SOFTCAP_LOG2}};
}

}  // namespace microsdpa
