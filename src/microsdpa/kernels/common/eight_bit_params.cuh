// EightBitParams: the one argument of every attention kernel with 8-bit operands.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Scales of a tensor of quantized values: value = quantized value * scale. One for each 2^shift rows; a stride of zero
// shares them.
struct RowScales {
  const float* data;
  int64 batch;
  int64 head;
  int32 shift;
  int32 step;  // from one row block to the next: 1, or 0 where all rows share a scale

  __device__ __forceinline__ const float* at(int64 b, int h, int row) const {
    return data + b * batch + h * head + (row >> shift) * step;
  }
};

// Scales of V, one for each channel; a stride of zero shares them.
struct ChannelScales {
  const float* data;
  int64 batch;
  int64 head;
  int64 channel;
};

// Distances in bytes; rows are dense.
struct ByteStrides {
  int64 batch;
  int64 head;
  int64 row;

  template <typename T>
  __device__ __forceinline__ const T* at(const void* base, int64 b, int h, int r) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(base) + b * batch + h * head + r * row);
  }
  // From one row to the next, in elements.
  template <typename T>
  __device__ __forceinline__ int64 row_in() const {
    return row / static_cast<int64>(sizeof(T));
  }
};

struct EightBitParams {
  const void* query;  // [B, H, S_q, TERMS * D] quantized
  const void* key;    // [B, H_kv, S_k, D] quantized
  const void* value;  // [B, H_kv, S_k, D] quantized, or FP16 or BF16
  void* out;          // [B, H, S_q, D] FP16 or BF16
  float* lse;         // [B, H, S_q], contiguous; null when not wanted
  ByteStrides query_strides;
  ByteStrides key_strides;
  ByteStrides value_strides;
  ByteStrides out_strides;
  RowScales query_scale;
  RowScales key_scale;
  ChannelScales value_scale;
  int32 batch;
  int32 heads;
  int32 heads_kv;
  int32 seqlen_q;
  int32 seqlen_k;
  int32 diagonal;    // causal: query i sees keys j <= i + diagonal
  float scale_log2;  // softmax scale times log2(e)
};

// Where one query head of one batch entry lies.
struct EightBitHead {
  int64 batch;
  int head;
  int head_kv;

  __device__ __forceinline__ EightBitHead(const EightBitParams& params, int index)
      : batch(index / params.heads),
        head(index % params.heads),
        head_kv(index % params.heads / (params.heads / params.heads_kv)) {}

  template <typename T>
  __device__ __forceinline__ const T* query(const EightBitParams& p, int row) const {
    return p.query_strides.at<T>(p.query, batch, head, row);
  }
  template <typename T>
  __device__ __forceinline__ const T* key(const EightBitParams& p, int row) const {
    return p.key_strides.at<T>(p.key, batch, head_kv, row);
  }
  template <typename T>
  __device__ __forceinline__ const T* value(const EightBitParams& p, int row) const {
    return p.value_strides.at<T>(p.value, batch, head_kv, row);
  }
  template <typename T>
  __device__ __forceinline__ T* out(const EightBitParams& p, int row) const {
    return const_cast<T*>(p.out_strides.at<T>(p.out, batch, head, row));
  }
  __device__ __forceinline__ float* lse(const EightBitParams& p, int row) const {
    return p.lse + (batch * p.heads + head) * p.seqlen_q + row;
  }
  __device__ __forceinline__ const float* query_scale(const EightBitParams& p, int row) const {
    return p.query_scale.at(batch, head, row);
  }
  __device__ __forceinline__ const float* key_scale(const EightBitParams& p, int row) const {
    return p.key_scale.at(batch, head_kv, row);
  }
  __device__ __forceinline__ float value_scale(const EightBitParams& p, int channel) const {
    const ChannelScales& s = p.value_scale;
    return s.data[batch * s.batch + head_kv * s.head + channel * s.channel];
  }
};

// Keys up to the last one that any of `rows` queries from `first_row` on sees. Negative is none.
template <bool CAUSAL>
__device__ __forceinline__ int keys_seen(const EightBitParams& params, int first_row, int rows) {
  return CAUSAL ? min(params.seqlen_k, first_row + rows + params.diagonal) : params.seqlen_k;
}

}  // namespace microsdpa
