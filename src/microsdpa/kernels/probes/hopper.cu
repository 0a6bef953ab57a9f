// Probes of sm_90: bulk copies, mbarriers, clusters, and what warps are given.
#include "../ptx/address.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cluster_load.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/prefetch.cuh"
#include "../ptx/proxy.cuh"
#include "../ptx/tma.cuh"
#include "probe.cuh"

namespace microsdpa {

constexpr int BOX_ROWS = 64;  // of 128 bytes at most

struct Box {
  alignas(1024) uint32 words[BOX_ROWS * 32];
  Mbarrier arrived;
};

__device__ __forceinline__ void set_up(Mbarrier& barrier, int arrivals) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Loads the box at (COLUMN, ROW) of head blockIdx.x, which may reach past the tensor, and writes the tile as it lies. A
// box of several heads begins at head ROW of row blockIdx.x.
template <int IN, int OUT, int COLUMN, int ROW, int BYTES>
__global__ void probe_tma_load(const __grid_constant__ ProbeParams params, const __grid_constant__ TensorMap map) {
  Box& box = dynamic_shared<Box>();
  set_up(box.arrived, 1);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(map);
    mbarrier_arrive_expect(box.arrived, BYTES);
    tma_load(box.words, map, box.arrived, COLUMN, ROW, blockIdx.x, 0);
  }
  mbarrier_wait(box.arrived, 0);
  for (int i = 0; i < OUT; ++i) {
    const int at = threadIdx.x * OUT + i;
    output_of<OUT>(params)[i] = at < BYTES / 4 ? box.words[at] : 0;
  }
}

// Stores what the threads read as a tile, in order with what they have written; rows and columns past the tensor are
// dropped.
template <int IN, int OUT, int COLUMN, int ROW, int BYTES>
__global__ void probe_tma_store(const __grid_constant__ ProbeParams params, const __grid_constant__ TensorMap map) {
  Box& box = dynamic_shared<Box>();
  for (int i = 0; i < IN; ++i) {
    const int at = threadIdx.x * IN + i;
    if (at < BYTES / 4) box.words[at] = input_of<IN>(params)[i];
  }
  fence_proxy_async();
  fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(map, box.words, COLUMN, ROW, blockIdx.x, 0);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

struct Lines {
  alignas(128) uint32 words[32][4];
  Mbarrier arrived;
};

// Loads the block's words as they are, and adds each thread's four floats to those that it has written. The fifth word
// is a turn, which ends twice.
template <int IN, int OUT>
__global__ void probe_bulk(const __grid_constant__ ProbeParams params) {
  Lines& lines = dynamic_shared<Lines>();
  const uint32* in = input_of<IN>(params);
  uint32* out = output_of<OUT>(params);
  auto* number = reinterpret_cast<int32*>(out + 4);
  set_up(lines.arrived, 1);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(lines.arrived, sizeof(lines.words));
    bulk_load(lines.words, in, sizeof(lines.words), lines.arrived);
  }
  mbarrier_wait(lines.arrived, 0);
  for (int i = 0; i < OUT; ++i) out[i] = i < 4 ? in[i] : 0;
  fence_proxy_async_global();
  end_turn(number, 1);
  bulk_reduce_add(reinterpret_cast<float*>(out), reinterpret_cast<const float*>(lines.words[threadIdx.x]), 16);
  tma_store_commit();
  tma_store_wait();
  wait_for_turn(number, 1);
  end_turn(number, 2);
}

// Each CTA of a pair loads half of the tile, for both.
template <int IN, int OUT, int BYTES>
__global__ void probe_tma_multicast(const __grid_constant__ ProbeParams params, const __grid_constant__ TensorMap map) {
  Box& box = dynamic_shared<Box>();
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(box.arrived, 1);
    mbarrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(box.arrived, BYTES);
    tma_load_multicast(box.words + rank * BYTES / 8, map, box.arrived, 0, rank * BOX_ROWS / 2, blockIdx.x / 2, 0, 3);
  }
  mbarrier_wait(box.arrived, 0);
  for (int i = 0; i < OUT; ++i) output_of<OUT>(params)[i] = box.words[threadIdx.x * OUT + i];
  cluster_arrive<false>();
  cluster_wait();
}

struct Exchange {
  alignas(128) float stored[32];
  alignas(128) float pairs[64];
  alignas(128) float quads[128];
  alignas(128) float copied[32];
  alignas(128) float source[32];
  Mbarrier bytes, signal;
};

