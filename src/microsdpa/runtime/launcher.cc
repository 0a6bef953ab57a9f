// The host launcher: one call from Python reads the tensors, finds the plan, allocates the LSE and launches.
//
// Nothing here validates an argument in words. A plan is registered only for arguments that Python has
// validated, and its key holds all that the validation looked at; any other call misses, and Python then says
// what is wrong.
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstddef>

#include "../kernels/common/mask_params.cuh"
#include "framework.h"
#include "launch.h"
#include "plan.h"
#include "torch_nodes.h"

namespace microsdpa {
namespace {

PlanTable& plans() {
  static PlanTable table;
  return table;
}

// Plans by what they keep when K grows: growing_key() gives the keys.
PlanTable& growing_plans() {
  static PlanTable table;
  return table;
}

Strides outer_strides(const TensorKey& key) { return {key.strides[0], key.strides[1], key.strides[2]}; }

// The parameter of kernels with 16-bit operands: all but addresses, scale and soft cap.
MaskedParams standard_params(const CallKey& k) {
  MaskedParams found{};
  AttentionParams& call = found.call;
  call.query_strides = outer_strides(k.tensors[QUERY]);
  call.key_strides = outer_strides(k.tensors[KEY]);
  call.value_strides = outer_strides(k.tensors[VALUE]);
  call.out_strides = outer_strides(k.tensors[OUT]);
  const std::int64_t (&query)[4] = k.tensors[QUERY].shape, (&key)[4] = k.tensors[KEY].shape;
  call.batch = static_cast<int32>(query[0]);
  call.heads = static_cast<int32>(query[1]);
  call.heads_kv = static_cast<int32>(key[1]);
  call.seqlen_q = static_cast<int32>(query[2]);
  call.seqlen_k = static_cast<int32>(key[2]);

  // Ends out of every key's reach are brought near: sums of them must stay in 32 bits. Masks.bounds() says the same.
  constexpr std::int64_t FAR = std::int64_t(1) << 40;
  const std::int64_t position = k.causal() == 2 ? key[2] - query[2] : 0;
  const std::int64_t furthest = k.causal() ? position : position + std::min(k.right, FAR);
  call.diagonal = static_cast<int32>(std::min(furthest, key[2]));
  MaskParams& masks = found.masks;
  masks.position = static_cast<int32>(position);
  masks.lowest = static_cast<int32>(std::max(position - std::min(k.left, FAR), -query[2]));
  if (k.given) {
    const std::int64_t (&mask)[4] = k.tensors[MASK].strides;
    masks.mask_strides = {mask[0], mask[1], mask[2]};
    masks.mask_column_stride = mask[3];
    masks.slope_batch_stride = k.tensors[SLOPES].strides[2];
    masks.slope_head_stride = k.tensors[SLOPES].strides[3];
    masks.sink_head_stride = k.tensors[SINKS].strides[3];
  }
  return found;
}

bool is_masked(const CallKey& k) { return k.given || k.left != -1 || k.right != -1 || k.capped; }

void fill_standard(PlannedKernel& kernel, const CallKey& k) {
  const MaskedParams params = standard_params(k);
  const bool masked = is_masked(k);
  kernel.params.assign(reinterpret_cast<const char*>(&params), masked ? sizeof(MaskedParams) : sizeof(AttentionParams));
  kernel.pointers = {
      {offsetof(AttentionParams, query), QUERY, 0}, {offsetof(AttentionParams, key), KEY, 0},
      {offsetof(AttentionParams, value), VALUE, 0}, {offsetof(AttentionParams, out), OUT, 0},
      {offsetof(AttentionParams, lse), LSE, 0},     {offsetof(AttentionParams, workspace), WORKSPACE, 0}};
  kernel.numbers = {{offsetof(AttentionParams, scale_log2), SCALE_LOG2}};
  if (!masked) return;
  constexpr std::size_t MASKS = offsetof(MaskedParams, masks);
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, mask), MASK, 0});
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, slopes), SLOPES, 0});
  kernel.pointers.push_back({MASKS + offsetof(MaskParams, sinks), SINKS, 0});
  kernel.numbers.push_back({MASKS + offsetof(MaskParams, softcap_log2), SOFTCAP_LOG2});
}

