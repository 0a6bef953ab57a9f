// What hopper/latency/kernel.cu multiplies: tensors of 16 bits, or 8-bit values with scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../../common/eight_bit_params.cuh"

namespace microsdpa::hopper::latency {

// 8-bit values: Q and K are QUERY_KEY, __nv_fp8_e4m3 or signed char, and V is E4M3; the output is OUT. A query is the
// sum of TERMS values. KEY_SCALES: the keys of a head have different scales.
template <typename QUERY_KEY, typename OUT, int TERMS, bool KEY_SCALES>
struct EightBit {};

// The parameter P of a kernel for 16 bits, with the scales of 8-bit values.
template <typename P>
struct Scaled {
  P call;
  RowScales query_scale;
  RowScales key_scale;
  ChannelScales value_scale;
};

// Whether products are integers.
template <typename QUERY_KEY>
constexpr bool HAS_INTEGER_PRODUCTS = false;
template <>
constexpr bool HAS_INTEGER_PRODUCTS<signed char> = true;

// OPERANDS: __half, __nv_bfloat16, or EightBit.
template <typename OPERANDS>
struct OperandsOf {
  using QueryKey = OPERANDS;  // of Q and K
  using Element = OPERANDS;   // of P and V, as they are multiplied
  using Out = OPERANDS;
  static constexpr bool EIGHT_BIT = false, INTEGERS = false, KEY_SCALES = false;
  static constexpr int TERMS = 1;
  template <typename PARAMS>
  using Params = PARAMS;  // of the kernel

  template <typename PARAMS>
  __device__ __forceinline__ static const PARAMS& unscaled(const PARAMS& arguments) {
    return arguments;
  }
};

// P V is a product of FP16, which holds every E4M3 value: V is widened in shared memory.
template <typename QUERY_KEY, typename OUT, int TERMS_, bool KEY_SCALES_>
struct OperandsOf<EightBit<QUERY_KEY, OUT, TERMS_, KEY_SCALES_>> {
  using QueryKey = QUERY_KEY;
  using Element = __half;
  using Out = OUT;
  static constexpr bool EIGHT_BIT = true, INTEGERS = HAS_INTEGER_PRODUCTS<QUERY_KEY>;
  static constexpr bool KEY_SCALES = KEY_SCALES_;
  static constexpr int TERMS = TERMS_;
  template <typename PARAMS>
  using Params = Scaled<PARAMS>;

  template <typename PARAMS>
  __device__ __forceinline__ static const PARAMS& unscaled(const Scaled<PARAMS>& arguments) {
    return arguments.call;
  }
};

}  // namespace microsdpa::hopper::latency
