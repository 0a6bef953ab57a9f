// The host launcher: one call from Python reads the tensors, finds the plan, allocates the LSE and launches.
//
// Nothing here validates an argument in words. A plan is registered only for arguments that Python has
// validated, and its key holds all that the validation looked at; any other call misses, and Python then says
// what is wrong.
#include <tvm/ffi/string.h>

#include <memory>
#include <optional>

#include "direct.h"
#include "framework.h"
#include "given_call.h"
#include "issue.h"
#include "launch.h"
#include "plan_reader.h"
#include "plans.h"
#include "prepared_exchange.h"
#include "torch_nodes.h"
#include "varlen.h"

namespace microsdpa {
namespace {

// Whether the LSE of a call that goes on from one is [B, H, S_q] in FP32, contiguous, and in memory of its own.
bool continues_from(const Call& call, ffi::AnyView given) {
  if (given.type_index() == ffi::TypeIndex::kTVMFFIBool) return false;
  const DLTensor* lse = optional_tensor(given);
  if (!lse || lse->ndim != 3 || !lse->strides || lse->dtype.code != kDLFloat || lse->dtype.bits != 32) return false;
  const DLTensor& query = *call.query;
  if (lse->device.device_type != query.device.device_type || lse->device.device_id != query.device.device_id) {
    return false;
  }
  TensorKey key{};
  key.dtype_and_device = TensorKey::pack(lse->dtype, lse->device);
  std::int64_t stride = 1;
  for (int i = 3; i-- > 0; stride *= query.shape[i]) {
    if (lse->shape[i] != query.shape[i] || (lse->shape[i] > 1 && lse->strides[i] != stride)) return false;
    key.shape[i] = lse->shape[i], key.strides[i] = stride;
  }
  key.shape[3] = 1;
  for (int i = 0; i < call.key.operands(); ++i) {
    if (call.addresses[i] && meets(address(*lse), key, call.addresses[i], call.key.tensors[i])) return false;
  }
  return address(*lse) != 0;
}

// Launches a plan; gives what LseArgument does.
ffi::Any execute(const Plan& plan, Call& call, ffi::AnyView wanted_lse, const Factors& factors) {
  if (call.key.varlen()) return execute_varlen(plan, call, wanted_lse, factors);
  const LseArgument lse(wanted_lse, *call.query);
  call.addresses[LSE] = lse.address;
  launch_kernels(plan, call, factors);
  return lse.result();
}

}  // namespace

ffi::Any attend(const Arguments& arguments, ffi::AnyView lse, Optional<double> scale, Optional<double> softcap,
                Node* node) {
  Call call;
  if (!parse(arguments, call)) return nullptr;
  const Factors factors = factors_of(arguments, scale, softcap);
  if (!factors.valid()) return nullptr;
  if (call.key.continues() && !continues_from(call, lse)) return nullptr;
  const std::shared_ptr<const Plan> plan = plan_of(call);
  if (!plan) return nullptr;
  if (node) {
    const bool masked = arguments.tensors[MASK] != nullptr;
    if ((masked ? static_cast<Node>(plan->node) : recorded_as(plan->node)) != *node) return nullptr;
    *node = static_cast<Node>(plan->node);
  }
  return execute(*plan, call, lse, factors);
}

namespace {

// A call for gradients, with the kernels that it needs beside the tensors in its key; false for one that no plan can be
// for. `given`: as in differentiate().
bool parse_gradients(const Arguments& arguments, const std::uintptr_t (&given)[OPERANDS], Call& call) {
  if (!parse(arguments, call)) return false;
  for (int i = LSE; i < OPERANDS; ++i) {
    if (given[i]) call.addresses[i] = given[i], call.key.options |= std::int64_t(1) << (32 + i);
  }
  return true;
}

}  // namespace

bool differentiate(const Arguments& arguments, const std::uintptr_t (&given)[OPERANDS], Optional<double> scale) {
  Call call;
  if (!parse_gradients(arguments, given, call)) return false;
  const Factors factors = factors_of(arguments, scale, {});
  const std::shared_ptr<const Plan> plan = factors.valid() ? plans().find(call.key) : nullptr;
  if (!plan) return false;
  launch_kernels(*plan, call, factors);
  return true;
}

namespace {

// attend() for a call whose further numbers are known.
ffi::Any attend_with(const Arguments& arguments, ffi::AnyView lse, const Factors& factors) {
  Call call;
  if (!factors.valid() || !parse(arguments, call)) return nullptr;
  const std::shared_ptr<const Plan> plan = plan_of(call);
  return plan ? execute(*plan, call, lse, factors) : ffi::Any(nullptr);
}

// The hot path. Gives None when there is no plan, else what LseArgument gives.
ffi::Any sdpa(ffi::PackedArgs args) {
  const GivenCall given(args);
  if (given.prologued) return attend_with(given.arguments, given.lse, given.factors());
  return attend(given.arguments, given.lse, given.scale, given.softcap);
}

// sdpa() for 8-bit values without masks, whose three scales stand in the place of these.
ffi::Any sdpa_scaled(ffi::PackedArgs args) {
  constexpr int SCALES = 3;
  TVM_FFI_CHECK(args.size() == FEWEST_ARGUMENTS + SCALES, TypeError) << "sdpa_scaled: expected a call and its scales";
  GivenCall given(args.Slice(0, FEWEST_ARGUMENTS));
  for (int i = 0; i < SCALES; ++i) {
    given.arguments.tensors[QUERY_SCALE + i] = optional_tensor(args[FEWEST_ARGUMENTS + i]);
  }
  return attend(given.arguments, given.lse, given.scale, given.softcap);
}

// sdpa() for a call whose mask is known to be for so many keys, the first argument. The second one says whether the
// call finds its plan while a CUDA graph is captured.
ffi::Any sdpa_known(ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() > 2, TypeError) << "sdpa_known: expected a number of keys, a bool and a call";
  const GivenCall given(args.Slice(2));
  Call call;
  if (!parse(given.arguments, call) || call.key.tensors[KEY].shape[2] != args[0].cast<std::int64_t>()) return nullptr;
  const Factors factors = given.factors();
  const std::shared_ptr<const Plan> plan = factors.valid() ? plan_of(call) : nullptr;
  if (!plan) return nullptr;
  const bool is_refused = !args[1].cast<bool>() && guarded([&] {
    ScopedContext current(driver(), plan->context);
    return is_captured(current_stream(call.query->device));
  });
  if (is_refused) return nullptr;
  return execute(*plan, call, given.lse, factors);
}

// What dropout adds to a call, ahead of its arguments: how many of 65,536 probabilities are kept, and the factor of
// these; seed and offset on the device, or None for the two numbers that follow; and where they are left, or None.
struct GivenDropout {
  static constexpr int ARGUMENTS = 6;

