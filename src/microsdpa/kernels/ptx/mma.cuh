// mma.sync: D += A B by a warp, row-major A, column-major B (PTX ISA, "mma", m16n8k16 sm_80; e4m3 m16n8k32 sm_89).
//
// With group = lane / 4 and t = lane % 4, a lane holds
//   D: d[0..1] = D[group][2t, 2t+1], d[2..3] = D[group + 8][2t, 2t+1]
//   16-bit A: a[0] = A[group][2t, 2t+1], a[1] = row + 8, a[2] = column + 8, a[3] = both;  B: b[0] = B[2t, 2t+1][group],
//             b[1] = row + 8
//   8-bit A:  a[0] = A[group][4t .. 4t+3], a[1] = row + 8, a[2] = column + 16, a[3] = both;  B: b[0] = B[4t ..
//   4t+3][group],
//             b[1] = row + 16
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../prelude.cuh"

namespace microsdpa {

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k32_s8(int32 (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace microsdpa
