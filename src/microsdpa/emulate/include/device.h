// CUDA's language and built-in functions for a host compiler; included before every kernel that runs in the emulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>

#include "emulator.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
// The runtime takes the library's thread-local segment for the block's shared memory.
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
// What emulate/build.py puts in its place where a function may be compiled once for all its callers, whose lines the
// runtime finds on the stack.
#define __function__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::microsdpa::emulator::thread_index())
#define blockIdx (::microsdpa::emulator::block_index())
#define blockDim (::microsdpa::emulator::block_size())
#define gridDim (::microsdpa::emulator::grid_size())

namespace microsdpa::emulator {

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
struct Shuffle {
  T value, result;
  int source;
};

// Every lane reads the value of its source lane; the source must take part.
template <typename T>
inline T shuffle(const char* operation, unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  count_shuffle();
  Shuffle<T> mine{value, value, source};
  warp_collective(
      operation, mask, &mine,
      [](void* const(&lanes)[32], const void*) {
        for (void* lane : lanes) {
          if (!lane) continue;
          auto& own = *static_cast<Shuffle<T>*>(lane);
          if (const void* other = lanes[own.source]) own.result = static_cast<const Shuffle<T>*>(other)->value;
        }
      },
      nullptr, place);
  return mine.result;
}

struct Vote {
  int predicate;
  unsigned ballot;
};

inline unsigned ballot(const char* operation, unsigned mask, int predicate, Place place) {
  Vote mine{predicate, 0};
  warp_collective(
      operation, mask, &mine,
      [](void* const(&lanes)[32], const void*) {
        unsigned bits = 0;
        for (int i = 0; i < 32; ++i) {
          if (lanes[i] && static_cast<Vote*>(lanes[i])->predicate) bits |= 1u << i;
        }
        for (void* lane : lanes) {
          if (lane) static_cast<Vote*>(lane)->ballot = bits;
        }
      },
      nullptr, place);
  return mine.ballot;
}

inline int lane() { return static_cast<int>(thread_index().x % 32); }

inline float counted_exp2f(float x) {
  count_exp2(1);
  return std::exp2(x);
}

}  // namespace microsdpa::emulator

inline void __syncthreads(microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  microsdpa::emulator::block_barrier(place);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  microsdpa::emulator::warp_barrier(mask, place);
}

// Segments of `width` lanes: __shfl_sync wraps its source into the segment; the others leave a lane its own value when
// the source is outside, but __shfl_xor_sync does reach into earlier segments.
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  const int base = microsdpa::emulator::lane() / width * width;
  return microsdpa::emulator::shuffle("__shfl_sync", mask, value, base + (source & (width - 1)), place);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  const int own = microsdpa::emulator::lane(), other = own ^ lane_mask;
  return microsdpa::emulator::shuffle("__shfl_xor_sync", mask, value, other / width <= own / width ? other : own,
                                      place);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  const int own = microsdpa::emulator::lane(), other = own - static_cast<int>(delta);
  const int source = other >= own / width * width ? other : own;
  return microsdpa::emulator::shuffle("__shfl_up_sync", mask, value, source, place);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  const int own = microsdpa::emulator::lane(), other = own + static_cast<int>(delta);
  const int source = other < (own / width + 1) * width ? other : own;
  return microsdpa::emulator::shuffle("__shfl_down_sync", mask, value, source, place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  return microsdpa::emulator::ballot("__ballot_sync", mask, predicate, place);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int __any_sync(unsigned mask, int predicate,
                      microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  return microsdpa::emulator::ballot("__any_sync", mask, predicate, place) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  return microsdpa::emulator::ballot("__all_sync", mask, predicate, place) == mask;
}

// Atomic operations, and the order of a thread's writes for the others.
inline unsigned atomicAdd(unsigned* global, unsigned value,
                          microsdpa::emulator::Place place = microsdpa::emulator::Place::here()) {
  return microsdpa::emulator::atomic_add(global, value, place);
}
inline void __threadfence() { microsdpa::emulator::thread_fence(); }

// Position of the lowest bit that is set, from 1; 0 for none.
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

// Rounded to 24 bits before anything is added to it.
inline float __fmul_rn(float x, float y) { return static_cast<float>(static_cast<double>(x) * y); }
inline float __uint_as_float(unsigned x) { return microsdpa::emulator::bit_cast<float>(x); }
inline float __int_as_float(int x) { return microsdpa::emulator::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return microsdpa::emulator::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return microsdpa::emulator::bit_cast<int>(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

#define exp2f(x) (::microsdpa::emulator::counted_exp2f(x))