  std::int64_t kept;
  double scale;
  const DLTensor *drawn, *state;
  std::int64_t seed, offset;

  explicit GivenDropout(ffi::PackedArgs args) {
    TVM_FFI_CHECK(args.size() > ARGUMENTS, TypeError) << "a call with dropout: expected numbers and a call";
    kept = args[0].cast<std::int64_t>(), scale = args[1].cast<double>();
    drawn = optional_tensor(args[2]);
    seed = args[3].cast<std::int64_t>(), offset = args[4].cast<std::int64_t>();
    state = optional_tensor(args[5]);
  }

  void apply(Call& call, Factors& factors) const {
    call.addresses[DRAWN] = drawn ? address(*drawn) : 0;
    call.addresses[SEED] = static_cast<std::uintptr_t>(seed);
    call.addresses[OFFSET] = static_cast<std::uintptr_t>(offset);
    call.addresses[STATE] = state ? address(*state) : 0;
    factors.kept = static_cast<std::uint32_t>(kept), factors.kept_scale = static_cast<float>(scale);
  }
};

// sdpa() for a call that drops probabilities.
ffi::Any sdpa_dropped(ffi::PackedArgs args) {
  const GivenDropout dropout(args);
  const GivenCall given(args.Slice(GivenDropout::ARGUMENTS));
  Call call;
  if (!parse(given.arguments, call)) return nullptr;
  Factors factors = given.factors();
  const std::shared_ptr<const Plan> plan = factors.valid() ? plan_of(call) : nullptr;
  if (!plan) return nullptr;
  dropout.apply(call, factors);
  return execute(*plan, call, given.lse, factors);
}

// Allows the node of an operator of torch's (Node of torch_nodes.h) for the plan of a call, which the arguments after
// its number describe; false when there is no plan.
bool allow_node(ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() > 1, TypeError) << "allow_node: expected a node and a call";
  Call call;
  if (!parse(GivenCall(args.Slice(1)).arguments, call) || call.key.varlen()) return false;
  const std::shared_ptr<const Plan> plan = plan_of(call);
  if (!plan) return false;
  auto allowed = std::make_shared<Plan>(*plan);
  allowed->node = args[0].cast<std::int64_t>();
  plans().insert(call.key, allowed);
  return true;
}

