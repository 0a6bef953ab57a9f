// Probe of prmt, with a selector that names every byte once or more.
#include "../ptx/arithmetic.cuh"
#include "probe.cuh"

namespace microsdpa {

template <int IN, int OUT>
__global__ void probe_permute(const __grid_constant__ ProbeParams params) {
  const uint32* in = input_of<IN>(params);
  uint32* out = output_of<OUT>(params);
  out[0] = permute_bytes<0x6420>(in[0], in[1]);
  out[1] = permute_bytes<0x7531>(in[0], in[1]);
  out[2] = permute_bytes<0x0077>(in[0], in[1]);
}

}  // namespace microsdpa
