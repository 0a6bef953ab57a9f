// Probes of wgmma: 64 x K times K x N by one warpgroup, K 32 bytes deep, for every layout of the tiles.
//
// A thread reads 4 words of A [64][32 bytes], N / 16 of B [N][32 bytes] and N / 2 accumulators, and writes N / 2. The
// probes of widths do so for every N, with the first rows of a B of 256.
#include "../ptx/address.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "probe.cuh"

namespace microsdpa {

__device__ constexpr int bytes_of(Swizzle swizzle) {
  return swizzle == Swizzle::BYTES_128  ? 128
         : swizzle == Swizzle::BYTES_64 ? 64
         : swizzle == Swizzle::BYTES_32 ? 32
                                        : 16;
}

// Where a tile keeps byte `byte` (of 32) of row `row`, its second K step in use when a pattern has room for two. The
// distances are those that the descriptor says.
template <Swizzle SWIZZLE, Major MAJOR>
struct Layout {
  static constexpr int PATTERN = bytes_of(SWIZZLE);
  static constexpr bool SWIZZLED = SWIZZLE != Swizzle::NONE;
  static constexpr int ADVANCE = MAJOR == Major::K && PATTERN > 32 ? 32 : 0;
  // Between groups of eight rows, of M or N or of K.
  static constexpr int STRIDE = SWIZZLED ? 8 * PATTERN : 256;
  static constexpr int LEADING = MAJOR == Major::MN && SWIZZLED ? 16 * PATTERN : 128;

  static __device__ __forceinline__ int offset(int row, int byte) {
    int at;
    if constexpr (MAJOR == Major::K) {
      at = SWIZZLED ? row / 8 * STRIDE + row % 8 * PATTERN + ADVANCE + byte
                    : row / 8 * STRIDE + row % 8 * 16 + byte / 16 * LEADING + byte % 16;
    } else {
      const int k = byte / 2, mn = 2 * row;  // 16-bit elements
      at = SWIZZLED ? mn / PATTERN * LEADING + k / 8 * STRIDE + k % 8 * PATTERN + mn % PATTERN
                    : mn / 16 * STRIDE + k / 8 * LEADING + k % 8 * 16 + mn % 16;
    }
    if constexpr (SWIZZLED) at ^= (at >> 7 & (PATTERN / 16 - 1)) << 4;
    return at;
  }

