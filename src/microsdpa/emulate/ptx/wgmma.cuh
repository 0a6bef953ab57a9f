// wgmma for the emulator; kernels/ptx/wgmma.cuh gives shapes, fragments and descriptors.
//
// Products are exact and sums are FP64, rounded to FP32 once per instruction, where the hardware's have fewer bits.
// Sums of E4M3 are the hardware's, of 14 bits.
#pragma once

#include "address.cuh"

namespace microsdpa {

inline void wgmma_fence(emulator::Place place = emulator::Place::here()) { emulator::wgmma_fence(place); }

inline void wgmma_commit(emulator::Place place = emulator::Place::here()) { emulator::wgmma_commit(place); }

template <int PENDING>
inline void wgmma_wait(emulator::Place place = emulator::Place::here()) {
  emulator::wgmma_wait(PENDING, place);
}

template <typename T, int N>
inline void wgmma_fence_registers(T (&)[N]) {}

enum class Swizzle : int { NONE = 0, BYTES_128 = 1, BYTES_64 = 2, BYTES_32 = 3 };

inline uint64 matrix_descriptor(const void* tile, int leading_bytes, int stride_bytes, Swizzle swizzle,
                                emulator::Place place = emulator::Place::here()) {
  return static_cast<uint64>(emulator::shared_address(tile, place) >> 4) |
         static_cast<uint64>(leading_bytes >> 4) << 16 | static_cast<uint64>(stride_bytes >> 4) << 32 |
         static_cast<uint64>(swizzle) << 62;
}

inline uint64 advance(uint64 descriptor, int bytes) { return descriptor + static_cast<uint64>(bytes >> 4); }

enum class Major : int { K = 0, MN = 1 };

namespace emulated {

template <typename T>
struct WgmmaElement;
template <>
struct WgmmaElement<__half> {
  static constexpr auto VALUE = emulator::Element::F16;
};
template <>
struct WgmmaElement<__nv_bfloat16> {
  static constexpr auto VALUE = emulator::Element::BF16;
};
template <>
struct WgmmaElement<__nv_fp8_e4m3> {
  static constexpr auto VALUE = emulator::Element::E4M3;
};
template <>
struct WgmmaElement<signed char> {
  static constexpr auto VALUE = emulator::Element::S8;
};

}  // namespace emulated

template <typename T, int N, Major A_MAJOR = Major::K, Major B_MAJOR = Major::K, typename Sum>
inline void wgmma(Sum (&d)[N / 2], uint64 a, uint64 b, bool accumulate = true,
                  emulator::Place place = emulator::Place::here()) {
  emulator::wgmma(
      {emulated::WgmmaElement<T>::VALUE, N, accumulate, A_MAJOR == Major::MN, B_MAJOR == Major::MN, nullptr, a, b, d},
      place);
}

template <typename T, int N, Major B_MAJOR = Major::K, typename Sum>
inline void wgmma(Sum (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool accumulate = true,
                  emulator::Place place = emulator::Place::here()) {
  emulator::wgmma({emulated::WgmmaElement<T>::VALUE, N, accumulate, false, B_MAJOR == Major::MN, a, 0, b, d}, place);
}

}  // namespace microsdpa
