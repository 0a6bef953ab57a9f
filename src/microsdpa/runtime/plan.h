// Plans: what one exact call (shapes, strides, types, device, options) launches, and the table of them.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "../kernels/common/mask_params.cuh"
#include "kernel_launch.h"
#include "tensor_key.h"

namespace microsdpa {

// Everything a plan may depend on. Compared as bytes: no padding, every field always written.
struct PlanKey {
  TensorKey query, key, value, out;
  std::int64_t options;    // the caller's code for causal, enable_gqa and impl
  std::int64_t alignment;  // 16 when every row of every tensor starts on 16 bytes, else 0

  // Whether the kernels chosen for this call compute `call` too: only its alignment may differ, for the better.
  bool admits(const PlanKey& call) const {
    return call.alignment >= alignment && !std::memcmp(this, &call, offsetof(PlanKey, alignment));
  }
};
static_assert(sizeof(PlanKey) == 4 * 72 + 16, "PlanKey must have no padding");

template <typename Key>
struct HashOfBytes {
  std::size_t operator()(const Key& key) const {
    std::uint64_t words[sizeof(Key) / 8], hash = 0;
    std::memcpy(words, &key, sizeof(key));
    for (std::uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    return hash;
  }
};

template <typename Key>
struct EqualBytes {
  bool operator()(const Key& a, const Key& b) const { return !std::memcmp(&a, &b, sizeof(a)); }
};

struct Plan {
  CUcontext context;
  std::vector<KernelLaunch> kernels;  // launched one after another with the same parameters
  std::int64_t workspace_bytes;       // scratch memory of one call
  MaskedParams params;                // all but the pointers, the scale and the soft cap
};

// Readers share the lock, so concurrent callers do not wait for one another. Keys are compared as bytes.
template <typename Key, typename Plan = microsdpa::Plan>
class PlanTable {
 public:
  std::shared_ptr<const Plan> find(const Key& key) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto entry = plans_.find(key);
    return entry == plans_.end() ? nullptr : entry->second;
  }

  // Bounded: a program that never repeats a shape must not grow for ever. Plans are cheap to make again.
  void insert(const Key& key, const Plan& plan) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (plans_.size() >= MAX_PLANS) plans_.clear();
    plans_[key] = std::make_shared<const Plan>(plan);
  }

  std::int64_t size() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return static_cast<std::int64_t>(plans_.size());
  }

  void clear() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    plans_.clear();
  }

 private:
  static constexpr std::size_t MAX_PLANS = 8192;
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, HashOfBytes<Key>, EqualBytes<Key>> plans_;
};

}  // namespace microsdpa
