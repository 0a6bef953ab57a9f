// The plans of this process: those of exact calls, and what they are for calls whose K has another length.
#pragma once

#include <algorithm>

#include "framework.h"
#include "plan.h"
#include "standard_params.h"

namespace microsdpa {

inline PlanTable& plans() {
  static PlanTable table;
  return table;
}

// Plans by what they keep when K grows: growing_key() gives the keys.
inline PlanTable& growing_plans() {
  static PlanTable table;
  return table;
}

// What calls have in common that differ in the length of K, in strides of K, V and mask, and so in addresses. False for
// a call that is none of those, or whose K has a norm or rotary embedding.
inline bool growing_key(const CallKey& key, CallKey& common) {
  constexpr std::int64_t MASKS = 1 << MASK | 1 << SLOPES | 1 << SINKS;
  constexpr std::int64_t OF_QUERY = 1 << COS | 1 << SIN | 1 << QUERY_POSITIONS | 1 << QUERY_WEIGHT | 1 << QUERY_BIAS;
  const std::int64_t length = key.tensors[KEY].shape[2];
  if (length < 2 || key.tensors[VALUE].shape[2] != length || (key.given & ~(MASKS | OF_QUERY))) return false;
  if ((key.given & 1 << COS) && key.rotates_key()) return false;
  common = key;
  for (const Operand operand : {KEY, VALUE}) {
    TensorKey& tensor = common.tensors[operand];
    if (tensor.shape[3] > 1 && tensor.strides[3] != 1) return false;
    tensor.shape[2] = 0;
    std::fill_n(tensor.strides, 3, 0);
  }
  if (key.given & 1 << MASK) {
    TensorKey& mask = common.tensors[MASK];
    if (mask.shape[3] == length) mask.shape[3] = 0;
    // Which rows share memory decides about kernels, as the last stride does.
    for (std::int64_t* stride = mask.strides; stride < mask.strides + 3; ++stride) *stride = *stride != 0;
  }
  return true;
}

// Bulk copies address strides below 2^40 bytes.
inline bool is_bulk(const TensorKey& tensor) {
  return std::all_of(tensor.strides, tensor.strides + 3, [&](std::int64_t stride) {
    return std::uint64_t(stride) * tensor.element_bytes() < std::uint64_t(1) << 40;
  });
}

// The plan of a call whose K has another length than that of a plan before it; null where there is none.
inline std::shared_ptr<const Plan> grown_plan(const Call& call) {
  CallKey common;
  if (!growing_key(call.key, common)) return nullptr;
  const std::shared_ptr<const Plan> before = growing_plans().find(common);
  if (!before || !before->growth.has(call.key.tensors[KEY].shape[2])) return nullptr;
  auto plan = std::make_shared<Plan>(*before);
  plan->node = 0;
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (PlannedKernel& kernel : plan->kernels) {
      fill(kernel, call.key, plan->changed, &kernel == &plan->kernels.front());
      for (EncodedTensorMap& map : kernel.launch.tensor_maps) {
        if (map.spec.operand == WORKSPACE) continue;  // Q as it was changed, of which nothing grows
        const TensorKey& tensor = call.key.tensors[map.spec.operand];
        if (!is_bulk(tensor)) return plan.reset();
        map = encode_tensor_map(driver(), map.spec, tensor, call.addresses[map.spec.operand]);
      }
    }
  });
  if (plan) plans().insert(call.key, plan);
  return plan;
}

// Calls without masks by what they have in common that differ in batch size, lengths and strides alone: resized_key()
// gives the keys. A plan in this table is none to launch: its `kind` is the number that Python knows the calls by.
inline PlanTable& kinds() {
  static PlanTable table;
  return table;
}

// The key of a call's kind. False for a call that is none of those: one that validation may refuse, or whose tensors
// bulk copies cannot address.
inline bool resized_key(const CallKey& key, CallKey& common) {
  const TensorKey *query = &key.tensors[QUERY], *keys = &key.tensors[KEY], *out = &key.tensors[OUT];
  const auto differ = [](const TensorKey& a, const TensorKey& b) { return !std::equal(a.shape, a.shape + 3, b.shape); };
  // Head dimensions stay in the key, of which value and output may have another.
  if (key.given || key.left != -1 || key.right != -1 || key.capped || differ(*query, *out) ||
      differ(*keys, key.tensors[VALUE]) || keys->shape[0] != query->shape[0]) {
    return false;
  }
  common = key;
  for (int i = 0; i < DENSE_OPERANDS; ++i) {
    TensorKey& tensor = common.tensors[i];
    if (tensor.shape[0] < 1 || tensor.shape[2] < 1 || !is_bulk(tensor)) return false;
    if (tensor.shape[3] > 1 && tensor.strides[3] != 1) return false;
    tensor.shape[0] = tensor.shape[2] = 0;
    std::fill_n(tensor.strides, 3, 0);
  }
  return true;
}

inline std::shared_ptr<const Plan> plan_of(const Call& call) {
  std::shared_ptr<const Plan> plan = plans().find(call.key);
  return plan ? plan : grown_plan(call);
}

}  // namespace microsdpa
