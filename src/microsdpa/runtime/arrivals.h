// Counters in device memory that are zero between launches: kernels whose CTAs wait for one another's parts count
// arrivals in them, and others the query tiles that CTAs have taken. The last one to count sets them back.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "framework.h"

namespace microsdpa {

// Launches that may run at the same time must not share counters. Those of one stream do not: a stream has counters of
// its own. A captured launch may run on any stream later, beside any other: it has counters of its own, for ever.
class Arrivals {
 public:
  static constexpr int COUNTERS = 1024;

  // The device address of that many counters, COUNTERS at most, for a launch on `stream`; the context is current.
  std::uintptr_t of(CUcontext context, CUstream stream, int counters = COUNTERS) {
    const bool captured = is_captured(stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (captured) return take(context, counters);
    std::uintptr_t& of_stream = of_stream_[{context, stream}];
    if (!of_stream) of_stream = take(context, COUNTERS);
    return of_stream;
  }

 private:
  struct Block {
    std::uintptr_t next = 0, end = 0;
  };
  static constexpr std::size_t BLOCK_BYTES = std::size_t(1) << 20, LINE_BYTES = 128;

  // Whole cache lines: launches that run at the same time do not wait for one another's.
  std::uintptr_t take(CUcontext context, int counters) {
    const std::size_t bytes = (counters * sizeof(uint32) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    Block& block = blocks_[context];
    if (block.end - block.next < bytes) block = allocate_zeros();
    const std::uintptr_t found = block.next;
    block.next += bytes;
    return found;
  }

  // On a stream of its own, so that a capture on another one is not disturbed.
  static Block allocate_zeros() {
    const Driver& d = driver();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    d.check(d.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    CUdeviceptr memory = 0;
    CUstream stream;
    CUresult result = d.memory_allocate(&memory, BLOCK_BYTES);
    if (result == CUDA_SUCCESS) result = d.stream_create(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS) result = d.memory_set(memory, 0, BLOCK_BYTES, stream);
    if (result == CUDA_SUCCESS) result = d.stream_synchronize(stream);
    d.check(d.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    d.check(result, "allocating counters");
    return {static_cast<std::uintptr_t>(memory), static_cast<std::uintptr_t>(memory) + BLOCK_BYTES};
  }

  std::mutex mutex_;
  std::map<std::pair<CUcontext, CUstream>, std::uintptr_t> of_stream_;
  std::map<CUcontext, Block> blocks_;
};

inline Arrivals& arrivals() {
  static Arrivals counters;
  return counters;
}

}  // namespace microsdpa