  static __device__ __forceinline__ uint64 descriptor(const unsigned char* tile) {
    return advance(matrix_descriptor(tile, LEADING, STRIDE, SWIZZLE), ADVANCE);
  }
};

template <int N>
struct WgmmaTiles {
  alignas(1024) unsigned char a[64 * 128];
  alignas(1024) unsigned char b[N * 128];
};

// Writes a tile of `rows` rows of 32 bytes, two bytes at a time.
template <typename LAYOUT>
__device__ __forceinline__ void write_tile(unsigned char* tile, const uint32* words, int count, int thread) {
  for (int i = 0; i < count; ++i) {
    for (int half = 0; half < 2; ++half) {
      const int at = (thread * count + i) * 4 + 2 * half;
      *reinterpret_cast<unsigned short*>(tile + LAYOUT::offset(at / 32, at % 32)) =
          static_cast<unsigned short>(words[i] >> 16 * half);
    }
  }
}

template <typename Sum>
__device__ __forceinline__ Sum sum_of(uint32 bits);
template <>
__device__ __forceinline__ float sum_of<float>(uint32 bits) {
  return __uint_as_float(bits);
}
template <>
__device__ __forceinline__ int32 sum_of<int32>(uint32 bits) {
  return static_cast<int32>(bits);
}
__device__ __forceinline__ uint32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32 bits_of(int32 x) { return static_cast<uint32>(x); }

enum class Start { ADDED, ZERO };

// D = A B + D, or A B, with the first N rows of B, from the accumulators at `in` to `out`.
template <typename T, typename Sum, int N, typename LayoutA, typename LayoutB, Major A_MAJOR, Major B_MAJOR,
          bool A_IN_REGISTERS, typename Tiles>
__device__ __forceinline__ void multiply(const Tiles& tiles, const uint32* in, uint32* out,
                                         Start start = Start::ADDED) {
  const int thread = threadIdx.x;
  Sum d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = sum_of<Sum>(in[i]);
  uint32 a[4];
  const int row = thread / 32 * 16 + thread % 32 / 4, byte = thread % 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + 8 * (i % 2), b = byte + 16 * (i / 2);
    uint32 low = *reinterpret_cast<const unsigned short*>(tiles.a + LayoutA::offset(r, b));
    uint32 high = *reinterpret_cast<const unsigned short*>(tiles.a + LayoutA::offset(r, b + 2));
    a[i] = low | high << 16;
  }
  wgmma_fence_registers(d);
  wgmma_fence();
  if constexpr (A_IN_REGISTERS) {
    wgmma<T, N, B_MAJOR>(d, a, LayoutB::descriptor(tiles.b), start == Start::ADDED);
  } else {
    wgmma<T, N, A_MAJOR, B_MAJOR>(d, LayoutA::descriptor(tiles.a), LayoutB::descriptor(tiles.b), start == Start::ADDED);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_registers(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[i] = bits_of(d[i]);
}

template <int IN, int OUT, typename T, typename Sum, int N, Swizzle SWIZZLE, Major A_MAJOR, Major B_MAJOR, Start START>
__global__ void __launch_bounds__(128, 1) probe_wgmma(const __grid_constant__ ProbeParams params) {
  using LayoutA = Layout<SWIZZLE, A_MAJOR>;
  using LayoutB = Layout<SWIZZLE, B_MAJOR>;
  auto& tiles = dynamic_shared<WgmmaTiles<N>>();
  const uint32* in = input_of<IN>(params);
  write_tile<LayoutA>(tiles.a, in, 4, threadIdx.x);
  write_tile<LayoutB>(tiles.b, in + 4, N / 16, threadIdx.x);
  fence_proxy_async();
  __syncthreads();
  multiply<T, Sum, N, LayoutA, LayoutB, A_MAJOR, B_MAJOR, false>(tiles, in + 4 + N / 16, output_of<OUT>(params), START);
}

// Widths: 16, 32, 48, 64, 80, 96, 112, 128, 160, 192 and 256, one after another.
template <int IN, int OUT, typename T, typename Sum, Major B_MAJOR, bool A_IN_REGISTERS>
__global__ void __launch_bounds__(128, 1) probe_wgmma_widths(const __grid_constant__ ProbeParams params) {
  using LayoutA = Layout<Swizzle::BYTES_128, Major::K>;
  using LayoutB = Layout<Swizzle::BYTES_128, B_MAJOR>;
  auto& tiles = dynamic_shared<WgmmaTiles<256>>();
  const uint32* in = input_of<IN>(params);
  write_tile<LayoutA>(tiles.a, in, 4, threadIdx.x);
  write_tile<LayoutB>(tiles.b, in + 4, 16, threadIdx.x);
  fence_proxy_async();
  __syncthreads();
  in += 20;
  uint32* out = output_of<OUT>(params);
  multiply<T, Sum, 16, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out);
  multiply<T, Sum, 32, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 8);
  multiply<T, Sum, 48, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 24);
  multiply<T, Sum, 64, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 48);
  multiply<T, Sum, 80, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 80);
  multiply<T, Sum, 96, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 120);
  multiply<T, Sum, 112, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 168);
  multiply<T, Sum, 128, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 224);
  multiply<T, Sum, 160, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 288);
  multiply<T, Sum, 192, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 368);
  multiply<T, Sum, 256, LayoutA, LayoutB, Major::K, B_MAJOR, A_IN_REGISTERS>(tiles, in, out + 464);
}

}  // namespace microsdpa
