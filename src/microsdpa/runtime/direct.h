// Functions of this library as built-in functions of Python. tvm_ffi makes an object of its own for every tensor that
// it hands on, which takes most of a call's time; here torch describes its tensors on the stack. Whatever else comes,
// and every call that fails, goes through tvm_ffi.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "framework.h"

namespace microsdpa {

using PyObject = struct PyObjectOpaque;

// Python's stable C interface, loaded from the process: this library is built for every Python, free-threaded ones too.
class Python {
 public:
  // Null where the process does not have all of it.
  static const Python* get() {
    static const Python python;
    return python.missing_ ? nullptr : &python;
  }

  PyObject *none, *yes, *no, *integer_type, *float_type, *bytes_type;
  PyObject* (*type)(PyObject*);
  void (*increase)(PyObject*);
  void (*decrease)(PyObject*);
  long long (*integer)(PyObject*, int* overflow);
  double (*number)(PyObject*);
  int (*bytes)(PyObject*, char** data, std::intptr_t* size);
  PyObject* (*new_integer)(long long);
  PyObject* (*new_tuple)(std::intptr_t size);
  int (*set_item)(PyObject* tuple, std::intptr_t at, PyObject* item);
  PyObject* (*call)(PyObject* callable, PyObject* arguments, PyObject* named);
  void* (*capsule_pointer)(PyObject*, const char* name);
  void (*clear_error)();
  void* (*detach)();
  void (*attach)(void* thread);

 private:
  Python() {
    load(none, "_Py_NoneStruct"), load(yes, "_Py_TrueStruct"), load(no, "_Py_FalseStruct");
    load(integer_type, "PyLong_Type"), load(float_type, "PyFloat_Type"), load(bytes_type, "PyBytes_Type");
    load(type, "PyObject_Type"), load(increase, "Py_IncRef"), load(decrease, "Py_DecRef");
    load(integer, "PyLong_AsLongLongAndOverflow"), load(number, "PyFloat_AsDouble");
    load(bytes, "PyBytes_AsStringAndSize"), load(new_integer, "PyLong_FromLongLong");
    load(new_tuple, "PyTuple_New"), load(set_item, "PyTuple_SetItem"), load(call, "PyObject_Call");
    load(capsule_pointer, "PyCapsule_GetPointer"), load(clear_error, "PyErr_Clear");
    load(detach, "PyEval_SaveThread"), load(attach, "PyEval_RestoreThread");
  }

  template <typename Pointer>
  void load(Pointer& found, const char* name) {
    found = reinterpret_cast<Pointer>(dlsym(RTLD_DEFAULT, name));
    missing_ = missing_ || !found;
  }

  bool missing_ = false;
};

// torch's classes whose objects are tensors with memory, and what describes them.
struct TensorClasses {
  const DLPackExchangeAPI* api;
  PyObject *tensor, *parameter;
};

// A function and the object of tvm_ffi's that calls it, which is kept.
struct Direct {
  static constexpr const char* NAME = "microsdpa.runtime.direct";

  ffi::Function function;
  PyObject* fallback;
  TensorClasses classes;
};

// What torch has to say in a call: its stream and its allocator hold until the end of the scope. Python's interpreter
// is attached while it begins.
class TorchScope {
 public:
  TorchScope(const Python& python, const DLPackExchangeAPI& api, DLDevice device) : device_(device) {
    void* stream = nullptr;
    if (device.device_type != kDLCPU) {
      if (api.current_work_stream(device.device_type, device.device_id, &stream)) {
        python.clear_error();
        return;
      }
      has_stream_ = !TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &stream_);
      if (!has_stream_) return;
    }
    has_allocator_ = !TVMFFIEnvSetDLPackManagedTensorAllocator(api.managed_tensor_allocator, 0, &allocator_);
  }
  ~TorchScope() {
    if (has_stream_) TVMFFIEnvSetStream(device_.device_type, device_.device_id, stream_, nullptr);
    if (has_allocator_) TVMFFIEnvSetDLPackManagedTensorAllocator(allocator_, 0, nullptr);
  }
  TorchScope(const TorchScope&) = delete;
  TorchScope& operator=(const TorchScope&) = delete;

  // Whether both hold.
  bool is_set() const { return has_allocator_; }

 private:
  DLDevice device_;
  TVMFFIStreamHandle stream_ = nullptr;
  DLPackManagedTensorAllocator allocator_ = nullptr;
  bool has_stream_ = false, has_allocator_ = false;
};

// The arguments of a call as the library's functions take them.
struct DirectArguments {
  static constexpr std::intptr_t MOST = 40;

  TVMFFIAny values[MOST];
  DLTensor tensors[MOST];
  TVMFFIByteArray bytes[MOST];
  DLDevice device{kDLCPU, 0};

