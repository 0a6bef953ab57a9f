// mbarriers: phases, and what those who wait for one learn.
#include <algorithm>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

constexpr int MAX_FAILED_TESTS = 1 << 20;

}  // namespace

void Processor::mbarrier_init(std::uint32_t address, int arrivals, Place place) {
  if (arrivals <= 0 || arrivals >= 1 << 20)
    fail(place, "mbarrier.init: expected 1 to %d arrivals, got %d", (1 << 20) - 1, arrivals);
  if (address % 8) fail(place, "mbarrier.init: expected an address aligned to 8 bytes, got %u", address);
  const std::size_t offset = cluster_offset(address, 8, "mbarrier.init", place);
  if (const std::string fault = shared_fault(offset, 8, true); !fault.empty()) fail(place, "%s", fault.c_str());
  const Epoch now = epoch_of(self_->known.clock[self_->id], self_->id);
  shadow_.mark_write(offset, 8, now, 0);
  const auto used = std::count_if(mbarriers_.begin(), mbarriers_.end(), [&](const auto& other) {
    return other.first / cta_bytes_ == offset / cta_bytes_ && other.first != offset;
  });
  if (used >= COPY_AGENTS)
    fail(place, "more than %d mbarriers in a CTA, which is all that the emulator has", COPY_AGENTS);
  const bool again = mbarriers_.count(offset);
  const int agent = again ? mbarriers_[offset].agent : threads() + self_->cta * COPY_AGENTS + static_cast<int>(used);
  Mbarrier& barrier = mbarriers_[offset] = {};
  barrier.agent = agent;
  barrier.expected = barrier.pending = arrivals;
  barrier.initialised = now;
  barrier.initialiser = self_->id;
  barrier.arriving.reset(agents_);
  barrier.completed.reset(agents_);
}

void Processor::mbarrier_init_fence() {
  for (auto& [offset, barrier] : mbarriers_) {
    if (barrier.initialiser != self_->id || barrier.published) continue;
    barrier.published = true;
    barrier.published_in = self_->cluster_arrivals;
  }
}

// The barrier, if the running thread can know that it is set up. `copy`: a bulk copy will count on it.
Mbarrier& Processor::mbarrier_at(std::size_t offset, const char* operation, bool copy, Place place) {
  auto found = mbarriers_.find(offset);
  if (found == mbarriers_.end()) {
    fail(place, "%s: no mbarrier was initialised at byte %zu", operation, offset % cta_bytes_);
  }
  Mbarrier& barrier = found->second;
  const bool synchronised = barrier.initialiser == self_->id || self_->known.knows(barrier.initialised);
  const bool through_cluster = barrier.published && self_->cluster_waits > barrier.published_in;
  if (!synchronised && !through_cluster) {
    fail(place, "race: %s on an mbarrier that %s initialises with no barrier between the two", operation,
         who(barrier.initialiser).c_str());
  }
  const bool remote = static_cast<int>(offset / cta_bytes_) != self_->cta;
  if ((copy || remote) && !barrier.published && !self_->known.fenced_off(barrier.initialised)) {
    fail(place, "%s on an mbarrier whose initialisation no fence has published: mbarrier_init_fence is missing",
         operation);
  }
  return barrier;
}

void Processor::mbarrier_arrive(std::uint32_t address, int expected_bytes, Place place) {
  const std::size_t offset = cluster_offset(address, 8, "mbarrier.arrive", place);
  Mbarrier& barrier = mbarrier_at(offset, "mbarrier.arrive", false, place);
  if (expected_bytes < 0 || expected_bytes >= 1 << 20) {
    fail(place, "mbarrier.arrive.expect_tx: expected 0 to %d bytes, got %d", (1 << 20) - 1, expected_bytes);
  }
  if (barrier.pending == 0) {
    fail(place, "mbarrier at byte %zu: more than the %d arrivals that a phase expects", offset % cta_bytes_,
         barrier.expected);
  }
  barrier.bytes += expected_bytes;
  --barrier.pending;
  barrier.arriving.learn(self_->known);
  advance(self_->id);
  if (static_cast<int>(offset / cta_bytes_) != self_->cta) barrier.peer = true;
  complete_if_due(barrier, offset);
  deliver_due(barrier, offset);
}

void Processor::complete_if_due(Mbarrier& barrier, std::size_t offset) {
  if (barrier.pending || barrier.bytes) return;
  ++counters.mbarrier_phases;
  barrier.completed.learn(barrier.arriving);
  barrier.arriving.reset(agents_);
  barrier.peer_completed = barrier.peer;
  barrier.peer = false;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  for (Thread& thread : threads_) {
    if (thread.waits_for && thread.waits_on == offset) make_ready(thread.id);
  }
}

// In the late schedule: what the phase still awaits arrives once a thread waits for it and all arrivals are in.
void Processor::deliver_due(Mbarrier& barrier, std::size_t offset) {
  if (barrier.pending || barrier.deliveries.empty()) return;
  const bool awaited = std::any_of(threads_.begin(), threads_.end(),
                                   [&](const Thread& thread) { return thread.waits_for && thread.waits_on == offset; });
  if (!awaited) return;
  while (!barrier.deliveries.empty() && barrier.bytes > 0) {
    const Delivery delivery = std::move(barrier.deliveries.front());
    barrier.deliveries.pop_front();
    arrive_bytes(barrier, delivery, offset);
  }
}

bool Processor::phase_done(std::uint32_t address, int parity, bool cluster_scope, Place place) {
  const std::size_t offset = cluster_offset(address, 8, "mbarrier.try_wait", place);
  Mbarrier& barrier = mbarrier_at(offset, "mbarrier.try_wait", false, place);
  if (parity != 0 && parity != 1) fail(place, "mbarrier.try_wait: expected parity 0 or 1, got %d", parity);
  if (static_cast<int>(barrier.phase & 1) == parity) return false;
  if (barrier.peer_completed && !cluster_scope) {
    fail(place, "mbarrier.try_wait: other CTAs' threads took part in the phase: wait with cluster scope");
  }
  self_->known.learn(barrier.completed);
  return true;
}

bool Processor::mbarrier_test(std::uint32_t address, int parity, Place place) {
  if (phase_done(address, parity, false, place)) {
    self_->failed_tests = 0;
    return true;
  }
  if (++self_->failed_tests > MAX_FAILED_TESTS) {
    fail(place, "mbarrier.try_wait: no success in %d tests: deadlock", MAX_FAILED_TESTS);
  }
  // A test counts as a wait: it may be the only one that there will ever be.
  const std::size_t offset = cluster_offset(address, 8, "mbarrier.try_wait", place);
  self_->waits_for = "an mbarrier";
  self_->waits_on = offset;
  deliver_due(mbarriers_[offset], offset);
  make_ready(self_->id);
  chosen_warp_ = -1;  // others must get their turn even when a warp runs ahead
  Context::switch_to(self_->context, scheduler_);
  return phase_done(address, parity, false, place);
}

void Processor::mbarrier_wait(std::uint32_t address, int parity, bool cluster_scope, Place place) {
  while (!phase_done(address, parity, cluster_scope, place)) {
    const std::size_t offset = cluster_offset(address, 8, "mbarrier.try_wait", place);
    self_->waits_for = "an mbarrier";
    self_->waits_at = place;
    self_->waits_on = offset;
    deliver_due(mbarriers_[offset], offset);  // this may make the thread ready again; it waits its turn
    Context::switch_to(self_->context, scheduler_);
  }
}

}  // namespace microsdpa::emulator