// What calls have in common that differ in the length of K, in strides of K, V and mask, and so in addresses. False for
// a call that is none of those.
bool growing_key(const CallKey& key, CallKey& common) {
  constexpr std::int64_t MASKS = 1 << MASK | 1 << SLOPES | 1 << SINKS;
  const std::int64_t length = key.tensors[KEY].shape[2];
  if (length < 2 || key.tensors[VALUE].shape[2] != length || (key.given & ~MASKS)) return false;
  common = key;
  for (const Operand operand : {KEY, VALUE}) {
    TensorKey& tensor = common.tensors[operand];
    if (tensor.shape[3] > 1 && tensor.strides[3] != 1) return false;
    tensor.shape[2] = 0;
    std::fill_n(tensor.strides, 3, 0);
  }
  if (key.given & 1 << MASK) {
    TensorKey& mask = common.tensors[MASK];
    if (mask.shape[3] == length) mask.shape[3] = 0;
    std::fill_n(mask.strides, 4, 0);
  }
  return true;
}

// Bulk copies address strides below 2^40 bytes.
bool is_bulk(const TensorKey& tensor) {
  return std::all_of(tensor.strides, tensor.strides + 3, [&](std::int64_t stride) {
    return std::uint64_t(stride) * tensor.element_bytes() < std::uint64_t(1) << 40;
  });
}

// The plan of a call whose K has another length than that of a plan before it; null where there is none.
std::shared_ptr<const Plan> grown_plan(const Call& call) {
  CallKey common;
  if (!growing_key(call.key, common)) return nullptr;
  const std::shared_ptr<const Plan> before = growing_plans().find(common);
  if (!before || !before->growth.has(call.key.tensors[KEY].shape[2])) return nullptr;
  auto plan = std::make_shared<Plan>(*before);
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (PlannedKernel& kernel : plan->kernels) {
      fill_standard(kernel, call.key);
      for (EncodedTensorMap& map : kernel.launch.tensor_maps) {
        const TensorKey& tensor = call.key.tensors[map.spec.operand];
        if (!is_bulk(tensor)) return plan.reset();
        map = encode_tensor_map(driver(), map.spec, tensor, call.addresses[map.spec.operand]);
      }
    }
  });
  if (plan) plans().insert(call.key, plan);
  return plan;
}

std::shared_ptr<const Plan> plan_of(const Call& call) {
  std::shared_ptr<const Plan> plan = plans().find(call.key);
  return plan ? plan : grown_plan(call);
}

// Launches a plan; gives what LseArgument does.
ffi::Any execute(const Plan& plan, Call& call, ffi::AnyView wanted_lse, const Factors& factors) {
  const LseArgument lse(wanted_lse, *call.query);
  Optional<ffi::Tensor> workspace;
  call.addresses[LSE] = lse.address;
  if (plan.workspace_bytes) {
    workspace = allocate(&plan.workspace_bytes, 1, DLDataType{kDLUInt, 8, 1}, *call.query);
    call.addresses[WORKSPACE] = reinterpret_cast<std::uintptr_t>(workspace.value().data_ptr());
  }
  Numbers numbers;
  numbers[SCALE] = static_cast<float>(factors.scale);
  numbers[SCALE_LOG2] = static_cast<float>(factors.scale * LOG2_E);
  numbers[SOFTCAP_LOG2] = static_cast<float>(factors.softcap * LOG2_E);
  const CUstream stream = current_stream(call.query->device);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    for (const PlannedKernel& kernel : plan.kernels) {
      if (!kernel.only_with_lse || lse.address) kernel.issue(driver(), stream, call.addresses, numbers);
    }
  });
  return lse.result();
}

// Places of a call's arguments: query, key, value, out, LSE, options, scale; and then, as far as they are given, the
// tensors and numbers of masks, and scales of 8-bit values.
enum Argument {
  LSE_ARGUMENT = OUT + 1,
  OPTIONS_ARGUMENT,
  SCALE_ARGUMENT,
  FEWEST_ARGUMENTS,
  MASK_ARGUMENT = FEWEST_ARGUMENTS,
  SLOPES_ARGUMENT,
  SINKS_ARGUMENT,
  LEFT_ARGUMENT,
  RIGHT_ARGUMENT,
  SOFTCAP_ARGUMENT,
  QUERY_SCALE_ARGUMENT,
  MOST_ARGUMENTS = QUERY_SCALE_ARGUMENT + 3
};

Optional<double> optional_number(ffi::AnyView argument) { return argument.cast<Optional<double>>(); }

struct GivenCall {
  Arguments arguments;
  ffi::AnyView lse;
  Optional<double> scale, softcap;

