// A C function around FlashAttention-3's forward, for benchmarks: dense [B, S, H, D] tensors, causal (lower right) or
// not. build.py compiles it against the headers of a checkout of flash-attention; evidence/peers/fa3_library.py calls
// it.

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "flash.h"

#ifndef FA3_COMMIT
#define FA3_COMMIT "unknown"
#endif

struct Tensor {
  void* data;
  std::int64_t batch_stride, row_stride, head_stride;  // in elements
};

enum Type : std::int32_t { FLOAT16, BFLOAT16, E4M3 };

struct Arguments {
  Tensor query, key, value, out;
  float* lse;                          // [B, H, S_q]
  float *q_scale, *k_scale, *v_scale;  // [B, H_kv] each for E4M3, else null
  std::int32_t* tile_counter;          // one number, for the scheduler of causal calls
  std::int32_t batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, type, causal, multiprocessors;
  float scale;
};

namespace {

template <typename Element, int HEAD_DIM>
void forward(Flash_fwd_params& params, cudaStream_t stream) {
  run_mha_fwd_<90, Element, HEAD_DIM, HEAD_DIM, false, false, false, false>(params, stream);
}

template <typename Element>
bool forward_of(Flash_fwd_params& params, cudaStream_t stream) {
  switch (params.d) {
#ifdef FA3_D64
    case 64:
      forward<Element, 64>(params, stream);
      return true;
#endif
#ifdef FA3_D128
    case 128:
      forward<Element, 128>(params, stream);
      return true;
#endif
#ifdef FA3_D256
    case 256:
      forward<Element, 256>(params, stream);
      return true;
#endif
    default:
      return false;
  }
}

}  // namespace

extern "C" const char* fa3_commit() { return FA3_COMMIT; }

/// What a caller compares with its own idea of the arguments.
extern "C" std::int32_t fa3_size_of_arguments() { return sizeof(Arguments); }

/// 0, a CUDA error, or -1 for a head dimension or a type that is not built.
extern "C" int fa3_forward(const Arguments* a, cudaStream_t stream) {
  Flash_fwd_params params = {};
  params.q_ptr = a->query.data;
  params.q_batch_stride = a->query.batch_stride;
  params.q_row_stride = a->query.row_stride;
  params.q_head_stride = a->query.head_stride;
  params.k_ptr = a->key.data;
  params.k_batch_stride = a->key.batch_stride;
  params.k_row_stride = a->key.row_stride;
  params.k_head_stride = a->key.head_stride;
  params.v_ptr = a->value.data;
  params.v_batch_stride = a->value.batch_stride;
  params.v_row_stride = a->value.row_stride;
  params.v_head_stride = a->value.head_stride;
  params.v_dim_stride = 1;
  params.o_ptr = a->out.data;
  params.o_batch_stride = a->out.batch_stride;
  params.o_row_stride = a->out.row_stride;
  params.o_head_stride = a->out.head_stride;
  params.softmax_lse_ptr = a->lse;
  params.q_descale_ptr = a->q_scale;
  params.k_descale_ptr = a->k_scale;
  params.v_descale_ptr = a->v_scale;
  params.q_descale_batch_stride = params.k_descale_batch_stride = params.v_descale_batch_stride = a->heads_kv;
  params.q_descale_head_stride = params.k_descale_head_stride = params.v_descale_head_stride = 1;
  params.b = params.b_k = a->batch;
  params.h = a->heads;
  params.h_k = a->heads_kv;
  params.seqlen_q = a->seqlen_q;
  params.seqlen_k = a->seqlen_k;
  params.d = params.d_rounded = params.dv = params.dv_rounded = a->head_dim;
  params.scale_softmax = a->scale;
  params.p_dropout = params.rp_dropout = 1;
  params.p_dropout_in_uint8_t = 255;
  params.is_causal = a->causal != 0;
  params.window_size_left = a->seqlen_k - 1;
  params.window_size_right = a->causal ? 0 : a->seqlen_q - 1;
  params.is_bf16 = a->type == BFLOAT16;
  params.is_e4m3 = a->type == E4M3;
  params.page_size = 1;
  params.num_splits = 1;
  params.arch = 90;
  params.num_sm = a->multiprocessors;
  if (params.is_causal) {  // its tiles are dealt by a counter that must begin at zero
    params.tile_count_semaphore = a->tile_counter;
    if (const cudaError_t error = cudaMemsetAsync(a->tile_counter, 0, sizeof(std::int32_t), stream)) return error;
  }
  bool known = false;
#ifdef FA3_FP16
  if (a->type == FLOAT16) known = forward_of<cutlass::half_t>(params, stream);
#endif
#ifdef FA3_BF16
  if (a->type == BFLOAT16) known = forward_of<cutlass::bfloat16_t>(params, stream);
#endif
#ifdef FA3_E4M3
  if (a->type == E4M3) known = forward_of<cutlass::float_e4m3_t>(params, stream);
#endif
  return known ? static_cast<int>(cudaGetLastError()) : -1;
}
