// The host launcher: one call from Python reads the tensors, finds the plan, allocates the output and
// launches.
//
// Nothing here validates an argument in words. A plan is registered only for arguments that Python has
// validated, and its key holds all that the validation looked at; any other call misses, and Python then says
// what is wrong.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>

#include "driver.h"
#include "plan.h"

namespace microsdpa {
namespace {

namespace ffi = tvm::ffi;
using ffi::Optional;

constexpr double LOG2_E = 1.44269504088896340736;

PlanTable& plans() {
  static PlanTable table;
  return table;
}

const Driver& driver() {
  const Driver* driver = Driver::get();
  if (!driver) throw std::runtime_error("no CUDA driver: libcuda.so.1 cannot be loaded or initialised");
  return *driver;
}

// Runs `body`, and hands a failure to Python as a RuntimeError with its words.
template <typename Body>
auto guarded(Body body) {
  try {
    return body();
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

std::uintptr_t address(const DLTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

TensorKey describe(const DLTensor& tensor) {
  TensorKey key;
  std::copy_n(tensor.shape, 4, key.shape);
  std::copy_n(tensor.strides, 4, key.strides);
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return key;
}

// Bits that must be zero for every row to start on 16 bytes: base address and outer strides, in bytes.
std::uint64_t alignment_bits(std::uintptr_t base, const TensorKey& key, std::uint64_t element_bytes) {
  std::uint64_t bits = base;
  for (int i = 0; i < 3; ++i) {
    if (key.shape[i] > 1) bits |= std::uint64_t(key.strides[i]) * element_bytes;
  }
  return bits;
}

// The output that the library allocates has the memory order of the query, as torch's does: of the outer
// dimensions, the one with the larger stride is outermost. Gives the order, outermost first.
void memory_order(const TensorKey& query, int (&order)[3]) {
  order[0] = 0, order[1] = 1, order[2] = 2;
  auto outer = [&](int a, int b) { return query.strides[a] > query.strides[b]; };
  // Three elements, stable: dimensions of equal stride keep their place.
  if (outer(order[1], order[0])) std::swap(order[0], order[1]);
  if (outer(order[2], order[1])) std::swap(order[1], order[2]);
  if (outer(order[1], order[0])) std::swap(order[0], order[1]);
}

TensorKey allocated_like(const TensorKey& query) {
  TensorKey out = query;
  int order[3];
  memory_order(query, order);
  std::int64_t stride = query.shape[3];
  for (int i = 2; i >= 0; --i) {
    out.strides[order[i]] = stride;
    stride *= query.shape[order[i]];
  }
  out.strides[3] = 1;
  return out;
}

// Memory from the framework's allocator, on the device and for the current stream of `like`. It may be given
// back as soon as the kernels that use it are launched: whoever gets it next is behind them in the stream.
ffi::Tensor allocate_flat(std::int64_t elements, DLDataType dtype, const DLTensor& like) {
  DLTensor prototype = like;
  prototype.dtype = dtype;
  prototype.shape = &elements;
  prototype.ndim = 1;
  TVMFFIObjectHandle handle;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvTensorAlloc(&prototype, &handle));
  return ffi::Tensor(
      ffi::details::ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(static_cast<TVMFFIObject*>(handle)));
}

ffi::Tensor allocate_output(const TensorKey& out, const DLTensor& like) {
  const std::int64_t elements = out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3];
  return allocate_flat(elements, like.dtype, like)
      .as_strided(ffi::ShapeView(out.shape, 4), ffi::ShapeView(out.strides, 4));
}

// One past the last byte that the tensor reaches.
std::uintptr_t end_address(std::uintptr_t base, const TensorKey& key, std::uint64_t element_bytes) {
  std::int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (key.shape[i] - 1) * key.strides[i];
  return base + (last + 1) * element_bytes;
}

struct Call {
  const DLTensor *query, *key, *value, *out;  // out is null when it is to be allocated
  std::uintptr_t addresses[OPERANDS];
  PlanKey plan_key;
};

// A tensor, or null for None.
const DLTensor* optional_tensor(ffi::AnyView argument) {
  return argument.type_index() == ffi::TypeIndex::kTVMFFINone ? nullptr : argument.cast<DLTensor*>();
}

// False when no plan can exist for the call: Python's validation then finds the reason.
bool parse(const DLTensor* query, const DLTensor* key, const DLTensor* value, const DLTensor* out, std::int64_t options,
           Call& call) {
  call.query = query, call.key = key, call.value = value, call.out = out;
  for (const DLTensor* tensor : {call.query, call.key, call.value, call.out}) {
    if (tensor && (tensor->ndim != 4 || !tensor->strides || tensor->device.device_type != kDLCUDA)) return false;
  }
  PlanKey& k = call.plan_key;
  k.query = describe(*call.query);
  k.key = describe(*call.key);
  k.value = describe(*call.value);
  k.out = call.out ? describe(*call.out) : allocated_like(k.query);
  k.options = options;
  const std::uint64_t bytes = call.query->dtype.bits / 8;
  const std::uintptr_t q = address(*call.query), kk = address(*call.key), v = address(*call.value);
  const std::uintptr_t o = call.out ? address(*call.out) : 0;
  call.addresses[QUERY] = q, call.addresses[KEY] = kk, call.addresses[VALUE] = v, call.addresses[OUT] = o;
  const std::uint64_t bits = alignment_bits(q, k.query, bytes) | alignment_bits(kk, k.key, bytes) |
                             alignment_bits(v, k.value, bytes) | alignment_bits(o, k.out, bytes);
  k.alignment = bits % 16 == 0 ? 16 : 0;
  if (call.out) {
    // An output that overlaps an input would be read after it is written.
    const std::uintptr_t o_end = end_address(o, k.out, bytes);
    if ((o < end_address(q, k.query, bytes) && q < o_end) || (o < end_address(kk, k.key, bytes) && kk < o_end) ||
        (o < end_address(v, k.value, bytes) && v < o_end)) {
      return false;
    }
  }
  return true;
}

double softmax_scale(const Optional<double>& scale, std::int64_t head_dim) {
  return scale.has_value() ? scale.value() : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

// The hot path. Gives None when there is no plan, True when `out` was given, else the output.
ffi::Any sdpa(DLTensor* query, DLTensor* key, DLTensor* value, ffi::AnyView out, ffi::AnyView lse, std::int64_t options,
              Optional<double> scale) {
  Call call;
  if (!parse(query, key, value, optional_tensor(out), options, call)) return nullptr;
  std::shared_ptr<const Plan> plan = plans().find(call.plan_key);
  const double factor = softmax_scale(scale, call.plan_key.query.shape[3]);
  if (!plan || !std::isfinite(factor)) return nullptr;

  Optional<ffi::Tensor> allocated;
  if (!call.out) {
    allocated = allocate_output(call.plan_key.out, *call.query);
    call.out = allocated.value().GetDLTensorPtr();
    call.addresses[OUT] = address(*call.out);
  }
  AttentionParams params = plan->params;
  params.query = reinterpret_cast<const void*>(call.addresses[QUERY]);
  params.key = reinterpret_cast<const void*>(call.addresses[KEY]);
  params.value = reinterpret_cast<const void*>(call.addresses[VALUE]);
  params.out = reinterpret_cast<void*>(call.addresses[OUT]);
  const DLTensor* lse_tensor = optional_tensor(lse);
  params.lse = lse_tensor ? reinterpret_cast<float*>(address(*lse_tensor)) : nullptr;
  params.scale_log2 = static_cast<float>(factor * LOG2_E);
  Optional<ffi::Tensor> workspace;
  if (plan->workspace_bytes) {
    workspace = allocate_flat(plan->workspace_bytes, DLDataType{kDLUInt, 8, 1}, *call.query);
    params.workspace = workspace.value().data_ptr();
  }

  const DLDevice device = call.query->device;
  auto* stream = static_cast<CUstream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (const KernelLaunch& kernel : plan->kernels) kernel.issue(driver(), stream, params, call.addresses);
  });
  if (allocated.has_value()) return allocated.value();
  return true;
}

Strides outer_strides(const TensorKey& key) { return {key.strides[0], key.strides[1], key.strides[2]}; }

// Integers of a kernel in register_plan(), and then of each of its tensor maps.
enum KernelField { FUNCTION, GRID_X, GRID_Y, GRID_Z, THREADS, SHARED_BYTES, CLUSTER, PROGRAMMATIC, KERNEL_FIELDS };
enum TensorMapField { OPERAND, ROWS, COLUMNS, SWIZZLE, TENSOR_MAP_FIELDS };

KernelLaunch kernel_launch(const ffi::Shape& fields, const Call& call) {
  const std::size_t maps = fields.size() < KERNEL_FIELDS ? 0 : (fields.size() - KERNEL_FIELDS) / TENSOR_MAP_FIELDS;
  TVM_FFI_CHECK(fields.size() == KERNEL_FIELDS + maps * TENSOR_MAP_FIELDS && maps <= KernelLaunch::MAX_TENSOR_MAPS,
                ValueError)
      << "kernels: expected " << int(KERNEL_FIELDS) << " integers each and " << int(TENSOR_MAP_FIELDS)
      << " for each of at most " << KernelLaunch::MAX_TENSOR_MAPS << " tensor maps, got " << fields.size();
  KernelLaunch kernel{};
  kernel.function = reinterpret_cast<CUfunction>(fields[FUNCTION]);
  for (int i = 0; i < 3; ++i) kernel.grid[i] = static_cast<unsigned>(fields[GRID_X + i]);
  kernel.threads = static_cast<unsigned>(fields[THREADS]);
  kernel.shared_bytes = static_cast<unsigned>(fields[SHARED_BYTES]);
  kernel.cluster = static_cast<unsigned>(fields[CLUSTER]);
  kernel.programmatic = fields[PROGRAMMATIC] != 0;
  for (std::size_t i = 0; i < maps; ++i) {
    const std::int64_t* field = fields.data() + KERNEL_FIELDS + i * TENSOR_MAP_FIELDS;
    TVM_FFI_CHECK(field[OPERAND] >= 0 && field[OPERAND] < OPERANDS, ValueError)
        << "kernels: expected an operand below " << int(OPERANDS) << ", got " << field[OPERAND];
    const TensorMapSpec spec{static_cast<Operand>(field[OPERAND]), static_cast<unsigned>(field[ROWS]),
                             static_cast<unsigned>(field[COLUMNS]), static_cast<unsigned>(field[SWIZZLE])};
    // An output that each call allocates has no address yet: the query's stands in until then.
    const std::uintptr_t address = call.addresses[spec.operand];
    const TensorKey* keys[] = {&call.plan_key.query, &call.plan_key.key, &call.plan_key.value, &call.plan_key.out};
    kernel.tensor_maps.push_back(
        encode_tensor_map(driver(), spec, *keys[spec.operand], address ? address : call.addresses[QUERY]));
  }
  return kernel;
}

// Registers the plan of a validated call. The tensors and options are the arguments that sdpa() will be called
// with; `kernels` are launched in their order, each given by its KernelFields and TensorMapFields.
void register_plan(DLTensor* query, DLTensor* key, DLTensor* value, ffi::AnyView out, std::int64_t options,
                   std::int64_t context, ffi::Array<ffi::Shape> kernels, std::int64_t workspace_bytes,
                   std::int64_t diagonal) {
  Call call;
  TVM_FFI_CHECK(parse(query, key, value, optional_tensor(out), options, call), ValueError)
      << "expected [B, H, S, D] CUDA tensors that do not overlap";
  const PlanKey& k = call.plan_key;
  Plan plan{};
  plan.context = reinterpret_cast<CUcontext>(context);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    for (const ffi::Shape& fields : kernels) plan.kernels.push_back(kernel_launch(fields, call));
  });
  plan.workspace_bytes = workspace_bytes;
  plan.params.query_strides = outer_strides(k.query);
  plan.params.key_strides = outer_strides(k.key);
  plan.params.value_strides = outer_strides(k.value);
  plan.params.out_strides = outer_strides(k.out);
  plan.params.heads = static_cast<int32>(k.query.shape[1]);
  plan.params.heads_kv = static_cast<int32>(k.key.shape[1]);
  plan.params.seqlen_q = static_cast<int32>(k.query.shape[2]);
  plan.params.seqlen_k = static_cast<int32>(k.key.shape[2]);
  plan.params.diagonal = static_cast<int32>(diagonal);
  plans().insert(k, plan);
}

