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

// What sharing keys costs, and where it is worth it, as in kernels/hopper/varlen/spec.py.
constexpr std::int64_t SHARING_COSTS = 3, LEAST_SHARE = 4, WORTH = 8, APART = 4, MOST_AT_ONCE = 16, MOST_TAKEN = 3;
constexpr std::int64_t BYTES_OF_L2 = std::int64_t(32) << 20;

// Which part of a call of one length a CTA computes, from the tiles' rows and keys and the bytes of a key and its
// value; shares_of() of the kernels' spec.py says the same.
inline void share_keys(OneLengthParams& p, std::int64_t block_m, std::int64_t block_n, std::int64_t key_bytes,
                       std::int64_t ctas) {
  const auto ceil = [](std::int64_t x, std::int64_t of) { return (x + of - 1) / of; };
  const std::int64_t row_tiles = ceil(std::int64_t(p.most_queries) * (p.heads / p.heads_kv), block_m);
  const std::int64_t heads = std::int64_t(p.batch) * p.heads_kv, units = heads * row_tiles;
  const std::int64_t tiles = ceil(p.most_keys, block_n);
  p.row_tiles = static_cast<int32>(row_tiles), p.key_tiles = static_cast<int32>(tiles);
  p.units = static_cast<int32>(units), p.parts = 1, p.each = 0;
  if (!p.part_heads) return;
  const std::int64_t numbered = std::max(ceil(units * tiles, ctas), LEAST_SHARE);
  const bool in_l2 = key_bytes * tiles * block_n * heads <= BYTES_OF_L2;
  std::int64_t least = numbered + (in_l2 ? 0 : numbered / APART) + 2 * SHARING_COSTS, parts = 0;
  for (std::int64_t taken = 1; taken <= MOST_TAKEN; ++taken) {
    const std::int64_t fitting = std::min(ctas * taken / units, tiles / LEAST_SHARE);
    if (fitting <= 1 || (taken > 1 && fitting > MOST_AT_ONCE)) continue;
    const std::int64_t cost = taken * (ceil(tiles, fitting) + SHARING_COSTS);
    if (cost < least) least = cost, parts = fitting;
  }
  if (ceil(units, ctas) * tiles <= least + least / WORTH) return;
  if (parts) {
    p.parts = static_cast<int32>(parts);
  } else {
    p.each = static_cast<int32>(numbered);
  }
}

// The parameter of a kernel for sequences of many lengths whose keys follow one another, from the key of a call that
// has one length of all.
inline OneLengthParams sequence_params(const KernelLaunch& launch, const CallKey& k) {
  const auto strides = [&](Operand operand) {
    const std::int64_t (&found)[4] = k.tensors[operand].strides;
    return Strides{found[0], found[1], found[2]};
  };
  const std::int64_t (&query)[4] = k.tensors[QUERY].shape, (&key)[4] = k.tensors[KEY].shape;
  OneLengthParams p{};
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
  share_keys(p, launch.sequence_rows, launch.sequence_keys, 2 * 2 * key[3], ctas);
  return p;
}

// Fills that parameter.
inline void fill_sequences(PlannedKernel& kernel, const CallKey& k) {
  const OneLengthParams params = sequence_params(kernel.launch, k);
  const std::size_t bytes = kernel.launch.cluster > 1 ? sizeof(VarlenParams) : sizeof(params);
  kernel.params.assign(reinterpret_cast<const char*>(&params), bytes);
  kernel.shares_keys = params.parts > 1 || params.each > 0;
  kernel.pointers = {{offsetof(VarlenParams, query), QUERY, 0},       {offsetof(VarlenParams, key), KEY, 0},
                     {offsetof(VarlenParams, value), VALUE, 0},       {offsetof(VarlenParams, out), OUT, 0},
                     {offsetof(VarlenParams, lse), LSE, 0},           {offsetof(VarlenParams, workspace), WORKSPACE, 0},
                     {offsetof(VarlenParams, arrivals), COUNTERS, 0}, {offsetof(VarlenParams, slopes), SLOPES, 0},
                     {offsetof(VarlenParams, sinks), SINKS, 0}};
  kernel.numbers = {{offsetof(VarlenParams, scale_log2), SCALE_LOG2},
                    {offsetof(VarlenParams, softcap_log2), SOFTCAP_LOG2}};
}

}  // namespace microsdpa
