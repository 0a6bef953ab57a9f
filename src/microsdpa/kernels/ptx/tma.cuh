// Bulk copies between global and shared memory, by the tensor memory accelerator (PTX ISA, "cp.async.bulk", sm_90).
//
// A tensor is [D, S, H, B], innermost first, or [D, H, S, B], of which a box has several heads: then `row` and `head`
// are the other way round. Coordinates count elements. One thread issues a copy for the block.
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

// Fetches the description before its first use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at (column, row, head, batch) to `shared`, 128-byte aligned (1024 when swizzled by 128 bytes). All
// bytes of the box count towards `barrier`, those outside the tensor, which become zeros, too.
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same to every CTA of the cluster whose bit is set in `ctas`, at the same place, each counting on its own barrier.
__device__ __forceinline__ void tma_load_multicast(void* shared, const TensorMap& map, Mbarrier& barrier, int column,
                                                   int row, int head, int batch, uint16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(ctas)
      : "memory");
}

// Copies the box from `shared`; elements outside the tensor are not written. The tile must have been written before a
// fence_proxy_async.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* shared, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Closes the group of this thread's stores since the last commit.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups still read shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Copies `bytes`, a multiple of 16, to another CTA's shared memory; they count towards `barrier` of that CTA.
__device__ __forceinline__ void bulk_copy_to_peer(ClusterAddress target, const void* shared, int bytes,
                                                  ClusterAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   target.value),
               "r"(shared_address(shared)), "r"(bytes), "r"(barrier.value)
               : "memory");
}

// Orders this thread's accesses to shared memory, and those that it knows of, with bulk copies and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace microsdpa
