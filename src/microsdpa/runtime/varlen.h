// Calls with sequences of many lengths: their key, which has no sizes that change from call to call, and their launch.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>

#include "arrivals.h"
#include "framework.h"
#include "plan.h"
#include "scratch.h"
#include "sequences.h"

namespace microsdpa {

// Numbers that the kernel's 32 bits have room for, as in kernels/ampere/varlen/spec.py.
constexpr std::int64_t MOST_KEYS = std::int64_t(1) << 29;
constexpr std::int64_t FEW_KEYS = 1536, SPLIT_KEYS = 512;  // as in spec.py
constexpr std::int64_t LARGEST_GRANULARITY = 64;           // as in sequences.py

// How clusters share the keys of few sequences, and numbers of keys at which more sequences have other tiles: SHARING,
// FEWEST_NARROW_KEYS and MOST_FEW_KEYS of spec.py.
struct Sharing {
  std::int64_t units, keys, wide_from;
};
constexpr Sharing SHARING[] = {{15, 8192, 0}, {30, 2048, 0}, {66, 4096, 257}, {132, 1024, 0}};

// The same for kernels/hopper/varlen/spec.py, with FEWEST_LARGE and LONG_KEYS, at which it may have larger tiles; and a
// number of keys at which sequences of more rows have another kernel: MOST_KEYS_OF_MMA of kernels/policy.py.
constexpr Sharing SHARING_OF_HOPPER[] = {{4, 16384, 0}, {12, 16384, 0}, {28, 8192, 0}, {56, 8192, 0}, {128, 4096, 0}};
constexpr std::int64_t MOST_KEYS_OF_MMA = 2048;
constexpr std::int64_t FEWEST_LARGE = 64, LONG_KEYS = 4096;

constexpr std::int64_t FEWEST_NARROW_KEYS = 128, MOST_FEW_KEYS = 512;

// A number for calls of which hopper/varlen has the same tiles as far as batch size and keys decide; 0 without
// clusters.
inline std::int64_t sharing_of_hopper(std::int64_t batch, std::int64_t heads_kv, std::int64_t most_keys) {
  std::int64_t number = 1;
  for (const Sharing& each : SHARING_OF_HOPPER) {
    if (batch * heads_kv <= each.units) return most_keys <= each.keys ? number : 0;
    ++number;
  }
  return 0;
}

// The same for ampere/varlen; 0 for few sequences of which no clusters share keys.
inline std::int64_t sharing_of_ampere(std::int64_t batch, std::int64_t heads_kv, std::int64_t most_keys) {
  std::int64_t number = 1;
  for (const Sharing& each : SHARING) {
    if (batch * heads_kv <= each.units) {
      if (most_keys > each.keys) return 0;
      const bool wide = each.wide_from && most_keys >= each.wide_from, one = batch == 1;
      return number + 4 * wide + 2 * one + (one && most_keys <= FEW_KEYS);
    }
    number += 8;
  }
  return number + (most_keys > FEWEST_NARROW_KEYS) + (most_keys > MOST_FEW_KEYS);
}

// A number for calls whose tiles are the same as far as batch size and keys decide.
inline std::int64_t sharing_of(std::int64_t batch, std::int64_t heads_kv, std::int64_t most_keys) {
  constexpr std::int64_t NUMBERS_OF_HOPPER = std::size(SHARING_OF_HOPPER) + 1;
  const std::int64_t number =
      sharing_of_ampere(batch, heads_kv, most_keys) * NUMBERS_OF_HOPPER + sharing_of_hopper(batch, heads_kv, most_keys);
  const bool many = batch * heads_kv >= FEWEST_LARGE || most_keys >= LONG_KEYS;
  return 4 * number + 2 * many + (batch * heads_kv <= std::end(SHARING)[-1].units && most_keys > MOST_KEYS_OF_MMA);
}

// Strides of [B, S, H, D] or [S, H, D], in the kernel's order: batch entry (0 without), head, row.
inline Strides row_strides(const DLTensor& tensor) {
  const int row = tensor.ndim - 3;
  return {row && tensor.shape[0] > 1 ? tensor.strides[0] : 0, tensor.strides[row + 1], tensor.strides[row]};
}

// Whether a tensor has so many dimensions, heads and columns, elements like those of `like` and rows on 16 bytes.
inline bool has_rows(const DLTensor& tensor, int rank, std::int64_t heads, std::int64_t head_dim,
                     const DLTensor& like) {
  if (tensor.ndim != rank || !tensor.strides || !address(tensor)) return false;
  if (tensor.shape[rank - 2] != heads || tensor.shape[rank - 1] != head_dim || tensor.strides[rank - 1] != 1) {
    return false;
  }
  if (TensorKey::pack(tensor.dtype, tensor.device) != TensorKey::pack(like.dtype, like.device)) return false;
  std::uint64_t bits = address(tensor);
  for (int i = 0; i < rank - 1; ++i) {
    if (tensor.shape[i] > 1) bits |= std::uint64_t(tensor.strides[i]) * (tensor.dtype.bits / 8);
  }
  return bits % 16 == 0;
}

// Whether a tensor, if there is one, is of int32 and has `size` numbers, or `size` rows of numbers.
inline bool has_integers(const DLTensor* tensor, int rank, std::int64_t size, const DLDevice& device) {
  if (!tensor) return true;
  if (tensor->ndim != rank || tensor->shape[0] != size || !tensor->strides || !address(*tensor)) return false;
  if (tensor->shape[rank - 1] > 1 && tensor->strides[rank - 1] != 1) return false;
  return TensorKey::pack(tensor->dtype, tensor->device) == TensorKey::pack({kDLInt, 32, 1}, device);
}

// One past the last byte that a tensor reaches.
inline std::uintptr_t end_of(const DLTensor& tensor) {
  std::int64_t last = 0;
  for (int i = 0; i < tensor.ndim; ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
  return address(tensor) + (last + 1) * tensor.dtype.bits / 8;
}

// Whether a tensor that is written to meets another one of the call, but for those of `except`.
inline bool meets_others(const DLTensor& written, const Arguments& arguments, std::uint64_t except) {
  for (int i = 0; i < GIVEN_OPERANDS; ++i) {
    const DLTensor* other = arguments.tensors[i];
    if (!other || except >> i & 1) continue;
    if (address(written) < end_of(*other) && address(*other) < end_of(written)) return true;
  }
  return false;
}

// Whether elements of a tensor may have memory of their own: no dimension is broadcast.
inline bool is_written_once(const DLTensor& tensor) {
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] < 1) return false;
  }
  return true;
}

