// The arguments of a call as Python gives them (Call of launcher.py).
#pragma once

#include <cstdint>

#include "call.h"
#include "framework.h"

namespace microsdpa {

// Places of a call's arguments: query, key, value, out, LSE, options, scale; and then, as far as they are given, the
// tensors and numbers of masks, scales of 8-bit values, and what says where sequences of many lengths lie.
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
  QUERY_OFFSETS_ARGUMENT = QUERY_SCALE_ARGUMENT + 3,
  MAX_QUERIES_ARGUMENT = QUERY_OFFSETS_ARGUMENT + 4,
  NEW_KEY_ARGUMENT,
  NORM_EPS_ARGUMENT = NEW_KEY_ARGUMENT + 6,
  LAST_ARGUMENT = NORM_EPS_ARGUMENT,
  MOST_ARGUMENTS
};

// The arguments of a call, without some that stand ahead of those of masks.
struct Skipping {
  ffi::PackedArgs all;
  int skipped;

  int size() const { return all.size() - skipped; }
  ffi::AnyView operator[](int i) const { return all[i < FEWEST_ARGUMENTS ? i : i + skipped]; }
};

// Of a parsed call.
inline Factors factors_of(const Arguments& arguments, const Optional<double>& scale, const Optional<double>& softcap) {
  const DLTensor& query = *arguments.tensors[QUERY];
  return Factors(scale, softcap, query.shape[query.ndim - 1]);
}

inline Optional<double> optional_number(ffi::AnyView argument) { return argument.cast<Optional<double>>(); }

// What norms and rotary embedding add to a call, between its scale and its masks: tensors, the first positions of
// queries and keys, and the epsilon of the norms.
struct GivenPrologue {
  static constexpr int TENSORS = KEYED_OPERANDS - PLAIN_OPERANDS, ARGUMENTS = TENSORS + 3;

  std::int64_t query_first = 0, key_first = 0;
  double eps = 0.0;

  void read(ffi::PackedArgs args, Arguments& arguments) {
    TVM_FFI_CHECK(args.size() >= ARGUMENTS, TypeError) << "a call with norms or rotary embedding: expected more";
    for (int i = 0; i < TENSORS; ++i) arguments.tensors[PLAIN_OPERANDS + i] = optional_tensor(args[i]);
    query_first = args[TENSORS].cast<std::int64_t>(), key_first = args[TENSORS + 1].cast<std::int64_t>();
    eps = args[TENSORS + 2].cast<double>();
  }

  // Whether the tables have rows for all positions that are counted from `first`.
  static bool fits(const Arguments& arguments, std::int64_t first, Operand positions, Operand operand) {
    const DLTensor *table = arguments.tensors[COS], &tensor = *arguments.tensors[operand];
    if (!table || arguments.tensors[positions] || tensor.ndim != 4 || table->ndim != 2) return true;
    return first >= 0 && first <= table->shape[0] - tensor.shape[2];
  }

  void apply(const Arguments& arguments, Factors& factors) const {
    const bool rotates_key = !(arguments.options >> 27 & 1);  // UNROTATED_KEY_BIT of call/options.py
    factors.prologue_valid = eps >= 0.0 && eps < 3e38 && fits(arguments, query_first, QUERY_POSITIONS, QUERY) &&
                             (!rotates_key || fits(arguments, key_first, KEY_POSITIONS, KEY));
    factors.query_first = static_cast<std::int32_t>(query_first);
    factors.key_first = static_cast<std::int32_t>(key_first);
    factors.eps = static_cast<float>(eps);
  }
};

struct GivenCall {
  Arguments arguments;
  ffi::AnyView lse;
  Optional<double> scale, softcap;
  GivenPrologue prologue;
  bool prologued = false;

  explicit GivenCall(ffi::PackedArgs all) {
    const bool has_prologue = all.size() > FEWEST_ARGUMENTS && all[OPTIONS_ARGUMENT].cast<std::int64_t>() >> 25 & 1;
    read(all, has_prologue ? GivenPrologue::ARGUMENTS : 0);
    if (!has_prologue) return;
    prologued = true;
    prologue.read(all.Slice(FEWEST_ARGUMENTS), arguments);
  }

  // `skipped`: arguments ahead of those of masks.
  void read(ffi::PackedArgs all, int skipped) {
    const Skipping args{all, skipped};
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
    for (int i = 0; i < 4 && QUERY_OFFSETS_ARGUMENT + i < count; ++i) {
      arguments.tensors[QUERY_OFFSETS + i] = optional_tensor(args[QUERY_OFFSETS_ARGUMENT + i]);
    }
    if (count > MAX_QUERIES_ARGUMENT) {
      arguments.max_queries = args[MAX_QUERIES_ARGUMENT].cast<Optional<std::int64_t>>().value_or(0);
    }
    for (int i = 0; i < 6 && NEW_KEY_ARGUMENT + i < count; ++i) {
      arguments.tensors[NEW_KEY + i] = optional_tensor(args[NEW_KEY_ARGUMENT + i]);
    }
    if (count > NORM_EPS_ARGUMENT) arguments.norm_eps = args[NORM_EPS_ARGUMENT].cast<double>();
  }

  Factors factors() const {
    Factors found = factors_of(arguments, scale, softcap);
    if (prologued) prologue.apply(arguments, found);
    return found;
  }
};

}  // namespace microsdpa
