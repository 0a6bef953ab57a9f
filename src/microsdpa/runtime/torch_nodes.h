// Kernels for two operators of torch's, whose nodes in autograd's graph are C++: the forward pass is this library's,
// and the backward pass torch's. nodes.py registers them, for a backend that no tensor is on, and calls the operators.
//
// The backward pass may also be this library's: its node is cuDNN's, with a sparse tensor for the random state. So
// torch's dispatcher looks for the backward operator's kernel of sparse tensors, which is own_gradients(). It finds the
// code of the call's options where the node has a number of queries, which it does not need. A call without a plan goes
// on to the kernel of sparse tensors of another layout, which nodes.py has registered.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <utility>

#include "framework.h"
#include "launch.h"
#include "torch_shim.h"

namespace microsdpa {

// What the next call of this thread asks for beyond the operator's arguments.
struct ExpectedCall {
  bool given = false;
  std::int64_t options = 0;
  bool masked = false;
  Node node = NO_NODE;  // of a call with a mask
  DLTensor mask{};
  std::int64_t sizes[4], strides[4];
};

inline ExpectedCall& expected_call() {
  static thread_local ExpectedCall call;
  return call;
}

// Codes of the options of a call that nothing more was said of, without and with a causal mask.
inline std::atomic<std::int64_t> plain_options{0}, causal_options{0};

// Random state and mask of the dropout that there is not, on each device, and the sparse tensors that stand for the
// state where the gradient is this library's, or null; nothing writes to them.
struct NodeConstants {
  TorchTensor state, scalar, empty, own, unplanned;
};
constexpr int MAX_DEVICES = 64;
inline std::atomic<const NodeConstants*> node_constants[MAX_DEVICES];

// Types of operands and masks; any other one is said to be opaque.
inline DLDataType type_of(std::int32_t torch_type) {
  switch (torch_type) {
    case TORCH_HALF:
      return {kDLFloat, 16, 1};
    case TORCH_BFLOAT16:
      return {kDLBfloat, 16, 1};
    case TORCH_BOOL:
      return {kDLBool, 8, 1};
    case TORCH_INT32:
      return {kDLInt, 32, 1};
    default:
      return {kDLOpaqueHandle, 16, 1};
  }
}

// A tensor of torch's as DLPack describes it, without a reference; it must live as long.
struct TorchView {
  DLTensor tensor{};

  TorchView(const TorchShim& torch, TorchTensor handle) {
    std::int32_t dtype, device_type, index;
    std::int64_t rank;
    TorchShim::check(torch.get_data_ptr(handle, &tensor.data), "get_data_ptr");
    TorchShim::check(torch.get_dim(handle, &rank), "get_dim");
    TorchShim::check(torch.get_sizes(handle, &tensor.shape), "get_sizes");
    TorchShim::check(torch.get_strides(handle, &tensor.strides), "get_strides");
    TorchShim::check(torch.get_dtype(handle, &dtype), "get_dtype");
    TorchShim::check(torch.get_device_type(handle, &device_type), "get_device_type");
    TorchShim::check(torch.get_device_index(handle, &index), "get_device_index");
    tensor.ndim = static_cast<std::int32_t>(rank);
    tensor.device = {device_type == TORCH_CUDA ? kDLCUDA : kDLCPU, index};
    tensor.dtype = type_of(dtype);
  }
};

// Memory for an output in the memory order of `like`, as torch.empty_like has it: dimensions by descending strides.
inline void dense_strides(const DLTensor& like, std::int64_t (&strides)[4]) {
  int order[4];
  std::iota(order, order + 4, 0);
  std::stable_sort(order, order + 4, [&](int a, int b) {
    if (like.shape[a] <= 1 || like.shape[b] <= 1) return false;
    return like.strides[a] > like.strides[b];
  });
  std::int64_t stride = 1;
  for (int i = 3; i >= 0; --i) strides[order[i]] = stride, stride *= std::max<std::int64_t>(like.shape[order[i]], 1);
}

// Memory like that of an operand, in its memory order.
inline OwnedTensor like(const TorchShim& torch, TorchTensor operand, const DLTensor& view) {
  std::int64_t strides[4];
  dense_strides(view, strides);
  std::int32_t dtype;
  OwnedTensor found;
  TorchShim::check(torch.get_dtype(operand, &dtype), "get_dtype");
  TorchShim::check(torch.empty_strided(4, view.shape, strides, dtype, TORCH_CUDA, view.device.device_id, found.place()),
                   "allocating memory like an operand's");
  return found;
}

// Runs `body` with torch's current stream of a device as the framework's: it is told to calls from Python only.
class CurrentStream {
 public:
  CurrentStream(const TorchShim& torch, const DLDevice& device) : device_(device) {
    void* stream;
    TorchShim::check(torch.current_stream(device.device_id, &stream), "get_current_cuda_stream");
    TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before_);
  }
  ~CurrentStream() { TVMFFIEnvSetStream(device_.device_type, device_.device_id, before_, nullptr); }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  DLDevice device_;
  TVMFFIStreamHandle before_ = nullptr;
};