// Reads the weights of norms of queries and new keys into a call whose other parts are read; false as parse().
inline bool parse_norms(const Arguments& arguments, std::int64_t head_dim, Call& call) {
  const DLTensor *query = arguments.tensors[QUERY_NORM], *key = arguments.tensors[KEY_NORM];
  if (!query && !key) return true;
  if (key && !arguments.tensors[NEW_KEY]) return false;
  if (!(arguments.norm_eps >= 0.0 && arguments.norm_eps < 3e38)) return false;
  const DLTensor& first = query ? *query : *key;
  for (const DLTensor* weights : {query, key}) {
    if (!weights) continue;
    if (weights->ndim != 1 || weights->shape[0] != head_dim || !weights->strides || !address(*weights)) return false;
    if (head_dim > 1 && weights->strides[0] != 1) return false;
    if (TensorKey::pack(weights->dtype, weights->device) != TensorKey::pack(first.dtype, call.query->device)) {
      return false;
    }
  }
  call.key.tensors[OUT] = {{1}, {}, TensorKey::pack(first.dtype, first.device)};
  if (query) call.varlen.query_norm = reinterpret_cast<const void*>(address(*query));
  if (key) call.varlen.key_norm = reinterpret_cast<const void*>(address(*key));
  call.varlen.norm_eps = static_cast<float>(arguments.norm_eps);
  return true;
}

