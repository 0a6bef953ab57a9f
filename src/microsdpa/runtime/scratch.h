// Scratch memory of one call.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

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

// Small blocks of torch's allocator that no call uses now, by stream: a call waits less for them than for torch. It
// takes a block out, so calls of other threads get others; who takes it next is behind its kernels in the stream.
class KeptScratch {
 public:
  // What is larger belongs to calls that the GPU is long busy with. A stream keeps two blocks, for 16 streams at most.
  static constexpr std::int64_t LARGEST = std::int64_t(4) << 20;

  // Whether blocks of so many bytes are kept: none where torch is told to keep none, as for a sanitizer.
  static bool keeps(std::int64_t bytes) {
    static const bool any = !std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
    return any && bytes <= LARGEST;
  }

  static KeptScratch& get() {
    static auto* kept = new KeptScratch;  // torch's allocator may end before this library: nothing is given back then
    return *kept;
  }

  // Bytes of the block for so many.
  static std::int64_t rounded(std::int64_t bytes) {
    std::int64_t size = SMALLEST;
    while (size < bytes) size *= 2;
    return size;
  }

  // A block of so many bytes, which are rounded; null for none.
  void* take(CUcontext context, CUstream stream, std::int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto blocks = of_stream_.find({context, stream});
    if (blocks == of_stream_.end()) return nullptr;
    for (Block& block : blocks->second) {
      if (block.bytes == bytes) {
        block.bytes = 0;
        return block.memory;
      }
    }
    return nullptr;
  }

  // Keeps a block; gives the one that is kept no longer, or null.
  void* keep(CUcontext context, CUstream stream, std::int64_t bytes, void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto blocks = of_stream_.find({context, stream});
    if (blocks == of_stream_.end()) {
      if (of_stream_.size() >= MOST_STREAMS) return memory;
      blocks = of_stream_.emplace(std::make_pair(context, stream), Blocks{}).first;
    }
    for (Block& block : blocks->second) {
      if (!block.bytes) return block = {memory, bytes}, nullptr;
    }
    std::swap(blocks->second[0], blocks->second[1]);  // the one that was kept for longest goes
    std::swap(blocks->second[1].memory, memory);
    blocks->second[1].bytes = bytes;
    return memory;
  }

 private:
  struct Block {
    void* memory = nullptr;
    std::int64_t bytes = 0;  // 0 for a place without a block
  };
  struct Blocks {
    Block each[2];

    Block* begin() { return each; }
    Block* end() { return each + 2; }
    Block& operator[](int i) { return each[i]; }
  };
  static constexpr std::int64_t SMALLEST = std::int64_t(64) << 10;
  static constexpr std::size_t MOST_STREAMS = 16;

  std::mutex mutex_;
  std::map<std::pair<CUcontext, CUstream>, Blocks> of_stream_;
};

// Memory for the current stream of a tensor's device, whose context is current. It is given back at the end of the
// scope, when the kernels that use it are launched: whoever gets it next is behind them in the stream. A graph that is
// captured may run on any stream, and gets memory that nobody keeps.
class Scratch {
 public:
  Scratch(std::int64_t bytes, const DLTensor& like, CUcontext context, CUstream stream)
      : context_(context), stream_(stream) {
    const TorchAllocator& torch = TorchAllocator::get();
    if (KeptScratch::keeps(bytes) && !is_captured(stream)) {
      kept_bytes_ = KeptScratch::rounded(bytes);
      raw_ = KeptScratch::get().take(context, stream, kept_bytes_);
      if (raw_) return;
    }
    const std::int64_t wanted = kept_bytes_ ? kept_bytes_ : bytes;
    if (torch.serves(like.device) && !torch.allocate(static_cast<std::uint64_t>(wanted), &raw_)) return;
    raw_ = nullptr;  // the framework's function says in words what is wrong
    tensor_ = allocate(&bytes, 1, DLDataType{kDLUInt, 8, 1}, like);
  }
  ~Scratch() {
    void* unused = raw_ && kept_bytes_ ? KeptScratch::get().keep(context_, stream_, kept_bytes_, raw_) : raw_;
    if (unused) TorchAllocator::get().give_back(unused);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(raw_ ? raw_ : tensor_.value().data_ptr()); }

 private:
  CUcontext context_;
  CUstream stream_;
  std::int64_t kept_bytes_ = 0;  // of memory that is kept; 0 for other memory
  void* raw_ = nullptr;
  Optional<ffi::Tensor> tensor_;
};

}  // namespace microsdpa
