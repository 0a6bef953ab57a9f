// What a plan knows of one tensor.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

#ifndef MICROSDPA_DEVICE
#define MICROSDPA_DEVICE \
  kDLCUDA  // tests build a launcher for tensors on a CPU, which launches with a stub of the driver
#endif

namespace microsdpa {

// Tensors of a call. Those up to OUT are always there and have four dimensions; a call's key has all up to GRAD_OUT,
// which a call for gradients has, and those of norms and rotary embedding, from COS on; the LSE, scratch memory and the
// gradients are addresses alone. Those from DRAWN on are of dropout, whose seed and offset are numbers in the place of
// addresses. Those from QUERY_OFFSETS on say where sequences of many lengths lie.
enum Operand {
  QUERY,
  KEY,
  VALUE,
  OUT,
  DENSE_OPERANDS,
  MASK = DENSE_OPERANDS,
  SLOPES,
  SINKS,
  QUERY_SCALE,
  KEY_SCALE,
  VALUE_SCALE,
  GRAD_OUT,
  COS,
  PLAIN_OPERANDS = COS,
  SIN,
  QUERY_POSITIONS,
  KEY_POSITIONS,
  QUERY_WEIGHT,
  QUERY_BIAS,
  KEY_WEIGHT,
  KEY_BIAS,
  KEYED_OPERANDS,
  LSE = KEYED_OPERANDS,
  WORKSPACE,
  COUNTERS,
  COUNTER,
  GRAD_LSE,
  GRAD_QUERY,
  GRAD_KEY,
  GRAD_VALUE,
  GRAD_MASK,
  GRAD_SLOPES,
  GRAD_SINKS,
  DRAWN,
  SEED,
  OFFSET,
  STATE,
  OPERANDS,
  QUERY_OFFSETS = OPERANDS,
  KEY_OFFSETS,
  LENGTHS,
  PAGE_TABLE,
  NEW_KEY,
  NEW_VALUE,
  ROTARY_COS,
  ROTARY_SIN,
  QUERY_NORM,
  KEY_NORM,
  GIVEN_OPERANDS
};

using Addresses = std::uintptr_t[OPERANDS];  // 0 for a tensor that the call does not have

// Shape and strides of one tensor of four dimensions, and its type and device.
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
