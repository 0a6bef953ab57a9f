// The host launcher: one call from Python reads the tensors, finds the plan, allocates the LSE and launches.
//
// Nothing here validates an argument in words. A plan is registered only for arguments that Python has
// validated, and its key holds all that the validation looked at; any other call misses, and Python then says
// what is wrong.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/string.h>

#include <algorithm>

#include "eight_bit_call.h"
#include "framework.h"
#include "masked_call.h"
#include "plan.h"
#include "torch_nodes.h"

namespace microsdpa {
namespace {

PlanTable<PlanKey>& plans() {
  static PlanTable<PlanKey> table;
  return table;
}

PlanTable<MaskedKey>& masked_plans() {
  static PlanTable<MaskedKey> table;
  return table;
}

// Launches the plan of a call, whose parameters are filled into a copy of the plan's; gives what LseArgument does.
ffi::Any execute(const Plan& plan, const Call& call, ffi::AnyView wanted_lse, double scale, AttentionParams& params) {
  const LseArgument lse(wanted_lse, *call.query);
  Optional<ffi::Tensor> workspace;
  params.query = reinterpret_cast<const void*>(call.addresses[QUERY]);
  params.key = reinterpret_cast<const void*>(call.addresses[KEY]);
  params.value = reinterpret_cast<const void*>(call.addresses[VALUE]);
  params.out = reinterpret_cast<void*>(call.addresses[OUT]);
  params.lse = reinterpret_cast<float*>(lse.address);
  params.scale_log2 = static_cast<float>(scale * LOG2_E);
  if (plan.workspace_bytes) {
    workspace = allocate(&plan.workspace_bytes, 1, DLDataType{kDLUInt, 8, 1}, *call.query);
    params.workspace = workspace.value().data_ptr();
  }

  const CUstream stream = current_stream(call.query->device);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    for (const KernelLaunch& kernel : plan.kernels) kernel.issue(driver(), stream, &params, call.addresses);
  });
  return lse.result();
}

MaskArguments mask_arguments(ffi::AnyView mask, ffi::AnyView slopes, ffi::AnyView sinks, std::int64_t left,
                             std::int64_t right, const Optional<double>& softcap) {
  return {{optional_tensor(mask), optional_tensor(slopes), optional_tensor(sinks)}, left, right, softcap.has_value()};
}

// execute() with masks; a soft cap of 1 stands for none.
ffi::Any execute_masked(const Plan& plan, const Call& call, ffi::AnyView lse, double scale, double softcap,
                        const MaskArguments& masks) {
  MaskedParams params = plan.params;
  const DLTensor* const* tensors = masks.tensors;
  if (tensors[MASK]) params.masks.mask = reinterpret_cast<const void*>(address(*tensors[MASK]));
  if (tensors[SLOPES]) params.masks.slopes = reinterpret_cast<const float*>(address(*tensors[SLOPES]));
  if (tensors[SINKS]) params.masks.sinks = reinterpret_cast<const void*>(address(*tensors[SINKS]));
  params.masks.softcap_log2 = static_cast<float>(softcap * LOG2_E);
  return execute(plan, call, lse, scale, params.call);
}

}  // namespace

// The hot path. Gives None when there is no plan, else what LseArgument gives.
ffi::Any sdpa(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, ffi::AnyView lse, std::int64_t options,
              Optional<double> scale) {
  Call call;
  if (!parse(query, key, value, out, options, call)) return nullptr;
  std::shared_ptr<const Plan> plan = plans().find(call.plan_key);
  const double factor = softmax_scale(scale, call.plan_key.query.shape[3]);
  if (!plan || !is_scale(factor)) return nullptr;
  AttentionParams params = plan->params.call;
  return execute(*plan, call, lse, factor, params);
}