// Reads what is appended to a cache, and what is done to it and queries, into a call whose other parts are read; false
// as parse().
inline bool parse_append(const Arguments& arguments, Call& call) {
  const DLTensor *query = arguments.tensors[QUERY], *key = arguments.tensors[KEY], *value = arguments.tensors[VALUE];
  const DLTensor *new_key = arguments.tensors[NEW_KEY], *new_value = arguments.tensors[NEW_VALUE];
  const DLTensor *cos = arguments.tensors[ROTARY_COS], *sin = arguments.tensors[ROTARY_SIN];
  AppendParams& p = call.varlen;
  if (!arguments.tensors[LENGTHS] || arguments.tensors[KEY_OFFSETS]) return false;
  if (!new_key != !new_value || !cos != !sin) return false;
  const int rank = query->ndim;
  const std::int64_t head_dim = query->shape[rank - 1];
  if (new_key) {
    for (const DLTensor* tensor : {new_key, new_value}) {
      const DLTensor& cache = tensor == new_key ? *key : *value;
      if (!has_rows(*tensor, rank, p.call.heads_kv, cache.shape[cache.ndim - 1], *query)) return false;
      for (int i = 0; i < rank - 2; ++i) {
        if (tensor->shape[i] != query->shape[i]) return false;
      }
    }
    constexpr std::uint64_t CACHE = 1u << KEY | 1u << VALUE;
    for (const DLTensor* tensor : {key, value}) {
      if (!is_written_once(*tensor) || meets_others(*tensor, arguments, CACHE)) return false;
    }
    p.new_key = reinterpret_cast<const void*>(address(*new_key));
    p.new_value = reinterpret_cast<const void*>(address(*new_value));
    p.new_key_strides = row_strides(*new_key), p.new_value_strides = row_strides(*new_value);
    p.call.appends = 1;
  }
  if (cos) {
    for (const DLTensor* tensor : {cos, sin}) {
      if (tensor->ndim != 2 || !tensor->strides || !address(*tensor) || tensor->strides[1] != 1) return false;
      if (tensor->shape[0] < 1 || tensor->shape[0] > MOST_KEYS || tensor->shape[0] != cos->shape[0]) return false;
      if (tensor->shape[1] != cos->shape[1]) return false;
      if (TensorKey::pack(tensor->dtype, tensor->device) != TensorKey::pack(cos->dtype, query->device)) return false;
    }
    call.key.tensors[VALUE] = {{cos->shape[1]}, {}, TensorKey::pack(cos->dtype, cos->device)};
    p.rotary_cos = reinterpret_cast<const void*>(address(*cos));
    p.rotary_sin = reinterpret_cast<const void*>(address(*sin));
    p.cos_stride = cos->strides[0], p.sin_stride = sin->strides[0];
    p.positions = static_cast<int32>(cos->shape[0]);
  }
  return parse_norms(arguments, head_dim, call);
}

// Whether keys and values may have a type of 8 bits beside queries of 16: E4M3, or INT8.
inline bool is_cached_type(const DLDataType& dtype) {
  return dtype.lanes == 1 && dtype.bits == 8 && (dtype.code == kDLFloat8_e4m3fn || dtype.code == kDLInt);
}

// Reads a scale of keys or values; gives whether each token has its own (1) or not (0), or -1 where it is no scale of
// these. kernel_strides() of call/cache.py says the same.
inline int parse_scale(const DLTensor& scale, const DLTensor& key, std::int64_t batch, const float*& numbers,
                       Strides& strides) {
  if (TensorKey::pack(scale.dtype, scale.device) != TensorKey::pack({kDLFloat, 32, 1}, key.device)) return -1;
  if (!address(scale) || (scale.ndim && !scale.strides) || scale.ndim > 3) return -1;
  numbers = reinterpret_cast<const float*>(address(scale));
  const int rank = scale.ndim, head = key.ndim - 2;
  bool each_token = rank == head + 1;
  for (int i = 0; i < rank && each_token; ++i) each_token = scale.shape[i] == key.shape[i];
  if (each_token) {
    strides = {rank == 3 ? scale.strides[0] : 0, scale.strides[rank - 1], scale.strides[rank - 2]};
    return 1;
  }
  if (rank == 0 || (rank == 1 && scale.shape[0] == 1)) return strides = {0, 0, 0}, 0;
  if (scale.shape[rank - 1] != key.shape[head] || rank > 2 || (rank == 2 && scale.shape[0] != batch)) return -1;
  strides = {rank == 2 ? scale.strides[0] : 0, scale.strides[rank - 1], 0};
  return 0;
}