  explicit GivenCall(ffi::PackedArgs args) {
    const int count = args.size();
    TVM_FFI_CHECK(count >= FEWEST_ARGUMENTS && count <= MOST_ARGUMENTS, TypeError)
        << "a call: expected " << int(FEWEST_ARGUMENTS) << " to " << int(MOST_ARGUMENTS) << " arguments, got " << count;
    for (int i = 0; i < DENSE_OPERANDS; ++i) arguments.tensors[i] = args[i].cast<DLTensor*>();
    lse = args[LSE_ARGUMENT];
    arguments.options = args[OPTIONS_ARGUMENT].cast<std::int64_t>();
    scale = optional_number(args[SCALE_ARGUMENT]);
    if (count == FEWEST_ARGUMENTS) return;
    for (int i = 0; i < 3 && MASK_ARGUMENT + i < count; ++i) {
      arguments.tensors[MASK + i] = optional_tensor(args[MASK_ARGUMENT + i]);
    }
    if (count > LEFT_ARGUMENT) arguments.left = args[LEFT_ARGUMENT].cast<std::int64_t>();
    if (count > RIGHT_ARGUMENT) arguments.right = args[RIGHT_ARGUMENT].cast<std::int64_t>();
    if (count > SOFTCAP_ARGUMENT) softcap = optional_number(args[SOFTCAP_ARGUMENT]);
    arguments.capped = softcap.has_value();
    for (int i = 0; i < 3 && QUERY_SCALE_ARGUMENT + i < count; ++i) {
      arguments.tensors[QUERY_SCALE + i] = optional_tensor(args[QUERY_SCALE_ARGUMENT + i]);
    }
  }

  Factors factors() const { return Factors(scale, softcap, arguments.tensors[QUERY]->shape[3]); }
};

}  // namespace

ffi::Any attend(const Arguments& arguments, ffi::AnyView lse, Optional<double> scale, Optional<double> softcap) {
  Call call;
  if (!parse(arguments, call)) return nullptr;
  const Factors factors(scale, softcap, arguments.tensors[QUERY]->shape[3]);
  if (!factors.valid()) return nullptr;
  const std::shared_ptr<const Plan> plan = plan_of(call);
  if (!plan) return nullptr;
  return execute(*plan, call, lse, factors);
}

namespace {

// The hot path. Gives None when there is no plan, else what LseArgument gives.
ffi::Any sdpa(ffi::PackedArgs args) {
  const GivenCall given(args);
  return attend(given.arguments, given.lse, given.scale, given.softcap);
}

// A function of (query, key, value, out, LSE, and tensors of masks and scales) that launches the plan of these
// arguments without looking it up: it gives what sdpa() does, and None for tensors that differ from these in more than
// their addresses. Window, soft cap and scale are those given here. None when there is no plan.
ffi::Any prepared_call(ffi::PackedArgs args) {
  const GivenCall given(args);
  Call first;
  if (!parse(given.arguments, first)) return nullptr;
  const Factors factors = given.factors();
  const std::shared_ptr<const Plan> plan = plan_of(first);
  if (!plan || !factors.valid()) return nullptr;
  return ffi::Function::FromPacked([plan, factors, expected = first.key](ffi::PackedArgs args, ffi::Any* result) {
    TVM_FFI_CHECK(args.size() > OUT + 1 && args.size() <= KEYED_OPERANDS + 1, TypeError)
        << "a prepared call: expected " << OUT + 2 << " to " << KEYED_OPERANDS + 1 << " arguments, got " << args.size();
    Arguments arguments;
    for (int i = 0; i < DENSE_OPERANDS; ++i) arguments.tensors[i] = args[i].cast<DLTensor*>();
    for (int i = OUT + 2; i < args.size(); ++i) arguments.tensors[i - 1] = optional_tensor(args[i]);
    arguments.options = expected.options;
    arguments.left = expected.left, arguments.right = expected.right, arguments.capped = expected.capped != 0;
    Call call;
    *result = nullptr;
    if (parse(arguments, call) && expected.admits(call.key)) *result = execute(*plan, call, args[OUT + 1], factors);
  });
}

// Integers that Python packs into bytes.
class Integers {
 public:
  explicit Integers(const ffi::Bytes& bytes)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()), size_(bytes.size() / 8) {}

