// Probes: one kernel per instruction of ptx/, so that the emulator's bodies can be held against a GPU's.
//
// Every thread reads IN words at its own place, runs the instruction, and writes OUT words.
#include "../common/element.cuh"
#include "../prelude.cuh"
#include "../ptx/address.cuh"
#include "../ptx/arithmetic.cuh"
#include "../ptx/control.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"
#include "probe.cuh"

namespace microsdpa {

template <int IN, int OUT>
__global__ void probe_ex2(const __grid_constant__ ProbeParams params) {
  output_of<OUT>(params)[0] = __float_as_uint(ex2_approx(__uint_as_float(input_of<IN>(params)[0])));
}

template <int IN, int OUT>
__global__ void probe_rcp(const __grid_constant__ ProbeParams params) {
  output_of<OUT>(params)[0] = __float_as_uint(rcp_approx(__uint_as_float(input_of<IN>(params)[0])));
}

template <int IN, int OUT>
__global__ void probe_rsqrt(const __grid_constant__ ProbeParams params) {
  output_of<OUT>(params)[0] = __float_as_uint(rsqrt_approx(__uint_as_float(input_of<IN>(params)[0])));
}

template <int IN, int OUT>
__global__ void probe_ex2_f16x2(const __grid_constant__ ProbeParams params) {
  output_of<OUT>(params)[0] = ex2_approx_f16x2(input_of<IN>(params)[0]);
}

template <int IN, int OUT>
__global__ void probe_e4m3_from_floats(const __grid_constant__ ProbeParams params) {
  const uint32* in = input_of<IN>(params);
  output_of<OUT>(params)[0] = e4m3x2_from_floats(__uint_as_float(in[0]), __uint_as_float(in[1]));
}

template <int IN, int OUT>
__global__ void probe_four_e4m3_from_floats(const __grid_constant__ ProbeParams params) {
  const uint32* in = input_of<IN>(params);
  output_of<OUT>(params)[0] = e4m3x4_from_floats(__uint_as_float(in[0]), __uint_as_float(in[1]), __uint_as_float(in[2]),
                                                 __uint_as_float(in[3]));
}

template <int IN, int OUT>
__global__ void probe_halves_from_e4m3(const __grid_constant__ ProbeParams params) {
  output_of<OUT>(params)[0] = halves_from_e4m3x2(input_of<IN>(params)[0] & 0xffffu);
}

// The value itself, and one computed from it in every turn of a loop.
template <int IN, int OUT>
__global__ void probe_opaque(const __grid_constant__ ProbeParams params) {
  const uint32 x = input_of<IN>(params)[0];
  uint32 sum = 0;
#pragma unroll 1
  for (uint32 i = 0; i < 4; ++i) sum = 3 * sum + (opaque(x) >> i);
  output_of<OUT>(params)[0] = opaque(x);
  output_of<OUT>(params)[1] = sum;
}

// A value that outlives a pause of as many clocks as it says; how long that takes is nothing the emulator knows.
template <int IN, int OUT>
__global__ void probe_pause(const __grid_constant__ ProbeParams params) {
  const uint32 x = input_of<IN>(params)[0];
  pause(static_cast<int>(x % 1024));
  output_of<OUT>(params)[0] = x;
}

// FP32 to FP16 and BF16 and back.
template <int IN, int OUT>
__global__ void probe_round(const __grid_constant__ ProbeParams params) {
  const float x = __uint_as_float(input_of<IN>(params)[0]);
  output_of<OUT>(params)[0] = __float_as_uint(to_float(from_float<__half>(x)));
  output_of<OUT>(params)[1] = __float_as_uint(to_float(from_float<__nv_bfloat16>(x)));
}

struct MmaOperands {
  uint32 a[4], b[2];
  float d[4];
};

template <int IN>
__device__ __forceinline__ MmaOperands mma_operands(const ProbeParams& params) {
  const uint32* in = input_of<IN>(params);
  MmaOperands operands;
#pragma unroll
  for (int i = 0; i < 4; ++i) operands.a[i] = in[i], operands.d[i] = __uint_as_float(in[6 + i]);
  operands.b[0] = in[4], operands.b[1] = in[5];
  return operands;
}

template <int IN, int OUT, typename T>
__global__ void probe_mma(const __grid_constant__ ProbeParams params) {
  MmaOperands operands = mma_operands<IN>(params);
  mma_m16n8k16<T>(operands.d, operands.a, operands.b);
#pragma unroll
  for (int i = 0; i < 4; ++i) output_of<OUT>(params)[i] = __float_as_uint(operands.d[i]);
}

template <int IN, int OUT>
__global__ void probe_mma_e4m3(const __grid_constant__ ProbeParams params) {
  MmaOperands operands = mma_operands<IN>(params);
  mma_m16n8k32_e4m3(operands.d, operands.a, operands.b);
#pragma unroll
  for (int i = 0; i < 4; ++i) output_of<OUT>(params)[i] = __float_as_uint(operands.d[i]);
}

template <int IN, int OUT>
__global__ void probe_mma_s8(const __grid_constant__ ProbeParams params) {
  const MmaOperands operands = mma_operands<IN>(params);
  int32 d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __float_as_int(operands.d[i]);
  mma_m16n8k32_s8(d, operands.a, operands.b);
#pragma unroll
  for (int i = 0; i < 4; ++i) output_of<OUT>(params)[i] = static_cast<uint32>(d[i]);
}

struct alignas(16) Words {
  uint32 word[4];
};

// The first four words are a 16-byte row of shared memory; the fifth chooses whose row the lane's address names.
template <int IN, int OUT, bool TRANSPOSED>
__global__ void probe_ldmatrix(const __grid_constant__ ProbeParams params) {
  __shared__ Words rows[32];
  const uint32* in = input_of<IN>(params);
  Words row;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.word[i] = in[i];
  rows[threadIdx.x] = row;
  __syncwarp();
  uint32 fragment[OUT];
  ldmatrix<OUT, TRANSPOSED>(fragment, &rows[in[4] % 32]);
#pragma unroll
  for (int i = 0; i < OUT; ++i) output_of<OUT>(params)[i] = fragment[i];
}

// The fifth word is the number of valid bytes; what lies behind the copied bytes must stay.
template <int IN, int OUT, int BYTES>
__global__ void probe_cp_async(const __grid_constant__ ProbeParams params) {
  __shared__ Words rows[32];
  const uint32* in = input_of<IN>(params);
  rows[threadIdx.x] = Words{{1, 2, 3, 4}};
  cp_async<BYTES>(&rows[threadIdx.x], in, static_cast<int>(in[4] % (BYTES + 1)));
  cp_async_commit();
  cp_async_wait<0>();
  const Words row = rows[threadIdx.x];
#pragma unroll
  for (int i = 0; i < 4; ++i) output_of<OUT>(params)[i] = row.word[i];
}

struct DynamicWords {
  uint32 word[32];
};

template <int IN, int OUT>
__global__ void probe_dynamic_shared(const __grid_constant__ ProbeParams params) {
  DynamicWords& shared = dynamic_shared<DynamicWords>();
  shared.word[threadIdx.x] = input_of<IN>(params)[0];
  __syncthreads();
  output_of<OUT>(params)[0] = shared.word[31 - threadIdx.x];
}

// Two groups, read one after the other; the second through a barrier by the neighbour.
template <int IN, int OUT>
__global__ void probe_cp_async_groups(const __grid_constant__ ProbeParams params) {
  __shared__ uint32 words[2][32];
  const uint32* in = input_of<IN>(params);
  cp_async<4>(&words[0][threadIdx.x], in);
  cp_async_commit();
  cp_async<4>(&words[1][threadIdx.x], in + 1);
  cp_async_commit();
  cp_async_wait<1>();
  output_of<OUT>(params)[0] = words[0][threadIdx.x];
  cp_async_wait<0>();
  __syncthreads();
  output_of<OUT>(params)[1] = words[1][(threadIdx.x + 1) % 32];
}

template <int IN, int OUT>
__global__ void probe_shuffle(const __grid_constant__ ProbeParams params) {
  const uint32* in = input_of<IN>(params);
  uint32* out = output_of<OUT>(params);
  const uint32 value = in[0];
  out[0] = __shfl_sync(0xffffffffu, value, static_cast<int>(in[1] % 32));
  out[1] = __shfl_sync(0xffffffffu, value, static_cast<int>(in[1] % 32), 8);
  out[2] = __shfl_xor_sync(0xffffffffu, value, 5);
  out[3] = __shfl_xor_sync(0xffffffffu, value, 12, 8);
  out[4] = __shfl_up_sync(0xffffffffu, value, 3u);
  out[5] = __shfl_up_sync(0xffffffffu, value, 3u, 16);
  out[6] = __shfl_down_sync(0xffffffffu, value, 3u);
  out[7] = __shfl_down_sync(0xffffffffu, value, 3u, 16);
}

template <int IN, int OUT>
__global__ void probe_vote(const __grid_constant__ ProbeParams params) {
  const int predicate = static_cast<int>(input_of<IN>(params)[0] % 3);
  uint32* out = output_of<OUT>(params);
  out[0] = __ballot_sync(0xffffffffu, predicate);
  out[1] = static_cast<uint32>(__any_sync(0xffffffffu, predicate == 5));
  out[2] = static_cast<uint32>(__all_sync(0xffffffffu, predicate < 3));
  out[3] = static_cast<uint32>(__any_sync(0xffffffffu, predicate) << 1 | __all_sync(0xffffffffu, predicate));
}

// Two warps: the first fills shared memory and arrives, the second waits and reads.
template <int IN, int OUT>
__global__ void probe_named_barrier(const __grid_constant__ ProbeParams params) {
  __shared__ uint32 words[32];
  const uint32 lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    words[lane] = input_of<IN>(params)[0];
    named_barrier_arrive(3, 64);
    output_of<OUT>(params)[0] = lane;
  } else {
    named_barrier_sync(3, 64);
    output_of<OUT>(params)[0] = words[31 - lane];
  }
}

}  // namespace microsdpa
