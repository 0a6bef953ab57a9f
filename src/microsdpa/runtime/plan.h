// Plans: what one exact call (shapes, strides, types, device, options) launches, and the table of them.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "call.h"
#include "kernel_launch.h"

namespace microsdpa {

// Where in a kernel's parameter an address belongs: that of an operand, plus `offset` bytes; null for none.
struct Pointer {
  std::size_t at;
  int operand;
  std::uintptr_t offset;
};

// Numbers of a call that are no part of its key; KEPT, QUERY_FIRST and KEY_FIRST have the bits of an integer.
enum Number { SCALE, SCALE_LOG2, SOFTCAP_LOG2, KEPT, KEPT_SCALE, QUERY_FIRST, KEY_FIRST, NORM_EPS, NUMBERS };
using Numbers = float[NUMBERS];

// Where in a kernel's parameter a float belongs.
struct NumberPlace {
  std::size_t at;
  int number;
};

// How the grid and the scratch memory of a kernel follow from a call's sizes, as work() and workspace_bytes() of
// kernels/spec.py have it.
struct Sizing {
  // Of CTAs: a grid that the plan has, CTAs along x, or along x, y and z, or parts, key heads and batch entries.
  enum Order { FIXED, ALONG_X, XYZ, CLUSTERS };

  std::int64_t order, split, pack, block_m, max_ctas, row_bytes;

  void apply(const CallKey& key, unsigned (&grid)[3]) const {
    if (order == FIXED) return;
    const std::int64_t (&query)[4] = key.tensors[QUERY].shape;
    const std::int64_t tiles = (query[2] * pack + block_m - 1) / block_m;
    const std::int64_t parts = split * (order == XYZ ? 1 : tiles * query[0]) * query[1] / pack;
    grid[0] = static_cast<unsigned>(order == CLUSTERS ? split : max_ctas ? std::min(parts, max_ctas) : parts);
    grid[1] = static_cast<unsigned>(order == XYZ ? tiles : order == CLUSTERS ? query[1] / pack : 1);
    grid[2] = static_cast<unsigned>(order == ALONG_X ? 1 : query[0]);
  }

  std::int64_t scratch_bytes(const CallKey& key) const {
    const std::int64_t (&query)[4] = key.tensors[QUERY].shape;
    return row_bytes * query[0] * query[1] * query[2];
  }
};

// A kernel with its parameter, in which only what may differ from call to call is left open.
struct PlannedKernel {
  static constexpr std::size_t MAX_PARAMS = 640;

  KernelLaunch launch;
  std::string params;
  std::vector<Pointer> pointers;
  std::vector<NumberPlace> numbers;
  bool only_with_lse;
  Sizing sizing{};
  bool shares_keys = false;  // its CTAs do, with the parameter of sequences.h

  void issue(const Driver& driver, CUstream stream, const Addresses& addresses, const Numbers& values) const {
    alignas(16) char filled[MAX_PARAMS];
    std::memcpy(filled, params.data(), params.size());
    for (const Pointer& pointer : pointers) {
      const std::uintptr_t base = addresses[pointer.operand], address = base ? base + pointer.offset : 0;
      std::memcpy(filled + pointer.at, &address, sizeof(address));
    }
    for (const NumberPlace& place : numbers) std::memcpy(filled + place.at, &values[place.number], sizeof(float));
    launch.issue(driver, stream, filled, addresses);
  }
};

// Sizes for which a plan's kernels are the ones that would be chosen: such a call gets its plan from this one. Strides
// and what the masks hide are then the call's own.
struct SizeRange {
  std::int64_t first_batch, last_batch, first, last;  // of batch sizes, and of lengths of K
  bool queries_follow;                                // whether S_q is S_k; else it is that of the plan

  bool is_empty() const { return first_batch > last_batch || first > last; }
  bool has(std::int64_t batch, std::int64_t seqlen_k) const {
    return first_batch <= batch && batch <= last_batch && first <= seqlen_k && seqlen_k <= last;
  }
};

// What the launch of a plan for sequences of many lengths depends on, beside the call: the kernel's tiles of rows, the
// most CTAs that share all keys, bytes of scratch memory that these leave partial outputs in, and CTAs of a cluster.
// `box_rows` and `box_columns` are those of the tensor maps of K and V, for a kernel of CTAs that stay and count what
// they take; 0 for one without. `tail_columns` are those of two further maps, of the tiles' last columns; 0 for none.
// `box_queries` are those of maps of Q, whose boxes have all heads of a key head; 0 for none.
struct VarlenLaunch {
  std::int64_t block_m, ctas, workspace_bytes, cluster, box_rows, box_columns, tail_columns, box_queries;
};

// Scratch memory in which the first kernel of a plan leaves Q and K with their norms and rotary embedding, and the
// others read them: bytes from its start to each, -1 for one that stays as it is, and to its end, where that of the
// others begins. It has no bytes in a plan without such a kernel.
struct ChangedRows {
  std::int64_t query, key, bytes;