  std::int64_t next() {
    TVM_FFI_CHECK(end_ - at_ >= 8, ValueError) << "numbers: expected more than " << size_ << " integers";
    std::int64_t found;
    std::memcpy(&found, at_, 8);
    at_ += 8;
    return found;
  }

  // A number of things, which do not exceed `most`.
  std::size_t count(std::size_t most, const char* what) {
    const std::int64_t found = next();
    TVM_FFI_CHECK(found >= 0 && found <= static_cast<std::int64_t>(most), ValueError)
        << "numbers: expected at most " << most << " " << what << ", got " << found;
    return static_cast<std::size_t>(found);
  }

  int operand(int below) {
    const std::int64_t found = next();
    TVM_FFI_CHECK(found >= 0 && found < below, ValueError)
        << "numbers: expected an operand below " << below << ", got " << found;
    return static_cast<int>(found);
  }

  bool at_end() const { return at_ == end_; }

 private:
  const char *at_, *end_;
  std::size_t size_;
};

// A kernel's function, grid, threads, bytes of shared memory, cluster, and whether its launch is programmatic.
KernelLaunch read_launch(Integers& integers) {
  KernelLaunch kernel{};
  kernel.function = reinterpret_cast<CUfunction>(integers.next());
  for (unsigned& ctas : kernel.grid) ctas = static_cast<unsigned>(integers.next());
  kernel.threads = static_cast<unsigned>(integers.next());
  kernel.shared_bytes = static_cast<unsigned>(integers.next());
  kernel.cluster = static_cast<unsigned>(integers.next());
  kernel.programmatic = integers.next() != 0;
  return kernel;
}

// A tensor map: its operand, the box's rows, columns and swizzle, the bytes from the operand's start to an array, that
// array's element bytes, shape and strides in elements. No element bytes stand for the operand as it is.
EncodedTensorMap read_tensor_map(Integers& integers, const Addresses& addresses, const TensorKey* operands) {
  TensorMapSpec spec{};
  spec.operand = integers.operand(OPERANDS);
  spec.rows = static_cast<unsigned>(integers.next());
  spec.columns = static_cast<unsigned>(integers.next());
  spec.swizzle = static_cast<unsigned>(integers.next());
  spec.offset = static_cast<std::uintptr_t>(integers.next());
  const std::int64_t bytes = integers.next();
  TensorKey array{};
  for (std::int64_t& size : array.shape) size = integers.next();
  for (std::int64_t& stride : array.strides) stride = integers.next();
  array.dtype_and_device = TensorKey::pack({kDLUInt, static_cast<std::uint8_t>(8 * bytes), 1}, {});
  const bool whole = !bytes && operands && spec.operand < DENSE_OPERANDS;
  // Memory that each call allocates has no address yet: the query's stands in until then.
  const std::uintptr_t address = addresses[spec.operand] ? addresses[spec.operand] : addresses[QUERY];
  return encode_tensor_map(driver(), spec, whole ? operands[spec.operand] : array, address);
}

std::vector<EncodedTensorMap> read_tensor_maps(Integers& integers, const Addresses& addresses,
                                               const TensorKey* operands) {
  std::vector<EncodedTensorMap> maps(integers.count(KernelLaunch::MAX_TENSOR_MAPS, "tensor maps"));
  for (EncodedTensorMap& map : maps) map = read_tensor_map(integers, addresses, operands);
  return maps;
}

// A kernel of a plan: its launch, whether only calls with an LSE launch it, the bytes of its parameter, the places of
// addresses and numbers in it, and its tensor maps. No bytes stand for the parameter of kernels with 16-bit operands.
PlannedKernel read_kernel(Integers& integers, const char*& params, const char* params_end, const Call& call) {
  PlannedKernel kernel{read_launch(integers), {}, {}, {}, integers.next() != 0};
  const std::size_t bytes = integers.count(PlannedKernel::MAX_PARAMS, "bytes of a parameter");
  TVM_FFI_CHECK(params_end - params >= static_cast<std::ptrdiff_t>(bytes), ValueError)
      << "params: expected " << bytes << " bytes more, got " << params_end - params;
  if (bytes) {
    kernel.params.assign(params, bytes), params += bytes;
  } else {
    fill_standard(kernel, call.key);
  }
  const auto place = [&](std::size_t size) {
    const std::int64_t at = integers.next();
    TVM_FFI_CHECK(at >= 0 && at + size <= kernel.params.size(), ValueError)
        << "numbers: expected a place in " << kernel.params.size() << " bytes of a parameter, got " << at;
    return static_cast<std::size_t>(at);
  };
  for (std::size_t left = integers.count(PlannedKernel::MAX_PARAMS / 8, "addresses"); left; --left) {
    const std::size_t at = place(sizeof(std::uintptr_t));
    const int operand = integers.operand(OPERANDS);
    kernel.pointers.push_back({at, operand, static_cast<std::uintptr_t>(integers.next())});
  }
  for (std::size_t left = integers.count(PlannedKernel::MAX_PARAMS / 4, "numbers"); left; --left) {
    const std::size_t at = place(sizeof(float));
    kernel.numbers.push_back({at, integers.operand(NUMBERS)});
  }
  kernel.launch.tensor_maps = read_tensor_maps(integers, call.addresses, call.key.tensors);
  return kernel;
}

