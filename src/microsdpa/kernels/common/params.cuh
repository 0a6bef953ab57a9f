// AttentionParams: the one argument of every attention kernel, filled by the host launcher.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Distances in elements; the stride along D is always one.
struct Strides {
  int64 batch;
  int64 head;
  int64 row;
};

struct AttentionParams {
  const void* query;  // [B, H, S_q, D]
  const void* key;    // [B, H_kv, S_k, D]
  const void* value;  // [B, H_kv, S_k, D]
  void* out;          // [B, H, S_q, D]
  float* lse;         // [B, H, S_q], contiguous; null when not wanted
  void* workspace;    // scratch memory of this call, workspace_row_bytes of the specification for each row of Q
  Strides query_strides;
  Strides key_strides;
  Strides value_strides;
  Strides out_strides;
  int32 batch;
  int32 heads;
  int32 heads_kv;
  int32 seqlen_q;
  int32 seqlen_k;
  int32 diagonal;    // causal: query i sees keys j <= i + diagonal
  float scale_log2;  // softmax scale times log2(e): scores are kept in the base-2 domain
};

}  // namespace microsdpa
