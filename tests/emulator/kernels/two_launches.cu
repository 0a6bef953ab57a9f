// A kernel of two launches that share scratch memory: the first doubles Q into the workspace, the second copies the
// workspace to the output. ROWS of the first launch are written.
#include "../common/element.cuh"
#include "../common/params.cuh"

namespace test {

using namespace microsdpa;

template <bool SECOND, int DIM, int ROWS>
__global__ void two_launches(const __grid_constant__ AttentionParams params) {
  const int row = blockIdx.x;
  float* scratch = static_cast<float*>(params.workspace) + row * DIM;
  for (int d = threadIdx.x; d < DIM; d += blockDim.x) {
    if (SECOND) {
      static_cast<__half*>(params.out)[row * DIM + d] = from_float<__half>(scratch[d]);
    } else if (row < ROWS) {
      scratch[d] = 2 * to_float(static_cast<const __half*>(params.query)[row * DIM + d]);
    }
  }
}

}  // namespace test