// Every way from one CTA of a pair to the other: stores, loads, asynchronous stores, a bulk copy, an arrival.
template <int IN, int OUT>
__global__ void probe_cluster(const __grid_constant__ ProbeParams params) {
  Exchange& shared = dynamic_shared<Exchange>();
  const int rank = cluster_rank(), peer = 1 - rank, t = threadIdx.x;
  if (t == 0) {
    mbarrier_init(shared.bytes, 1);
    mbarrier_init(shared.signal, 32);
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared.bytes, 32 * (8 + 16 + 4));
  }
  const float x = __uint_as_float(input_of<IN>(params)[0]), y = __uint_as_float(input_of<IN>(params)[1]);
  shared.source[t] = x;
  fence_proxy_async();
  cluster_arrive();
  cluster_wait();
  store_async(peer_address(&shared.pairs[2 * t], peer), x, y, peer_address(&shared.bytes, peer));
  store_async(peer_address(&shared.quads[4 * t], peer), x, y, y, x, peer_address(&shared.bytes, peer));
  if (t == 0) {
    bulk_copy_to_peer(peer_address(shared.copied, peer), shared.source, 128, peer_address(&shared.bytes, peer));
  }
  store_peer(peer_address(shared.stored, peer) + 4 * t, y);
  mbarrier_arrive_peer(peer_address(&shared.signal, peer));
  const float loaded = load_peer(peer_address(&shared.source[t], peer));
  const float4 four = load_peer4(peer_address(&shared.source[t / 4 * 4], peer));
  mbarrier_wait_cluster(shared.signal, 0);
  mbarrier_wait_cluster(shared.bytes, 0);
  uint32* out = output_of<OUT>(params);
  const float received[] = {shared.stored[t],
                            shared.pairs[2 * t],
                            shared.pairs[2 * t + 1],
                            shared.quads[4 * t],
                            shared.quads[4 * t + 1],
                            shared.quads[4 * t + 2],
                            shared.quads[4 * t + 3],
                            shared.copied[t],
                            loaded,
                            four.x,
                            four.y,
                            four.z,
                            four.w};
  for (int i = 0; i < 13; ++i) out[i] = __float_as_uint(received[i]);
  out[13] = rank;
  cluster_arrive();
  cluster_wait();
}

struct PingPong {
  uint32 word[32];
  Mbarrier full, empty;
};

// Two warps pass words through one buffer, four times: phases and their parity. ASLEEP: both wait so.
template <int IN, int OUT, bool ASLEEP>
__global__ void probe_mbarrier(const __grid_constant__ ProbeParams params) {
  PingPong& shared = dynamic_shared<PingPong>();
  if (threadIdx.x == 0) {
    mbarrier_init(shared.full, 32);
    mbarrier_init(shared.empty, 32);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  uint32* out = output_of<OUT>(params);
  for (int i = 0; i < OUT; ++i) {
    if (threadIdx.x < 32) {
      if (i > 0 && ASLEEP) mbarrier_wait_asleep(shared.empty, (i - 1) & 1);
      if (i > 0 && !ASLEEP) mbarrier_wait(shared.empty, (i - 1) & 1);
      shared.word[lane] = input_of<IN>(params)[0] + i;
      mbarrier_arrive(shared.full);
      out[i] = i;
    } else {
      if (ASLEEP) mbarrier_wait_asleep(shared.full, i & 1);
      while (!ASLEEP && !mbarrier_test(shared.full, i & 1)) {
      }
      out[i] = shared.word[31 - lane];
      mbarrier_arrive(shared.empty);
    }
  }
}

template <int IN, int OUT>
__global__ void __launch_bounds__(256, 1) probe_warp_role(const __grid_constant__ ProbeParams params) {
  const uint32 elected = __ballot_sync(0xffffffffu, elect_one());
  const uint32 again = __ballot_sync(0xffffffffu, elect_one());
  if (threadIdx.x < 128) {
    setmaxnreg_dec<64>();
  } else {
    setmaxnreg_inc<240>();
  }
  fetch_address(params.input);
  prefetch_line(input_of<IN>(params));
  grid_dependency_wait();
  uint32* out = output_of<OUT>(params);
  out[0] = input_of<IN>(params)[0];
  out[1] = elected == again && (elected & (elected - 1)) == 0 && elected != 0;
  grid_dependency_launch();
}

template <int IN, int OUT>
__global__ void probe_stmatrix(const __grid_constant__ ProbeParams params) {
  struct Matrices {
    alignas(16) unsigned short rows[32][8];
  };
  Matrices& shared = dynamic_shared<Matrices>();
  uint32 fragment[4];
  for (int i = 0; i < 4; ++i) fragment[i] = input_of<IN>(params)[i];
  stmatrix(shared.rows[threadIdx.x ^ 5], fragment);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    output_of<OUT>(params)[i] =
        shared.rows[threadIdx.x][2 * i] | static_cast<uint32>(shared.rows[threadIdx.x][2 * i + 1]) << 16;
  }
}

}  // namespace microsdpa
