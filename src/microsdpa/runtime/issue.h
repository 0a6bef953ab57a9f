// The launch of a plan's kernels, whoever has found it.
#pragma once

#include <cstring>
#include <optional>

#include "arrivals.h"
#include "framework.h"
#include "plans.h"
#include "scratch.h"

namespace microsdpa {

// Launches the kernels of a plan on a stream of the query's device, whose context is current. All addresses but that
// of scratch memory or counters are there, and that one, too, where the stream is not the current one.
inline void issue_kernels(const Plan& plan, const DLTensor& query, Addresses& addresses, const Factors& factors,
                          CUstream stream) {
  Numbers numbers;
  numbers[SCALE] = static_cast<float>(factors.scale);
  numbers[SCALE_LOG2] = static_cast<float>(factors.scale * LOG2_E);
  numbers[SOFTCAP_LOG2] = static_cast<float>(factors.softcap * LOG2_E);
  std::memcpy(&numbers[KEPT], &factors.kept, sizeof(factors.kept));
  numbers[KEPT_SCALE] = factors.kept_scale;
  std::memcpy(&numbers[QUERY_FIRST], &factors.query_first, sizeof(factors.query_first));
  std::memcpy(&numbers[KEY_FIRST], &factors.key_first, sizeof(factors.key_first));
  numbers[NORM_EPS] = factors.eps;
  std::optional<Scratch> scratch;
  if (plan.workspace_bytes && !addresses[WORKSPACE]) {
    scratch.emplace(plan.workspace_bytes, query, plan.context, stream);
    addresses[WORKSPACE] = scratch->address();
  }
  if (plan.counters) addresses[COUNTER] = addresses[COUNTERS] = arrivals().of(plan.context, stream, plan.counters);
  for (const PlannedKernel& kernel : plan.kernels) {
    if (!kernel.only_with_lse || addresses[LSE]) kernel.issue(driver(), stream, addresses, numbers);
  }
}

// Launches the kernels of a plan for a call of which all addresses but that of scratch memory are there.
inline void launch_kernels(const Plan& plan, Call& call, const Factors& factors) {
  const CUstream stream = current_stream(call.query->device);
  guarded([&] {
    ScopedContext current(driver(), plan.context);
    issue_kernels(plan, *call.query, call.addresses, factors, stream);
  });
}

}  // namespace microsdpa
