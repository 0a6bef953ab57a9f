// Tensor maps: descriptors of [B, H, S, D] tensors for the copy engine, seen as [D, S, H, B], innermost first, or,
// where a box has several heads, as [D, H, S, B].
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels/prelude.cuh"
#include "driver.h"
#include "tensor_key.h"

namespace microsdpa {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap), "kernels see the driver's descriptor");

// What a kernel's specification says of one tensor map, and where its tensor begins in the operand's memory.
struct TensorMapSpec {
  int operand;
  unsigned rows, columns, swizzle;
  std::uintptr_t offset;
  unsigned heads;  // of a box that has several; 0 where it has one
};

// A tensor map as it was encoded for the first call of a plan.
struct EncodedTensorMap {
  CUtensorMap map;
  std::uintptr_t address;
  TensorMapSpec spec;
};

inline CUtensorMapDataType tensor_map_type(const TensorKey& tensor) {
  const DLDataType type = tensor.dtype();
  if (type.bits == 8) return CU_TENSOR_MAP_DATA_TYPE_UINT8;  // bytes are moved, whatever they stand for
  if (type.bits == 16)
    return type.code == kDLBfloat ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (type.bits == 32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  throw std::runtime_error("tensor map: expected elements of 8, 16 or 32 bits, got " + std::to_string(type.bits));
}

inline CUtensorMapSwizzle tensor_map_swizzle(unsigned bytes) {
  switch (bytes) {
    case 0:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
  }
  throw std::runtime_error("tensor map: expected a swizzle of 0, 32, 64 or 128 bytes, got " + std::to_string(bytes));
}

// The tensor's layout must be one that bulk copies address: Problem.bulk and an alignment of 16. `address` is the
// operand's.
inline EncodedTensorMap encode_tensor_map(const Driver& driver, const TensorMapSpec& spec, const TensorKey& tensor,
                                          std::uintptr_t address) {
  constexpr cuuint32_t RANK = 4;
  const cuuint64_t bytes = tensor.dtype().bits / 8;
  cuuint64_t sizes[RANK], strides[RANK - 1];
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(tensor.shape[3 - i]);
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of size one says nothing and may be any number; the driver wants a multiple of 16.
    const bool used = sizes[i + 1] > 1;
    strides[i] = used ? static_cast<cuuint64_t>(tensor.strides[2 - i]) * bytes : (sizes[0] * bytes + 15) / 16 * 16;
  }
  cuuint32_t box[RANK] = {spec.columns, spec.rows, 1, 1};
  const cuuint32_t steps[RANK] = {1, 1, 1, 1};
  if (spec.heads) {
    std::swap(sizes[1], sizes[2]), std::swap(strides[0], strides[1]);
    box[1] = spec.heads, box[2] = spec.rows;
  }
  address += spec.offset;
  EncodedTensorMap encoded{{}, address, spec};
  driver.check(
      driver.tensor_map_encode(&encoded.map, tensor_map_type(tensor), RANK, reinterpret_cast<void*>(address), sizes,
                               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, tensor_map_swizzle(spec.swizzle),
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  return encoded;
}

}  // namespace microsdpa