// Gives the calls that differ from this one in batch size, lengths and strides alone a number; false where there is
// more to look at in each.
bool register_kind(ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() > 1, TypeError) << "register_kind: expected a number and a call";
  Call call;
  CallKey common;
  if (!parse(GivenCall(args.Slice(1)).arguments, call) || call.key.varlen()) return false;
  if (!resized_key(call.key, common)) return false;
  auto kind = std::make_shared<Plan>();
  kind->kind = args[0].cast<std::int64_t>();
  kinds().insert(common, kind);
  return true;
}

// sdpa(), and for a call without a plan the number of its kind, or None.
ffi::Any sdpa_or_kind(ffi::PackedArgs args) {
  ffi::Any launched = sdpa(args);
  if (launched.type_index() != ffi::TypeIndex::kTVMFFINone) return launched;
  const GivenCall given(args);
  Call call;
  CallKey common;
  if (!parse(given.arguments, call) || call.key.varlen() || !given.factors().valid()) return nullptr;
  if (!resized_key(call.key, common)) return nullptr;
  const std::shared_ptr<const Plan> kind = kinds().find(common);
  return kind ? ffi::Any(kind->kind) : ffi::Any(nullptr);
}

// A function of (query, key, value, out, LSE, and tensors of masks and scales) that launches the plan of these
// arguments without looking it up: it gives what sdpa() does, and None for tensors that differ from these in more than
// their addresses. Window, soft cap and scale are those given here. None when there is no plan.
ffi::Any prepared_call(ffi::PackedArgs args) {
  const GivenCall given(args);
  Call first;
  if (!parse(given.arguments, first) || first.key.varlen() || first.key.drops()) return nullptr;
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

// A call for gradients: the call's arguments up to the soft cap, of which the output and the LSE are read, and then the
// gradients of the output and the LSE, and what is written: those of query, key, value, attn_mask, slopes and sinks.
// None stands for what there is not.
struct GivenGradients {
  static constexpr int FIRST = QUERY_SCALE_ARGUMENT, GRADIENTS = DRAWN - GRAD_QUERY, ARGUMENTS = FIRST + 2 + GRADIENTS;

  GivenCall given;
  std::uintptr_t addresses[OPERANDS]{};

  explicit GivenGradients(ffi::PackedArgs args) : given(args.Slice(0, FIRST)) {
    TVM_FFI_CHECK(args.size() == ARGUMENTS, TypeError)
        << "a call for gradients: expected " << ARGUMENTS << " arguments, got " << args.size();
    given.arguments.tensors[GRAD_OUT] = args[FIRST].cast<DLTensor*>();
    addresses[LSE] = address(*given.lse.cast<DLTensor*>());
    if (const DLTensor* tensor = optional_tensor(args[FIRST + 1])) addresses[GRAD_LSE] = address(*tensor);
    for (int i = 0; i < GRADIENTS; ++i) {
      if (const DLTensor* tensor = optional_tensor(args[FIRST + 2 + i])) addresses[GRAD_QUERY + i] = address(*tensor);
    }
  }

  bool parse(Call& call) const { return parse_gradients(given.arguments, addresses, call); }
};

// Launches the plan of a call for gradients; false when there is none. `dropout` is null for none.
bool launch_gradients(ffi::PackedArgs args, const GivenDropout* dropout) {
  const GivenGradients given(args);
  Call call;
  if (!given.parse(call)) return false;
  Factors factors = given.given.factors();
  const std::shared_ptr<const Plan> plan = factors.valid() ? plans().find(call.key) : nullptr;
  if (!plan) return false;
  if (dropout) dropout->apply(call, factors);
  launch_kernels(*plan, call, factors);
  return true;
}

bool gradients(ffi::PackedArgs args) { return launch_gradients(args, nullptr); }

// The same for a call that dropped probabilities.
bool gradients_dropped(ffi::PackedArgs args) {
  const GivenDropout dropout(args);
  return launch_gradients(args.Slice(GivenDropout::ARGUMENTS), &dropout);
}

// Registers the plan of a validated call, and gives it. The numbers are the context, bytes of scratch memory, the first
// and the last length of K that the plan is for, the fields of VarlenLaunch and of ChangedRows, and the kernels in the
// order of their launch. Of a plan that is for other sizes too, the further fields of SizeRange follow, and Sizing of
// each kernel.
std::shared_ptr<const Plan> register_plan(Integers integers, const ffi::Bytes& params, bool is_parsed,
                                          const Call& call) {
  TVM_FFI_CHECK(is_parsed, ValueError) << "expected [B, H, S, D] CUDA tensors that do not overlap the output";
  auto plan = std::make_shared<Plan>();
  plan->context = reinterpret_cast<CUcontext>(integers.next());
  plan->workspace_bytes = integers.next();
  plan->range.first = integers.next(), plan->range.last = integers.next();
  plan->range.first_batch = plan->range.last_batch = call.key.tensors[QUERY].shape[0];
  plan->varlen.block_m = integers.next(), plan->varlen.ctas = integers.next();
  plan->varlen.workspace_bytes = integers.next(), plan->varlen.cluster = integers.next();
  plan->varlen.box_rows = integers.next(), plan->varlen.box_columns = integers.next();
  plan->varlen.tail_columns = integers.next(), plan->varlen.box_queries = integers.next();
  plan->changed.query = integers.next(), plan->changed.key = integers.next(), plan->changed.bytes = integers.next();
  const std::size_t kernels = integers.count(8, "kernels");
  const char* at = params.data();
  guarded([&] {
    ScopedContext current(driver(), plan->context);
    for (std::size_t i = 0; i < kernels; ++i) {
      const char* end = params.data() + params.size();
      plan->kernels.push_back(read_kernel(integers, at, end, call, plan->changed, i == 0));
    }
  });
  if (kernels && plan->kernels.back().launch.sequence_rows) {
    plan->shared_bytes = plan->workspace_bytes - plan->changed.bytes;
    plan->size_shared_scratch();
  }
  if (!integers.at_end()) {
    plan->range.first_batch = integers.next(), plan->range.last_batch = integers.next();
    plan->range.queries_follow = integers.next() != 0;
    for (PlannedKernel& kernel : plan->kernels) kernel.sizing = read_sizing(integers);
  }
  for (const PlannedKernel& kernel : plan->kernels) {
    for (const Pointer& pointer : kernel.pointers) {
      if (pointer.operand == COUNTERS) plan->counters = Arrivals::COUNTERS;
      if (pointer.operand == COUNTER) plan->counters = std::max(plan->counters, 1);
    }
  }
  TVM_FFI_CHECK(integers.at_end(), ValueError) << "numbers: expected no more after " << kernels << " kernels";
  if (!call.key.varlen()) add_ranged(call.key, plan);
  plans().insert(call.key, plan);
  return plan;
}

bool parse_call(ffi::PackedArgs args, Call& call) { return parse(GivenCall(args).arguments, call); }
bool parse_given_gradients(ffi::PackedArgs args, Call& call) { return GivenGradients(args).parse(call); }

// `parse` reads the arguments behind numbers and params as sdpa() or gradients() does.
template <typename Parse>
void only_register(ffi::PackedArgs args, Parse parse) {
  TVM_FFI_CHECK(args.size() > 2, TypeError) << "register_plan: expected numbers, params and a call";
  Call call;
  const ffi::Bytes numbers = args[0].cast<ffi::Bytes>();
  const bool is_parsed = parse(args.Slice(2), call);
  register_plan(Integers(numbers), args[1].cast<ffi::Bytes>(), is_parsed, call);
}

// Registers the plan of a call and launches it; gives what sdpa() does.
ffi::Any register_and_launch(Integers integers, const ffi::Bytes& params, ffi::PackedArgs args) {
  const GivenCall given(args);
  Call call;
  const bool is_parsed = parse(given.arguments, call);
  const std::shared_ptr<const Plan> plan = register_plan(integers, params, is_parsed, call);
  const Factors factors = given.factors();
  if (!factors.valid()) return nullptr;
  return execute(*plan, call, given.lse, factors);
}

ffi::Any register_and_launch(ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() > 2, TypeError) << "register_and_launch: expected numbers, params and a call";
  const ffi::Bytes numbers = args[0].cast<ffi::Bytes>();
  return register_and_launch(Integers(numbers), args[1].cast<ffi::Bytes>(), args.Slice(2));
}

