// Programmatic dependent launch (PTX ISA, "griddepcontrol", sm_90).
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Waits until the grids that this one depends on have ended and their writes are visible. Before it a kernel that is
// launched programmatically may read nothing but its parameters and may write no global memory.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the grids that depend on this one begin, once every CTA has called it or ended.
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace microsdpa