  // False for an argument that tvm_ffi has to look at.
  bool read(const Python& python, const TensorClasses& classes, PyObject* given, std::intptr_t at) {
    TVMFFIAny& value = values[at];
    value.zero_padding = 0, value.v_int64 = 0;
    if (given == python.none) return value.type_index = kTVMFFINone, true;
    if (given == python.yes || given == python.no) {
      return value.type_index = kTVMFFIBool, value.v_int64 = given == python.yes, true;
    }
    PyObject* type = python.type(given);
    python.decrease(type);  // the object keeps it
    if (type == classes.tensor || type == classes.parameter) {
      DLTensor& tensor = tensors[at];
      if (classes.api->dltensor_from_py_object_no_sync(given, &tensor)) return python.clear_error(), false;
      if (device.device_type == kDLCPU) device = tensor.device;
      return value.type_index = kTVMFFIDLTensorPtr, value.v_ptr = &tensor, true;
    }
    if (type == python.integer_type) {
      int overflow = 0;
      return value.type_index = kTVMFFIInt, value.v_int64 = python.integer(given, &overflow), !overflow;
    }
    if (type == python.float_type) return value.type_index = kTVMFFIFloat, value.v_float64 = python.number(given), true;
    if (type != python.bytes_type) return false;
    char* data;
    std::intptr_t size;
    if (python.bytes(given, &data, &size)) return python.clear_error(), false;
    bytes[at] = {data, static_cast<std::size_t>(size)};
    return value.type_index = kTVMFFIByteArrayPtr, value.v_ptr = &bytes[at], true;
  }
};

// What a function gave, as Python has it; false for what tvm_ffi has to make.
inline bool to_python(const Python& python, const TensorClasses& classes, const ffi::Any& value, PyObject*& found) {
  switch (value.type_index()) {
    case kTVMFFINone:
      return python.increase(found = python.none), true;
    case kTVMFFIBool:
      return python.increase(found = value.cast<bool>() ? python.yes : python.no), true;
    case kTVMFFIInt:
      return found = python.new_integer(value.cast<std::int64_t>()), true;
    case kTVMFFITensor: {
      DLManagedTensorVersioned* tensor = value.cast<ffi::Tensor>().ToDLPackVersioned();
      void* object = nullptr;
      if (classes.api->managed_tensor_to_py_object_no_sync(tensor, &object)) return false;
      return found = static_cast<PyObject*>(object), true;
    }
    default:
      return false;
  }
}

// The same call through tvm_ffi.
inline PyObject* call_through_tvm_ffi(const Python& python, PyObject* function, PyObject* const* given,
                                      std::intptr_t count) {
  PyObject* arguments = python.new_tuple(count);
  if (!arguments) return nullptr;
  for (std::intptr_t i = 0; i < count; ++i) python.increase(given[i]), python.set_item(arguments, i, given[i]);
  PyObject* found = python.call(function, arguments, nullptr);
  python.decrease(arguments);
  return found;
}

// What Python calls (METH_FASTCALL). `self` is a capsule of a Direct. Other threads run while the function does.
extern "C" inline PyObject* microsdpa_call_directly(PyObject* self, PyObject* const* given, std::intptr_t count) {
  const Python& python = *Python::get();
  const auto* direct = static_cast<const Direct*>(python.capsule_pointer(self, Direct::NAME));
  if (!direct) return nullptr;
  DirectArguments arguments;
  bool is_read = count <= DirectArguments::MOST;
  for (std::intptr_t i = 0; is_read && i < count; ++i) is_read = arguments.read(python, direct->classes, given[i], i);
  if (is_read) {
    ffi::Any result;
    bool has_ended = false;
    const TorchScope torch(python, *direct->classes.api, arguments.device);
    if (!torch.is_set()) return call_through_tvm_ffi(python, direct->fallback, given, count);
    void* thread = python.detach();
    try {
      direct->function.CallPacked(reinterpret_cast<const ffi::AnyView*>(arguments.values), static_cast<int>(count),
                                  &result);
      has_ended = true;
    } catch (...) {
      // tvm_ffi raises what the function throws again.
    }
    python.attach(thread);
    PyObject* found = nullptr;
    if (has_ended && to_python(python, direct->classes, result, found)) return found;
    python.clear_error();
  }
  return call_through_tvm_ffi(python, direct->fallback, given, count);
}

extern "C" inline void microsdpa_forget_direct(PyObject* self) {
  const Python& python = *Python::get();
  auto* direct = static_cast<Direct*>(python.capsule_pointer(self, Direct::NAME));
  python.decrease(direct->fallback);
  delete direct;
}

// The addresses that a built-in function is made of: what Python calls, what a capsule holds, and what frees that; none
// where Python or torch lacks what is needed. `fallback` is the address of the object that stands for `function`, and
// `api`, `tensor` and `parameter` are those of TensorClasses.
inline ffi::Shape direct_function(ffi::Function function, std::int64_t fallback, std::int64_t api, std::int64_t tensor,
                                  std::int64_t parameter) {
  const Python* python = Python::get();
  const auto* exchange = reinterpret_cast<const DLPackExchangeAPI*>(api);
  if (!python || !exchange || exchange->header.version.major != DLPACK_MAJOR_VERSION) return {};
  if (!exchange->dltensor_from_py_object_no_sync || !exchange->current_work_stream) return {};
  const TensorClasses classes{exchange, reinterpret_cast<PyObject*>(tensor), reinterpret_cast<PyObject*>(parameter)};
  auto* direct = new Direct{std::move(function), reinterpret_cast<PyObject*>(fallback), classes};
  return ffi::Shape{reinterpret_cast<std::int64_t>(&microsdpa_call_directly), reinterpret_cast<std::int64_t>(direct),
                    reinterpret_cast<std::int64_t>(&microsdpa_forget_direct)};
}

}  // namespace microsdpa
