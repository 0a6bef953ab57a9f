// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into the fragments of mma (PTX ISA, "ldmatrix", sm_75).
#pragma once

#include "shared_address.cuh"

namespace microsdpa {

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

}  // namespace microsdpa
