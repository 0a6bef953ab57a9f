// torch's stable C interface (torch/csrc/stable/c/shim.h, torch/csrc/inductor/aoti_torch/c/shim.h), loaded at run time
// from the torch that the process has: this library is built without torch, and for every version from 2.11 on.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace microsdpa {

using TorchTensor = struct TorchTensorOpaque*;  // AtenTensorHandle: owned by whoever has it
using TorchValue = std::uint64_t;               // StableIValue: a number, or the address of what is larger
using TorchKernel = void (*)(TorchValue* stack, std::uint64_t arguments, std::uint64_t results);

constexpr std::uint64_t TORCH_ABI = std::uint64_t(2) << 56 | std::uint64_t(11) << 48;  // of torch 2.11
constexpr std::int32_t TORCH_INT32 = 3, TORCH_HALF = 5, TORCH_FLOAT = 6, TORCH_BOOL = 11, TORCH_BFLOAT16 = 15,
                       TORCH_CUDA = 1;

class TorchShim {
 public:
  // Null where the process has no torch for CUDA, or one without this interface.
  static const TorchShim* get() {
    static const TorchShim shim;
    return shim.missing_ ? nullptr : &shim;
  }

  // Whether torch.use_deterministic_algorithms(True) holds; true where this torch cannot be asked: by functions in C++,
  // which the interface is not.
  bool may_want_same_bits() const { return !context_ || !deterministic_ || deterministic_(context_()); }

  // torch has printed what went wrong.
  static void check(std::int32_t error, const char* call) {
    if (error) throw std::runtime_error(std::string(call) + " failed");
  }

  std::int32_t (*get_data_ptr)(TorchTensor, void**);
  std::int32_t (*get_dim)(TorchTensor, std::int64_t*);
  std::int32_t (*get_sizes)(TorchTensor, std::int64_t**);
  std::int32_t (*get_strides)(TorchTensor, std::int64_t**);
  std::int32_t (*get_dtype)(TorchTensor, std::int32_t*);
  std::int32_t (*get_device_type)(TorchTensor, std::int32_t*);
  std::int32_t (*get_device_index)(TorchTensor, std::int32_t*);
  std::int32_t (*empty_strided)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t,
                                std::int32_t, TorchTensor*);
  std::int32_t (*tensor_from_blob)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t,
                                   std::int32_t, std::int32_t, std::int32_t, TorchTensor*);
  std::int32_t (*new_handle)(TorchTensor, TorchTensor*);
  std::int32_t (*new_undefined)(TorchTensor*);
  std::int32_t (*is_defined)(TorchTensor, bool*);
  std::int32_t (*delete_tensor)(TorchTensor);
  std::int32_t (*current_stream)(std::int32_t, void**);
  std::int32_t (*library_init)(const char*, const char*, const char*, std::uint32_t, void**);
  std::int32_t (*library_impl)(void*, const char*, TorchKernel, std::uint64_t);
  std::int32_t (*call_dispatcher)(const char*, const char*, TorchValue*, std::uint64_t);

 private:
  TorchShim() {
    void* cpu = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    void* cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    load(cpu, get_data_ptr, "aoti_torch_get_data_ptr");
    load(cpu, get_dim, "aoti_torch_get_dim");
    load(cpu, get_sizes, "aoti_torch_get_sizes");
    load(cpu, get_strides, "aoti_torch_get_strides");
    load(cpu, get_dtype, "aoti_torch_get_dtype");
    load(cpu, get_device_type, "aoti_torch_get_device_type");
    load(cpu, get_device_index, "aoti_torch_get_device_index");
    load(cpu, empty_strided, "aoti_torch_empty_strided");
    load(cpu, tensor_from_blob, "aoti_torch_create_tensor_from_blob");
    load(cpu, new_handle, "aoti_torch_new_tensor_handle");
    load(cpu, new_undefined, "aoti_torch_new_uninitialized_tensor");
    load(cpu, is_defined, "aoti_torch_is_defined");
    load(cpu, delete_tensor, "aoti_torch_delete_tensor_object");
    load(cuda, current_stream, "aoti_torch_get_current_cuda_stream");
    load(cpu, library_init, "aoti_torch_library_init_impl");
    load(cpu, library_impl, "torch_library_impl");
    load(cpu, call_dispatcher, "torch_call_dispatcher");
    const bool missing = missing_;
    load(cpu, context_, "_ZN2at13globalContextEv");
    load(cpu, deterministic_, "_ZNK2at7Context23deterministicAlgorithmsEv");
    missing_ = missing;
  }

  template <typename Function>
  void load(void* library, Function& function, const char* name) {
    function = library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
    missing_ = missing_ || !function;
  }

  bool missing_ = false;
  void* (*context_)();
  bool (*deterministic_)(void*);
};

// A tensor that is given back at the end of its scope.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  explicit OwnedTensor(TorchTensor handle) : handle_(handle) {}
  OwnedTensor(OwnedTensor&& other) noexcept : handle_(other.release()) {}
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  ~OwnedTensor() {
    if (handle_) TorchShim::get()->delete_tensor(handle_);
  }

  TorchTensor get() const { return handle_; }
  TorchTensor* place() { return &handle_; }
  TorchTensor release() {
    TorchTensor handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  TorchTensor handle_ = nullptr;
};

// Values of a kernel's stack. An optional one is null, or the address of a value that whoever reads it gives back.
inline TorchValue value_of(TorchTensor tensor) { return reinterpret_cast<TorchValue>(tensor); }
inline TorchTensor tensor_of(TorchValue value) { return reinterpret_cast<TorchTensor>(value); }
inline bool bool_of(TorchValue value) { return (value & 0xff) != 0; }

inline TorchValue optional_value(double number) {
  auto* value = new TorchValue;
  std::memcpy(value, &number, sizeof(number));
  return reinterpret_cast<TorchValue>(value);
}

// Whether there is a value, which is then taken out.
inline bool take_optional(TorchValue optional, TorchValue& value) {
  auto* address = reinterpret_cast<TorchValue*>(optional);
  if (!address) return false;
  value = *address;
  delete address;
  return true;
}

}  // namespace microsdpa
