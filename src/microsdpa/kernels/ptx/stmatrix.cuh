// stmatrix: 8x8 matrices of 16-bit elements from the fragments of mma to shared memory (PTX ISA, "stmatrix", sm_90).
#pragma once

#include "shared_address.cuh"

namespace microsdpa {

// Stores four matrices, the inverse of ldmatrix: lane 8 i + r gives the address of row r of matrix i, 16-byte aligned.
__device__ __forceinline__ void stmatrix(void* row, const uint32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace microsdpa
