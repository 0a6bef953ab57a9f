// Global memory that several clusters use: races, and what orders clusters: counters with fences, and turns.
//
// What a thread knows when it passes a fence, later atomic operations release: its own, and those of threads behind a
// barrier with it. What an atomic operation finds, its thread knows behind the next fence, and others behind a barrier.
#include <chrono>
#include <cstdio>
#include <thread>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

constexpr std::chrono::seconds TURN_SECONDS(60);  // far longer than another block takes

}  // namespace

void Processor::global_access(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place) {
  const Access own{cluster_, self_->id, self_->known.clock[self_->id]};
  const GlobalConflict conflict = job_.global.record(address, bytes, write, place, own, self_->known);
  if (!conflict.kind) return;
  const Access& other = conflict.access;
  const int threads = job_.launch.threads;
  char where[32];
  std::snprintf(where, sizeof(where), "{0x%llx}", static_cast<unsigned long long>(conflict.place));
  fail_at(place, "race: this %s global memory that thread %d of block %lld %s at %s, with no %s between the two",
          write ? "writes" : "reads", other.thread % threads,
          static_cast<long long>(other.cluster * job_.launch.cluster + other.thread / threads), conflict.kind, where,
          other.cluster == cluster_ ? "barrier" : "counter behind fences, and no turn,");
}

// That what threads wrote to global memory is behind a proxy fence when a bulk copy comes.
void Processor::check_async_global(std::uintptr_t address, std::size_t bytes, const char* operation, Place place) {
  const GlobalConflict conflict = job_.global.unfenced(address, bytes, cluster_, self_->known);
  if (!conflict.kind) return;
  const Access& other = conflict.access;
  const int threads = job_.launch.threads;
  const auto block = static_cast<long long>(other.cluster * job_.launch.cluster + other.thread / threads);
  fail(place, "%s of global memory that thread %d of block %lld wrote, with no %s between the two", operation,
       other.thread % threads, block,
       other.cluster == cluster_ ? "fence.proxy.async.global ahead of a barrier"
                                 : "counter behind fences, and no turn,");
}

// A clock of this cluster's threads beside those of others.
std::shared_ptr<const Heard> Processor::for_others(const VectorClock& clock,
                                                   const std::shared_ptr<const Heard>& heard) const {
  auto all = heard ? std::make_shared<Heard>(*heard) : std::make_shared<Heard>();
  (*all)[cluster_] = std::make_shared<VectorClock>(clock);
  return all;
}

std::uint32_t Processor::atomic_add(std::uint32_t* number, std::uint32_t value, std::uint64_t place) {
  const auto address = reinterpret_cast<std::uintptr_t>(number);
  if (address % sizeof(value)) fail_at(place, "misaligned atomic addition at address %#zx", std::size_t(address));
  check_global(address, sizeof(value), true, place);
  counters.global_write_bytes += sizeof(value);
  const std::lock_guard<std::mutex> lock(job_.rendezvous.mutex);
  std::shared_ptr<const Heard>& left = job_.rendezvous.left[address];
  self_->acquired = together(self_->acquired, left);
  const Knowledge& known = self_->known;
  if (!known.released.empty()) left = together(left, for_others(known.released, known.released_of_others));
  return __atomic_fetch_add(number, value, __ATOMIC_SEQ_CST);
}

void Processor::thread_fence() {
  self_->known.heard = together(self_->known.heard, self_->acquired);
  self_->acquired.reset();
  self_->known.release();
  advance(self_->id);
}

// Blocks begin in the order of their numbers, each on one OS thread: the one that sets the number has begun. One that
// has begun later never sets it in time, which is a deadlock of a GPU too.
void Processor::wait_for_turn(const std::int32_t* number, std::int32_t turn, Place place) {
  if (const std::string fault = global_fault(reinterpret_cast<std::uintptr_t>(number), sizeof(*number), false);
      !fault.empty()) {
    fail(place, "wait for a turn: %s", fault.c_str());
  }
  const auto begin = std::chrono::steady_clock::now();
  while (__atomic_load_n(number, __ATOMIC_ACQUIRE) != turn) {
    if (job_.stop || std::chrono::steady_clock::now() - begin > TURN_SECONDS) {
      fail(place, "wait for turn %d: the number stays %d", turn, __atomic_load_n(number, __ATOMIC_ACQUIRE));
    }
    std::this_thread::yield();
  }
  {
    const std::lock_guard<std::mutex> lock(job_.rendezvous.mutex);
    self_->known.heard = together(self_->known.heard, job_.rendezvous.left[reinterpret_cast<std::uintptr_t>(number)]);
  }
  fence_proxy_async_global();
}

void Processor::end_turn(std::int32_t* number, std::int32_t next, Place place) {
  if (const std::string fault = global_fault(reinterpret_cast<std::uintptr_t>(number), sizeof(*number), true);
      !fault.empty()) {
    fail(place, "end of a turn: %s", fault.c_str());
  }
  if (!self_->open_stores.empty() || !self_->store_groups.empty()) {
    fail(place, "end of a turn: this thread has a bulk store in flight: a wait is missing");
  }
  {
    const std::lock_guard<std::mutex> lock(job_.rendezvous.mutex);
    std::shared_ptr<const Heard>& left = job_.rendezvous.left[reinterpret_cast<std::uintptr_t>(number)];
    left = together(left, for_others(self_->known.clock, self_->known.heard));
  }
  advance(self_->id);
  __atomic_store_n(number, next, __ATOMIC_RELEASE);
}

}  // namespace microsdpa::emulator
