// ldmatrix for the emulator; kernels/ptx/ldmatrix.cuh says what it does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

namespace emulated {

struct alignas(16) Row {
  unsigned short element[8];
};

template <int COUNT>
struct MatrixLane {
  Row row;  // the row whose address this lane gave
  uint32 fragment[COUNT];
};

}  // namespace emulated

template <int COUNT, bool TRANSPOSED = false>
inline void ldmatrix(uint32 (&fragment)[COUNT], const void* row, emulator::Place place = emulator::Place::here()) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "ldmatrix loads 1, 2 or 4 matrices");
  using Lane = emulated::MatrixLane<COUNT>;
  Lane mine{};
  if (emulator::lane() < 8 * COUNT) mine.row = *static_cast<const emulated::Row*>(row);
  emulator::warp_collective(
      "ldmatrix", 0xffffffffu, &mine,
      [](void* const(&lanes)[32], const void*) {
        for (int t = 0; t < 32; ++t) {
          for (int i = 0; i < COUNT; ++i) {
            unsigned short pair[2];
            for (int e = 0; e < 2; ++e) {
              const int r = TRANSPOSED ? 2 * (t % 4) + e : t / 4, c = TRANSPOSED ? t / 4 : 2 * (t % 4) + e;
              pair[e] = static_cast<const Lane*>(lanes[8 * i + r])->row.element[c];
            }
            static_cast<Lane*>(lanes[t])->fragment[i] = pair[0] | static_cast<uint32>(pair[1]) << 16;
          }
        }
      },
      nullptr, place);
  for (int i = 0; i < COUNT; ++i) fragment[i] = mine.fragment[i];
}

}  // namespace microsdpa
