// The last columns of tiles, of which bulk copies bring the others: threads of hopper/latency/kernel.cu copy them.
//
// A bulk copy takes as long for a panel of 16 columns as for one of 64, and zeros beyond the tensor's last column cost
// what bytes do. Chunks of eight columns lie as wgmma has them without a swizzle.
#pragma once

#include "../../ptx/cp_async.cuh"
#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Keeps the compiler from working an address out later.
template <typename T>
__device__ __forceinline__ const T* hold(const T* address) {
  const auto bits = reinterpret_cast<uint64>(address);
  uint32 words[2] = {static_cast<uint32>(bits), static_cast<uint32>(bits >> 32)};
  wgmma_fence_registers(words);
  return reinterpret_cast<const T*>(static_cast<uint64>(words[1]) << 32 | words[0]);
}

// Starts to copy the last columns of this warpgroup's keys and values, and to read those of Q. The warp that issues
// the bulk copies has no time for it. Addresses are worked out while the kernel ahead runs.
template <typename C>
__device__ __forceinline__ void Consumer<C>::copy_tails() {
  constexpr int CHUNKS = TAIL_COLUMNS / 8;
  const int copying = warpgroup == 0 ? WARPGROUP_THREADS - 32 : WARPGROUP_THREADS;
  const int own = fragment.thread - (WARPGROUP_THREADS - copying);
  const int row = own / CHUNKS, chunk = own % CHUNKS, rows = copying / CHUNKS;
  const bool exists = own >= 0 && FIRST_OF_TAIL + 8 * chunk < C::COLUMNS;
  const int column = FIRST_OF_TAIL + (exists ? 8 * chunk : 0);
  const T* keys = static_cast<const T*>(params.key) + work.batch * params.key_strides.batch +
                  work.head_kv * params.key_strides.head + column;
  const T* values = static_cast<const T*>(params.value) + work.batch * params.value_strides.batch +
                    work.head_kv * params.value_strides.head + column;
  const T* from[ROUNDS][2][2];
  int bytes[ROUNDS][2];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int key = work.first_key(round, warpgroup) + row + turn * rows;
      bytes[round][turn] = exists && key < params.seqlen_k ? 16 : 0;
      const int64 place = bytes[round][turn] ? key : 0;
      from[round][turn][0] = hold(keys + place * params.key_strides.row);
      from[round][turn][1] = hold(values + place * params.value_strides.row);
    }
  }
  find_query_tail();
  grid_dependency_wait();
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int at = row + turn * rows;
      if (own >= 0 && at < BLOCK_N) {
        cp_async<16>(shared.key_tail[round][warpgroup][chunk][at], from[round][turn][0], bytes[round][turn]);
        cp_async<16>(shared.value_tail[round][warpgroup][chunk][at], from[round][turn][1], bytes[round][turn]);
      }
    }
  }
  cp_async_commit();
  load_query_tail();
}
// Where the last columns of Q are that this thread multiplies, and their loads; those that the tensor lacks are zeros.
template <typename C>
__device__ __forceinline__ void Consumer<C>::find_query_tail() {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(work.first_row + fragment.tile_row(half), params.seqlen_q - 1);
    query_tail[half] = hold(static_cast<const T*>(params.query) + work.batch * params.query_strides.batch +
                            work.head * params.query_strides.head + row * params.query_strides.row + FIRST_OF_TAIL +
                            2 * fragment.quad_lane());
  }
}
template <typename C>
__device__ __forceinline__ void Consumer<C>::load_query_tail() {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool exists = FIRST_OF_TAIL + i / 2 * 8 < C::COLUMNS;
    query[QUERY_STEPS - 1][i] = exists ? *reinterpret_cast<const uint32*>(query_tail[i % 2] + i / 2 * 8) : 0;
  }
}
// Waits for them.
template <typename C>
__device__ __forceinline__ void Consumer<C>::await_tails() const {
  cp_async_wait<0>();
  fence_proxy_async();
  named_barrier_sync(TAILS_READ_BY_FIRST + warpgroup, WARPGROUP_THREADS);
}

}  // namespace microsdpa::hopper::latency
