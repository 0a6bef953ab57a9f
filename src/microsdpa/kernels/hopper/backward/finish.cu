// dQ in the inputs' type, of the FP32 sums that hopper/backward/kernel.cu leaves.
//
// A CTA has a tile of queries. A part of the sums has 64 queries and 64 columns, as a warpgroup's accumulators lie in
// its registers: [column / 8][thread][4]. A thread has eight columns of two queries.
// Bound by: memory; the sums are read once, and dQ written.
#include "../../common/element.cuh"
#include "../../common/mma_tile.cuh"
#include "../../ptx/control.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

template <typename T, int HEAD_DIM, int BLOCK_M, int THREADS>
__global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ BackwardParams params) {
  constexpr float LN_2 = 0.693147180559945309417f;
  constexpr int PARTS = PANEL_COLUMNS<HEAD_DIM> / BOX * BLOCK_M / ROWS;
  const AttentionParams& call = params.forward.call;
  grid_dependency_wait();
  grid_dependency_launch();
  const Workspace<BLOCK_M, PARTS> workspace(call);
  const int index = blockIdx.x / workspace.tiles, tile = blockIdx.x % workspace.tiles;  // the head of all, and its tile
  const int64 batch = index / call.heads, head = index % call.heads;
  T* const grad_query = static_cast<T*>(params.grad_query) + batch * params.grad_query_strides.batch +
                        head * params.grad_query_strides.head;
  const float factor = call.scale_log2 * LN_2;
  const auto* sums = reinterpret_cast<const float4*>(workspace.sum(index, tile));
#pragma unroll
  for (int i = threadIdx.x; i < PARTS * PART / 16; i += THREADS) {
    const int part = i / (PART / 16), pair = i / 8 % 32, block = i % 8;
    const int row = pair / 8 * 16 + pair % 8 + (BLOCK_M > 64 ? part * 64 : 0);
    const int column = 8 * block + (BLOCK_M > 64 ? 0 : part * 64);
    if constexpr (HEAD_DIM % BOX != 0) {
      if (column >= HEAD_DIM) continue;
    }
    const float4* from = sums + part * PART / 4 + block * WARPGROUP_THREADS + 4 * pair;
    uint32 word[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float4 sum = from[e];
      word[0][e] = pack<T>(sum.x * factor, sum.y * factor);
      word[1][e] = pack<T>(sum.z * factor, sum.w * factor);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64 query = tile * BLOCK_M + row + 8 * half;
      if (query < call.seqlen_q && column < HEAD_DIM) {
        *reinterpret_cast<uint4*>(grad_query + query * params.grad_query_strides.row + column) =
            make_uint4(word[half][0], word[half][1], word[half][2], word[half][3]);
      }
    }
  }
}

}  // namespace microsdpa::hopper::backward
