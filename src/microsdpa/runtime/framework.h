// What the launcher has from the framework that calls it (memory, streams, errors), and the driver.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "call.h"
#include "driver.h"

namespace microsdpa {

namespace ffi = tvm::ffi;
using ffi::Optional;

constexpr double LOG2_E = 1.44269504088896340736;

inline const Driver& driver() {
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

// The framework reports every error of its allocator as a MemoryError, in the words of the error and of where it was
// raised. Out of memory becomes the kind that Python knows as torch.OutOfMemoryError (launcher.py), another a
// RuntimeError; both keep the framework's own words alone.
[[noreturn]] inline void rethrow_allocation_error(const ffi::Error& error) {
  std::string words = error.message();
  const bool out_of_memory = words.find("out of memory") != std::string::npos;
  words = words.substr(0, words.find("\nException raised from "));
  throw ffi::Error(out_of_memory ? "microsdpa.OutOfMemoryError" : "RuntimeError", words, error.backtrace());
}

// Memory from the framework's allocator, on the device and for the current stream of `like`. It may be given
// back as soon as the kernels that use it are launched: whoever gets it next is behind them in the stream.
inline ffi::Tensor allocate(const std::int64_t* shape, int rank, DLDataType dtype, const DLTensor& like) {
  DLTensor prototype = like;
  prototype.dtype = dtype;
  prototype.shape = const_cast<std::int64_t*>(shape);
  prototype.ndim = rank;
  TVMFFIObjectHandle handle;
  if (TVMFFIEnvTensorAlloc(&prototype, &handle)) rethrow_allocation_error(ffi::details::MoveFromSafeCallRaised());
  return ffi::Tensor(
      ffi::details::ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(static_cast<TVMFFIObject*>(handle)));
}

inline CUstream current_stream(const DLDevice& device) {
  return static_cast<CUstream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// Whether launches on a stream become part of a CUDA graph; a context is current.
inline bool is_captured(CUstream stream) {
  CUstreamCaptureStatus status;
  driver().check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// A tensor, or null for None.
inline const DLTensor* optional_tensor(ffi::AnyView argument) {
  return argument.type_index() == ffi::TypeIndex::kTVMFFINone ? nullptr : argument.cast<DLTensor*>();
}

// The LSE that a call asks for: a tensor of the caller's, with True memory that is allocated, with None or False none.
struct LseArgument {
  std::uintptr_t address = 0;
  Optional<ffi::Tensor> allocated;

  // It is [B, H, S_q] in FP32 for a query of [B, H, S_q, D].
  LseArgument(ffi::AnyView argument, const DLTensor& query) : LseArgument(argument, query, query.shape, 3) {}

  // It has this shape.
  LseArgument(ffi::AnyView argument, const DLTensor& query, const std::int64_t* shape, int rank) {
    if (argument.type_index() == ffi::TypeIndex::kTVMFFIBool) {
      if (!argument.cast<bool>()) return;
      allocated = allocate(shape, rank, DLDataType{kDLFloat, 32, 1}, query);
      address = reinterpret_cast<std::uintptr_t>(allocated.value().data_ptr());
    } else if (const DLTensor* tensor = optional_tensor(argument)) {
      address = microsdpa::address(*tensor);
    }
  }

  // What a launch gives: the memory that was allocated, or else True.
  ffi::Any result() const {
    if (allocated.has_value()) return allocated.value();
    return true;
  }
};

// The softmax's scale and the soft cap of one call; a soft cap of 1 stands for none. Of 65,536 probabilities `kept` are
// kept, times `kept_scale`, where some are dropped.
struct Factors {
  double scale, softcap;
  std::uint32_t kept = 0;
  float kept_scale = 0.0f;
  std::int32_t query_first = 0, key_first = 0;  // positions of the first query and key, where they are counted
  float eps = 0.0f;                             // of norms
  bool prologue_valid = true;  // whether eps is valid, and there are angles for all positions that are counted

  Factors(const Optional<double>& given, const Optional<double>& cap, std::int64_t head_dim)
      : scale(given.has_value() ? given.value() : 1.0 / std::sqrt(static_cast<double>(head_dim))),
        softcap(cap.has_value() ? cap.value() : 1.0) {}

  // What validation admits, so that float32 holds them: LARGEST_FACTOR and SMALLEST_FACTOR of kernels/problem.py.
  bool valid() const {
    return std::abs(scale) <= 0x1p127 && softcap >= 0x1p-126 && softcap <= 0x1p127 && prologue_valid;
  }
};

}  // namespace microsdpa
