// An empty kernel: what a launch costs by itself, measured beside the kernels that do something.
#include "../prelude.cuh"

namespace microsdpa {

template <int UNUSED>
__global__ void probe_empty() {}

}  // namespace microsdpa
