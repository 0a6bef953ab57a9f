// What norms and rotary embedding of Q and K add to a kernel's parameter.
#pragma once

#include "mask_params.cuh"

namespace microsdpa {

// Pointers are null for what a call does not have. The last strides are one.
struct PrologueParams {
  const void* cos;              // [positions, R / 2]
  const void* sin;              // [positions, R / 2]
  const void* query_positions;  // [B or 1, S_q], integers: rows of the tables
  const void* key_positions;    // [B or 1, S_k]
  const void* query_weight;     // [D]
  const void* query_bias;       // [D]
  const void* key_weight;       // [D]
  const void* key_bias;         // [D]
  int64 cos_stride, sin_stride;
  int64 query_positions_stride, key_positions_stride;  // from one batch entry to the next
  int32 positions;                                     // rows of the tables
  int32 query_first, key_first;                        // without positions: those of row 0
  float eps;
};

// What kernels with norms or rotary embedding get, those without further masks too.
struct Prologued {
  MaskedParams masked;
  PrologueParams prologue;
};

}  // namespace microsdpa
