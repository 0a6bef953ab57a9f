// Copies K to O, which have one shape, a box of ROWS rows by a CTA: in by one tensor map, out by another. The LSE gets
// each CTA's rank in its cluster.
#include "../common/params.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"

namespace test {

using namespace microsdpa;

template <int DIM, int ROWS>
__global__ void copy_keys(const __grid_constant__ AttentionParams params, const __grid_constant__ TensorMap key,
                          const __grid_constant__ TensorMap out) {
  __shared__ alignas(1024) unsigned short box[ROWS * DIM];
  __shared__ Mbarrier loaded;
  if (threadIdx.x == 0) {
    const int tiles = (params.seqlen_k + ROWS - 1) / ROWS;
    const int row = static_cast<int>(blockIdx.x) % tiles * ROWS, head = static_cast<int>(blockIdx.x) / tiles;
    mbarrier_init(loaded, 1);
    mbarrier_init_fence();
    grid_dependency_wait();
    mbarrier_arrive_expect(loaded, sizeof(box));
    tma_load(box, key, loaded, 0, row, head % params.heads_kv, head / params.heads_kv);
    mbarrier_wait(loaded, 0);
    tma_store(out, box, 0, row, head % params.heads, head / params.heads);
    tma_store_commit();
    tma_store_wait_read<0>();
    if (params.lse) params.lse[blockIdx.x] = static_cast<float>(cluster_rank());
  }
}

}  // namespace test
