// Combines the parts that a split ampere/mma leaves in the workspace: O and, optionally, LSE.
//
// A CTA takes BLOCK_M rows of one head; a thread takes four columns of a row and adds up the parts in their order.
// Bound by: the launch, and reading 4 SPLIT bytes from L2 for each element of O.
#include "../../common/combine.cuh"
#include "../../common/mma_tile.cuh"
#include "../../common/online_softmax.cuh"
#include "../../ptx/control.cuh"

namespace microsdpa::ampere::combine {

template <typename T, int HEAD_DIM, int BLOCK_M, int SPLIT, bool PROGRAMMATIC>
__global__ void __launch_bounds__(BLOCK_M* HEAD_DIM / 4) combine(const __grid_constant__ AttentionParams params) {
  const int tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const int64 head = blockIdx.x / tiles;  // of batch * heads
  const int row = blockIdx.x % tiles * BLOCK_M + threadIdx.x / (HEAD_DIM / 4);
  const int column = threadIdx.x % (HEAD_DIM / 4) * 4;
  if (PROGRAMMATIC) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  if (row >= params.seqlen_q) return;
  const int64 flat = head * params.seqlen_q + row;
  const PartialOutputs<HEAD_DIM, SPLIT> partial(params);
  RowStats stats;
  const Values4 values = combine_parts<SPLIT>(
      stats, [&](int part) { return *partial.stats(part, flat); },
      [&](int part) { return *partial.values(part, flat, column); });
  const float inverse = normalizer(stats.sum);
  const Vector<uint32, 2> packed = {{pack<T>(values.data[0] * inverse, values.data[1] * inverse),
                                     pack<T>(values.data[2] * inverse, values.data[3] * inverse)}};
  const Strides& strides = params.out_strides;
  T* out = static_cast<T*>(params.out) + head / params.heads * strides.batch + head % params.heads * strides.head +
           row * strides.row + column;
  *reinterpret_cast<Vector<uint32, 2>*>(out) = packed;
  if (params.lse != nullptr && column == 0) params.lse[flat] = log_sum_exp(stats.stabilizer, stats.sum);
}

}  // namespace microsdpa::ampere::combine
