// The parameter of kernels with 16-bit operands, filled from the key of a call.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../kernels/common/dropout_params.cuh"
#include "../kernels/common/mask_params.cuh"
#include "../kernels/common/prologue_params.cuh"
#include "plan.h"
#include "sequences.h"

namespace microsdpa {

inline Strides outer_strides(const TensorKey& key) { return {key.strides[0], key.strides[1], key.strides[2]}; }

// The parameter of kernels with 16-bit operands: all but addresses, scale and soft cap.
inline MaskedParams standard_params(const CallKey& k) {
  MaskedParams found{};
  AttentionParams& call = found.call;
  call.query_strides = outer_strides(k.tensors[QUERY]);
  call.key_strides = outer_strides(k.tensors[KEY]);
  call.value_strides = outer_strides(k.tensors[VALUE]);
  call.out_strides = outer_strides(k.tensors[OUT]);
  const std::int64_t (&query)[4] = k.tensors[QUERY].shape, (&key)[4] = k.tensors[KEY].shape;
  call.batch = static_cast<int32>(query[0]);
  call.heads = static_cast<int32>(query[1]);
  call.heads_kv = static_cast<int32>(key[1]);
  call.seqlen_q = static_cast<int32>(query[2]);
  call.seqlen_k = static_cast<int32>(key[2]);

  // Ends out of every key's reach are brought near: sums of them must stay in 32 bits. Masks.bounds() says the same.
  constexpr std::int64_t FAR = std::int64_t(1) << 40;
  const std::int64_t position = k.causal() == 2 ? key[2] - query[2] : 0;
  const std::int64_t furthest = k.causal() ? position : position + std::min(k.right, FAR);
  call.diagonal = static_cast<int32>(std::min(furthest, key[2]));
  MaskParams& masks = found.masks;
  masks.position = static_cast<int32>(position);
  masks.lowest = static_cast<int32>(std::max(position - std::min(k.left, FAR), -query[2]));
  if (k.given) {
    const std::int64_t (&mask)[4] = k.tensors[MASK].strides;
    masks.mask_strides = {mask[0], mask[1], mask[2]};
    masks.mask_column_stride = mask[3];
    masks.slope_batch_stride = k.tensors[SLOPES].strides[2];
    masks.slope_head_stride = k.tensors[SLOPES].strides[3];
    masks.sink_head_stride = k.tensors[SINKS].strides[3];
  }
  return found;
}

inline bool is_masked(const CallKey& k) {
  const bool tensors = k.given & ((std::int64_t(1) << PLAIN_OPERANDS) - 1);
  return tensors || k.left != -1 || k.right != -1 || k.capped || k.drops();
}

// Adds what norms and rotary embedding need to a parameter.
inline void add_prologue(PlannedKernel& kernel, const CallKey& k) {
  const auto stride = [&](Operand operand, int dimension) { return k.tensors[operand].strides[dimension]; };
  PrologueParams params{};
  params.cos_stride = stride(COS, 2), params.sin_stride = stride(SIN, 2);
  params.query_positions_stride = stride(QUERY_POSITIONS, 2), params.key_positions_stride = stride(KEY_POSITIONS, 2);
  params.positions = static_cast<int32>(k.given & 1 << COS ? k.tensors[COS].shape[2] : 1);
  const std::size_t start = kernel.params.size();
  static_assert(offsetof(Prologued, prologue) == sizeof(MaskedParams), "the prologue follows");
  kernel.params.append(reinterpret_cast<const char*>(&params), sizeof(params));
  const auto pointer = [&](std::size_t at, int operand) { kernel.pointers.push_back({start + at, operand, 0}); };
  pointer(offsetof(PrologueParams, cos), COS);
  pointer(offsetof(PrologueParams, sin), SIN);
  pointer(offsetof(PrologueParams, query_positions), QUERY_POSITIONS);
  pointer(offsetof(PrologueParams, key_positions), KEY_POSITIONS);
  pointer(offsetof(PrologueParams, query_weight), QUERY_WEIGHT);
  pointer(offsetof(PrologueParams, query_bias), QUERY_BIAS);
  pointer(offsetof(PrologueParams, key_weight), KEY_WEIGHT);
  pointer(offsetof(PrologueParams, key_bias), KEY_BIAS);
  kernel.numbers.push_back({start + offsetof(PrologueParams, query_first), QUERY_FIRST});
  kernel.numbers.push_back({start + offsetof(PrologueParams, key_first), KEY_FIRST});
  kernel.numbers.push_back({start + offsetof(PrologueParams, eps), NORM_EPS});
}

inline void fill_standard(PlannedKernel& kernel, const CallKey& k) {
  const Dropped<MaskedParams> params{standard_params(k), {}};
  const bool masked = is_masked(k);
  const bool with_masks = masked || k.prologued();
  const std::size_t bytes = k.drops() ? sizeof(params) : with_masks ? sizeof(MaskedParams) : sizeof(AttentionParams);
  kernel.params.assign(reinterpret_cast<const char*>(&params), bytes);
  kernel.pointers = {
      {offsetof(AttentionParams, query), QUERY, 0}, {offsetof(AttentionParams, key), KEY, 0},
      {offsetof(AttentionParams, value), VALUE, 0}, {offsetof(AttentionParams, out), OUT, 0},
      {offsetof(AttentionParams, lse), LSE, 0},     {offsetof(AttentionParams, workspace), WORKSPACE, 0}};
  kernel.numbers = {{offsetof(AttentionParams, scale_log2), SCALE_LOG2}};
  if (k.prologued()) add_prologue(kernel, k);
  if (!masked) return;
  constexpr std::size_t MASKS = offsetof(MaskedParams, masks);
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, mask), MASK, 0});
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, slopes), SLOPES, 0});
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, sinks), SINKS, 0});
  kernel.numbers.push_back({MASKS + offsetof(MaskParams, softcap_log2), SOFTCAP_LOG2});
  if (!k.drops()) return;
  constexpr std::size_t DROPOUT = offsetof(Dropped<MaskedParams>, dropout);
  kernel.pointers.push_back({DROPOUT + offsetof(DropoutParams, drawn), DRAWN, 0});
  kernel.pointers.push_back({DROPOUT + offsetof(DropoutParams, seed), SEED, 0});
  kernel.pointers.push_back({DROPOUT + offsetof(DropoutParams, offset), OFFSET, 0});
  kernel.pointers.push_back({DROPOUT + offsetof(DropoutParams, state), STATE, 0});
  kernel.numbers.push_back({DROPOUT + offsetof(DropoutParams, kept), KEPT});
  kernel.numbers.push_back({DROPOUT + offsetof(DropoutParams, scale), KEPT_SCALE});
}

