// What a plan knows of one tensor.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

namespace microsdpa {

// Tensors of a call, in the order of its arguments.
enum Operand { QUERY, KEY, VALUE, OUT, OPERANDS };

// Shape and strides of one [B, H, S, D] tensor, and its type and device.
struct TensorKey {
  std::int64_t shape[4];
  std::int64_t strides[4];
  std::uint64_t dtype_and_device;

  static std::uint64_t pack(const DLDataType& dtype, const DLDevice& device) {
    return std::uint64_t(dtype.code) | std::uint64_t(dtype.bits) << 8 | std::uint64_t(dtype.lanes) << 16 |
           std::uint64_t(device.device_type) << 32 | std::uint64_t(device.device_id) << 40;
  }

  DLDataType dtype() const {
    return {static_cast<std::uint8_t>(dtype_and_device), static_cast<std::uint8_t>(dtype_and_device >> 8),
            static_cast<std::uint16_t>(dtype_and_device >> 16)};
  }

  std::uint64_t element_bytes() const { return (dtype_and_device >> 8 & 0xff) / 8; }
};

}  // namespace microsdpa
