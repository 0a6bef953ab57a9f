// Clusters: the barrier and the shared memory of other CTAs; and what the warps of a CTA are given.
#include <cstring>

#include "processor.h"

namespace microsdpa::emulator {

void Processor::peer_access(std::uint32_t target, void* data, int bytes, bool write, Place place) {
  const char* operation = write ? "st.shared::cluster" : "ld.shared::cluster";
  if (target % static_cast<unsigned>(bytes)) fail(place, "%s: misaligned access of %d bytes", operation, bytes);
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t offset = cluster_offset(target, size, operation, place);
  if (const std::string fault = shared_fault(offset, size, write); !fault.empty()) fail(place, "%s", fault.c_str());
  counters.peer_bytes += size;
  if (write) {
    shadow_.mark_write(offset, size, epoch_of(self_->known.clock[self_->id], self_->id), 0);
    std::memcpy(memory_at(offset), data, size);
  } else {
    shadow_.mark_read(offset, size, self_->id, self_->known, 0);
    std::memcpy(data, memory_at(offset), size);
  }
}

void Processor::cluster_arrive(bool release, Place place) {
  Thread& thread = *self_;
  if (thread.cluster_arrivals != thread.cluster_waits) {
    fail(place, "barrier.cluster.arrive: this thread has not waited since it arrived last");
  }
  ++thread.cluster_arrivals;
  if (release) {
    cluster_known_.learn(thread.known);
    advance(thread.id);
  }
  at_cluster_barrier_.push_back(thread.id);
  if (++cluster_arrived_ == live_) release_cluster_barrier();
}

void Processor::release_cluster_barrier() {
  ++counters.cluster_barriers;
  ++cluster_phase_;
  cluster_arrived_ = 0;
  for (int id : at_cluster_barrier_) {
    Thread& thread = threads_[id];
    if (thread.finished) continue;
    if (thread.waits_for && !std::strcmp(thread.waits_for, "barrier.cluster")) make_ready(id);
  }
  at_cluster_barrier_.clear();
}

void Processor::cluster_wait(Place place) {
  Thread& thread = *self_;
  if (thread.cluster_arrivals != thread.cluster_waits + 1) {
    fail(place, "barrier.cluster.wait: this thread has not arrived");
  }
  while (cluster_phase_ < thread.cluster_arrivals) wait("barrier.cluster", place);
  thread.known.learn(cluster_known_);
  ++thread.cluster_waits;
}

bool Processor::elect_one(Place place) {
  warp_collective("elect.sync", 0xffffffffu, self_, [](void* const(&)[32], const void*) {}, nullptr, place);
  return self_->lane == static_cast<int>(job_.launch.seed * 11 % 32);  // any lane, the same at every call
}

// Registers come from, and return to, what the CTA was launched with; this emulator knows not how many the compiler
// gave each thread, and takes the most that it may.
void Processor::set_registers(int registers, bool up, Place place) {
  if (registers % 8 || registers < 24 || registers > 256) {
    fail(place, "setmaxnreg: expected a multiple of 8 from 24 to 256, got %d", registers);
  }
  const char* operation = up ? "setmaxnreg.inc" : "setmaxnreg.dec";
  warp_collective(operation, 0xffffffffu, self_, [](void* const(&)[32], const void*) {}, nullptr, place);
  Thread& thread = *self_;
  if (thread.lane != 0) {
    warp_collective(operation, 0xffffffffu, self_, [](void* const(&)[32], const void*) {}, nullptr, place);
    return;
  }
  Warp& own = warp();
  Cta& block = cta();
  const int change = (registers - own.registers) * 32;
  if (!up && change > 0) fail(place, "%s: %d registers, where the warp has %d", operation, registers, own.registers);
  while (up && change > block.registers_left) {
    block.waiting_for_registers.push_back(thread.id);
    wait("setmaxnreg.inc", place);
  }
  block.registers_left -= change;
  own.registers = registers;
  for (int id : block.waiting_for_registers) make_ready(id);
  block.waiting_for_registers.clear();
  warp_collective(operation, 0xffffffffu, self_, [](void* const(&)[32], const void*) {}, nullptr, place);
}

void Processor::grid_dependency_wait() { self_->known.clock[grid_agent()] = 1; }

}  // namespace microsdpa::emulator
