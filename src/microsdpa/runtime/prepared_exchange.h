// A call of attention over a group, prepared: its exchange with other ranks and its launches, for tensors wherever
// they lie.
#pragma once

#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "exchange.h"
#include "given_call.h"
#include "issue.h"
#include "plans.h"
#include "scratch.h"

namespace microsdpa {

// The context that torch uses on a device; it is kept for the life of the process.
inline std::int64_t primary_context(std::int64_t device) {
  return guarded([&] {
    CUcontext context;
    driver().check(driver().primary_context_retain(&context, static_cast<CUdevice>(device)),
                   "cuDevicePrimaryCtxRetain");
    return reinterpret_cast<std::int64_t>(context);
  });
}

// Plays operations without launches once, on a stream that the caller names and others.
inline void play(std::int64_t context, std::int64_t stream, ffi::Bytes operations) {
  const Exchange exchange(operations, 0);
  const std::int64_t moved[DENSE_OPERANDS]{};
  guarded([&] {
    ScopedContext current(driver(), reinterpret_cast<CUcontext>(context));
    exchange.play(driver(), reinterpret_cast<CUstream>(stream), moved, [](std::size_t, CUstream) {});
  });
}

// What the latest exchange of this thread that failed has to say.
inline thread_local std::optional<ffi::Error> exchange_failure;

inline void rethrow_exchange_failure() {
  if (!exchange_failure) return;
  const ffi::Error failure = std::move(*exchange_failure);
  exchange_failure.reset();
  throw failure;
}

// The tensors of a call of attention over a group: query, key, value, out and, or None, the LSE.
struct WholeTensors {
  static constexpr int COUNT = DENSE_OPERANDS + 1;

  std::uintptr_t addresses[COUNT]{};
  TensorKey keys[COUNT]{};
  const DLTensor* query;

  // False for tensors that no list can be for.
  bool read(ffi::PackedArgs args) {
    query = args[QUERY].cast<DLTensor*>();
    for (int i = 0; i < COUNT; ++i) {
      const DLTensor* tensor = optional_tensor(args[i]);
      if (!tensor && i < DENSE_OPERANDS) return false;
      if (tensor && !describe_broadcast(*tensor, keys[i])) return false;
      if (tensor) addresses[i] = address(*tensor);
    }
    return true;
  }

  // Whether a list for these tensors is one for others, too: these differ in addresses alone, and where kernels read
  // and write they are as aligned.
  bool admits(const WholeTensors& others) const {
    const auto turn = [&](int i) { return (addresses[i] - others.addresses[i]) % 16; };
    return !std::memcmp(keys, others.keys, sizeof(keys)) && !turn(QUERY) && !turn(OUT) &&
           !addresses[DENSE_OPERANDS] == !others.addresses[DENSE_OPERANDS];
  }
};

// A list of operations with launches of attention, for tensors of one description.
class PreparedExchange {
 public:
  PreparedExchange(CUcontext context, const ffi::Bytes& operations, std::size_t launches)
      : context_(context), exchange_(operations, launches) {}

  // Adds a launch, by a call's arguments up to the soft cap; false where there is no plan for it.
  bool add(ffi::PackedArgs args) {
    const GivenCall given(args);
    Call call;
    if (!parse(given.arguments, call)) return false;
    const CallKey& key = call.key;
    if (key.varlen() || key.drops() || key.continues() || key.prologued()) return false;
    Launch launch{plan_of(call), {}, given.factors()};
    if (!launch.plan || !launch.factors.valid()) return false;
    if (const DLTensor* lse = optional_tensor(given.lse)) call.addresses[LSE] = address(*lse);
    std::memcpy(launch.addresses, call.addresses, sizeof(launch.addresses));
    launches_.push_back(std::move(launch));
    return true;
  }

  // Takes the tensors that the list was made for; false where it cannot be played for others. Launches beside the
  // caller's stream share scratch memory, so they have to be on one stream.
  bool finish(ffi::PackedArgs tensors) {
    std::int64_t beside = Operation::CALLERS;
    for (const Operation& operation : exchange_.operations()) {
      if (operation.code != Operation::LAUNCH || operation.stream == Operation::CALLERS) continue;
      const std::int64_t bytes = launches_[operation.numbers[0]].plan->workspace_bytes;
      if (!bytes) continue;
      if (beside != Operation::CALLERS && beside != operation.stream) return false;
      beside = operation.stream, scratch_bytes_ = std::max(scratch_bytes_, bytes);
    }
    return first_.read(tensors);
  }

