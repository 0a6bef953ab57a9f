// One call: its arguments, and what a plan is found by.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../kernels/common/varlen_params.cuh"
#include "tensor_key.h"
#include "tracing.h"

namespace microsdpa {

// Arguments of a call as they came. Tensors that are not given are null.
struct Arguments {
  const DLTensor* tensors[GIVEN_OPERANDS]{};
  std::int64_t options = 0;
  std::int64_t left = -1, right = -1;  // ends of the window; -1 for none
  bool capped = false;                 // whether there is a soft cap
  std::int64_t max_queries = 0;        // of a packed sequence; 0 for none that is known
  double norm_eps = 0.0;               // of norms of queries and new keys
};

// Everything a plan may depend on. Compared as bytes: no padding, every field always written. The values of the scale
// and of the soft cap are no part of it.
struct CallKey {
  std::int64_t options;         // the caller's code for causal, enable_gqa, impl and precision
  std::int64_t alignment;       // 16 when every row of query, key, value, out and dO starts on 16 bytes, else 0
  std::int64_t mask_alignment;  // the same of the mask
  std::int64_t left, right, capped;
  std::int64_t given;  // a bit for each operand from MASK on
  TensorKey tensors[KEYED_OPERANDS];

  // Most calls have dense operands alone: the others are then neither compared nor hashed.
  int operands() const { return !given ? DENSE_OPERANDS : prologued() ? KEYED_OPERANDS : PLAIN_OPERANDS; }
  static std::size_t bytes_of(int operands) { return operands * sizeof(TensorKey); }

  // Calls `part` with the address and size of each part of the key that says something: fields, dense operands, and
  // those operands that are given. It stops at the first part that gives false, and gives whether none did.
  template <typename Part>
  bool all_parts(Part part) const {
    if (!part(reinterpret_cast<const char*>(this), offsetof(CallKey, tensors) + bytes_of(DENSE_OPERANDS))) return false;
    const int most = operands();
    for (int i = DENSE_OPERANDS; i < most; ++i) {
      if (given >> i & 1 && !part(reinterpret_cast<const char*>(&tensors[i]), sizeof(TensorKey))) return false;
    }
    return true;
  }

  bool operator==(const CallKey& other) const {
    const char *own = reinterpret_cast<const char*>(this), *others = reinterpret_cast<const char*>(&other);
    return given == other.given && all_parts([&](const char* part, std::size_t size) {
             return !std::memcmp(part, others + (part - own), size);
           });
  }

  // Whether the kernels chosen for this call compute `call` too: only alignments may differ, for the better.
  bool admits(const CallKey& call) const {
    CallKey same = call;
    same.alignment = alignment, same.mask_alignment = mask_alignment;
    return call.alignment >= alignment && call.mask_alignment >= mask_alignment && *this == same;
  }

  // The causal mask's alignment, which the options' lowest two bits have: 0 for none, 1 upper left, 2 lower right.
  static constexpr std::int64_t CAUSAL_BITS = 3;
  std::int64_t causal() const { return options & CAUSAL_BITS; }

  // Whether the call drops probabilities: DROPOUT_BIT of call/options.py.
  bool drops() const { return options >> 23 & 1; }

  // Whether the call goes on from an output and an LSE of other keys: CONTINUED_BIT of call/options.py.
  bool continues() const { return options >> 30 & 1; }

  // Whether the call has norms or rotary embedding: PROLOGUE_BIT of call/options.py.
  static constexpr std::int64_t PROLOGUE_BIT = std::int64_t(1) << 25;
  bool prologued() const { return options & PROLOGUE_BIT; }
  // Whether K is rotated as Q is: not with UNROTATED_KEY_BIT.
  bool rotates_key() const { return !(options >> 27 & 1); }