// Reads the scales of 8-bit keys and values into a call whose other parts are read; false as parse().
inline bool parse_cache(const Arguments& arguments, std::int64_t batch, Call& call) {
  const DLTensor *key = arguments.tensors[KEY], *query = arguments.tensors[QUERY];
  const DLTensor* scales[2] = {arguments.tensors[KEY_SCALE], arguments.tensors[VALUE_SCALE]};
  CacheParams& p = call.varlen;
  if (!scales[0] || !scales[1] || key->device.device_id != query->device.device_id) return false;
  const int of_keys = parse_scale(*scales[0], *key, batch, p.key_scale, p.key_scale_strides);
  const int of_values = parse_scale(*scales[1], *key, batch, p.value_scale, p.value_scale_strides);
  if (of_keys < 0 || of_values < 0) return false;
  // Beside scales of tokens, those of heads are the same for all sequences.
  if (of_keys != of_values && (of_keys ? p.value_scale_strides : p.key_scale_strides).batch) return false;
  const std::int64_t each_token = of_keys || of_values;
  if (each_token && arguments.tensors[NEW_KEY]) {  // their scales are written
    constexpr std::uint64_t SCALES = 1u << KEY_SCALE | 1u << VALUE_SCALE;
    for (const DLTensor* scale : scales) {
      if (of_keys != of_values || !is_written_once(*scale) || meets_others(*scale, arguments, SCALES)) return false;
    }
  }
  call.key.tensors[KEY_SCALE] = {{each_token}, {}, TensorKey::pack(key->dtype, key->device)};
  return true;
}

// What tiles are chosen for: at most so many queries of a sequence, rounded up as in call/sequences.py.
inline std::int64_t rounded_queries(std::int64_t most) {
  std::int64_t rounded = 1;
  while (rounded < most) rounded *= 2;
  const std::int64_t fewer = rounded / 4 * 3;
  return most <= fewer ? fewer : rounded;
}

