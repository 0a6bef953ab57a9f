// Calls with 8-bit operands. Their kernels take different parameters, which Python has filled but for the addresses of
// the call's tensors: what is left to do for a call is to look the plan up, allocate, put the addresses in and launch.
#pragma once

#include <cstring>
#include <string>

#include "framework.h"
#include "masked_call.h"

namespace microsdpa {

// Tensors of a call beside query, key, value and out, whose addresses kernels get.
enum EightBitOperand { LSE = OPERANDS, WORKSPACE, QUERY_SCALE, KEY_SCALE, VALUE_SCALE, EIGHT_BIT_OPERANDS };
constexpr int SCALES = EIGHT_BIT_OPERANDS - QUERY_SCALE;

using Addresses = std::uintptr_t[EIGHT_BIT_OPERANDS];  // 0 for a tensor that the call does not have

struct EightBitKey {
  PlanKey call;
  TensorKey scales[SCALES];
  double factor;  // of the softmax; it is in the kernels' parameters

  bool operator==(const EightBitKey& other) const { return !std::memcmp(this, &other, sizeof(*this)); }
};
static_assert(sizeof(EightBitKey) == sizeof(PlanKey) + SCALES * 72 + 8, "EightBitKey must have no padding");

struct EightBitCall {
  Call call;
  EightBitKey key;
  Addresses addresses{};

  // False when no plan can exist for the call: Python's validation then finds the reason.
  bool parse(DLTensor* query, DLTensor* k, DLTensor* value, DLTensor* out, std::int64_t options,
             const Optional<double>& scale, const DLTensor* const (&scales)[SCALES]) {
    if (!microsdpa::parse(query, k, value, out, options, call)) return false;
    key.call = call.plan_key;
    key.factor = softmax_scale(scale, query->shape[3]);
    if (!is_scale(key.factor)) return false;
    for (int i = 0; i < OPERANDS; ++i) addresses[i] = call.addresses[i];
    for (int i = 0; i < SCALES; ++i) {
      key.scales[i] = TensorKey{};
      if (!scales[i]) continue;
      // [B, H] and [1, B, H] are not the same scales: the rank is part of the key.
      if (!describe_broadcast(*scales[i], key.scales[i])) return false;
      key.scales[i].dtype_and_device |= std::uint64_t(scales[i]->ndim) << 56;
      addresses[QUERY_SCALE + i] = address(*scales[i]);
      if (meets(call.addresses[OUT], key.call.out, address(*scales[i]), key.scales[i])) return false;
    }
    return true;
  }
};

// Where in a kernel's parameters an address belongs: that of an operand, plus `offset` bytes.
struct Pointer {
  std::size_t at;
  int operand;
  std::uintptr_t offset;
};

struct FilledKernel {
  static constexpr std::size_t MAX_PARAMS = 512;

  KernelLaunch launch;
  std::string params;
  std::vector<Pointer> pointers;
  bool only_with_lse;

  void issue(const Driver& driver, CUstream stream, const Addresses& addresses) const {
    alignas(16) char filled[MAX_PARAMS];
    std::memcpy(filled, params.data(), params.size());
    for (const Pointer& pointer : pointers) {
      const std::uintptr_t base = addresses[pointer.operand], address = base ? base + pointer.offset : 0;
      std::memcpy(filled + pointer.at, &address, sizeof(address));
    }
    launch.issue(driver, stream, filled, addresses);
  }
};

struct EightBitPlan {
  CUcontext context;
  std::vector<FilledKernel> kernels;
  std::int64_t workspace_bytes;

  // Gives what LseArgument does.
  ffi::Any execute(EightBitCall& call, ffi::AnyView wanted_lse) const {
    const DLTensor& query = *call.call.query;
    const LseArgument lse(wanted_lse, query);
    call.addresses[LSE] = lse.address;
    Optional<ffi::Tensor> workspace;
    if (workspace_bytes) {
      workspace = allocate(&workspace_bytes, 1, DLDataType{kDLUInt, 8, 1}, query);
      call.addresses[WORKSPACE] = reinterpret_cast<std::uintptr_t>(workspace.value().data_ptr());
    }
    const CUstream stream = current_stream(query.device);
    guarded([&] {
      ScopedContext current(driver(), context);
      for (const FilledKernel& kernel : kernels) {
        if (!kernel.only_with_lse || call.addresses[LSE]) kernel.issue(driver(), stream, call.addresses);
      }
    });
    return lse.result();
  }
};

inline PlanTable<EightBitKey, EightBitPlan>& eight_bit_plans() {
  static PlanTable<EightBitKey, EightBitPlan> table;
  return table;
}

// What sdpa() of launcher.cc is for calls with 16-bit operands; scales are those of codes, or None.
inline ffi::Any sdpa_eight_bit(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, ffi::AnyView lse,
                               std::int64_t options, Optional<double> scale, ffi::AnyView query_scale,
                               ffi::AnyView key_scale, ffi::AnyView value_scale) {
  EightBitCall call;
  const DLTensor* const scales[] = {optional_tensor(query_scale), optional_tensor(key_scale),
                                    optional_tensor(value_scale)};
  if (!call.parse(query, key, value, out, options, scale, scales)) return nullptr;
  const std::shared_ptr<const EightBitPlan> plan = eight_bit_plans().find(call.key);
  if (!plan) return nullptr;
  return plan->execute(call, lse);
}

// What prepared_call() of launcher.cc is for calls with 16-bit operands; for calls that quantise.
inline ffi::Any prepared_eight_bit_call(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out,
                                        std::int64_t options, Optional<double> scale) {
  EightBitCall first;
  if (!first.parse(query, key, value, out, options, scale, {})) return nullptr;
  const std::shared_ptr<const EightBitPlan> plan = eight_bit_plans().find(first.key);
  if (!plan) return nullptr;
  return ffi::Function::FromTyped([plan, expected = first.key](DLTensor* query, DLTensor* key, DLTensor* value,
                                                               DLTensor* out, ffi::AnyView lse) -> ffi::Any {
    EightBitCall call;
    if (!call.parse(query, key, value, out, expected.call.options, expected.factor, {})) return nullptr;
    if (!(call.key == expected)) return nullptr;
    return plan->execute(call, lse);
  });
}

}  // namespace microsdpa