struct NodeCall {
  OwnedTensor query, key, value, bias;
  bool causal;
  Optional<double> scale;
};

inline Optional<double> take_scale(TorchValue optional) {
  TorchValue bits;
  if (!take_optional(optional, bits)) return {};
  double scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

// An LSE for a backward pass under a mask: +inf for a row that sees no key, which has -inf. Its weights, which are
// exp(score - LSE), are then zeros.
inline OwnedTensor of_seen_rows(const TorchShim& torch, OwnedTensor lse) {
  TorchValue stack[] = {value_of(lse.release()), optional_value(NAN), optional_value(INFINITY),
                        optional_value(INFINITY)};
  TorchShim::check(torch.call_dispatcher("aten::nan_to_num_", "", stack, TORCH_ABI), "nan_to_num_");
  return OwnedTensor(tensor_of(stack[0]));
}

// Nine results that say that nothing was computed: tensors that are not there.
inline void give_nothing(const TorchShim& torch, TorchValue* stack) {
  OwnedTensor absent[7];
  for (OwnedTensor& tensor : absent) TorchShim::check(torch.new_undefined(tensor.place()), "new_uninitialized_tensor");
  stack[4] = stack[5] = 0;
  for (int i = 0; i < 7; ++i) stack[i < 4 ? i : i + 2] = value_of(absent[i].release());
}

// The operators' nine results: output, LSE of `lse_rank` dimensions, two tensors that are not there, S_q, S_k, random
// state and mask of a dropout. No tensor is there where the call has no plan that `node` is allowed for: Python then
// makes one, or says what is wrong.
inline void attend_node(TorchValue* stack, NodeCall call, Node node, int lse_rank, TorchTensor NodeConstants::* state) {
  const ExpectedCall expected = std::exchange(expected_call(), ExpectedCall{});
  const TorchShim& torch = *TorchShim::get();
  TorchView query(torch, call.query.get()), key(torch, call.key.get()), value(torch, call.value.get());
  const DLTensor& q = query.tensor;
  const bool on_gpu = q.ndim == 4 && q.device.device_type == kDLCUDA && q.device.device_id < MAX_DEVICES;
  const NodeConstants* constants = on_gpu ? node_constants[q.device.device_id].load() : nullptr;
  if (!constants) return give_nothing(torch, stack);

  OwnedTensor out = like(torch, call.query.get(), q), lse;
  const std::int64_t sizes[] = {q.shape[0], q.shape[1], q.shape[2], 1};
  const std::int64_t dense[] = {sizes[1] * sizes[2], sizes[2], 1, 1};
  TorchShim::check(
      torch.empty_strided(lse_rank, sizes, dense, TORCH_FLOAT, TORCH_CUDA, q.device.device_id, lse.place()),
      "allocating the LSE");

  TorchView result(torch, out.get()), sums(torch, lse.get());
  const std::int64_t options =
      expected.given ? expected.options : (call.causal ? causal_options : plain_options).load();
  Arguments arguments;
  arguments.tensors[QUERY] = &query.tensor, arguments.tensors[KEY] = &key.tensor;
  arguments.tensors[VALUE] = &value.tensor, arguments.tensors[OUT] = &result.tensor;
  arguments.options = options;
  DLTensor mask = expected.mask;
  if (expected.masked) {
    mask.shape = const_cast<std::int64_t*>(expected.sizes), mask.strides = const_cast<std::int64_t*>(expected.strides);
    arguments.tensors[MASK] = &mask;
    node = expected.node;
  }
  CurrentStream current(torch, q.device);
  const ffi::Any launched = attend(arguments, ffi::AnyView(&sums.tensor), call.scale, {}, &node);
  const bool own = node == OWN_NODE;
  if (launched == nullptr || (own && !constants->own)) return give_nothing(torch, stack);
  if (expected.masked && !own) {
    OwnedTensor seen = of_seen_rows(torch, std::move(lse));
    *lse.place() = seen.release();
  }

  OwnedTensor absent[2], held[3];
  const TorchTensor shared[] = {own ? constants->own : constants->*state, constants->scalar, constants->empty};
  for (OwnedTensor& tensor : absent) TorchShim::check(torch.new_undefined(tensor.place()), "new_uninitialized_tensor");
  for (int i = 0; i < 3; ++i) TorchShim::check(torch.new_handle(shared[i], held[i].place()), "new_tensor_handle");
  stack[0] = value_of(out.release()), stack[1] = value_of(lse.release());
  stack[2] = value_of(absent[0].release()), stack[3] = value_of(absent[1].release());
  stack[4] = static_cast<TorchValue>(own ? options : q.shape[2]);
  stack[5] = static_cast<TorchValue>(key.tensor.shape[2]);
  for (int i = 0; i < 3; ++i) stack[6 + i] = value_of(held[i].release());
}

inline OwnedTensor taken(TorchValue value) { return OwnedTensor(tensor_of(value)); }

// _scaled_dot_product_cudnn_attention(query, key, value, bias, compute LSE, dropout, causal, debug mask, scale)
inline void cudnn_node(TorchValue* stack, std::uint64_t, std::uint64_t) {
  TorchValue bias = 0;
  take_optional(stack[3], bias);
  attend_node(stack,
              {taken(stack[0]), taken(stack[1]), taken(stack[2]), taken(bias), bool_of(stack[6]), take_scale(stack[8])},
              CUDNN_NODE, 4, &NodeConstants::scalar);
}

// _scaled_dot_product_flash_attention(query, key, value, dropout, causal, debug mask, scale)
inline void flash_node(TorchValue* stack, std::uint64_t, std::uint64_t) {
  attend_node(
      stack,
      {taken(stack[0]), taken(stack[1]), taken(stack[2]), OwnedTensor(), bool_of(stack[4]), take_scale(stack[6])},
      FLASH_NODE, 3, &NodeConstants::state);
}

constexpr char CUDNN_BACKWARD[] = "_scaled_dot_product_cudnn_attention_backward";

// Places in the arguments of _scaled_dot_product_cudnn_attention_backward.
enum BackwardArgument { GIVEN_LSE = 5, GIVEN_STATE, GIVEN_BIAS = 8, GIVEN_CODE = 11, GIVEN_SCALE = 15 };

// Gradients of query, key and value by the plan that there is for a call; false where there is none. The LSE has a
// dimension more than the call's.
inline bool differentiate_node(const TorchShim& torch, const TorchValue* stack, Optional<double> scale,
                               OwnedTensor (&found)[3]) {
  // Of a call of no kernel in particular: causal, and whether heads share keys, which a plan for gradients always may.
  constexpr std::int64_t CAUSAL_BITS = 3, SHARED_BIT = 4;
  const auto code = static_cast<std::int64_t>(stack[GIVEN_CODE]);
  bool masked;
  if (torch.may_want_same_bits() || (code & ~(CAUSAL_BITS | SHARED_BIT))) return false;
  std::int32_t device_type;
  TorchShim::check(torch.get_device_type(tensor_of(stack[1]), &device_type), "get_device_type");
  if (device_type != TORCH_CUDA) return false;
  Arguments arguments;
  arguments.options = (code & CAUSAL_BITS) | SHARED_BIT;
  const TorchView grad(torch, tensor_of(stack[0])), query(torch, tensor_of(stack[1])), key(torch, tensor_of(stack[2]));
  const TorchView value(torch, tensor_of(stack[3])), out(torch, tensor_of(stack[4]));
  const TorchView lse(torch, tensor_of(stack[GIVEN_LSE]));
  const DLTensor& dense = lse.tensor;
  if (dense.ndim != 4 || grad.tensor.ndim != 4) return false;
  if (grad.tensor.strides[3] != 1 && grad.tensor.shape[3] > 1) return false;
  if (dense.strides[2] != 1 || dense.strides[1] != dense.shape[2]) return false;
  if (dense.strides[0] != dense.shape[1] * dense.shape[2]) return false;
  arguments.tensors[QUERY] = &query.tensor, arguments.tensors[KEY] = &key.tensor;
  arguments.tensors[VALUE] = &value.tensor, arguments.tensors[OUT] = &out.tensor;
  arguments.tensors[GRAD_OUT] = &grad.tensor;
  TorchShim::check(torch.is_defined(tensor_of(stack[GIVEN_BIAS]), &masked), "is_defined");
  Optional<TorchView> mask;
  if (masked) mask = TorchView(torch, tensor_of(stack[GIVEN_BIAS])), arguments.tensors[MASK] = &mask.value().tensor;

  std::uintptr_t given[OPERANDS]{};
  given[LSE] = address(dense);
  const TorchView* operands[] = {&query, &key, &value};
  for (int i = 0; i < 3; ++i) {
    OwnedTensor memory = like(torch, tensor_of(stack[1 + i]), operands[i]->tensor);
    given[GRAD_QUERY + i] = address(TorchView(torch, memory.get()).tensor);
    *found[i].place() = memory.release();
  }
  CurrentStream current(torch, query.tensor.device);
  return differentiate(arguments, given, scale);
}

// _scaled_dot_product_cudnn_attention_backward of a node whose gradient is this library's.
inline void own_gradients(TorchValue* stack, std::uint64_t, std::uint64_t) {
  const TorchShim& torch = *TorchShim::get();
  TorchValue bits = 0;
  const bool scaled = take_optional(stack[GIVEN_SCALE], bits);
  double scale = 0.0;
  std::memcpy(&scale, &bits, sizeof(scale));
  OwnedTensor found[3];
  if (differentiate_node(torch, stack, scaled ? Optional<double>(scale) : Optional<double>(), found)) {
    for (int i = 0; i < 11; ++i) torch.delete_tensor(tensor_of(stack[i]));
    for (int i = 0; i < 3; ++i) stack[i] = value_of(found[i].release());
    return;
  }
  std::int32_t device;
  TorchShim::check(torch.get_device_index(tensor_of(stack[1]), &device), "get_device_index");
  const NodeConstants* constants = device >= 0 && device < MAX_DEVICES ? node_constants[device].load() : nullptr;
  if (!constants || !constants->unplanned) throw std::runtime_error("no node of this device has such a gradient");
  torch.delete_tensor(tensor_of(stack[GIVEN_STATE]));
  TorchTensor state;
  TorchShim::check(torch.new_handle(constants->unplanned, &state), "new_tensor_handle");
  stack[GIVEN_STATE] = value_of(state), stack[GIVEN_SCALE] = scaled ? optional_value(scale) : 0;
  const std::string name = std::string("aten::") + CUDNN_BACKWARD;
  TorchShim::check(torch.call_dispatcher(name.c_str(), "", stack, TORCH_ABI), CUDNN_BACKWARD);
}

// Registers the kernel for nodes whose gradient is this library's under a dispatch key of torch's.
inline void register_own_gradients(ffi::String key) {
  static void* library = nullptr;  // for the life of the process
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (library) return;
  const TorchShim& torch = *TorchShim::get();
  guarded([&] {
    TorchShim::check(torch.library_init("aten", key.c_str(), __FILE__, __LINE__, &library), "library_init_impl");
    TorchShim::check(torch.library_impl(library, CUDNN_BACKWARD, own_gradients, TORCH_ABI), "torch_library_impl");
  });
}

// Registers the kernels under a dispatch key of torch's for those of the operators that are named; false where the
// process has no torch with CUDA.
inline bool register_nodes(ffi::String key, Optional<ffi::String> cudnn, Optional<ffi::String> flash,
                           std::int64_t plain, std::int64_t causal) {
  const TorchShim* torch = TorchShim::get();
  if (!torch) return false;
  static void* library = nullptr;  // for the life of the process: torch has its kernels as long
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (library) return true;
  plain_options = plain, causal_options = causal;
  guarded([&] {
    TorchShim::check(torch->library_init("aten", key.c_str(), __FILE__, __LINE__, &library), "library_init_impl");
    const auto add = [&](const Optional<ffi::String>& name, TorchKernel kernel) {
      if (name.has_value()) {
        TorchShim::check(torch->library_impl(library, name.value().c_str(), kernel, TORCH_ABI), "torch_library_impl");
      }
    };
    add(cudnn, cudnn_node);
    add(flash, flash_node);
  });
  return true;
}

// Sets up a device: addresses of two random numbers and of one, in its memory, which the caller keeps for ever, and
// handles of the sparse tensors of NodeConstants, or 0, which become this library's.
inline void set_node_constants(std::int64_t device, std::int64_t state, std::int64_t scalar, std::int64_t own,
                               std::int64_t unplanned) {
  TVM_FFI_CHECK(device >= 0 && device < MAX_DEVICES, ValueError)
      << "device: expected one below " << MAX_DEVICES << ", got " << device;
  constexpr std::int32_t INT64 = 4, UINT64 = 29;
  const TorchShim& torch = *TorchShim::get();
  const std::int64_t two = 2, none = 0, unit = 1;
  const auto index = static_cast<std::int32_t>(device);
  guarded([&] {
    NodeConstants found{};
    TorchShim::check(torch.tensor_from_blob(reinterpret_cast<void*>(state), 1, &two, &unit, 0, UINT64, TORCH_CUDA,
                                            index, &found.state),
                     "create_tensor_from_blob");
    TorchShim::check(torch.tensor_from_blob(reinterpret_cast<void*>(scalar), 0, nullptr, nullptr, 0, INT64, TORCH_CUDA,
                                            index, &found.scalar),
                     "create_tensor_from_blob");
    TorchShim::check(torch.tensor_from_blob(reinterpret_cast<void*>(scalar), 1, &none, &unit, 0, TORCH_FLOAT,
                                            TORCH_CUDA, index, &found.empty),
                     "create_tensor_from_blob");
    found.own = reinterpret_cast<TorchTensor>(own), found.unplanned = reinterpret_cast<TorchTensor>(unplanned);
    node_constants[device].store(new NodeConstants(found));
  });
}

// Says what the next call of this thread asks for: the code of its options, its mask of at most four dimensions, and
// the node that is to have its gradient.
inline void expect_node(std::int64_t options, ffi::AnyView mask, std::int64_t node) {
  ExpectedCall call;
  call.given = true, call.options = options, call.node = static_cast<Node>(node);
  if (const DLTensor* tensor = optional_tensor(mask)) {
    TVM_FFI_CHECK(tensor->ndim <= 4, ValueError) << "mask: expected at most 4 dimensions, got " << tensor->ndim;
    call.masked = true, call.mask = *tensor;
    std::copy_n(tensor->shape, tensor->ndim, call.sizes);
    std::copy_n(tensor->strides, tensor->ndim, call.strides);
  }
  expected_call() = call;
}

// Takes that back, after a call that did not come to its kernel.
inline void expect_no_node() { expected_call() = ExpectedCall{}; }

}  // namespace microsdpa
