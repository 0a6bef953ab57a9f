// The instructions of kernels/ptx/mma.cuh for the emulator.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// mma.sync.
//
// Products are exact and sums are FP64, rounded to FP32 once per instruction: the hardware's sums have fewer bits.

namespace emulated {

template <typename Sum>
struct MmaLane {
  Sum d[4];
  uint32 a[4], b[2];
};

template <typename T>
inline double decode(uint32 bits);
template <>
inline double decode<__half>(uint32 bits) {
  return __half2float(emulator::bit_cast<__half>(static_cast<unsigned short>(bits)));
}
template <>
inline double decode<__nv_bfloat16>(uint32 bits) {
  return __bfloat162float(emulator::bit_cast<__nv_bfloat16>(static_cast<unsigned short>(bits)));
}
template <>
inline double decode<__nv_fp8_e4m3>(uint32 bits) {
  const auto half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), __NV_E4M3);
  return __half2float(emulator::bit_cast<__half>(half.x));
}
template <>
inline double decode<signed char>(uint32 bits) {
  return static_cast<signed char>(bits);
}

// One instruction: A is 16 x K, B is K x 8, with the elements of T packed into registers.
template <typename T, typename Sum>
inline void mma(const char* name, Sum (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2], emulator::Place place) {
  static constexpr int PER = 4 / sizeof(T);  // elements in a register
  static constexpr int K = 8 * PER;
  using Lane = MmaLane<Sum>;
  Lane mine{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  emulator::warp_collective(
      name, 0xffffffffu, &mine,
      [](void* const(&lanes)[32], const void*) {
        double A[16][K], B[K][8];
        for (int lane = 0; lane < 32; ++lane) {
          const Lane& l = *static_cast<const Lane*>(lanes[lane]);
          const int group = lane / 4, t = lane % 4;
          for (int r = 0; r < 4; ++r) {
            for (int e = 0; e < PER; ++e) {
              const uint32 bits = l.a[r] >> (8 * sizeof(T) * e);
              A[group + 8 * (r % 2)][PER * t + e + 4 * PER * (r / 2)] = decode<T>(bits);
            }
          }
          for (int r = 0; r < 2; ++r) {
            for (int e = 0; e < PER; ++e)
              B[PER * t + e + 4 * PER * r][group] = decode<T>(l.b[r] >> (8 * sizeof(T) * e));
          }
        }
        emulator::count_tensor(2 * 16 * 8 * K);
        for (int lane = 0; lane < 32; ++lane) {
          Lane& l = *static_cast<Lane*>(lanes[lane]);
          for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            double sum = l.d[i];
            for (int k = 0; k < K; ++k) sum += A[row][k] * B[k][column];
            l.d[i] = static_cast<Sum>(sum);
          }
        }
      },
      nullptr, place);
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}

}  // namespace emulated

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2],
                         emulator::Place place = emulator::Place::here()) {
  emulated::mma<T>("mma.m16n8k16", d, a, b, place);
}

inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2],
                              emulator::Place place = emulator::Place::here()) {
  emulated::mma<__nv_fp8_e4m3>("mma.m16n8k32.e4m3", d, a, b, place);
}

inline void mma_m16n8k32_s8(int32 (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2],
                            emulator::Place place = emulator::Place::here()) {
  emulated::mma<signed char>("mma.m16n8k32.s8", d, a, b, place);
}

// ldmatrix.

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

// stmatrix.

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
