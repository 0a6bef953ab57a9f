// The last columns of tiles, of which bulk copies bring the others: threads of hopper/latency/kernel.cu copy them.
//
// A bulk copy takes as long for a panel of few columns as for a whole one: columns beyond the tensor's last one, which
// become zeros, cost what others do.
#pragma once

#include "../../ptx/cp_async.cuh"
#include "consumer.cuh"

namespace microsdpa::hopper::latency {

// Copies the last columns of the query tile and of all the CTA's keys and values, those that the tensors lack as zeros,
// and waits for them. All warps but the one that issues the bulk copies, ahead of the block's barrier.
template <typename C>
__device__ __forceinline__ void Consumer<C>::copy_tails() {
  using Tails = typename Base::Shared::Tails;
  constexpr int COPYING = THREADS - 32, CHUNKS = Tails::CHUNKS, ROWS = COPYING / CHUNKS;  // at a time
  constexpr int KEYS = Tails::KEYS;
  static_assert(BLOCK_M + KEYS % ROWS <= ROWS, "the last keys leave threads for all queries");
  const int own = static_cast<int>(threadIdx.x) - 32, own_row = own / CHUNKS, chunk = own % CHUNKS;
  const bool exists = FIRST_OF_TAIL + Tails::CHUNK * chunk < C::COLUMNS;
  const int column = FIRST_OF_TAIL + (exists ? Tails::CHUNK * chunk : 0), first_key = work.first_key(0, 0);
  const T* const keys = static_cast<const T*>(params.key) + work.batch * params.key_strides.batch +
                        work.head_kv * params.key_strides.head + column;
  const T* const values = static_cast<const T*>(params.value) + work.batch * params.value_strides.batch +
                          work.head_kv * params.value_strides.head + column;
  const int query = own_row - (ROWS - BLOCK_M), place = work.first_row + query;
  const T* const queries = static_cast<const T*>(params.query) + work.batch * params.query_strides.batch +
                           work.head * params.query_strides.head + column;
  grid_dependency_wait();
#pragma unroll
  for (int first = 0; first < KEYS; first += ROWS) {
    const int row = first + own_row;
    if (row < KEYS) {
      const int64 key = min(first_key + row, params.seqlen_k - 1);
      const int bytes = exists && first_key + row < params.seqlen_k ? 16 : 0;
      cp_async<16>(shared.key_tail[chunk].row[row], keys + key * params.key_strides.row, bytes);
      cp_async<16>(shared.value_tail[chunk].row[row], values + key * params.value_strides.row, bytes);
    }
  }
  if (query >= 0) {
    const int64 row = min(place, params.seqlen_q - 1);
    cp_async<16>(shared.query_tail[chunk].row[query], queries + row * params.query_strides.row,
                 exists && place < params.seqlen_q ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();
}

}  // namespace microsdpa::hopper::latency