// The same for one kernel with 16-bit operands, of whose numbers those that sizes change come by themselves: the
// numbers ahead of the growth, its two, those up to the grid, its three, those behind it, and then the call.
ffi::Any register_sized(ffi::PackedArgs args) {
  constexpr int GROWTH = 1, GRID = 4, CALL = 8;
  TVM_FFI_CHECK(args.size() > CALL, TypeError) << "register_sized: expected numbers, growth, grid and a call";
  std::string numbers;
  const auto add = [&](int from, int to) {
    for (int i = from; i < to; ++i) {
      const std::int64_t number = args[i].cast<std::int64_t>();
      numbers.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    const ffi::Bytes rest = args[to].cast<ffi::Bytes>();
    numbers.append(rest.data(), rest.size());
  };
  add(0, 0), add(GROWTH, GROWTH + 2), add(GRID, GRID + 3);
  return register_and_launch(Integers(numbers.data(), numbers.size()), ffi::Bytes(), args.Slice(CALL));
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

void clear_kinds() { kinds().clear(); }

void clear_plans() { plans().clear(), ranged_plans().clear(), kinds().clear(); }

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
MICROSDPA_EXPORT_PACKED(sdpa_scaled, sdpa_scaled(packed))
MICROSDPA_EXPORT_PACKED(sdpa_known, sdpa_known(packed))
MICROSDPA_EXPORT_PACKED(prepared_call, prepared_call(packed))
MICROSDPA_EXPORT_PACKED(prepared_exchange, prepared_exchange(packed))
MICROSDPA_EXPORT_PACKED(allow_node, allow_node(packed))
MICROSDPA_EXPORT_PACKED(register_kind, register_kind(packed))
MICROSDPA_EXPORT_PACKED(sdpa_or_kind, sdpa_or_kind(packed))
MICROSDPA_EXPORT_PACKED(gradients, gradients(packed))
MICROSDPA_EXPORT_PACKED(sdpa_dropped, sdpa_dropped(packed))
MICROSDPA_EXPORT_PACKED(gradients_dropped, gradients_dropped(packed))
MICROSDPA_EXPORT_PACKED(register_plan, (only_register(packed, parse_call), nullptr))
MICROSDPA_EXPORT_PACKED(register_and_launch, register_and_launch(packed))
MICROSDPA_EXPORT_PACKED(register_sized, register_sized(packed))
MICROSDPA_EXPORT_PACKED(register_gradients, (only_register(packed, parse_given_gradients), nullptr))
TVM_FFI_DLL_EXPORT_TYPED_FUNC(direct_function, direct_function);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_one, launch_one);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(primary_context, primary_context);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(play, play);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rethrow_exchange_failure, rethrow_exchange_failure);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_nodes, register_nodes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_own_gradients, register_own_gradients);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_node_constants, set_node_constants);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect_node, expect_node);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expect_no_node, expect_no_node);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(alignment, alignment);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load_kernel, load_kernel);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(driver_version, driver_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_programmatic, set_programmatic);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_count, plan_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_plans, clear_plans);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clear_kinds, clear_kinds);

}  // namespace microsdpa
