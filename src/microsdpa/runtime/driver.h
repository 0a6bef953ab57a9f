// The CUDA driver API, loaded at run time: this library builds, and loads, on a machine without CUDA.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace microsdpa {

class Driver {
 public:
  // Null when the machine has no driver.
  static const Driver* get() {
    static const Driver driver;
    return driver.library_ ? &driver : nullptr;
  }

  // Throws with the driver's own words when `result` is an error.
  void check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return;
    const char* words = nullptr;
    error_string(result, &words);
    throw std::runtime_error(std::string(call) + " failed with error " + std::to_string(result) + ": " +
                             (words ? words : "unknown error") + cause(result));
  }

  decltype(&cuInit) init;
  decltype(&cuDriverGetVersion) driver_version;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&cuCtxGetCurrent) context_get;
  decltype(&cuCtxPushCurrent) context_push;
  decltype(&cuCtxPopCurrent) context_pop;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&cuModuleLoadData) module_load;
  decltype(&cuModuleGetFunction) module_function;
  decltype(&cuFuncSetAttribute) function_set_attribute;
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuStreamIsCapturing) stream_is_capturing;
  decltype(&cuStreamCreate) stream_create;
  decltype(&cuStreamSynchronize) stream_synchronize;
  decltype(&cuMemAlloc) memory_allocate;
  decltype(&cuMemsetD8Async) memory_set;
  decltype(&cuMemcpy2DAsync) memory_copy;
  decltype(&cuStreamWriteValue32) stream_write;
  decltype(&cuStreamWaitValue32) stream_wait;
  decltype(&cuEventRecord) event_record;
  decltype(&cuStreamWaitEvent) stream_wait_event;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode;
  decltype(&cuTensorMapReplaceAddress) tensor_map_replace_address;

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library_) return;
    load(init, "cuInit");
    load(driver_version, "cuDriverGetVersion");
    load(error_string, "cuGetErrorString");
    load(primary_context_retain, "cuDevicePrimaryCtxRetain");
    load(context_get, "cuCtxGetCurrent");
    load(context_push, "cuCtxPushCurrent_v2");
    load(context_pop, "cuCtxPopCurrent_v2");
    load(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    load(module_load, "cuModuleLoadData");
    load(module_function, "cuModuleGetFunction");
    load(function_set_attribute, "cuFuncSetAttribute");
    load(launch, "cuLaunchKernelEx");
    load(stream_is_capturing, "cuStreamIsCapturing");
    load(stream_create, "cuStreamCreate");
    load(stream_synchronize, "cuStreamSynchronize");
    load(memory_allocate, "cuMemAlloc_v2");
    load(memory_set, "cuMemsetD8Async");
    load(memory_copy, "cuMemcpy2DAsync_v2");
    load(stream_write, "cuStreamWriteValue32_v2");
    load(stream_wait, "cuStreamWaitValue32_v2");
    load(event_record, "cuEventRecord");
    load(stream_wait_event, "cuStreamWaitEvent");
    load(tensor_map_encode, "cuTensorMapEncodeTiled");
    load(tensor_map_replace_address, "cuTensorMapReplaceAddress");
    if (missing_ || init(0) != CUDA_SUCCESS) library_ = nullptr;
  }

  // What an error says of the process rather than of the call; empty for most.
  const char* cause(CUresult result) const {
    if (getpid() != process_) {
      return "; CUDA was used before this process was forked, and cannot be used in it: start processes with the "
             "method "
             "spawn or forkserver of multiprocessing";
    }
    switch (result) {
      case CUDA_ERROR_ILLEGAL_ADDRESS:
      case CUDA_ERROR_LAUNCH_TIMEOUT:
      case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      case CUDA_ERROR_ASSERT:
      case CUDA_ERROR_HARDWARE_STACK_ERROR:
      case CUDA_ERROR_ILLEGAL_INSTRUCTION:
      case CUDA_ERROR_MISALIGNED_ADDRESS:
      case CUDA_ERROR_INVALID_ADDRESS_SPACE:
      case CUDA_ERROR_INVALID_PC:
      case CUDA_ERROR_LAUNCH_FAILED:
        return "; a kernel before this call, of any library, has lost the CUDA context: start the process again, with "
               "CUDA_LAUNCH_BLOCKING=1 to see which";
      default:
        return "";
    }
  }

  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    missing_ = missing_ || !function;
  }

  const pid_t process_ = getpid();
  void* library_ = nullptr;
  bool missing_ = false;
};

// Makes `context` current for the life of the object; costs one query when it already is.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    driver.check(driver.context_get(&current), "cuCtxGetCurrent");
    pushed_ = current != context;
    if (pushed_) driver.check(driver.context_push(context), "cuCtxPushCurrent");
  }
  ~ScopedContext() {
    CUcontext popped;
    if (pushed_) driver_.context_pop(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace microsdpa
