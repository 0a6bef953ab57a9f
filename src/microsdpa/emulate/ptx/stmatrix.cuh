// stmatrix for the emulator; kernels/ptx/stmatrix.cuh says what it does.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

namespace emulated {

struct alignas(16) StoredRow {
  unsigned short element[8];
};

struct StoreLane {
  uint32 fragment[4];
  StoredRow row;  // the row whose address this lane gave
};

}  // namespace emulated

inline void stmatrix(void* row, const uint32 (&fragment)[4], emulator::Place place = emulator::Place::here()) {
  using Lane = emulated::StoreLane;
  Lane mine{{fragment[0], fragment[1], fragment[2], fragment[3]}, {}};
  emulator::warp_collective(
      "stmatrix", 0xffffffffu, &mine,
      [](void* const(&lanes)[32], const void*) {
        for (int t = 0; t < 32; ++t) {
          for (int i = 0; i < 4; ++i) {
            const uint32 pair = static_cast<const Lane*>(lanes[t])->fragment[i];
            auto& target = static_cast<Lane*>(lanes[8 * i + t / 4])->row;
            for (int e = 0; e < 2; ++e) target.element[2 * (t % 4) + e] = static_cast<unsigned short>(pair >> 16 * e);
          }
        }
      },
      nullptr, place);
  *static_cast<emulated::StoredRow*>(row) = mine.row;
}

}  // namespace microsdpa
