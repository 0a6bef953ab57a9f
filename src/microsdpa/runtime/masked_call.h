// A call with masks: what its plan is found by beside the rest of the call, and what its kernel gets.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../kernels/common/mask_params.cuh"
#include "call.h"

namespace microsdpa {

// Tensors among the masks, in the order of the arguments.
enum MaskOperand { MASK, SLOPES, SINKS, MASK_OPERANDS };

// The masks of one call. The soft cap's value, as the scale's, is not part of a plan: that there is one is.
struct MaskArguments {
  const DLTensor* tensors[MASK_OPERANDS];  // null for none
  std::int64_t left, right;                // ends of the window
  bool capped;
};

struct MaskedKey {
  PlanKey call;
  TensorKey tensors[MASK_OPERANDS];
  std::int64_t left, right, capped;

  // As PlanKey's.
  bool admits(const MaskedKey& other) const {
    const std::size_t begin = offsetof(MaskedKey, tensors);
    return call.admits(other.call) && !std::memcmp(tensors, other.tensors, sizeof(MaskedKey) - begin);
  }
};
static_assert(sizeof(MaskedKey) == sizeof(PlanKey) + 3 * 72 + 24, "MaskedKey must have no padding");

// Sizes and strides of a tensor of at most four dimensions, aligned to the last; false for any other. What is
// broadcast has a stride of zero.
inline bool describe_broadcast(const DLTensor& tensor, TensorKey& key) {
  if (tensor.ndim > 4 || (tensor.ndim && !tensor.strides) || tensor.device.device_type != kDLCUDA) return false;
  if (!address(tensor)) return false;
  for (int i = 0; i < 4; ++i) {
    const int dimension = i - (4 - tensor.ndim);
    key.shape[i] = dimension < 0 ? 1 : tensor.shape[dimension];
    key.strides[i] = key.shape[i] > 1 ? tensor.strides[dimension] : 0;
  }
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return true;
}

// False when no plan can exist for the call: Python's validation then finds the reason.
inline bool parse_masks(const Call& call, const MaskArguments& masks, MaskedKey& key) {
  key.call = call.plan_key;
  key.left = masks.left, key.right = masks.right, key.capped = masks.capped;
  for (int i = 0; i < MASK_OPERANDS; ++i) {
    key.tensors[i] = TensorKey{};
    const DLTensor* tensor = masks.tensors[i];
    if (!tensor) continue;
    if (!describe_broadcast(*tensor, key.tensors[i])) return false;
    if (meets(call.addresses[OUT], key.call.out, address(*tensor), key.tensors[i])) return false;
  }
  return true;
}

// What a plan knows of its masks: all but the pointers and the soft cap.
inline MaskParams mask_params(const MaskedKey& key, std::int64_t position, std::int64_t lowest) {
  MaskParams params{};
  const std::int64_t (&mask)[4] = key.tensors[MASK].strides;
  params.mask_strides = {mask[0], mask[1], mask[2]};
  params.mask_column_stride = mask[3];
  params.slope_batch_stride = key.tensors[SLOPES].strides[2];
  params.slope_head_stride = key.tensors[SLOPES].strides[3];
  params.sink_head_stride = key.tensors[SINKS].strides[3];
  params.position = static_cast<int32>(position);
  params.lowest = static_cast<int32>(lowest);
  return params;
}

}  // namespace microsdpa
