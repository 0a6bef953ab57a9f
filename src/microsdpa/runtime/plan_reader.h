// Kernels of a plan, read from the integers that Python packs (launcher.py, register() and launch_one()).
#pragma once

#include <cstring>

#include "framework.h"
#include "plan.h"
#include "standard_params.h"

namespace microsdpa {

// Integers that Python packs into bytes.
class Integers {
 public:
  // The bytes outlive it.
  explicit Integers(const ffi::Bytes& bytes) : Integers(bytes.data(), bytes.size()) {}
  Integers(const char* bytes, std::size_t size) : at_(bytes), end_(bytes + size), size_(size / 8) {}

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

// A kernel's function, grid, threads, bytes of shared memory, cluster, whether its launch is programmatic, whether it
// has heads as queries, and the rows and keys of its tiles where it is for sequences of many lengths.
inline KernelLaunch read_launch(Integers& integers) {
  KernelLaunch kernel{};
  kernel.function = reinterpret_cast<CUfunction>(integers.next());
  for (unsigned& ctas : kernel.grid) ctas = static_cast<unsigned>(integers.next());
  kernel.threads = static_cast<unsigned>(integers.next());
  kernel.shared_bytes = static_cast<unsigned>(integers.next());
  kernel.cluster = static_cast<unsigned>(integers.next());
  kernel.programmatic = integers.next() != 0;
  kernel.heads_as_queries = integers.next() != 0;
  kernel.sequence_rows = static_cast<unsigned>(integers.next());
  kernel.sequence_keys = static_cast<unsigned>(integers.next());
  return kernel;
}

// How a kernel's grid and scratch memory follow from sizes: the fields of Sizing.
inline Sizing read_sizing(Integers& integers) {
  Sizing sizing{};
  for (std::int64_t* field :
       {&sizing.order, &sizing.split, &sizing.pack, &sizing.block_m, &sizing.max_ctas, &sizing.row_bytes}) {
    *field = integers.next();
  }
  TVM_FFI_CHECK(sizing.order == Sizing::FIXED || (sizing.pack > 0 && sizing.block_m > 0), ValueError)
      << "numbers: expected rows of a tile, and heads that share one";
  return sizing;
}

// A tensor map: its operand, the box's rows, columns, swizzle and heads, the bytes from the operand's start to an
// array, that array's element bytes, shape and strides in elements. No element bytes stand for the operand as it is.
inline EncodedTensorMap read_tensor_map(Integers& integers, const Addresses& addresses, const TensorKey* operands) {
  TensorMapSpec spec{};
  spec.operand = integers.operand(OPERANDS);
  spec.rows = static_cast<unsigned>(integers.next());
  spec.columns = static_cast<unsigned>(integers.next());
  spec.swizzle = static_cast<unsigned>(integers.next());
  spec.heads = static_cast<unsigned>(integers.next());
  spec.offset = static_cast<std::uintptr_t>(integers.next());
  const std::int64_t bytes = integers.next();
  TensorKey array{};
  for (std::int64_t& size : array.shape) size = integers.next();
  for (std::int64_t& stride : array.strides) stride = integers.next();
  array.dtype_and_device = TensorKey::pack({kDLUInt, static_cast<std::uint8_t>(8 * bytes), 1}, {});
  const bool whole = !bytes && operands && spec.operand <= MASK;
  // Memory that each call allocates has no address yet: the query's stands in until then.
  const std::uintptr_t address = addresses[spec.operand] ? addresses[spec.operand] : addresses[QUERY];
  return encode_tensor_map(driver(), spec, whole ? operands[spec.operand] : array, address);
}

inline std::vector<EncodedTensorMap> read_tensor_maps(Integers& integers, const Addresses& addresses,
                                                      const TensorKey* operands) {
  std::vector<EncodedTensorMap> maps(integers.count(KernelLaunch::MAX_TENSOR_MAPS, "tensor maps"));
  for (EncodedTensorMap& map : maps) map = read_tensor_map(integers, addresses, operands);
  return maps;
}

// A kernel of a plan: its launch, whether only calls with an LSE launch it, the bytes of its parameter, the places of
// addresses and numbers in it, and its tensor maps. No bytes stand for the parameter of kernels with 16-bit operands,
// which may be the first one of a plan with `changed` rows.
inline PlannedKernel read_kernel(Integers& integers, const char*& params, const char* params_end, const Call& call,
                                 const ChangedRows& changed, bool first) {
  PlannedKernel kernel{read_launch(integers), {}, {}, {}, integers.next() != 0};
  const CallKey key = operands_of(kernel, call.key);
  const std::size_t bytes = integers.count(PlannedKernel::MAX_PARAMS, "bytes of a parameter");
  TVM_FFI_CHECK(params_end - params >= static_cast<std::ptrdiff_t>(bytes), ValueError)
      << "params: expected " << bytes << " bytes more, got " << params_end - params;
  if (bytes) {
    kernel.params.assign(params, bytes), params += bytes;
  } else {
    fill(kernel, key, changed, first);
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
  const CallKey seen = behind(changed, key);
  kernel.launch.tensor_maps = read_tensor_maps(integers, call.addresses, seen.tensors);
  for (EncodedTensorMap& map : kernel.launch.tensor_maps) {
    const std::int64_t place = changed.place(map.spec.operand);
    if (place >= 0) map.spec.operand = WORKSPACE, map.spec.offset = static_cast<std::uintptr_t>(place);
  }
  return kernel;
}

}  // namespace microsdpa
