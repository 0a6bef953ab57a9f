// Requests of global memory whose bytes nobody waits for.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Brings the line of an address into L2 (PTX ISA, "prefetch", sm_80). It reads nothing: what another grid writes there
// afterwards is seen. The request fills the tables of pages on its way, so that later loads of the page are shorter.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Has an address of a kernel's parameter in a register from here on: a parameter's first access takes long.
__device__ __forceinline__ void fetch_address(const void* address) { asm volatile("" ::"l"(address)); }

}  // namespace microsdpa