// The same with masks.
ffi::Any sdpa_masked(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, ffi::AnyView lse,
                     std::int64_t options, Optional<double> scale, ffi::AnyView mask, ffi::AnyView slopes,
                     ffi::AnyView sinks, std::int64_t left, std::int64_t right, Optional<double> softcap) {
  Call call;
  MaskedKey masked_key;
  const MaskArguments masks = mask_arguments(mask, slopes, sinks, left, right, softcap);
  if (!parse(query, key, value, out, options, call)) return nullptr;
  if (!parse_masks(call, masks, masked_key)) return nullptr;
  std::shared_ptr<const Plan> plan = masked_plans().find(masked_key);
  const double factor = softmax_scale(scale, call.plan_key.query.shape[3]);
  const double cap = softcap.has_value() ? softcap.value() : 1.0;
  if (!plan || !is_scale(factor) || !is_softcap(cap)) return nullptr;
  return execute_masked(*plan, call, lse, factor, cap, masks);
}

namespace {

// A function of (query, key, value, out, lse) that launches the plan of these arguments without looking it up: it gives
// what sdpa() does, and None for tensors that differ from these in more than their addresses. None when there is no
// plan.
ffi::Any prepared_call(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, std::int64_t options,
                       Optional<double> scale) {
  Call first;
  if (!parse(query, key, value, out, options, first)) return nullptr;
  std::shared_ptr<const Plan> plan = plans().find(first.plan_key);
  const double factor = softmax_scale(scale, first.plan_key.query.shape[3]);
  if (!plan || !is_scale(factor)) return nullptr;
  return ffi::Function::FromTyped([plan, expected = first.plan_key, factor](DLTensor* query, DLTensor* key,
                                                                            DLTensor* value, DLTensor* out,
                                                                            ffi::AnyView lse) -> ffi::Any {
    Call call;
    const bool parsed = parse(query, key, value, out, expected.options, call);
    if (!parsed || !expected.admits(call.plan_key)) return nullptr;
    AttentionParams params = plan->params.call;
    return execute(*plan, call, lse, factor, params);
  });
}

// The same with masks, whose tensors follow the LSE's; the window and the soft cap are the plan's.
ffi::Any prepared_masked_call(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, std::int64_t options,
                              Optional<double> scale, ffi::AnyView mask, ffi::AnyView slopes, ffi::AnyView sinks,
                              std::int64_t left, std::int64_t right, Optional<double> softcap) {
  Call first;
  MaskedKey first_key;
  if (!parse(query, key, value, out, options, first)) return nullptr;
  if (!parse_masks(first, mask_arguments(mask, slopes, sinks, left, right, softcap), first_key)) return nullptr;
  std::shared_ptr<const Plan> plan = masked_plans().find(first_key);
  const double factor = softmax_scale(scale, first.plan_key.query.shape[3]);
  const double cap = softcap.has_value() ? softcap.value() : 1.0;
  if (!plan || !is_scale(factor) || !is_softcap(cap)) return nullptr;
  return ffi::Function::FromTyped([plan, expected = first_key, factor, cap](
                                      DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, ffi::AnyView lse,
                                      ffi::AnyView mask, ffi::AnyView slopes, ffi::AnyView sinks) -> ffi::Any {
    Call call;
    MaskedKey masked_key;
    MaskArguments masks = mask_arguments(mask, slopes, sinks, expected.left, expected.right, {});
    masks.capped = expected.capped != 0;
    const bool parsed = parse(query, key, value, out, expected.call.options, call);
    if (!parsed || !parse_masks(call, masks, masked_key) || !expected.admits(masked_key)) return nullptr;
    return execute_masked(*plan, call, lse, factor, cap, masks);
  });
}

Strides outer_strides(const TensorKey& key) { return {key.strides[0], key.strides[1], key.strides[2]}; }

// Integers of a kernel in register_plan(), and then of each of its tensor maps.
enum KernelField { FUNCTION, GRID_X, GRID_Y, GRID_Z, THREADS, SHARED_BYTES, CLUSTER, PROGRAMMATIC, KERNEL_FIELDS };
enum TensorMapField { OPERAND, ROWS, COLUMNS, SWIZZLE, TENSOR_MAP_FIELDS };

KernelLaunch without_tensor_maps(const ffi::Shape& fields) {
  KernelLaunch kernel{};
  kernel.function = reinterpret_cast<CUfunction>(fields[FUNCTION]);
  for (int i = 0; i < 3; ++i) kernel.grid[i] = static_cast<unsigned>(fields[GRID_X + i]);
  kernel.threads = static_cast<unsigned>(fields[THREADS]);
  kernel.shared_bytes = static_cast<unsigned>(fields[SHARED_BYTES]);
  kernel.cluster = static_cast<unsigned>(fields[CLUSTER]);
  kernel.programmatic = fields[PROGRAMMATIC] != 0;
  return kernel;
}

KernelLaunch kernel_launch(const ffi::Shape& fields, const Call& call) {
  const std::size_t maps = fields.size() < KERNEL_FIELDS ? 0 : (fields.size() - KERNEL_FIELDS) / TENSOR_MAP_FIELDS;
  TVM_FFI_CHECK(fields.size() == KERNEL_FIELDS + maps * TENSOR_MAP_FIELDS && maps <= KernelLaunch::MAX_TENSOR_MAPS,
                ValueError)
      << "kernels: expected " << int(KERNEL_FIELDS) << " integers each and " << int(TENSOR_MAP_FIELDS)
      << " for each of at most " << KernelLaunch::MAX_TENSOR_MAPS << " tensor maps, got " << fields.size();
  KernelLaunch kernel = without_tensor_maps(fields);
  for (std::size_t i = 0; i < maps; ++i) {
    const std::int64_t* field = fields.data() + KERNEL_FIELDS + i * TENSOR_MAP_FIELDS;
    TVM_FFI_CHECK(field[OPERAND] >= 0 && field[OPERAND] < OPERANDS, ValueError)
        << "kernels: expected an operand below " << int(OPERANDS) << ", got " << field[OPERAND];
    const TensorMapSpec spec{static_cast<int>(field[OPERAND]), static_cast<unsigned>(field[ROWS]),
                             static_cast<unsigned>(field[COLUMNS]), static_cast<unsigned>(field[SWIZZLE]), 0};
    const TensorKey* keys[] = {&call.plan_key.query, &call.plan_key.key, &call.plan_key.value, &call.plan_key.out};
    kernel.tensor_maps.push_back(encode_tensor_map(driver(), spec, *keys[spec.operand], call.addresses[spec.operand]));
  }
  return kernel;
}

// Integers of a tensor map of a kernel with 8-bit operands: the operand that it describes a [B, H, S, D] array of, the
// bytes from its start to the array, the array's shape, its strides in elements and their bytes, and the box.
enum ArrayField {
  OF,
  STARTS_AT,
  SHAPE,
  STRIDES = SHAPE + 4,
  BYTES = STRIDES + 4,
  BOX_ROWS,
  BOX_COLUMNS,
  BOX_SWIZZLE,
  ARRAY_FIELDS
};

// The tensor map of an array in memory that starts at `address`.
EncodedTensorMap array_tensor_map(const std::int64_t* field, std::uintptr_t address) {
  TensorKey array{};
  std::copy_n(field + SHAPE, 4, array.shape);
  std::copy_n(field + STRIDES, 4, array.strides);
  array.dtype_and_device = TensorKey::pack({kDLUInt, static_cast<std::uint8_t>(8 * field[BYTES]), 1}, {});
  const TensorMapSpec spec{static_cast<int>(field[OF]), static_cast<unsigned>(field[BOX_ROWS]),
                           static_cast<unsigned>(field[BOX_COLUMNS]), static_cast<unsigned>(field[BOX_SWIZZLE]),
                           static_cast<std::uintptr_t>(field[STARTS_AT])};
  return encode_tensor_map(driver(), spec, array, address);
}

// Launches one kernel, given by its KernelFields and ArrayFields, where an array's start is its address, on a stream,
// which the caller names: the framework tells its current one only to calls with tensors. `params` is the kernel's
// first argument.
void launch_one(std::int64_t stream, std::int64_t context, ffi::Shape fields, ffi::Bytes params) {
  TVM_FFI_CHECK(fields.size() >= KERNEL_FIELDS && (fields.size() - KERNEL_FIELDS) % ARRAY_FIELDS == 0, ValueError)
      << "fields: expected " << int(KERNEL_FIELDS) << " integers and " << int(ARRAY_FIELDS)
      << " for each tensor map, got " << fields.size();
  guarded([&] {
    ScopedContext current(driver(), reinterpret_cast<CUcontext>(context));
    KernelLaunch kernel = without_tensor_maps(fields);
    for (std::size_t at = KERNEL_FIELDS; at < fields.size(); at += ARRAY_FIELDS) {
      kernel.tensor_maps.push_back(array_tensor_map(fields.data() + at, 0));
    }
    const Addresses none{};
    kernel.issue(driver(), reinterpret_cast<CUstream>(stream), const_cast<char*>(params.data()), none);
  });
}

Plan make_plan(const Call& call, std::int64_t context, const ffi::Array<ffi::Shape>& kernels,
               std::int64_t workspace_bytes, std::int64_t diagonal) {
  const PlanKey& k = call.plan_key;
  Plan plan{};
  plan.context = reinterpret_cast<CUcontext>(context);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    for (const ffi::Shape& fields : kernels) plan.kernels.push_back(kernel_launch(fields, call));
  });
  plan.workspace_bytes = workspace_bytes;
  AttentionParams& params = plan.params.call;
  params.query_strides = outer_strides(k.query);
  params.key_strides = outer_strides(k.key);
  params.value_strides = outer_strides(k.value);
  params.out_strides = outer_strides(k.out);
  params.batch = static_cast<int32>(k.query.shape[0]);
  params.heads = static_cast<int32>(k.query.shape[1]);
  params.heads_kv = static_cast<int32>(k.key.shape[1]);
  params.seqlen_q = static_cast<int32>(k.query.shape[2]);
  params.seqlen_k = static_cast<int32>(k.key.shape[2]);
  params.diagonal = static_cast<int32>(diagonal);
  return plan;
}

