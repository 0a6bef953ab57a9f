// Probe of wmma: D = A B + C for one 16x16x16 product a warp, from global memory and back.
#include <mma.h>

#include "../common/element.cuh"
#include "../prelude.cuh"

namespace microsdpa {

struct ProbeParams {
  const uint32* input;  // a warp: A and B, 128 words each, and C, 256 words
  uint32* out;          // a warp: D, 256 words
};

// LAYOUT is that of A; B has the other one, so that both are tried.
template <int IN, int OUT, typename T, typename LAYOUT, typename OTHER>
__global__ void probe_wmma(const __grid_constant__ ProbeParams params) {
  namespace wmma = nvcuda::wmma;
  const uint32* in = params.input + blockIdx.x * 32 * IN;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LAYOUT> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, T, OTHER> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c, d;
  wmma::load_matrix_sync(a, reinterpret_cast<const T*>(in), 16);
  wmma::load_matrix_sync(b, reinterpret_cast<const T*>(in + 128), 16);
  wmma::load_matrix_sync(c, reinterpret_cast<const float*>(in + 256), 16, wmma::mem_col_major);
  wmma::mma_sync(d, a, b, c);
  for (int i = 0; i < d.num_elements; ++i) d.x[i] *= 0.5f;
  wmma::store_matrix_sync(reinterpret_cast<float*>(params.out + blockIdx.x * 32 * OUT), d, 16, wmma::mem_row_major);
}

}  // namespace microsdpa
