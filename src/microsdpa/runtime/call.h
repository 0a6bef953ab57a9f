// One call's tensors, read into what a plan is found by.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

#include "plan.h"
#include "tracing.h"

namespace microsdpa {

struct Call {
  const DLTensor* query;
  std::uintptr_t addresses[OPERANDS];
  PlanKey plan_key;
};

inline std::uintptr_t address(const DLTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

// The stride of a dimension of size one says nothing about memory: tensors that differ in nothing else share a plan.
inline TensorKey describe(const DLTensor& tensor) {
  TensorKey key;
  for (int i = 0; i < 4; ++i) {
    key.shape[i] = tensor.shape[i];
    key.strides[i] = tensor.shape[i] > 1 ? tensor.strides[i] : 0;
  }
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return key;
}

// Bits that must be zero for every row to start on 16 bytes: base address and outer strides, in bytes.
inline std::uint64_t alignment_bits(std::uintptr_t base, const TensorKey& key) {
  std::uint64_t bits = base;
  for (int i = 0; i < 3; ++i) bits |= std::uint64_t(key.strides[i]) * key.element_bytes();
  return bits;
}

// One past the last byte that the tensor reaches.
inline std::uintptr_t end_address(std::uintptr_t base, const TensorKey& key) {
  std::int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (key.shape[i] - 1) * key.strides[i];
  return base + (last + 1) * key.element_bytes();
}

// Whether the memory of two tensors meets.
inline bool meets(std::uintptr_t a, const TensorKey& a_key, std::uintptr_t b, const TensorKey& b_key) {
  return a < end_address(b, b_key) && b < end_address(a, a_key);
}

// False when no plan can exist for the call: Python's validation then finds the reason.
inline bool parse(const DLTensor* query, const DLTensor* key, const DLTensor* value, const DLTensor* out,
                  std::int64_t options, Call& call) {
  // A launch would not be in the graph: the caller is told that there is no plan, and calls an operator.
  if (torch_is_tracing()) return false;
  call.query = query;
  PlanKey& k = call.plan_key;
  const DLTensor* const tensors[OPERANDS] = {query, key, value, out};
  TensorKey* const keys[OPERANDS] = {&k.query, &k.key, &k.value, &k.out};
  std::uint64_t bits = 0;
  for (int i = 0; i < OPERANDS; ++i) {
    if (!tensors[i]) return false;
    const DLTensor& tensor = *tensors[i];
    if (tensor.ndim != 4 || !tensor.strides || tensor.device.device_type != kDLCUDA) return false;
    call.addresses[i] = address(tensor);
    // A tensor without memory is a tracer's, as torch's FakeTensor is.
    if (!call.addresses[i]) return false;
    *keys[i] = describe(tensor);
    bits |= alignment_bits(call.addresses[i], *keys[i]);
  }
  k.options = options;
  k.alignment = bits % 16 == 0 ? 16 : 0;
  // An output that overlaps an input would be read after it is written.
  const auto overlaps = [&](int i) { return meets(call.addresses[OUT], k.out, call.addresses[i], *keys[i]); };
  return !(overlaps(QUERY) || overlaps(KEY) || overlaps(VALUE));
}

}  // namespace microsdpa
