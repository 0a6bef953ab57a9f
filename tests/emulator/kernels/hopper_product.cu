// O = (Q K^T) V by a pair of CTAs: what a Hopper kernel synchronizes, in as few lines as it takes.
//
// The CTAs take turns at the tiles of 64 keys. In each a producer warp copies tiles through a ring of two stages, and
// four consumer warps multiply: S = Q K^T, S as P through shared memory, O += P V. CTA 1 then sends its sum to CTA 0.
#include "../common/element.cuh"
#include "../ptx/address.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

namespace test {

using namespace microsdpa;

constexpr int TILE = 64;  // queries, keys and channels
constexpr int TILE_BYTES = TILE * TILE * 2;
constexpr int CONSUMERS = 128;

struct Params {
  float* out;  // [64, 64]
  int keys;
};

struct Shared {
  alignas(1024) __half query[TILE * TILE];
  alignas(1024) __half key[2][TILE * TILE];
  alignas(1024) __half value[2][TILE * TILE];
  alignas(1024) __half probability[TILE * TILE];
  alignas(16) float received[TILE * TILE];
  Mbarrier query_full, full[2], empty[2], received_full;
};

__device__ __forceinline__ void produce(Shared& shared, const TensorMap& query, const TensorMap& key,
                                        const TensorMap& value, int rank, int tiles) {
  if (!elect_one()) return;
  grid_dependency_wait();
  mbarrier_arrive_expect(shared.query_full, TILE_BYTES);
  tma_load(shared.query, query, shared.query_full, 0, 0, 0, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    if (tile >= 2) mbarrier_wait(shared.empty[stage], (tile / 2 - 1) & 1);
    mbarrier_arrive_expect(shared.full[stage], 2 * TILE_BYTES);
    tma_load(shared.key[stage], key, shared.full[stage], 0, (2 * tile + rank) * TILE, 0, 0);
    tma_load(shared.value[stage], value, shared.full[stage], 0, (2 * tile + rank) * TILE, 0, 0);
  }
}

// Element of a tile whose rows are 128 bytes, swizzled.
__device__ __forceinline__ int swizzled(int row, int column) { return row * TILE + (column ^ (row % 8 * 8)); }

__device__ __forceinline__ void consume(Shared& shared, float (&o)[TILE / 2], int tiles) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  mbarrier_wait(shared.query_full, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    mbarrier_wait(shared.full[stage], tile / 2 & 1);
    const uint64 query = matrix_descriptor(shared.query, 16, 1024, Swizzle::BYTES_128);
    const uint64 key = matrix_descriptor(shared.key[stage], 16, 1024, Swizzle::BYTES_128);
    float s[TILE / 2];
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
      wgmma<__half, TILE>(s, advance(query, 32 * step), advance(key, 32 * step), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();  // S is there
    wgmma_fence_registers(s);
    for (int i = 0; i < TILE / 2; ++i) {
      shared.probability[swizzled(row + 8 * (i / 2 % 2), i / 4 * 8 + column + i % 2)] = from_float<__half>(s[i]);
    }
    fence_proxy_async();
    named_barrier_sync(1, CONSUMERS);
    const uint64 probability = matrix_descriptor(shared.probability, 16, 1024, Swizzle::BYTES_128);
    const uint64 value = matrix_descriptor(shared.value[stage], 8192, 1024, Swizzle::BYTES_128);
    wgmma_fence_registers(o);
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
      wgmma<__half, TILE, Major::K, Major::MN>(o, advance(probability, 32 * step), advance(value, 2048 * step), true);
    }
    wgmma_commit();
    wgmma_wait<0>();  // O is there, and the stage has been read
    wgmma_fence_registers(o);
    mbarrier_arrive(shared.empty[stage]);
  }
}

template <int UNUSED>
__global__ void __launch_bounds__(CONSUMERS + 32, 1)
    product(const __grid_constant__ Params params, const __grid_constant__ TensorMap query,
            const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value) {
  Shared& shared = dynamic_shared<Shared>();
  const int rank = cluster_rank(), tiles = (params.keys + TILE - 1 - rank * TILE + TILE) / (2 * TILE);
  if (threadIdx.x == 0) {
    mbarrier_init(shared.query_full, 1);
    mbarrier_init(shared.received_full, 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(shared.full[stage], 1);
      mbarrier_init(shared.empty[stage], CONSUMERS);
    }
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared.received_full, rank == 0 ? TILE * TILE * 4 : 0);
  }
  __syncthreads();
  cluster_arrive<false>();
  float o[TILE / 2] = {};
  if (threadIdx.x >= CONSUMERS) {
    produce(shared, query, key, value, rank, tiles);
  } else {
    consume(shared, o, tiles);
  }
  cluster_wait();
  if (threadIdx.x >= CONSUMERS) return;
  if (rank == 1) {
    for (int i = 0; i < TILE / 2; i += 2) {
      const int at = (i / 2 * CONSUMERS + threadIdx.x) * 2;
      store_async(peer_address(shared.received + at, 0), o[i], o[i + 1], peer_address(&shared.received_full, 0));
    }
    return;
  }
  mbarrier_wait_cluster(shared.received_full, 0);
  for (int i = 0; i < TILE / 2; ++i) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * (i / 2 % 2);
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    params.out[row * TILE + column] = o[i] + shared.received[(i / 2 * CONSUMERS + threadIdx.x) * 2 + i % 2];
  }
}

}  // namespace test
