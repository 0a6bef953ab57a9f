// wgmma: D = A B + D by a warpgroup, asynchronously (PTX ISA, "wgmma.mma_async", sm_90a).
//
// A is 64 x K from shared memory or registers, B is K x N from shared memory, K is 32 bytes of elements. Thread t of
// warp w of the warpgroup holds D[16 w + t / 4 + 8 h][8 j + 2 (t % 4) + e] in d[4 j + 2 h + e]; A in registers is laid
// out as mma's, 16 rows per warp. All 128 threads call with the same descriptors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "address.cuh"

namespace microsdpa {

// Orders this thread's register accesses before the next wgmma. Needed before the first one, and whenever registers
// that one uses were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are in flight. Until then their registers and tiles are not touched.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to `d` across a wait.
template <typename T, int N>
__device__ __forceinline__ void wgmma_fence_registers(T (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 4 && static_cast<T>(0.5f) != static_cast<T>(0)) {
      asm volatile("" : "+f"(d[i])::"memory");
    } else {
      asm volatile("" : "+r"(d[i])::"memory");
    }
  }
}

// Pattern of a tile in shared memory: bytes after which it repeats along the contiguous dimension. The 16-byte chunks
// of a row are exchanged by XOR with the row's number, so that neither rows nor columns meet in one bank.
enum class Swizzle : int { NONE = 0, BYTES_128 = 1, BYTES_64 = 2, BYTES_32 = 3 };

// Descriptor of a tile in shared memory (PTX ISA, "Matrix Descriptor Format"): `tile` is aligned to the pattern, eight
// rows of it, or 16 bytes where there is none.
//   contiguous along K:    stride_bytes lie between groups of eight rows, leading_bytes, without swizzle, between the
//                          16-byte halves of K
//   contiguous along M, N: swizzled, leading_bytes lie between patterns along M or N, stride_bytes between groups of
//                          eight along K; without swizzle the other way round
__device__ __forceinline__ uint64 matrix_descriptor(const void* tile, int leading_bytes, int stride_bytes,
                                                    Swizzle swizzle) {
  return static_cast<uint64>((shared_address(tile) & 0x3ffff) >> 4) | static_cast<uint64>(leading_bytes >> 4) << 16 |
         static_cast<uint64>(stride_bytes >> 4) << 32 | static_cast<uint64>(swizzle) << 62;
}

// The same tile `bytes` further on: the next K of a tile that is contiguous along K, for example.
__device__ __forceinline__ uint64 advance(uint64 descriptor, int bytes) {
  return descriptor + static_cast<uint64>(bytes >> 4);
}

// Which dimension of a tile is contiguous in shared memory. 8-bit elements: K alone.
enum class Major : int { K = 0, MN = 1 };