constexpr const char* BAD_CALL = "expected [B, H, S, D] CUDA tensors that do not overlap";

// Registers the plan of a validated call. The tensors and options are the arguments that sdpa() will be called
// with; `kernels` are launched in their order, each given by its KernelFields and TensorMapFields.
void register_plan(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, std::int64_t options,
                   std::int64_t context, ffi::Array<ffi::Shape> kernels, std::int64_t workspace_bytes,
                   std::int64_t diagonal) {
  Call call;
  TVM_FFI_CHECK(parse(query, key, value, out, options, call), ValueError) << BAD_CALL;
  plans().insert(call.plan_key, make_plan(call, context, kernels, workspace_bytes, diagonal));
}

// The same for sdpa_masked().
void register_masked_plan(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, std::int64_t options,
                          std::int64_t context, ffi::Array<ffi::Shape> kernels, std::int64_t workspace_bytes,
                          std::int64_t diagonal, ffi::AnyView mask, ffi::AnyView slopes, ffi::AnyView sinks,
                          std::int64_t left, std::int64_t right, Optional<double> softcap, std::int64_t position,
                          std::int64_t lowest) {
  Call call;
  MaskedKey masked_key;
  const MaskArguments masks = mask_arguments(mask, slopes, sinks, left, right, softcap);
  TVM_FFI_CHECK(parse(query, key, value, out, options, call) && parse_masks(call, masks, masked_key), ValueError)
      << BAD_CALL;
  Plan plan = make_plan(call, context, kernels, workspace_bytes, diagonal);
  plan.params.masks = mask_params(masked_key, position, lowest);
  masked_plans().insert(masked_key, plan);
}