  // Bytes to what stands for an operand; -1 for the operand itself.
  std::int64_t place(int operand) const {
    return !bytes || operand > KEY ? -1 : operand == QUERY ? query : operand == KEY ? key : -1;
  }
};

struct Plan {
  CUcontext context;
  std::vector<PlannedKernel> kernels;  // launched one after another
  std::int64_t workspace_bytes;        // scratch memory of one call
  std::int64_t shared_bytes;           // what of it a kernel needs where its CTAs share keys, of sequences.h
  int counters;                        // among the addresses of a kernel: those of an operand, one, or none
  ChangedRows changed;
  SizeRange range;
  std::shared_ptr<const Plan> next;  // in ranged_plans() of plans.h: of other sizes
  VarlenLaunch varlen;               // of no CTAs for other plans
  std::int64_t node;  // the operator of torch's whose node of autograd has the call's gradient: see torch_nodes.h
  std::int64_t kind;  // of kinds() in plans.h

  // Scratch memory of a kernel of sequences.h, behind what it reads of changed rows.
  void size_shared_scratch() {
    if (shared_bytes) workspace_bytes = changed.bytes + (kernels.back().shares_keys ? shared_bytes : 0);
  }

  // Scratch memory of kernels whose sizing says it: they have it in turn, behind what others read of changed rows.
  void size_scratch(const CallKey& key) {
    for (const PlannedKernel& kernel : kernels) {
      if (!kernel.sizing.row_bytes) continue;
      workspace_bytes = changed.bytes;
      for (const PlannedKernel& each : kernels) {
        workspace_bytes = std::max(workspace_bytes, changed.bytes + each.sizing.scratch_bytes(key));
      }
      return;
    }
  }
};

// Readers share the lock, so concurrent callers do not wait for one another. Keys are compared as bytes.
class PlanTable {
 public:
  std::shared_ptr<const Plan> find(const CallKey& key) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto entry = plans_.find(key);
    return entry == plans_.end() ? nullptr : entry->second;
  }

  // Bounded: a program that never repeats a shape must not grow for ever. Plans are cheap to make again.
  void insert(const CallKey& key, std::shared_ptr<const Plan> plan) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (plans_.size() >= MAX_PLANS) plans_.clear();
    plans_[key] = std::move(plan);
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
  struct Hash {
    std::size_t operator()(const CallKey& key) const {
      // Lanes do not wait for one another's products. A key has a few words more than a multiple of LANES.
      constexpr std::size_t LANES = 4;
      constexpr std::uint64_t FACTOR = 0x9e3779b97f4a7c15u;
      const auto mixed = [](std::uint64_t hash, std::uint64_t word) {
        hash = (hash ^ word) * FACTOR;
        return hash ^ hash >> 29;
      };
      std::uint64_t lanes[LANES] = {1, 2, 3, 4};
      key.all_parts([&](const char* part, std::size_t size) {
        for (; size >= LANES * 8; part += LANES * 8, size -= LANES * 8) {
          std::uint64_t words[LANES];
          std::memcpy(words, part, sizeof(words));
          for (std::size_t lane = 0; lane < LANES; ++lane) lanes[lane] = mixed(lanes[lane], words[lane]);
        }
        for (std::size_t lane = 0; lane < size / 8; ++lane) {
          std::uint64_t word;
          std::memcpy(&word, part + 8 * lane, sizeof(word));
          lanes[lane] = mixed(lanes[lane], word);
        }
        return true;
      });
      return mixed(mixed(lanes[0], lanes[1]), mixed(lanes[2], lanes[3]));
    }
  };

  static constexpr std::size_t MAX_PLANS = 8192;
  mutable std::shared_mutex mutex_;
  std::unordered_map<CallKey, std::shared_ptr<const Plan>, Hash> plans_;
};

}  // namespace microsdpa
