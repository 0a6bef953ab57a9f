// A libcuda.so.1 that launches nothing and remembers what it was asked: the launcher's hot path then runs anywhere.
#include <cuda.h>
#include <dlpack/dlpack.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "../../src/microsdpa/cuda/core/params.cuh"

namespace {
thread_local std::vector<CUcontext> contexts;
std::mutex record_mutex;
using Lock = std::lock_guard<std::mutex>;
std::uintptr_t as_number(void* p) { return reinterpret_cast<std::uintptr_t>(p); }
}  // namespace

extern "C" {

constexpr int HISTORY = 8;

struct StubLaunch {
  std::int64_t grid[3], threads, shared_bytes, stream, function, context, depth, cluster[3], programmatic, attributes;
  microsdpa::AttentionParams params;
};

struct StubRecord {
  std::int64_t launches, pushes, pops, capture_mode, max_shared_bytes, large_clusters;
  StubLaunch history[HISTORY];  // launch number i, from 0, is entry i % HISTORY
};

StubRecord stub_record;
int stub_error = 0;
int stub_live_bytes = 0;  // allocated and not given back
int stub_last_bytes = 0;  // of the latest allocation
int stub_version = 13000;

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = stub_version, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** words) {
  *words = error == CUDA_ERROR_LAUNCH_FAILED ? "the stub was told to fail" : "another error";
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(std::uintptr_t(0x1000 + device));
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(context);
  Lock lock(record_mutex);
  return ++stub_record.pushes, CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = contexts.back();
  contexts.pop_back();
  Lock lock(record_mutex);
  return ++stub_record.pops, CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const auto before = static_cast<CUstreamCaptureMode>(stub_record.capture_mode);
  stub_record.capture_mode = *mode;
  return *mode = before, CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (std::memcmp(image, "cubin", 5)) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(std::uintptr_t(0x2000));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  if (std::strcmp(name, "kernel")) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(std::uintptr_t(0x3000));
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) stub_record.max_shared_bytes = value;
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) stub_record.large_clusters = value;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  Lock lock(record_mutex);
  if (stub_error) return static_cast<CUresult>(stub_error);
  StubLaunch& r = stub_record.history[stub_record.launches++ % HISTORY];
  r = {};
  r.grid[0] = config->gridDimX, r.grid[1] = config->gridDimY, r.grid[2] = config->gridDimZ;
  r.threads = config->blockDimX;
  r.shared_bytes = config->sharedMemBytes;
  r.stream = as_number(config->hStream);
  r.function = as_number(function);
  r.context = as_number(contexts.empty() ? nullptr : contexts.back());
  r.depth = static_cast<std::int64_t>(contexts.size());
  for (r.attributes = 0; r.attributes < config->numAttrs; ++r.attributes) {
    const CUlaunchAttribute& attribute = config->attrs[r.attributes];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const auto& cluster = attribute.value.clusterDim;
      r.cluster[0] = cluster.x, r.cluster[1] = cluster.y, r.cluster[2] = cluster.z;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      r.programmatic = attribute.value.programmaticStreamSerializationAllowed;
    }
  }
  std::memcpy(&r.params, arguments[0], sizeof(r.params));
  return CUDA_SUCCESS;
}

void stub_set_context(std::int64_t context) {
  contexts.clear();
  if (context) contexts.push_back(reinterpret_cast<CUcontext>(context));
}

// An allocator of "device" memory, in the form that the framework gives to the launcher.
int stub_allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void*,
                  void (*)(void*, const char*, const char*)) {
  auto* tensor = new DLManagedTensorVersioned{};
  tensor->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  tensor->deleter = [](DLManagedTensorVersioned* self) {
    stub_live_bytes -= static_cast<int>(reinterpret_cast<std::intptr_t>(self->manager_ctx));
    std::free(self->dl_tensor.data);
    delete[] self->dl_tensor.shape;
    delete self;
  };
  DLTensor& t = tensor->dl_tensor;
  t = *prototype;
  t.shape = new std::int64_t[2 * prototype->ndim];
  t.strides = t.shape + prototype->ndim;
  std::size_t bytes = prototype->dtype.bits / 8;
  for (int i = prototype->ndim - 1; i >= 0; --i) {
    t.shape[i] = prototype->shape[i];
    t.strides[i] = i + 1 == prototype->ndim ? 1 : t.strides[i + 1] * t.shape[i + 1];
    bytes *= t.shape[i];
  }
  stub_live_bytes += stub_last_bytes = static_cast<int>(bytes);
  tensor->manager_ctx = reinterpret_cast<void*>(bytes);
  t.data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  t.byte_offset = 0;
  *out = tensor;
  return 0;
}
}