// Integers of a pointer in register_eight_bit_plan().
enum PointerField { AT, POINTS_TO, OFFSET, POINTER_FIELDS };

// The same for sdpa_eight_bit(). `kernels` are given by their KernelFields, whether only calls with an LSE launch them,
// and ArrayFields; `params` are their parameters, and `pointers` where in these addresses belong.
void register_eight_bit_plan(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out, std::int64_t options,
                             Optional<double> scale, ffi::AnyView query_scale, ffi::AnyView key_scale,
                             ffi::AnyView value_scale, std::int64_t context, ffi::Array<ffi::Shape> kernels,
                             ffi::Array<ffi::Bytes> params, ffi::Array<ffi::Shape> pointers,
                             std::int64_t workspace_bytes) {
  EightBitCall call;
  const DLTensor* const scales[] = {optional_tensor(query_scale), optional_tensor(key_scale),
                                    optional_tensor(value_scale)};
  TVM_FFI_CHECK(call.parse(query, key, value, out, options, scale, scales), ValueError) << BAD_CALL;
  EightBitPlan plan{reinterpret_cast<CUcontext>(context), {}, workspace_bytes};
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const ffi::Shape fields = kernels[i], places = pointers[i];
    const ffi::Bytes bytes = params[i];
    constexpr std::size_t OWN = KERNEL_FIELDS + 1;
    const std::size_t maps = fields.size() < OWN ? 0 : (fields.size() - OWN) / ARRAY_FIELDS;
    TVM_FFI_CHECK(fields.size() == OWN + maps * ARRAY_FIELDS && maps <= KernelLaunch::MAX_TENSOR_MAPS &&
                      bytes.size() <= FilledKernel::MAX_PARAMS && places.size() % POINTER_FIELDS == 0,
                  ValueError)
        << "kernels: expected " << OWN << " integers each and " << int(ARRAY_FIELDS) << " for each of at most "
        << KernelLaunch::MAX_TENSOR_MAPS << " tensor maps, parameters of at most " << FilledKernel::MAX_PARAMS
        << " bytes and " << int(POINTER_FIELDS) << " integers a pointer, got " << fields.size() << ", " << bytes.size()
        << " and " << places.size();
    FilledKernel kernel{without_tensor_maps(fields), {bytes.data(), bytes.size()}, {}, fields[KERNEL_FIELDS] != 0};
    for (const std::int64_t* p = places.data(); p < places.data() + places.size(); p += POINTER_FIELDS) {
      TVM_FFI_CHECK(p[POINTS_TO] >= 0 && p[POINTS_TO] < EIGHT_BIT_OPERANDS && p[AT] >= 0 &&
                        p[AT] + sizeof(std::uintptr_t) <= bytes.size(),
                    ValueError)
          << "pointers: expected an operand below " << int(EIGHT_BIT_OPERANDS) << " and a place in " << bytes.size()
          << " bytes of parameters, got " << p[POINTS_TO] << " at " << p[AT];
      kernel.pointers.push_back(
          {static_cast<std::size_t>(p[AT]), static_cast<int>(p[POINTS_TO]), static_cast<std::uintptr_t>(p[OFFSET])});
    }
    guarded([&] {
      ScopedContext current(driver(), plan.context);
      for (std::size_t map = 0; map < maps; ++map) {
        const std::int64_t* array = fields.data() + OWN + map * ARRAY_FIELDS;
        TVM_FFI_CHECK(array[OF] >= 0 && array[OF] < EIGHT_BIT_OPERANDS, ValueError)
            << "kernels: expected an operand below " << int(EIGHT_BIT_OPERANDS) << ", got " << array[OF];
        // Memory that each call allocates has no address yet: the query's stands in until then.
        const std::uintptr_t address = call.addresses[array[OF]];
        kernel.launch.tensor_maps.push_back(array_tensor_map(array, address ? address : call.addresses[QUERY]));
      }
    });
    plan.kernels.push_back(std::move(kernel));
  }
  eight_bit_plans().insert(call.key, plan);
}

// 16 when the call's tensors allow 16-byte loads and stores of every row, else 0; -1 when `out` overlaps an
// input or a tensor is no 4-dimensional CUDA tensor.
std::int64_t alignment(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out) {
  Call call;
  return parse(query, key, value, out, 0, call) ? call.plan_key.alignment : -1;
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

std::int64_t plan_count() { return plans().size() + masked_plans().size() + eight_bit_plans().size(); }

void clear_plans() { plans().clear(), masked_plans().clear(), eight_bit_plans().clear(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sdpa, sdpa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sdpa_masked, sdpa_masked);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepared_call, prepared_call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepared_masked_call, prepared_masked_call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sdpa_eight_bit, sdpa_eight_bit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepared_eight_bit_call, prepared_eight_bit_call);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_one, launch_one);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_plan, register_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_masked_plan, register_masked_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_eight_bit_plan, register_eight_bit_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_nodes, register_nodes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_node_constants, set_node_constants);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect_node, expect_node);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect_no_node, expect_no_node);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(alignment, alignment);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_kernel, load_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, driver_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_programmatic, set_programmatic);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_count, plan_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_plans, clear_plans);

}  // namespace microsdpa
