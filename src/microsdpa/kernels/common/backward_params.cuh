// BackwardParams: the one argument of the kernels that compute gradients.
#pragma once

#include "mask_params.cuh"

namespace microsdpa::backward {

// The call's own parameter, of which the output and the LSE are read, and the gradients.
struct BackwardParams {
  MaskedParams forward;
  const void* grad_out;   // [B, H, S_q, D]
  const float* grad_lse;  // [B, H, S_q], contiguous; null for zeros
  void* grad_query;       // [B, H, S_q, D]
  void* grad_key;         // [B, H_kv, S_k, D]
  void* grad_value;       // [B, H_kv, S_k, D]
  Strides grad_out_strides;
  Strides grad_query_strides;
  Strides grad_key_strides;
  Strides grad_value_strides;
  void* grad_mask;     // of the mask's shape and type
  float* grad_slopes;  // [H] or [B, H], contiguous
  void* grad_sinks;    // [H], contiguous, of the sinks' type
  float* slope_parts;  // [B, H, parts_of_slope]: what each warp of the CTAs that own queries has of a slope's
  Strides grad_mask_strides;
  int64 grad_mask_column_stride;
  int32 mask_batch, mask_heads, mask_rows, mask_columns;  // the mask's shape: each is 1 or the whole
  int32 parts_of_slope;
  int32 slope_batch;  // batch entries that have slopes of their own: 1 or all
  int32 key_heads;    // key heads of all batch entries whose CTAs run side by side
  int32 query_heads;  // the same for query heads
};

}  // namespace microsdpa::backward
