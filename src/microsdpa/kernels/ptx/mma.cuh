// Matrix products of a warp, and its fragments to and from shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../prelude.cuh"
#include "address.cuh"

namespace microsdpa {

// mma.sync: D += A B by a warp, row-major A, column-major B (PTX ISA, "mma", m16n8k16 sm_80; e4m3 m16n8k32 sm_89).
//
// With group = lane / 4 and t = lane % 4, a lane holds
//   D: d[0..1] = D[group][2t, 2t+1], d[2..3] = D[group + 8][2t, 2t+1]
//   16-bit A: a[0] = A[group][2t, 2t+1], a[1] = row + 8, a[2] = column + 8, a[3] = both;  B: b[0] = B[2t, 2t+1][group],
//             b[1] = row + 8
//   8-bit A:  a[0] = A[group][4t .. 4t+3], a[1] = row + 8, a[2] = column + 16, a[3] = both;  B: b[0] = B[4t ..
//   4t+3][group],
//             b[1] = row + 16

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

// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into the fragments of mma (PTX ISA, "ldmatrix", sm_75).

// Loads COUNT (1, 2 or 4) matrices. Lane 8 i + r gives the address of row r of matrix i, 16 bytes, 16-byte aligned.
// Lane t receives elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4 of matrix i in fragment[i]; TRANSPOSED, of column t
// / 4.
template <int COUNT, bool TRANSPOSED = false>
__device__ __forceinline__ void ldmatrix(uint32 (&fragment)[COUNT], const void* row) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "ldmatrix loads 1, 2 or 4 matrices");
  const uint32 address = shared_address(row);
  if constexpr (COUNT == 1 && !TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(fragment[0]) : "r"(address) : "memory");
  } else if constexpr (COUNT == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (COUNT == 2 && !TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (!TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
  }
}

// stmatrix: 8x8 matrices of 16-bit elements from the fragments of mma to shared memory (PTX ISA, "stmatrix", sm_90).

// Stores four matrices, the inverse of ldmatrix: lane 8 i + r gives the address of row r of matrix i, 16-byte aligned.
__device__ __forceinline__ void stmatrix(void* row, const uint32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace microsdpa