// Fills the parameter that a kernel takes.
inline void fill_own(PlannedKernel& kernel, const CallKey& k) {
  if (kernel.launch.sequence_rows) return fill_sequences(kernel, k);
  fill_standard(kernel, k);
}

// A call of one query a head that sees all keys, whose query heads of a key head are taken as the queries of one head.
inline CallKey heads_as_queries(CallKey key) {
  const std::int64_t heads_kv = key.tensors[KEY].shape[1];
  for (const Operand operand : {QUERY, OUT}) {
    TensorKey& tensor = key.tensors[operand];
    const std::int64_t group = tensor.shape[1] / heads_kv, stride = tensor.strides[1];
    tensor.shape[1] = heads_kv, tensor.shape[2] = group;
    tensor.strides[1] = heads_kv > 1 ? group * stride : 0, tensor.strides[2] = stride;
  }
  key.options &= ~CallKey::CAUSAL_BITS;
  return key;
}

// What a kernel of a plan sees of a call.
inline CallKey operands_of(const PlannedKernel& kernel, const CallKey& key) {
  return kernel.launch.heads_as_queries ? heads_as_queries(key) : key;
}

// A tensor of these sizes whose rows follow one another.
inline TensorKey dense(TensorKey tensor) {
  std::int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    tensor.strides[i] = tensor.shape[i] > 1 ? stride : 0;
    stride *= tensor.shape[i];
  }
  return tensor;
}

// The call that is left behind a kernel that has changed Q and K.
inline CallKey behind(const ChangedRows& changed, CallKey key) {
  if (!changed.bytes) return key;
  key.options &= ~CallKey::PROLOGUE_BIT;
  key.given &= (std::int64_t(1) << PLAIN_OPERANDS) - 1;
  for (const Operand operand : {QUERY, KEY}) {
    if (changed.place(operand) >= 0) key.tensors[operand] = dense(key.tensors[operand]);
  }
  return key;
}

// The parameter of a kernel of a plan: the first one of those with `changed` rows writes them to where the output and
// scratch memory of other kernels are.
inline void fill(PlannedKernel& kernel, const CallKey& key, const ChangedRows& changed, bool first) {
  if (!changed.bytes) return fill_own(kernel, key);
  fill_own(kernel, first ? key : behind(changed, key));
  for (Pointer& pointer : kernel.pointers) {
    const int operand = pointer.operand;
    const std::int64_t own = operand == WORKSPACE ? changed.bytes : changed.place(operand);
    const std::int64_t written = operand == OUT ? changed.query : operand == WORKSPACE ? changed.key : -1;
    const std::int64_t place = first ? written : own;
    if (place >= 0) pointer = {pointer.at, WORKSPACE, static_cast<std::uintptr_t>(place)};
  }
}

}  // namespace microsdpa
