// nvcuda::wmma for the emulator: 16x16x16 products of FP16 or BF16 with FP32 sums.
//
// A fragment's layout is unspecified in CUDA; here lane l holds elements 8 l to 8 l + 7, in row-major order. The
// counted bank conflicts of loads and stores are therefore those of this layout, not of a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "emulator.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16, "the emulator has 16x16x16 fragments only");
  static constexpr int num_elements = 8;
  T x[num_elements];
};

namespace emulated {

using microsdpa::emulator::Place;

// Tiles start on 32 bytes, and their rows are multiples of 16 bytes apart (CUDA C++ Programming Guide, "Warp matrix
// functions").
template <typename T>
inline void check(const T* tile, unsigned stride, Place place) {
  if (reinterpret_cast<std::uintptr_t>(tile) % 32)
    microsdpa::emulator::fail("wmma: the tile does not start on 32 bytes", place);
  if (stride * sizeof(T) % 16)
    microsdpa::emulator::fail("wmma: the leading dimension is no multiple of 16 bytes", place);
}

inline unsigned element_offset(int element, unsigned stride, bool rows) {
  const int index = microsdpa::emulator::lane() * 8 + element, row = index / 16, column = index % 16;
  return static_cast<unsigned>(rows ? row : column) * stride + static_cast<unsigned>(rows ? column : row);
}

struct Operands {
  float a[8], b[8], c[8], d[8];
};

inline float widen(__half x) { return __half2float(x); }
inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

}  // namespace emulated

template <typename Fragment, typename T>
inline void fill_fragment(Fragment& fragment, T value) {
  for (auto& x : fragment.x) x = value;
}

template <typename Use, typename T, typename Layout>
inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& fragment, const T* tile, unsigned stride,
                             emulated::Place place = emulated::Place::here()) {
  emulated::check(tile, stride, place);
  for (int i = 0; i < 8; ++i) {
    fragment.x[i] = tile[emulated::element_offset(i, stride, std::is_same_v<Layout, row_major>)];
  }
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float>& fragment, const float* tile, unsigned stride,
                             layout_t layout, emulated::Place place = emulated::Place::here()) {
  emulated::check(tile, stride, place);
  for (int i = 0; i < 8; ++i) fragment.x[i] = tile[emulated::element_offset(i, stride, layout == mem_row_major)];
}

inline void store_matrix_sync(float* tile, const fragment<accumulator, 16, 16, 16, float>& fragment, unsigned stride,
                              layout_t layout, emulated::Place place = emulated::Place::here()) {
  emulated::check(tile, stride, place);
  for (int i = 0; i < 8; ++i) tile[emulated::element_offset(i, stride, layout == mem_row_major)] = fragment.x[i];
}

template <typename T, typename LayoutA, typename LayoutB>
inline void mma_sync(fragment<accumulator, 16, 16, 16, float>& d, const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
                     const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
                     const fragment<accumulator, 16, 16, 16, float>& c,
                     emulated::Place place = emulated::Place::here()) {
  emulated::Operands mine;
  for (int i = 0; i < 8; ++i) {
    mine.a[i] = emulated::widen(a.x[i]), mine.b[i] = emulated::widen(b.x[i]), mine.c[i] = c.x[i];
  }
  microsdpa::emulator::warp_collective(
      "wmma::mma_sync", 0xffffffffu, &mine,
      [](void* const(&lanes)[32], const void*) {
        auto of = [&](int index) -> emulated::Operands& { return *static_cast<emulated::Operands*>(lanes[index / 8]); };
        microsdpa::emulator::count_tensor(2 * 16 * 16 * 16);
        for (int row = 0; row < 16; ++row) {
          for (int column = 0; column < 16; ++column) {
            const int at = row * 16 + column;
            double sum = of(at).c[at % 8];
            for (int k = 0; k < 16; ++k) {
              const int left = row * 16 + k, right = k * 16 + column;
              sum += static_cast<double>(of(left).a[left % 8]) * of(right).b[right % 8];
            }
            of(at).d[at % 8] = static_cast<float>(sum);
          }
        }
      },
      nullptr, place);
  for (int i = 0; i < 8; ++i) d.x[i] = mine.d[i];
}

}  // namespace nvcuda::wmma
