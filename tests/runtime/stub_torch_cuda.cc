// Stands for libtorch_cuda.so where torch is built without CUDA: what torch_shim.h looks for there.
#include <cstdint>

extern "C" std::int32_t aoti_torch_get_current_cuda_stream(std::int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
