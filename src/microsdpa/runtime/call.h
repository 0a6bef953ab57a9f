// One call's tensors, read into what a plan is found by.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <utility>

#include "plan.h"

namespace microsdpa {

struct Call {
  const DLTensor *query, *key, *value, *out;  // out is null when it is to be allocated
  std::uintptr_t addresses[OPERANDS];
  PlanKey plan_key;
};

inline std::uintptr_t address(const DLTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

// The stride of a dimension of size one says nothing about memory: tensors that differ in nothing else share a plan.
inline TensorKey describe(const DLTensor& tensor, const std::int64_t* strides) {
  TensorKey key;
  for (int i = 0; i < 4; ++i) {
    key.shape[i] = tensor.shape[i];
    key.strides[i] = tensor.shape[i] > 1 ? strides[i] : 0;
  }
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return key;
}

// Strides of the output that the library allocates: dense, in the memory order of the query, as torch's is: of the
// outer dimensions, the one with the larger stride is outermost. Gives whether that is the order [B, H, S, D].
inline bool output_strides(const DLTensor& query, std::int64_t (&strides)[4]) {
  int order[] = {0, 1, 2};  // outermost first
  auto outer = [&](int a, int b) { return query.strides[a] > query.strides[b]; };
  // Three elements, stable: dimensions of equal stride keep their place.
  if (outer(order[1], order[0])) std::swap(order[0], order[1]);
  if (outer(order[2], order[1])) std::swap(order[1], order[2]);
  if (outer(order[1], order[0])) std::swap(order[0], order[1]);
  std::int64_t stride = query.shape[3];
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= query.shape[order[i]];
  }
  strides[3] = 1;
  return order[0] == 0 && order[1] == 1;
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
  call.query = query, call.key = key, call.value = value, call.out = out;
  for (const DLTensor* tensor : {query, key, value, out}) {
    if (tensor && (tensor->ndim != 4 || !tensor->strides || tensor->device.device_type != kDLCUDA)) return false;
  }
  PlanKey& k = call.plan_key;
  k.query = describe(*query, query->strides);
  k.key = describe(*key, key->strides);
  k.value = describe(*value, value->strides);
  if (out) {
    k.out = describe(*out, out->strides);
  } else {
    std::int64_t strides[4];
    output_strides(*query, strides);
    k.out = describe(*query, strides);
  }
  k.options = options;
  const std::uintptr_t q = address(*query), kk = address(*key), v = address(*value), o = out ? address(*out) : 0;
  call.addresses[QUERY] = q, call.addresses[KEY] = kk, call.addresses[VALUE] = v, call.addresses[OUT] = o;
  const std::uint64_t bits =
      alignment_bits(q, k.query) | alignment_bits(kk, k.key) | alignment_bits(v, k.value) | alignment_bits(o, k.out);
  k.alignment = bits % 16 == 0 ? 16 : 0;
  // An output that overlaps an input would be read after it is written.
  return !out || !(meets(o, k.out, q, k.query) || meets(o, k.out, kk, k.key) || meets(o, k.out, v, k.value));
}

}  // namespace microsdpa