// 16 when the call's tensors allow 16-byte loads and stores of every row, else 0; -1 when `out` overlaps an
// input or a tensor is no 4-dimensional CUDA tensor.
std::int64_t alignment(DLTensor* query, DLTensor* key, DLTensor* value, ffi::AnyView out) {
  Call call;
  return parse(query, key, value, optional_tensor(out), 0, call) ? call.plan_key.alignment : -1;
}

// Clusters of more CTAs run on some GPUs only, and a kernel must ask for them.
constexpr std::int64_t PORTABLE_CLUSTER = 8;

// Loads a cubin into the primary context of a device; gives {function, context}. Safe while a stream is
// captured.
ffi::Shape load_kernel(std::int64_t device, ffi::Bytes cubin, ffi::String symbol, std::int64_t shared_bytes,
                       std::int64_t cluster) {
  return guarded([&] {
    const Driver& d = driver();
    CUcontext context;
    CUmodule module;
    CUfunction function;
    d.check(d.primary_context_retain(&context, static_cast<CUdevice>(device)), "cuDevicePrimaryCtxRetain");
    ScopedContext current(d, context);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    d.check(d.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    CUresult result = d.module_load(&module, cubin.data());
    if (result == CUDA_SUCCESS) result = d.module_function(&function, module, symbol.c_str());
    if (result == CUDA_SUCCESS && shared_bytes > 48 * 1024) {
      result = d.function_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(shared_bytes));
    }
    if (result == CUDA_SUCCESS && cluster > PORTABLE_CLUSTER) {
      result = d.function_set_attribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    }
    d.check(d.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    d.check(result, "loading the kernel");
    return ffi::Shape{reinterpret_cast<std::int64_t>(function), reinterpret_cast<std::int64_t>(context)};
  });
}

// CUDA version of the driver, as 1000 * major + 10 * minor; 0 when the machine has no driver.
std::int64_t driver_version() {
  const Driver* d = Driver::get();
  int version = 0;
  if (d) d->driver_version(&version);
  return version;
}

// Lets kernels begin before the one ahead of them has ended, or not; gives what held before.
bool set_programmatic(bool enabled) { return programmatic_enabled.exchange(enabled); }

std::int64_t plan_count() { return plans().size(); }

void clear_plans() { plans().clear(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sdpa, sdpa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_plan, register_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(alignment, alignment);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_kernel, load_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, driver_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_programmatic, set_programmatic);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_count, plan_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_plans, clear_plans);

}  // namespace microsdpa
