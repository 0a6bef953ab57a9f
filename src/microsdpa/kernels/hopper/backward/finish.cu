// dQ in the inputs' type, of the FP32 sums that hopper/backward/kernel.cu leaves.
//
// A CTA has a tile of queries. A part of the sums lies as a warpgroup's accumulators lie in its registers. It has 64
// queries and 64 columns, [column / 8][thread][4]: a thread here makes eight columns of two queries. In tiles of 80
// queries it has all of them and 64 columns, transposed, [query / 8][thread][4]: a thread makes 16 columns of two.
// Bound by: memory; the sums are read once, and dQ written.
#include "../../common/element.cuh"
#include "../../common/mma_tile.cuh"
#include "../../ptx/control.cuh"
#include "shared.cuh"

namespace microsdpa::hopper::backward {

// Eight columns of a query.
template <typename T>
__device__ __forceinline__ void write(const BackwardParams& params, T* grad_query, int64 query, int column, int columns,
                                      const uint32 (&word)[4]) {
  if (query < params.forward.call.seqlen_q && column < columns) {
    *reinterpret_cast<uint4*>(grad_query + query * params.grad_query_strides.row + column) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int THREADS>
__global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ BackwardParams params) {
  constexpr float LN_2 = 0.693147180559945309417f;
  constexpr int PARTS = PARTS_OF<HEAD_DIM>, PART = PANEL_COLUMNS<HEAD_DIM> * BLOCK_M / PARTS;
  const AttentionParams& call = params.forward.call;
  grid_dependency_wait();
  grid_dependency_launch();
  const Workspace<BLOCK_M, PARTS, PART> workspace(call);
  const int index = blockIdx.x / workspace.tiles, tile = blockIdx.x % workspace.tiles;  // the head of all, and its tile
  const int64 batch = index / call.heads, head = index % call.heads, first_query = tile * BLOCK_M;
  T* const grad_query = static_cast<T*>(params.grad_query) + batch * params.grad_query_strides.batch +
                        head * params.grad_query_strides.head;
  const float factor = call.scale_log2 * LN_2;
  const auto* sums = reinterpret_cast<const float4*>(workspace.sum(index, tile));
  if constexpr (BLOCK_M % BOX != 0) {  // parts of all queries and 64 columns, transposed
    for (int i = threadIdx.x; i < PARTS * PART / 32; i += THREADS) {
      const int pair = i % 4, sixteen = i / 4 % 4, part = i / 16 % PARTS, eight = i / (16 * PARTS);
      const float4* from = sums + part * PART / 4 + eight * WARPGROUP_THREADS + 32 * sixteen + pair;
      float sum[2][16];  // of two queries, 16 columns
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float4 found = from[4 * column];
        sum[0][column] = found.x, sum[1][column] = found.y;
        sum[0][8 + column] = found.z, sum[1][8 + column] = found.w;
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32 word[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* const two = &sum[row][8 * half + 2 * e];
            word[e] = pack<T>(two[0] * factor, two[1] * factor);
          }
          write(params, grad_query, first_query + 8 * eight + 2 * pair + row, BOX * part + 16 * sixteen + 8 * half,
                HEAD_DIM, word);
        }
      }
    }
  } else {
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
        write(params, grad_query, first_query + row + 8 * half, column, HEAD_DIM, word[half]);
      }
    }
  }
}

}  // namespace microsdpa::hopper::backward