inline bool parse_varlen(const Arguments& arguments, Call& call) {
  const DLTensor *query = arguments.tensors[QUERY], *key = arguments.tensors[KEY], *value = arguments.tensors[VALUE];
  const DLTensor *out = arguments.tensors[OUT], *table = arguments.tensors[PAGE_TABLE];
  const DLTensor *query_offsets = arguments.tensors[QUERY_OFFSETS], *key_offsets = arguments.tensors[KEY_OFFSETS];
  const DLTensor *slopes = arguments.tensors[SLOPES], *sinks = arguments.tensors[SINKS];
  const int query_rank = query_offsets ? 3 : 4, key_rank = key_offsets ? 3 : 4;
  if (!query || !key || !value || !out || query->device.device_type != MICROSDPA_DEVICE || arguments.tensors[MASK])
    return false;
  if (query->dtype.bits != 16 || query->ndim != query_rank || key->ndim != key_rank || (table && key_offsets)) {
    return false;
  }
  const std::int64_t heads = query->shape[query_rank - 2], head_dim = query->shape[query_rank - 1];
  const std::int64_t heads_kv = key->shape[key_rank - 2];
  if (value->ndim != key_rank || value->shape[key_rank - 1] < 1 || value->shape[key_rank - 1] > head_dim) return false;
  const std::int64_t value_dim = value->shape[key_rank - 1];
  if (heads_kv < 1 || heads < 1 || heads % heads_kv) return false;
  if (!has_rows(*query, query_rank, heads, head_dim, *query) || !has_rows(*out, query_rank, heads, value_dim, *query) ||
      !has_rows(*key, key_rank, heads_kv, head_dim, *key) || !has_rows(*value, key_rank, heads_kv, value_dim, *key)) {
    return false;
  }
  const bool is_cached = is_cached_type(key->dtype);
  if (is_cached && value_dim != head_dim) return false;
  if (!is_cached && TensorKey::pack(key->dtype, key->device) != TensorKey::pack(query->dtype, query->device)) {
    return false;
  }
  if (arguments.tensors[QUERY_SCALE]) return false;
  if (!is_cached && (arguments.tensors[KEY_SCALE] || arguments.tensors[VALUE_SCALE])) return false;
  for (int i = 0; i < query_rank; ++i) {
    if ((i < query_rank - 1 && query->shape[i] != out->shape[i]) || query->shape[i] < 1) return false;
  }
  for (int i = 0; i < key_rank; ++i) {
    if ((i < key_rank - 1 && key->shape[i] != value->shape[i]) || key->shape[i] < 1) return false;
  }
  if (query_offsets && (query_offsets->ndim != 1 || query_offsets->shape[0] < 2)) return false;
  const std::int64_t batch = query_offsets ? query_offsets->shape[0] - 1 : query->shape[0];
  if (!has_integers(query_offsets, 1, batch + 1, query->device) ||
      !has_integers(key_offsets, 1, batch + 1, query->device) || !has_integers(table, 2, batch, query->device) ||
      !has_integers(arguments.tensors[LENGTHS], 1, batch, query->device)) {
    return false;
  }
  if (!table && !key_offsets && key->shape[0] != batch) return false;
  const std::int64_t queries = query_offsets ? query->shape[0] : batch * query->shape[1];
  const std::int64_t page_size = table ? key->shape[1] : 1;
  const std::int64_t most_keys = table ? table->shape[1] * page_size : key->shape[key_offsets ? 0 : 1];
  const std::int64_t rows = (queries * heads + 15) / 16 + batch * heads_kv;
  if (most_keys < 1 || most_keys > MOST_KEYS || queries > MOST_KEYS || arguments.max_queries < 0) return false;
  if (rows > MOST_WORK) return false;
  if (call.key.batch_invariant() && rows * ((most_keys + SPLIT_KEYS - 1) / SPLIT_KEYS + 1) > MOST_WORK) return false;
  if (!is_written_once(*out) || meets_others(*out, arguments, 1u << OUT)) return false;

  call.varlen = NormedParams{};
  VarlenParams& p = call.varlen.call;
  CallKey& k = call.key;
  std::memset(k.tensors, 0, k.bytes_of(PLAIN_OPERANDS));
  k.alignment = k.mask_alignment = 16, k.given = 0;
  k.left = arguments.left != -1, k.right = arguments.right != -1, k.capped = arguments.capped;
  if (arguments.left < -1 || arguments.right < -1) return false;
  for (int i = MASK; i < GIVEN_OPERANDS; ++i) k.given |= std::int64_t(arguments.tensors[i] != nullptr) << i;
  const std::int64_t mean = (queries + batch - 1) / batch;
  const std::int64_t hint =
      arguments.max_queries && batch > 1 ? std::max(mean, std::min(arguments.max_queries, queries)) : mean;
  const std::int64_t most = rounded_queries(query_offsets ? hint : query->shape[1]);
  const bool packed = query_offsets && batch > 1;
  const std::int64_t sharing = 2 * sharing_of(batch, heads_kv, most_keys) + packed;
  k.tensors[QUERY] = {{query_rank, most, heads, head_dim}, {sharing}, TensorKey::pack(query->dtype, query->device)};
  const std::int64_t granularity = table ? std::min(page_size & -page_size, LARGEST_GRANULARITY) : 0;
  k.tensors[KEY] = {{key_rank, granularity, heads_kv, head_dim}, {value_dim}, 0};
  if (slopes) {
    const bool each = slopes->ndim == 2;
    if ((slopes->ndim != 1 && !each) || slopes->shape[slopes->ndim - 1] != heads ||
        (each && slopes->shape[0] != batch)) {
      return false;
    }
    if (TensorKey::pack(slopes->dtype, slopes->device) != TensorKey::pack({kDLFloat, 32, 1}, query->device))
      return false;
    p.slopes = reinterpret_cast<const float*>(address(*slopes));
    p.slope_batch_stride = each ? slopes->strides[0] : 0;
    p.slope_head_stride = slopes->strides[slopes->ndim - 1];
  }
  if (sinks) {
    if (sinks->ndim != 1 || sinks->shape[0] != heads || sinks->device.device_type != MICROSDPA_DEVICE) return false;
    k.tensors[SINKS].dtype_and_device = TensorKey::pack(sinks->dtype, sinks->device);
    p.sinks = reinterpret_cast<const void*>(address(*sinks));
    p.sink_head_stride = sinks->strides[0];
  }
  call.query = query, call.keys_and_values[0] = key, call.keys_and_values[1] = value;
  const auto integers = [&](int operand) {
    const DLTensor* tensor = arguments.tensors[operand];
    return tensor ? reinterpret_cast<const int32*>(address(*tensor)) : nullptr;
  };
  p.query = reinterpret_cast<const void*>(address(*query));
  p.key = reinterpret_cast<const void*>(address(*key));
  p.value = reinterpret_cast<const void*>(address(*value));
  p.out = reinterpret_cast<void*>(address(*out));
  p.query_offsets = integers(QUERY_OFFSETS), p.key_offsets = integers(KEY_OFFSETS);
  p.lengths = integers(LENGTHS), p.page_table = integers(PAGE_TABLE);
  p.query_strides = row_strides(*query), p.out_strides = row_strides(*out);
  p.key_strides = row_strides(*key), p.value_strides = row_strides(*value);
  p.lse_batch_stride = query_offsets ? 0 : heads * query->shape[1];
  p.lse_head_stride = query_offsets ? queries : query->shape[1];
  p.table_stride = table ? table->strides[0] : 0;
  p.page_shift = 32;
  while (std::int64_t(1) << (p.page_shift - 32) < page_size) ++p.page_shift;
  p.page_factor = ((std::uint64_t(1) << p.page_shift) + page_size - 1) / page_size;
  p.page_size = static_cast<int32>(page_size);
  p.pages = static_cast<int32>(std::min(key->shape[0], std::int64_t(INT32_MAX)));
  p.most_keys = static_cast<int32>(most_keys);
  p.most_queries = static_cast<int32>(query_offsets ? queries : query->shape[1]);
  p.batch = static_cast<int32>(batch), p.heads = static_cast<int32>(heads), p.heads_kv = static_cast<int32>(heads_kv);
  p.left = static_cast<int32>(std::min(arguments.left, MOST_KEYS));
  p.right = k.causal() ? 0 : static_cast<int32>(std::min(arguments.right, MOST_KEYS));
  call.varlen.queries = static_cast<int32>(queries);
  constexpr std::int64_t APPENDED = std::int64_t(63) << NEW_KEY;  // and values, cosines, sines and norms
  if (is_cached && !parse_cache(arguments, batch, call)) return false;
  return !(k.given & APPENDED) || parse_append(arguments, call);
}

