// What decides about scores beyond the causal mask, and the parameters of kernels that know it.
#pragma once

#include "params.cuh"

namespace microsdpa {

// Of a query i and a key j, the score is, in this order: scale q k; soft-capped; less slope |i + position - j|; plus
// the mask. The key is seen when i + lowest <= j <= i + diagonal and the mask does not hide it. Distances are in
// elements, 0 along a dimension that is broadcast.
struct MaskParams {
  const void* mask;     // [B, H, S_q, S_k]: bool, false hides, or numbers to be added; or [B, H, S_q, 2] of KeyRange's
                        // int32; null when there is none
  const float* slopes;  // [B, H]: ALiBi's; null when there are none
  const void* sinks;    // [H]: a logit of each head that takes its share and has no value; null when there are none
  Strides mask_strides;
  int64 mask_column_stride;
  int64 slope_batch_stride;
  int64 slope_head_stride;
  int64 sink_head_stride;
  int32 position;      // query i stands at key i + position
  int32 lowest;        // left end of the window
  float softcap_log2;  // times log2(e)
};

// What the general kernel gets. Kernels that take AttentionParams alone see its first part.
struct MaskedParams {
  AttentionParams call;
  MaskParams masks;
};

}  // namespace microsdpa
