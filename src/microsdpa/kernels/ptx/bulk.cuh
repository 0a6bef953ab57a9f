// Bulk copies of plain bytes, bulk reductions, and turns that CTAs take to add (PTX ISA, "cp.async.bulk",
// "cp.reduce.async.bulk", sm_90). One thread issues them for the block.
#pragma once

#include "address.cuh"
#include "mbarrier.cuh"

namespace microsdpa {

// Copies `bytes`, a multiple of 16, from global to shared memory, both on 16 bytes; they count towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Adds `bytes` of floats, a multiple of 16, in shared memory to those in global memory, both on 16 bytes: one float
// after the other, whoever else adds to it, in an order that is nobody's. It is one of the thread's stores.
__device__ __forceinline__ void bulk_reduce_add(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Waits until all of this thread's stores are there, for whoever learns of it.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Turns that CTAs take, by a number in global memory (PTX ISA, "ld.acquire" and "st.release", sm_70).

// Waits until the number is `turn`. The CTA that sets it must have started: those of lower numbers have.
__device__ __forceinline__ void wait_for_turn(const int32* number, int32 turn) {
  int32 found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(number) : "memory");
  } while (found != turn);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Sets the number: what this thread did, and bulk stores that it has waited for, come before what the next one does.
__device__ __forceinline__ void end_turn(int32* number, int32 next) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(number), "r"(next) : "memory");
}

}  // namespace microsdpa