// Neighbouring key heads whose CTAs take the same keys side by side, as in kernels/ampere/varlen/spec.py.
inline std::int64_t heads_abreast(std::int64_t heads_kv) {
  std::int64_t heads = 8;
  while (heads_kv % heads) --heads;
  return heads;
}

// Finds the CTAs of a launch, and gives whether they take equal parts of all keys, or may; grid_of() of the kernels'
// spec.py says the same.
inline bool varlen_ctas(const Call& call, const VarlenLaunch& launch, unsigned (&ctas)[3]) {
  const VarlenParams& p = call.varlen.call;
  if (launch.cluster > 1) {
    const bool packed = p.query_offsets != nullptr && p.batch > 1;
    const std::int64_t rows = std::int64_t(call.varlen.queries) * (p.heads / p.heads_kv);
    const std::int64_t further = packed ? std::max<std::int64_t>(0, rows - 1) / launch.block_m : 0;
    ctas[0] = static_cast<unsigned>(launch.cluster), ctas[1] = p.heads_kv;
    ctas[2] = static_cast<unsigned>(p.batch + further);
    return false;
  }
  if (call.key.batch_invariant()) {
    ctas[0] = launch.ctas, ctas[1] = ctas[2] = 1;
    return true;
  }
  const std::int64_t pack = p.heads / p.heads_kv, most = call.key.tensors[QUERY].shape[1];
  const std::int64_t queries = call.varlen.queries;
  const bool stays = launch.box_rows > 0;
  const std::int64_t most_tiles = stays ? WAVES * launch.ctas : launch.ctas;
  const bool divides = divides_keys(p, queries, most, launch.block_m, most_tiles);
  ctas[0] = divides || stays ? launch.ctas : (queries * pack / launch.block_m + p.batch) * p.heads_kv;
  ctas[1] = ctas[2] = 1;
  if (divides && !stays) {
    ctas[0] = static_cast<unsigned>(heads_abreast(p.heads_kv)), ctas[1] = static_cast<unsigned>(launch.ctas) / ctas[0];
  }
  return divides;
}

