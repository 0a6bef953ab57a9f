// A libcuda.so.1 that launches nothing and remembers what it was asked: the launcher's hot path then runs anywhere.
#include <cuda.h>
#include <dlpack/dlpack.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "../../src/microsdpa/kernels/common/mask_params.cuh"

namespace {
thread_local std::vector<CUcontext> contexts;
std::mutex record_mutex;
using Lock = std::lock_guard<std::mutex>;
std::uintptr_t as_number(void* p) { return reinterpret_cast<std::uintptr_t>(p); }
}  // namespace

extern "C" {

constexpr int HISTORY = 8, MAX_MAPS = 8;

struct StubLaunch {
  std::int64_t grid[3], threads, shared_bytes, stream, function, context, depth, cluster[3], programmatic, attributes;
  unsigned long long tensor_maps[MAX_MAPS][16];  // the first `stub_tensor_maps` arguments after the parameters
  unsigned char raw[640];                        // the first `stub_raw_bytes` of the parameter
  microsdpa::AttentionParams params;
  microsdpa::MaskParams masks;  // when `stub_masked`
};

struct StubRecord {
  std::int64_t launches, pushes, pops, capture_mode, max_shared_bytes, large_clusters, encoded, moved, torn;
  StubLaunch history[HISTORY];  // launch number i, from 0, is entry i % HISTORY
};

// What was put on streams beside launches, in their order: exchange.h has the codes and numbers. Launches come among
// them, with the addresses of query, out, LSE and scratch memory.
struct StubOperation {
  std::int64_t code, stream, context, numbers[6];
};
constexpr int MAX_OPERATIONS = 512;
struct StubOperations {
  std::int64_t count;
  StubOperation each[MAX_OPERATIONS];
};

StubOperations stub_operations;
int stub_refused = -1;  // the code of operations that are refused
StubRecord stub_record;
int stub_error = 0;
int stub_capturing = 0;  // whether streams are being captured
int stub_blocks = 0;     // of memory from the driver itself
int stub_tensor_maps = 0;
int stub_masked = 0;  // whether kernels take MaskedParams
int stub_raw_bytes = 0;
int stub_live_bytes = 0;  // allocated and not given back
int stub_last_bytes = 0;  // of the latest allocation
int stub_version = 13000;
std::atomic<int> stub_held{0};                // whether launches wait, as with a full queue: for ten seconds at most
const char* stub_allocation_error = nullptr;  // words of the error that the allocator answers with

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
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = stub_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  return *stream = reinterpret_cast<CUstream>(std::uintptr_t(0x7000)), CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr* memory, std::size_t bytes) {
  Lock lock(record_mutex);
  if (stub_record.capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return *memory = 0x600000000 + bytes * stub_blocks++, CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char value, std::size_t, CUstream stream) {
  return value || as_number(stream) != 0x7000 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static CUresult put(std::int64_t code, CUstream stream, const std::vector<std::int64_t>& numbers) {
  Lock lock(record_mutex);
  StubOperation& operation = stub_operations.each[stub_operations.count++ % MAX_OPERATIONS];
  operation = {};
  operation.code = code, operation.stream = static_cast<std::int64_t>(as_number(stream));
  operation.context = static_cast<std::int64_t>(as_number(contexts.empty() ? nullptr : contexts.back()));
  for (std::size_t i = 0; i < numbers.size(); ++i) operation.numbers[i] = numbers[i];
  return code == stub_refused ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
static std::int64_t number(std::uint64_t value) { return static_cast<std::int64_t>(value); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy->srcMemoryType != CU_MEMORYTYPE_DEVICE || copy->dstMemoryType != CU_MEMORYTYPE_DEVICE || copy->srcXInBytes ||
      copy->srcY || copy->dstXInBytes || copy->dstY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return put(0, stream,
             {number(copy->dstDevice), number(copy->dstPitch), number(copy->srcDevice), number(copy->srcPitch),
              number(copy->WidthInBytes), number(copy->Height)});
}
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  return put(1, stream, {number(address), value, flags});
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  return put(2, stream, {number(address), value, flags - CU_STREAM_WAIT_VALUE_EQ});
}
CUresult cuEventRecord(CUevent event, CUstream stream) { return put(3, stream, {number(as_number(event))}); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return put(4, stream, {number(as_number(event)), flags});
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  for (int waits = 0; stub_held; ++waits) {
    if (waits == 1000) return CUDA_ERROR_NOT_READY;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
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
  StubOperation& operation = stub_operations.each[stub_operations.count++ % MAX_OPERATIONS];
  operation = {5, r.stream, r.context, {}};
  const void* addresses[] = {r.params.query, r.params.out, r.params.lse, r.params.workspace};
  for (int i = 0; i < 4; ++i) operation.numbers[i] = number(as_number(const_cast<void*>(addresses[i])));
  if (stub_masked) r.masks = static_cast<const microsdpa::MaskedParams*>(arguments[0])->masks;
  std::memcpy(r.raw, arguments[0], stub_raw_bytes);
  const void* operands[] = {r.params.query, r.params.key, r.params.value, r.params.out};
  for (int i = 0; i < stub_tensor_maps; ++i) {
    std::memcpy(r.tensor_maps[i], arguments[1 + i], sizeof(r.tensor_maps[i]));
    if (i < 4) stub_record.torn += r.tensor_maps[i][0] != as_number(const_cast<void*>(operands[i]));
  }
  return CUDA_SUCCESS;
}

// The "encoded" map is what it was made from: address, codes, sizes, strides, box, element strides.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Lock lock(record_mutex);
  ++stub_record.encoded;
  for (cuuint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
  }
  cuuint64_t* out = map->opaque;
  *out++ = as_number(address);
  for (int code : {int(type), int(rank), int(interleave), int(swizzle), int(promotion), int(fill)}) *out++ = code;
  for (cuuint32_t i = 0; i < rank; ++i) *out++ = sizes[i];
  for (cuuint32_t i = 0; i + 1 < rank; ++i) *out++ = strides[i];
  *out++ = box[0] | cuuint64_t(box[1]) << 16 | cuuint64_t(box[2]) << 32 | cuuint64_t(box[3]) << 48;
  *out++ = steps[0] | cuuint64_t(steps[1]) << 16 | cuuint64_t(steps[2]) << 32 | cuuint64_t(steps[3]) << 48;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  Lock lock(record_mutex);
  ++stub_record.moved;
  map->opaque[0] = as_number(address);
  return CUDA_SUCCESS;
}

void stub_set_context(std::int64_t context) {
  contexts.clear();
  if (context) contexts.push_back(reinterpret_cast<CUcontext>(context));
}

// An allocator of "device" memory, in the form that the framework gives to the launcher.
int stub_allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* context,
                  void (*set_error)(void*, const char*, const char*)) {
  if (stub_allocation_error) return set_error(context, "MemoryError", stub_allocation_error), -1;
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
