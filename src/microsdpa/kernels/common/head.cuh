// Where one head of one batch entry lies, and which of its keys a query sees.
#pragma once

#include "params.cuh"

namespace microsdpa {

// Pointers to the first row of a head; rows are the params' strides apart.
template <typename T>
struct Head {
  const T* query;  // [S_q, D]
  const T* key;    // [S_k, D]
  const T* value;  // [S_k, D]
  T* out;          // [S_q, D]
  float* lse;      // [S_q]; null when not wanted

  // `index` counts heads through the batch: batch entry times `params.heads` plus query head.
  __device__ __forceinline__ Head(const AttentionParams& params, int index) {
    const int64 batch = index / params.heads;
    const int head = index % params.heads;
    const int head_kv = head / (params.heads / params.heads_kv);
    query = static_cast<const T*>(params.query) + batch * params.query_strides.batch + head * params.query_strides.head;
    key = static_cast<const T*>(params.key) + batch * params.key_strides.batch + head_kv * params.key_strides.head;
    value =
        static_cast<const T*>(params.value) + batch * params.value_strides.batch + head_kv * params.value_strides.head;
    out = static_cast<T*>(params.out) + batch * params.out_strides.batch + head * params.out_strides.head;
    lse = params.lse == nullptr ? nullptr : params.lse + static_cast<int64>(index) * params.seqlen_q;
  }
};

// Keys up to the last one that any of `rows` queries from `first_row` on sees: later ones are never loaded. Negative
// means none.
template <bool CAUSAL>
__device__ __forceinline__ int keys_seen(const AttentionParams& params, int first_row, int rows) {
  return CAUSAL ? min(params.seqlen_k, first_row + rows + params.diagonal) : params.seqlen_k;
}

}  // namespace microsdpa