// The shape of a call's LSE: [H, queries], or [B, H, S_q]; gives its rank.
inline int varlen_lse_shape(const Call& call, std::int64_t (&shape)[3]) {
  const VarlenParams& p = call.varlen.call;
  if (p.query_offsets) return shape[0] = p.heads, shape[1] = p.most_queries, 2;
  return shape[0] = p.batch, shape[1] = p.heads, shape[2] = p.most_queries, 3;
}

// The tensor map of packed or dense rows, or of a cache, as [B or pages, H, rows, D]: of `tensor`, or of what lies with
// such strides at an address in its place.
inline CUtensorMap varlen_map(const DLTensor& tensor, const Strides& strides, std::uintptr_t address,
                              const TensorMapSpec& spec) {
  const int row = tensor.ndim - 3;
  TensorKey array{};
  const std::int64_t shape[4] = {row ? tensor.shape[0] : 1, tensor.shape[row + 1], tensor.shape[row],
                                 tensor.shape[row + 2]};
  std::copy(shape, shape + 4, array.shape);
  array.strides[0] = strides.batch, array.strides[1] = strides.head, array.strides[2] = strides.row;
  array.strides[3] = 1;
  array.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return encode_tensor_map(driver(), spec, array, address).map;
}

// The tensor maps of a call, in the kernel's order: panels of K and V, their tails, a panel of Q and its tail.
struct VarlenMaps {
  CUtensorMap maps[6];
  const CUtensorMap* own[7] = {};  // behind the last one is a null pointer

  VarlenMaps(const Call& call, const VarlenLaunch& launch) {
    const VarlenParams& p = call.varlen.call;
    const DLTensor &key = *call.keys_and_values[0], &value = *call.keys_and_values[1];
    const unsigned widths[2] = {static_cast<unsigned>(launch.box_columns), static_cast<unsigned>(launch.tail_columns)};
    const auto heads = static_cast<unsigned>(launch.box_queries ? p.heads / p.heads_kv : 0);
    int count = 0;
    const auto add = [&](const DLTensor& tensor, const Strides& strides, const void* at, const TensorMapSpec& spec) {
      maps[count] = varlen_map(tensor, strides, reinterpret_cast<std::uintptr_t>(at), spec);
      own[count] = maps + count, ++count;
    };
    for (const unsigned columns : widths) {
      const TensorMapSpec spec{KEY, static_cast<unsigned>(launch.box_rows), columns, 2 * columns, 0, 0};
      if (columns) add(key, p.key_strides, p.key, spec), add(value, p.value_strides, p.value, spec);
    }
    for (const unsigned columns : widths) {
      const TensorMapSpec spec{QUERY, static_cast<unsigned>(launch.box_queries), columns, 2 * columns, 0, heads};
      if (columns && heads) add(*call.query, p.query_strides, p.query, spec);
    }
  }
};

