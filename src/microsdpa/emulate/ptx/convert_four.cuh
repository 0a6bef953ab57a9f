// cvt of four floats for the emulator; kernels/ptx/convert_four.cuh says what it does.
#pragma once

#include "convert.cuh"

namespace microsdpa {

inline uint32 e4m3x4_from_floats(float a, float b, float c, float d) {
  return e4m3x2_from_floats(a, b) | e4m3x2_from_floats(c, d) << 16;
}

}  // namespace microsdpa
