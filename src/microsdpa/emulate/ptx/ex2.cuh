// ex2.approx for the emulator; kernels/ptx/ex2.cuh says what each function does. Rounded correctly, where the
// hardware's results may be off in the last places.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

inline float ex2_approx(float x) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
  emulator::count_exp2(1);
  if (std::fabs(x) < SMALLEST_NORMAL) return 1.0f;
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));
  return y < SMALLEST_NORMAL ? 0.0f : y;
}

inline uint32 ex2_approx_f16x2(uint32 x) {
  emulator::count_exp2(2);
  uint32 y = 0;
  for (int i = 0; i < 2; ++i) {
    const auto half = emulator::bit_cast<__half>(static_cast<unsigned short>(x >> 16 * i));
    const __half result = __double2half(std::exp2(static_cast<double>(__half2float(half))));
    y |= static_cast<uint32>(emulator::bit_cast<unsigned short>(result)) << 16 * i;
  }
  return y;
}

}  // namespace microsdpa