  // Whether the call has sequences of many lengths: VARLEN_BIT of call/options.py.
  bool varlen() const { return options >> 20 & 1; }
  // Whether bits of a sequence must not depend on the others: INVARIANT_BIT.
  bool batch_invariant() const { return options >> 26 & 1; }
};
static_assert(sizeof(CallKey) == 7 * 8 + KEYED_OPERANDS * 72, "CallKey must have no padding");

// A tensor whose second and third dimensions are exchanged: [B, H, S, D], read as [B, S, H, D].
struct Turned {
  DLTensor tensor;
  std::int64_t shape[4], strides[4];

  // Null for a tensor of another rank than `rank`, which is 3 or 4.
  const DLTensor* of(const DLTensor& given, int rank) {
    if (given.ndim != rank || !given.strides) return nullptr;
    tensor = given, tensor.shape = shape, tensor.strides = strides;
    for (int i = 0; i < rank; ++i) {
      const int from = i == 1 ? 2 : i == 2 ? 1 : i;
      shape[i] = given.shape[from], strides[i] = given.strides[from];
    }
    return &tensor;
  }
};

struct Call {
  const DLTensor* query;
  const DLTensor* keys_and_values[2];  // of calls with sequences of many lengths
  Addresses addresses{};
  CallKey key;
  NormedParams varlen;  // of calls with sequences of many lengths, whose key has no sizes but those of heads
  Turned turned[DENSE_OPERANDS + 2];  // of calls with TURNED_BIT: operands, and scales of every token
};

inline std::uintptr_t address(const DLTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

// The stride of a dimension of size one says nothing about memory: tensors that differ in nothing else share a plan.
inline TensorKey describe(const DLTensor& tensor) {
  TensorKey key;
  for (int i = 0; i < 4; ++i) {
    key.shape[i] = tensor.shape[i];
    key.strides[i] = tensor.shape[i] > 1 ? tensor.strides[i] : 0;
  }
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return key;
}

// Sizes and strides of a tensor of at most four dimensions, aligned to the last; false for any other. What is
// broadcast has a stride of zero.
inline bool describe_broadcast(const DLTensor& tensor, TensorKey& key) {
  if (tensor.ndim > 4 || (tensor.ndim && !tensor.strides) || tensor.device.device_type != MICROSDPA_DEVICE)
    return false;
  if (!address(tensor)) return false;
  for (int i = 0; i < 4; ++i) {
    const int dimension = i - (4 - tensor.ndim);
    key.shape[i] = dimension < 0 ? 1 : tensor.shape[dimension];
    key.strides[i] = key.shape[i] > 1 ? tensor.strides[dimension] : 0;
  }
  key.dtype_and_device = TensorKey::pack(tensor.dtype, tensor.device);
  return true;
}

// Bits that must be zero for every row to start on 16 bytes: base address and outer strides, in bytes.
inline std::uint64_t alignment_bits(std::uintptr_t base, const TensorKey& key) {
  std::uint64_t bits = base;
  for (int i = 0; i < 3; ++i) bits |= std::uint64_t(key.strides[i]) * key.element_bytes();
  return bits;
}

// One past the last byte that the tensor reaches.
inline std::uintptr_t end_address(std::uintptr_t base, const TensorKey& key) {
  std::int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (key.shape[i] - 1) * key.strides[i];
  return base + (last + 1) * key.element_bytes();
}

// Whether the memory of two tensors meets.
inline bool meets(std::uintptr_t a, const TensorKey& a_key, std::uintptr_t b, const TensorKey& b_key) {
  return a < end_address(b, b_key) && b < end_address(a, a_key);
}

inline bool parse_varlen(const Arguments& arguments, Call& call);

// TURNED_BIT of call/options.py: operands of a call with sequences of many lengths are [B, H, S, D].
constexpr std::int64_t TURNED_BIT = std::int64_t(1) << 29;

// parse_varlen() for a call whose operands are [B, H, S, D], and scales of every token [B, H, S].
inline bool parse_turned(Arguments arguments, Call& call) {
  for (int i = 0; i < DENSE_OPERANDS; ++i) {
    if (!arguments.tensors[i]) return false;
    arguments.tensors[i] = call.turned[i].of(*arguments.tensors[i], 4);
    if (!arguments.tensors[i]) return false;
  }
  for (int i = 0; i < 2; ++i) {
    const DLTensor*& scale = arguments.tensors[KEY_SCALE + i];
    if (!scale || scale->ndim != 3) continue;
    scale = call.turned[DENSE_OPERANDS + i].of(*scale, 3);
    if (!scale) return false;
  }
  return parse_varlen(arguments, call);
}

// False when no plan can exist for the call: Python's validation then finds the reason.
inline bool parse(const Arguments& arguments, Call& call) {
  // A launch would not be in the graph: the caller is told that there is no plan, and calls an operator.
  if (torch_is_tracing()) return false;
  call.key.options = arguments.options & ~TURNED_BIT;
  if (call.key.varlen()) {
    return arguments.options & TURNED_BIT ? parse_turned(arguments, call) : parse_varlen(arguments, call);
  }
  CallKey& k = call.key;
  call.query = arguments.tensors[QUERY];
  std::uint64_t bits = 0;
  for (int i = 0; i < DENSE_OPERANDS; ++i) {
    if (!arguments.tensors[i]) return false;
    const DLTensor& tensor = *arguments.tensors[i];
    if (tensor.ndim != 4 || !tensor.strides || tensor.device.device_type != MICROSDPA_DEVICE) return false;
    call.addresses[i] = address(tensor);
    // A tensor without memory is a tracer's, as torch's FakeTensor is.
    if (!call.addresses[i]) return false;
    k.tensors[i] = describe(tensor);
    bits |= alignment_bits(call.addresses[i], k.tensors[i]);
  }
  k.options = arguments.options;
  k.alignment = bits % 16 == 0 ? 16 : 0;
  k.left = arguments.left, k.right = arguments.right, k.capped = arguments.capped;
  k.given = 0, k.mask_alignment = 0;
  const int most = k.prologued() ? KEYED_OPERANDS : PLAIN_OPERANDS;
  for (int i = DENSE_OPERANDS; i < most; ++i) k.given |= std::int64_t(arguments.tensors[i] != nullptr) << i;
  if (k.given) {
    for (int i = DENSE_OPERANDS; i < k.operands(); ++i) {
      k.tensors[i] = TensorKey{};
      if (!arguments.tensors[i]) continue;
      const DLTensor& tensor = *arguments.tensors[i];
      if (!describe_broadcast(tensor, k.tensors[i])) return false;
      // [B, H] and [1, B, H] are not the same scales: the rank is part of the key.
      if (i >= QUERY_SCALE) k.tensors[i].dtype_and_device |= std::uint64_t(tensor.ndim) << 56;
      call.addresses[i] = address(tensor);
      // Angles and weights are read 16 bytes at a time; of positions integers.
      const bool vectors = i >= COS && i != QUERY_POSITIONS && i != KEY_POSITIONS;
      if (vectors && alignment_bits(call.addresses[i], k.tensors[i]) % 16) return false;
    }
    if (call.addresses[MASK]) k.mask_alignment = alignment_bits(call.addresses[MASK], k.tensors[MASK]) % 16 ? 0 : 16;
  }
  if (arguments.tensors[GRAD_OUT]) {  // what is an output elsewhere is read here
    if (alignment_bits(call.addresses[GRAD_OUT], k.tensors[GRAD_OUT]) % 16) k.alignment = 0;
    return true;
  }
  // An output that overlaps an input would be read after it is written.
  for (int i = 0; i < k.operands(); ++i) {
    if (i == OUT || !call.addresses[i]) continue;
    if (meets(call.addresses[OUT], k.tensors[OUT], call.addresses[i], k.tensors[i])) return false;
  }
  return true;
}

}  // namespace microsdpa