// Registers the plan of a validated call. After `numbers` and `params` come the arguments that sdpa() will be called
// with. The numbers are the context, bytes of scratch memory, the first and the last length of K that the plan is for,
// and the kernels in the order of their launch.
void register_plan(ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() > 2, TypeError) << "register_plan: expected numbers, params and a call";
  Integers integers(args[0].cast<ffi::Bytes>());
  const ffi::Bytes params = args[1].cast<ffi::Bytes>();
  const GivenCall given(args.Slice(2));
  Call call;
  TVM_FFI_CHECK(parse(given.arguments, call), ValueError)
      << "expected [B, H, S, D] CUDA tensors that do not overlap the output";
  auto plan = std::make_shared<Plan>();
  plan->context = reinterpret_cast<CUcontext>(integers.next());
  plan->workspace_bytes = integers.next();
  plan->growth.first = integers.next(), plan->growth.last = integers.next();
  const std::size_t kernels = integers.count(8, "kernels");
  const char* at = params.data();
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (std::size_t i = 0; i < kernels; ++i) {
      plan->kernels.push_back(read_kernel(integers, at, params.data() + params.size(), call));
    }
  });
  TVM_FFI_CHECK(integers.at_end(), ValueError) << "numbers: expected no more after " << kernels << " kernels";
  CallKey common;
  if (plan->growth.first <= plan->growth.last && growing_key(call.key, common)) growing_plans().insert(common, plan);
  plans().insert(call.key, plan);
}

// Launches one kernel on a stream, which the caller names: the framework tells its current one only to calls with
// tensors. The numbers are the context, the launch and tensor maps of arrays that start at their offsets. `params` is
// the kernel's first argument.
void launch_one(std::int64_t stream, ffi::Bytes numbers, ffi::Bytes params) {
  Integers integers(numbers);
  guarded([&] {
    ScopedContext current(driver(), reinterpret_cast<CUcontext>(integers.next()));
    KernelLaunch kernel = read_launch(integers);
    const Addresses none{};
    kernel.tensor_maps = read_tensor_maps(integers, none, nullptr);
    kernel.issue(driver(), reinterpret_cast<CUstream>(stream), const_cast<char*>(params.data()), none);
  });
}

// 16 when the call's tensors allow 16-byte loads and stores of every row, else 0; -1 when `out` overlaps an
// input or a tensor is no 4-dimensional CUDA tensor.
std::int64_t alignment(DLTensor* query, DLTensor* key, DLTensor* value, DLTensor* out) {
  Arguments arguments;
  arguments.tensors[QUERY] = query, arguments.tensors[KEY] = key;
  arguments.tensors[VALUE] = value, arguments.tensors[OUT] = out;
  Call call;
  return parse(arguments, call) ? call.key.alignment : -1;
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

void clear_plans() { plans().clear(), growing_plans().clear(); }

}  // namespace

// A function of any number of arguments, exported as those are that TVM_FFI_DLL_EXPORT_TYPED_FUNC exports.
#define MICROSDPA_EXPORT_PACKED(name, body)                                                                            \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                         \
    const ffi::PackedArgs packed(reinterpret_cast<const ffi::AnyView*>(args), count);                                  \
    *reinterpret_cast<ffi::Any*>(result) = body;                                                                       \
    TVM_FFI_SAFE_CALL_END();                                                                                           \
  }

MICROSDPA_EXPORT_PACKED(sdpa, sdpa(packed))
MICROSDPA_EXPORT_PACKED(prepared_call, prepared_call(packed))
MICROSDPA_EXPORT_PACKED(register_plan, (register_plan(packed), nullptr))
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_one, launch_one);
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