namespace wgmma_detail {

// One instruction a specialization: operands in shared memory, and A in registers.
template <typename T, int N>
struct Instruction;

// clang-format off
#define MICROSDPA_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MICROSDPA_REGISTERS_0_TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MICROSDPA_REGISTERS_16_TO_23 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MICROSDPA_REGISTERS_32_TO_39 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MICROSDPA_REGISTERS_48_TO_55 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MICROSDPA_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MICROSDPA_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MICROSDPA_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MICROSDPA_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MICROSDPA_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MICROSDPA_REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MICROSDPA_REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MICROSDPA_SIXTEEN(C, I) C(d[I + 0]), C(d[I + 1]), C(d[I + 2]), C(d[I + 3]), C(d[I + 4]), C(d[I + 5]), C(d[I + 6]), C(d[I + 7]), C(d[I + 8]), C(d[I + 9]), C(d[I + 10]), C(d[I + 11]), C(d[I + 12]), C(d[I + 13]), C(d[I + 14]), C(d[I + 15])
#define MICROSDPA_EIGHT(C, I) C(d[I + 0]), C(d[I + 1]), C(d[I + 2]), C(d[I + 3]), C(d[I + 4]), C(d[I + 5]), C(d[I + 6]), C(d[I + 7])
#define MICROSDPA_LIST_16 MICROSDPA_REGISTERS_0_TO_7
#define MICROSDPA_OUTPUTS_16(C) MICROSDPA_EIGHT(C, 0)
#define MICROSDPA_LIST_32 MICROSDPA_REGISTERS_0
#define MICROSDPA_OUTPUTS_32(C) MICROSDPA_SIXTEEN(C, 0)
#define MICROSDPA_LIST_48 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16_TO_23
#define MICROSDPA_OUTPUTS_48(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_EIGHT(C, 16)
#define MICROSDPA_LIST_64 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16
#define MICROSDPA_OUTPUTS_64(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16)
#define MICROSDPA_LIST_80 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32_TO_39
#define MICROSDPA_OUTPUTS_80(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_EIGHT(C, 32)
#define MICROSDPA_LIST_96 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32
#define MICROSDPA_OUTPUTS_96(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32)
#define MICROSDPA_LIST_112 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32 MICROSDPA_REGISTERS_48_TO_55
#define MICROSDPA_OUTPUTS_112(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32), MICROSDPA_EIGHT(C, 48)
#define MICROSDPA_LIST_128 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32 MICROSDPA_REGISTERS_48
#define MICROSDPA_OUTPUTS_128(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32), MICROSDPA_SIXTEEN(C, 48)
#define MICROSDPA_LIST_160 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32 MICROSDPA_REGISTERS_48 MICROSDPA_REGISTERS_64
#define MICROSDPA_OUTPUTS_160(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32), MICROSDPA_SIXTEEN(C, 48), MICROSDPA_SIXTEEN(C, 64)
#define MICROSDPA_LIST_192 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32 MICROSDPA_REGISTERS_48 MICROSDPA_REGISTERS_64 MICROSDPA_REGISTERS_80
#define MICROSDPA_OUTPUTS_192(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32), MICROSDPA_SIXTEEN(C, 48), MICROSDPA_SIXTEEN(C, 64), MICROSDPA_SIXTEEN(C, 80)
#define MICROSDPA_LIST_256 MICROSDPA_REGISTERS_0 MICROSDPA_REGISTERS_16 MICROSDPA_REGISTERS_32 MICROSDPA_REGISTERS_48 MICROSDPA_REGISTERS_64 MICROSDPA_REGISTERS_80 MICROSDPA_REGISTERS_96 MICROSDPA_REGISTERS_112
#define MICROSDPA_OUTPUTS_256(C) MICROSDPA_SIXTEEN(C, 0), MICROSDPA_SIXTEEN(C, 16), MICROSDPA_SIXTEEN(C, 32), MICROSDPA_SIXTEEN(C, 48), MICROSDPA_SIXTEEN(C, 64), MICROSDPA_SIXTEEN(C, 80), MICROSDPA_SIXTEEN(C, 96), MICROSDPA_SIXTEEN(C, 112)
// clang-format on
#define MICROSDPA_F(x) "+f"(x)
#define MICROSDPA_R(x) "+r"(x)

// P: number of the first operand after the accumulators; it and its successors are spelled out, since the assembler
// text cannot count.
#define MICROSDPA_WGMMA_16(TYPE, PTX, N, P0, P1, P2, P3, P4, P5, P6, P7)                                               \
  template <>                                                                                                          \
  struct Instruction<TYPE, N> {                                                                                        \
    template <Major A_MAJOR, Major B_MAJOR>                                                                            \
    static __device__ __forceinline__ void run(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) {                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX    \
                   "." PTX " {" MICROSDPA_LIST_##N "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";}"              \
                   : MICROSDPA_OUTPUTS_##N(MICROSDPA_F)                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(A_MAJOR)), "n"(static_cast<int>(B_MAJOR))); \
    }                                                                                                                  \
    template <Major B_MAJOR>                                                                                           \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, int accumulate) {    \
      asm volatile(                                                                                                    \
          "{.reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX     \
          " {" MICROSDPA_LIST_##N "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";}"         \
          : MICROSDPA_OUTPUTS_##N(MICROSDPA_F)                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(static_cast<int>(B_MAJOR)));      \
    }                                                                                                                  \
  };

#define MICROSDPA_WGMMA_8(TYPE, PTX, SUM, TAIL, C, N, P0, P1, P2, P3, P4, P5, P6, P7)                             \
  template <>                                                                                                     \
  struct Instruction<TYPE, N> {                                                                                   \
    template <Major A_MAJOR, Major B_MAJOR>                                                                       \
    static __device__ __forceinline__ void run(SUM (&d)[N / 2], uint64 a, uint64 b, int accumulate) {             \
      static_assert(A_MAJOR == Major::K && B_MAJOR == Major::K, "8-bit tiles are contiguous along K");            \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." PTX   \
                   " {" MICROSDPA_LIST_##N "}, %" #P0 ", %" #P1 ", p" TAIL ";}"                                   \
                   : MICROSDPA_OUTPUTS_##N(C)                                                                     \
                   : "l"(a), "l"(b), "r"(accumulate));                                                            \
    }                                                                                                             \
    template <Major B_MAJOR>                                                                                      \
    static __device__ __forceinline__ void run(SUM (&d)[N / 2], const uint32 (&a)[4], uint64 b, int accumulate) { \
      static_assert(B_MAJOR == Major::K, "8-bit tiles are contiguous along K");                                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." PTX   \
                   " {" MICROSDPA_LIST_##N "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p" TAIL ";}"   \
                   : MICROSDPA_OUTPUTS_##N(C)                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                        \
    }                                                                                                             \
  };

#define MICROSDPA_WGMMA(N, ...)                                                                   \
  MICROSDPA_WGMMA_16(__half, "f16", N, __VA_ARGS__)                                               \
  MICROSDPA_WGMMA_16(__nv_bfloat16, "bf16", N, __VA_ARGS__)                                       \
  MICROSDPA_WGMMA_8(__nv_fp8_e4m3, "f32.e4m3.e4m3", float, ", 1, 1", MICROSDPA_F, N, __VA_ARGS__) \
  MICROSDPA_WGMMA_8(signed char, "s32.s8.s8", int32, "", MICROSDPA_R, N, __VA_ARGS__)

MICROSDPA_WGMMA(16, 8, 9, 10, 11, 12, 13, 14, 15)
MICROSDPA_WGMMA(32, 16, 17, 18, 19, 20, 21, 22, 23)
MICROSDPA_WGMMA(48, 24, 25, 26, 27, 28, 29, 30, 31)
MICROSDPA_WGMMA(64, 32, 33, 34, 35, 36, 37, 38, 39)
MICROSDPA_WGMMA(80, 40, 41, 42, 43, 44, 45, 46, 47)
MICROSDPA_WGMMA(96, 48, 49, 50, 51, 52, 53, 54, 55)
MICROSDPA_WGMMA(112, 56, 57, 58, 59, 60, 61, 62, 63)
MICROSDPA_WGMMA(128, 64, 65, 66, 67, 68, 69, 70, 71)
MICROSDPA_WGMMA(160, 80, 81, 82, 83, 84, 85, 86, 87)
MICROSDPA_WGMMA(192, 96, 97, 98, 99, 100, 101, 102, 103)
MICROSDPA_WGMMA(256, 128, 129, 130, 131, 132, 133, 134, 135)

#undef MICROSDPA_WGMMA
#undef MICROSDPA_WGMMA_8
#undef MICROSDPA_WGMMA_16
#undef MICROSDPA_R
#undef MICROSDPA_F
#undef MICROSDPA_LIST_16
#undef MICROSDPA_OUTPUTS_16
#undef MICROSDPA_LIST_32
#undef MICROSDPA_OUTPUTS_32
#undef MICROSDPA_LIST_48
#undef MICROSDPA_OUTPUTS_48
#undef MICROSDPA_LIST_64
#undef MICROSDPA_OUTPUTS_64
#undef MICROSDPA_LIST_80
#undef MICROSDPA_OUTPUTS_80
#undef MICROSDPA_LIST_96
#undef MICROSDPA_OUTPUTS_96
#undef MICROSDPA_LIST_112
#undef MICROSDPA_OUTPUTS_112
#undef MICROSDPA_LIST_128
#undef MICROSDPA_OUTPUTS_128
#undef MICROSDPA_LIST_160
#undef MICROSDPA_OUTPUTS_160
#undef MICROSDPA_LIST_192
#undef MICROSDPA_OUTPUTS_192
#undef MICROSDPA_LIST_256
#undef MICROSDPA_OUTPUTS_256
#undef MICROSDPA_REGISTERS_0
#undef MICROSDPA_REGISTERS_16
#undef MICROSDPA_REGISTERS_32
#undef MICROSDPA_REGISTERS_48
#undef MICROSDPA_REGISTERS_64
#undef MICROSDPA_REGISTERS_80
#undef MICROSDPA_REGISTERS_96
#undef MICROSDPA_REGISTERS_112
#undef MICROSDPA_REGISTERS_0_TO_7
#undef MICROSDPA_REGISTERS_16_TO_23
#undef MICROSDPA_REGISTERS_32_TO_39
#undef MICROSDPA_REGISTERS_48_TO_55
#undef MICROSDPA_EIGHT
#undef MICROSDPA_SIXTEEN

}  // namespace wgmma_detail

// d = A B (+ d when `accumulate`), of elements T: __half, __nv_bfloat16 and __nv_fp8_e4m3 with FP32 sums, signed char
// with int32 sums. A and B in shared memory.
template <typename T, int N, Major A_MAJOR = Major::K, Major B_MAJOR = Major::K, typename Sum>
__device__ __forceinline__ void wgmma(Sum (&d)[N / 2], uint64 a, uint64 b, bool accumulate = true) {
  wgmma_detail::Instruction<T, N>::template run<A_MAJOR, B_MAJOR>(d, a, b, accumulate);
}

// The same with A in registers.
template <typename T, int N, Major B_MAJOR = Major::K, typename Sum>
__device__ __forceinline__ void wgmma(Sum (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate = true) {
  wgmma_detail::Instruction<T, N>::template run<B_MAJOR>(d, a, b, accumulate);
}

}  // namespace microsdpa
