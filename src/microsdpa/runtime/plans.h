// The plans of this process: those of exact calls, and what they are for calls of other sizes.
#pragma once

#include <algorithm>
#include <iterator>

#include "framework.h"
#include "plan.h"
#include "standard_params.h"

namespace microsdpa {

inline PlanTable& plans() {
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

// Calls without tensors of masks by what they have in common that differ in batch size, lengths and strides alone:
// resized_key() gives the keys. A plan in this table is none to launch: its `kind` is the number that Python knows the
// calls by.
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
  if (key.given || differ(*query, *out) || differ(*keys, key.tensors[VALUE]) || keys->shape[0] != query->shape[0]) {
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

// Plans by what they keep in the range of their sizes: ranged_key() gives the keys. Plans of one key are a list.
inline PlanTable& ranged_plans() {
  static PlanTable table;
  return table;
}

// What calls have in common that differ in sizes of such a range, in strides, and so in addresses. False for a call
// that no range has. Where tensors of masks are given, only the length of K may differ.
inline bool ranged_key(const CallKey& key, bool queries_follow, CallKey& common) {
  if (key.given) return !queries_follow && growing_key(key, common);
  const std::int64_t queries = key.tensors[QUERY].shape[2], keys = key.tensors[KEY].shape[2];
  if (keys < 2 || (queries_follow && queries != keys) || !resized_key(key, common)) return false;
  const std::int64_t kept = queries_follow ? 0 : queries;
  common.tensors[QUERY].shape[2] = common.tensors[OUT].shape[2] = kept;
  return true;
}

// Lets calls of other sizes have their plan from this one, as far as its range has them.
inline void add_ranged(const CallKey& key, const std::shared_ptr<Plan>& plan) {
  constexpr int LONGEST_LIST = 16;
  CallKey common;
  if (plan->range.is_empty() || !ranged_key(key, plan->range.queries_follow, common)) return;
  std::shared_ptr<const Plan> others = ranged_plans().find(common);
  int length = 0;
  for (const Plan* other = others.get(); other; other = other->next.get()) ++length;
  auto first = std::make_shared<Plan>(*plan);
  first->next = length < LONGEST_LIST ? std::move(others) : nullptr;
  ranged_plans().insert(common, first);
}

// The plan of a call by that of a call of other sizes, with the same kernels; null where a tensor map cannot describe
// one of its tensors.
inline std::shared_ptr<const Plan> plan_like(const Plan& before, const Call& call) {
  auto plan = std::make_shared<Plan>(before);
  plan->node = 0, plan->next = nullptr;
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (PlannedKernel& kernel : plan->kernels) {
      const CallKey key = operands_of(kernel, call.key);
      const std::vector<Pointer> pointers = std::move(kernel.pointers);
      fill(kernel, key, plan->changed, &kernel == &plan->kernels.front());
      std::copy_if(pointers.begin(), pointers.end(), std::back_inserter(kernel.pointers),
                   [](const Pointer& pointer) { return pointer.operand == COUNTER; });  // of no size
      kernel.sizing.apply(key, kernel.launch.grid);
      for (EncodedTensorMap& map : kernel.launch.tensor_maps) {
        if (map.spec.operand == WORKSPACE) continue;  // Q as it was changed, of which nothing grows
        const TensorKey& tensor = key.tensors[map.spec.operand];
        if (!is_bulk(tensor)) return plan.reset();
        map = encode_tensor_map(driver(), map.spec, tensor, call.addresses[map.spec.operand]);
      }
    }
  });
  if (plan) plan->size_scratch(call.key), plan->size_shared_scratch();
  return plan;
}

// The plan of a call whose sizes are in the range of a plan before it; null where there is none.
inline std::shared_ptr<const Plan> ranged_plan(const Call& call) {
  const std::int64_t batch = call.key.tensors[QUERY].shape[0], keys = call.key.tensors[KEY].shape[2];
  for (const bool queries_follow : {true, false}) {
    CallKey common;
    if (!ranged_key(call.key, queries_follow, common)) continue;
    std::shared_ptr<const Plan> before = ranged_plans().find(common);
    while (before && !before->range.has(batch, keys)) before = before->next;
    if (!before) continue;
    std::shared_ptr<const Plan> plan = plan_like(*before, call);
    if (plan) plans().insert(call.key, plan);
    return plan;
  }
  return nullptr;
}

inline std::shared_ptr<const Plan> plan_of(const Call& call) {
  std::shared_ptr<const Plan> plan = plans().find(call.key);
  return plan ? plan : ranged_plan(call);
}

}  // namespace microsdpa
