// Scratch memory of one call.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "framework.h"

namespace microsdpa {

// torch's allocator, without a tensor around its memory: half the time. Null functions where the process has no torch
// for CUDA, or one without them.
struct TorchAllocator {
  std::int32_t (*current_device)(std::int32_t*);
  std::int32_t (*allocate)(std::uint64_t, void**);
  std::int32_t (*give_back)(void*);

  static const TorchAllocator& get() {
    static const TorchAllocator allocator;
    return allocator;
  }

  // It allocates on the current device alone.
  bool serves(const DLDevice& device) const {
    std::int32_t current;
    return allocate && give_back && current_device && !current_device(&current) && current == device.device_id;
  }

 private:
  TorchAllocator() {
    void* cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    load(cuda, current_device, "aoti_torch_get_current_device_index");
    load(cuda, allocate, "aoti_torch_cuda_caching_allocator_raw_alloc");
    load(cuda, give_back, "aoti_torch_cuda_caching_allocator_raw_delete");
  }

  template <typename Function>
  static void load(void* library, Function& function, const char* name) {
    function = library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
  }
};

// Memory for the current stream of a tensor's device. It is given back at the end of the scope, when the kernels that
// use it are launched: whoever gets it next is behind them in the stream.
class Scratch {
 public:
  Scratch(std::int64_t bytes, const DLTensor& like) {
    const TorchAllocator& torch = TorchAllocator::get();
    if (torch.serves(like.device) && !torch.allocate(static_cast<std::uint64_t>(bytes), &raw_)) return;
    raw_ = nullptr;  // the framework's function says in words what is wrong
    tensor_ = allocate(&bytes, 1, DLDataType{kDLUInt, 8, 1}, like);
  }
  ~Scratch() {
    if (raw_) TorchAllocator::get().give_back(raw_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(raw_ ? raw_ : tensor_.value().data_ptr()); }

 private:
  void* raw_ = nullptr;
  Optional<ffi::Tensor> tensor_;
};

}  // namespace microsdpa
