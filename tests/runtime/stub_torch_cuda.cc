// Stands for libtorch_cuda.so where torch is built without CUDA: what torch_shim.h and scratch.h look for there.
#include <atomic>
#include <cstdint>
#include <cstdlib>

extern "C" {
int stub_raw_allocator = 0;  // whether torch's allocator has memory
std::atomic<int> stub_raw_allocations{0}, stub_raw_live{0};
void* stub_raw_last = nullptr;

std::int32_t aoti_torch_get_current_cuda_stream(std::int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

std::int32_t aoti_torch_get_current_device_index(std::int32_t* device) {
  *device = 0;
  return 0;
}

std::int32_t aoti_torch_cuda_caching_allocator_raw_alloc(std::uint64_t bytes, void** memory) {
  if (!stub_raw_allocator) return 1;
  ++stub_raw_allocations, ++stub_raw_live;
  *memory = stub_raw_last = std::malloc(bytes);
  return 0;
}

std::int32_t aoti_torch_cuda_caching_allocator_raw_delete(void* memory) {
  --stub_raw_live;
  std::free(memory);
  return 0;
}
}