  // Plays the list for tensors. Gives None for others than it was made for, and false after a failure, which is kept:
  // what threw would be called a second time.
  ffi::Any play(ffi::PackedArgs args) {
    TVM_FFI_CHECK(args.size() == WholeTensors::COUNT, TypeError)
        << "an exchange: expected " << WholeTensors::COUNT << " tensors, got " << args.size();
    WholeTensors given;
    if (!given.read(args) || !first_.admits(given)) return nullptr;
    std::int64_t moved[WholeTensors::COUNT];
    for (int i = 0; i < WholeTensors::COUNT; ++i) {
      moved[i] = static_cast<std::int64_t>(given.addresses[i] - first_.addresses[i]);
    }
    try {
      guarded([&] { play(given, moved); });
      return true;
    } catch (const ffi::Error& failure) {
      exchange_failure = failure;
      return false;
    }
  }

 private:
  struct Launch {
    std::shared_ptr<const Plan> plan;
    Addresses addresses;
    Factors factors;
  };

  void play(const WholeTensors& given, const std::int64_t* moved) {
    const std::lock_guard<std::mutex> lock(mutex_);  // the list has its own events
    const DLTensor& query = *given.query;
    const CUstream callers = current_stream(query.device);
    ScopedContext current(driver(), context_);
    // The streams beside the caller's are behind it when they begin, and ahead of it in the end.
    std::optional<Scratch> scratch;
    std::exception_ptr failure;
    try {
      if (scratch_bytes_) scratch.emplace(scratch_bytes_, query, context_, callers);
    } catch (...) {
      failure = std::current_exception();
    }
    exchange_.play(driver(), callers, moved, [&](std::size_t number, CUstream stream) {
      if (failure) std::rethrow_exception(failure);
      const Launch& launch = launches_[number];
      Addresses addresses;
      std::memcpy(addresses, launch.addresses, sizeof(addresses));
      addresses[QUERY] += moved[QUERY], addresses[OUT] += moved[OUT];
      if (addresses[LSE]) addresses[LSE] += moved[DENSE_OPERANDS];
      if (stream != callers && scratch) addresses[WORKSPACE] = scratch->address();
      issue_kernels(*launch.plan, query, addresses, launch.factors, stream);
    });
  }

  CUcontext context_;
  Exchange exchange_;
  std::vector<Launch> launches_;
  WholeTensors first_;
  std::int64_t scratch_bytes_ = 0;
  std::mutex mutex_;
};

// A function of query, key, value, out and, or None, the LSE that plays a list of operations. The arguments are the
// context, the operations, the number of launches, these tensors, and for each launch a call up to its soft cap. None
// where a launch has no plan, or the list can be for no others than these tensors.
inline ffi::Any prepared_exchange(ffi::PackedArgs args) {
  constexpr int LAUNCHES = 2, TENSORS = 3, CALLS = TENSORS + WholeTensors::COUNT, EACH = QUERY_SCALE_ARGUMENT;
  TVM_FFI_CHECK(args.size() >= CALLS, TypeError) << "prepared_exchange: expected numbers, tensors and calls";
  const auto launches = args[LAUNCHES].cast<std::int64_t>();
  TVM_FFI_CHECK(args.size() == CALLS + launches * EACH, TypeError)
      << "prepared_exchange: expected " << EACH << " arguments for each of " << launches << " launches, got "
      << args.size() - CALLS;
  auto prepared = std::make_shared<PreparedExchange>(reinterpret_cast<CUcontext>(args[0].cast<std::int64_t>()),
                                                     args[1].cast<ffi::Bytes>(), static_cast<std::size_t>(launches));
  for (int at = CALLS; at < args.size(); at += EACH) {
    if (!prepared->add(args.Slice(at, at + EACH))) return nullptr;
  }
  if (!prepared->finish(args.Slice(TENSORS, CALLS))) return nullptr;
  return ffi::Function::FromPacked(
      [prepared](ffi::PackedArgs args, ffi::Any* result) { *result = prepared->play(args); });
}

}  // namespace microsdpa