// The threads of the kernel that appends, each with 16 bytes.
constexpr int APPEND_THREADS = 128;

// Whether queries come out of the kernel that appends other than they are.
inline bool changes_query(const NormedParams& params) {
  return params.rotary_cos || params.query_norm || params.key_norm;
}

// CTAs that append and change rows; append_grid() of kernels/ampere/varlen/spec.py says the same.
inline unsigned append_ctas(const NormedParams& params, std::int64_t head_dim) {
  const std::int64_t rows =
      (params.new_key ? 2 * params.call.heads_kv : 0) + (changes_query(params) ? params.call.heads : 0);
  std::int64_t lanes = 1;
  while (lanes < head_dim / 8) lanes *= 2;
  return static_cast<unsigned>((params.queries * rows * lanes + APPEND_THREADS - 1) / APPEND_THREADS);
}

// Launches a plan for sequences of many lengths; gives what LseArgument does.
inline ffi::Any execute_varlen(const Plan& plan, Call& call, ffi::AnyView wanted_lse, const Factors& factors) {
  std::int64_t shape[3];
  const int rank = varlen_lse_shape(call, shape);
  const LseArgument lse(wanted_lse, *call.query, shape, rank);
  VarlenParams& params = call.varlen.call;
  const std::int64_t head_dim = call.query->shape[call.query->ndim - 1];
  unsigned ctas[3];
  const bool divides_keys = varlen_ctas(call, plan.varlen, ctas);
  const std::int64_t row = params.heads * head_dim;    // of rotated queries
  const bool appends_ahead = plan.kernels.size() > 1;  // else the kernel of attention does
  const std::int64_t rotated_bytes = appends_ahead && changes_query(call.varlen) ? call.varlen.queries * row * 2 : 0;
  const std::int64_t bytes = (divides_keys ? plan.varlen.workspace_bytes : 0) + rotated_bytes;
  params.lse = reinterpret_cast<float*>(lse.address);
  params.part_heads = divides_keys ? std::max(1, params.heads_kv / static_cast<int32>(ctas[0])) : 0;
  params.scale_log2 = static_cast<float>(factors.scale * LOG2_E);
  params.softcap_log2 = static_cast<float>(factors.softcap * LOG2_E);
  const CUstream stream = current_stream(call.query->device);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    std::optional<Scratch> workspace;
    if (bytes) {
      workspace.emplace(bytes, *call.query, plan.context, stream);
      params.workspace = reinterpret_cast<void*>(workspace->address());
    }
    if (divides_keys || plan.varlen.box_rows)
      params.arrivals = reinterpret_cast<uint32*>(arrivals().of(plan.context, stream));
    if (appends_ahead) {
      if (rotated_bytes) {
        call.varlen.rotated = static_cast<char*>(params.workspace) + (divides_keys ? plan.varlen.workspace_bytes : 0);
      }
      const unsigned append[3] = {append_ctas(call.varlen, head_dim), 1, 1};
      plan.kernels[0].launch.issue(driver(), stream, &call.varlen, call.addresses, append);
      if (rotated_bytes) {
        params.query = call.varlen.rotated;
        params.query_strides = {params.query_offsets ? 0 : params.most_queries * row, head_dim, row};
      }
    }
    std::optional<VarlenMaps> maps;
    if (plan.varlen.box_rows) maps.emplace(call, plan.varlen);
    // The parameter of a kernel that appends begins with that of one that does not.
    plan.kernels.back().launch.issue(driver(), stream, &call.varlen, call.addresses, ctas, maps ? maps->own : nullptr);
  });
  return lse.result();
}

}  // namespace microsdpa
