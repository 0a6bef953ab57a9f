// Barriers of a block and collectives of a warp.
#include <cstring>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

bool same(const char* a, const char* b) { return a == b || !std::strcmp(a, b); }

bool same(Place a, Place b) { return a.line == b.line && same(a.file, b.file); }

}  // namespace

void Processor::block_barrier(Place place) {
  Cta& block = cta();
  for (int id : block.at_barrier) {
    if (!same(threads_[id].waits_at, place)) {
      fail(place, "divergent __syncthreads: thread %d waits at %s", id % job_.launch.threads,
           name(threads_[id].waits_at).c_str());
    }
  }
  block.at_barrier.push_back(self_->id);
  self_->waits_for = "__syncthreads";
  self_->waits_at = place;
  if (static_cast<int>(block.at_barrier.size()) == block.live) {
    release_block_barrier(block);  // this thread is ready again too, and waits its turn
  }
  Context::switch_to(self_->context, scheduler_);
}

void Processor::release_block_barrier(Cta& block) {
  ++counters.block_barriers;
  join(block.at_barrier);
  if (job_.launch.count_banks) {
    const int first = threads_[block.at_barrier[0]].cta * static_cast<int>(warps_.size() / ctas_.size());
    for (int warp = first; warp < first + static_cast<int>(warps_.size() / ctas_.size()); ++warp) flush_banks(warp);
  }
  for (int id : block.at_barrier) make_ready(id);
  block.at_barrier.clear();
}

void Processor::named_barrier(int id, int threads, bool wait_for_it, Place place) {
  if (id < 0 || id >= NAMED_BARRIERS) fail(place, "barrier %d: expected a number from 0 to %d", id, NAMED_BARRIERS - 1);
  if (threads <= 0 || threads % 32 || threads > job_.launch.threads) {
    fail(place, "barrier %d: expected a multiple of 32 threads, at most the block's %d, got %d", id,
         job_.launch.threads, threads);
  }
  Barrier& barrier = cta().named[id];
  if (barrier.arrived.empty()) barrier.expected = threads;
  if (barrier.expected != threads) {
    fail(place, "barrier %d: %d threads expected here, but %d by thread %d", id, threads, barrier.expected,
         barrier.arrived[0] % job_.launch.threads);
  }
  const auto own = static_cast<std::size_t>(self_->id % job_.launch.threads);
  if (barrier.threads[own])
    fail(place, "barrier %d: thread %zu arrives twice in one phase: a wait is missing", id, own);
  barrier.threads.set(own);
  barrier.arrived.push_back(self_->id);
  if (wait_for_it) {
    barrier.waiting.push_back(self_->id);
    self_->waits_for = "a named barrier";
    self_->waits_at = place;
  }
  if (static_cast<int>(barrier.arrived.size()) == threads) {
    ++counters.named_barriers;
    // Those that only arrived publish what they did; those that wait learn of it.
    Knowledge all = threads_[barrier.arrived[0]].known;
    for (int other : barrier.arrived) all.learn(threads_[other].known);
    for (int other : barrier.waiting) {
      threads_[other].known.learn(all);
      make_ready(other);
    }
    for (int other : barrier.arrived) advance(other);
    barrier = {};
  }
  if (wait_for_it) Context::switch_to(self_->context, scheduler_);
}

void Processor::warp_barrier(std::uint32_t mask, Place place) {
  struct Context {
    Processor* processor;
    std::uint32_t mask;
    int first;
  } uniform{this, mask, first_thread(self_->warp)};
  warp_collective(
      "__syncwarp", mask, self_,
      [](void* const(&)[32], const void* context) {
        const auto& c = *static_cast<const Context*>(context);
        std::vector<int> participants;
        for (int lane = 0; lane < 32; ++lane) {
          if (c.mask >> lane & 1) participants.push_back(c.first + lane);
        }
        c.processor->join(participants);
        ++c.processor->counters.warp_barriers;
      },
      &uniform, place);
}

void Processor::warp_collective(const char* operation, std::uint32_t mask, void* mine, Apply apply, const void* uniform,
                                Place place) {
  Thread& thread = *self_;
  Warp& warp = warps_[thread.warp];
  if (!(mask >> thread.lane & 1)) fail(place, "%s: mask 0x%08x does not name the calling lane", operation, mask);
  if (mask & ~warp.live) {
    fail(place, "%s: mask 0x%08x names lanes that have returned or do not exist", operation, mask & ~warp.live);
  }
  Collective* collective = nullptr;
  for (Collective& open : warp.open) {
    if (!(open.mask & mask)) continue;
    if (open.mask != mask || !same(open.operation, operation) || !same(open.place, place)) {
      fail(place, "divergent warp: this lane is at %s with mask 0x%08x, others of it are at %s (%s) with mask 0x%08x",
           operation, mask, open.operation, name(open.place).c_str(), open.mask);
    }
    collective = &open;
  }
  if (!collective) {
    warp.open.push_back({operation, mask, 0, {}, place});
    collective = &warp.open.back();
  }
  collective->arrived |= 1u << thread.lane;
  collective->lanes[thread.lane] = mine;
  if (collective->arrived != mask) {
    wait(operation, place);
    return;
  }
  const Collective complete = *collective;
  warp.open.erase(warp.open.begin() + (collective - warp.open.data()));
  in_runtime = true;
  apply(complete.lanes, uniform);
  in_runtime = false;
  if (mask == 0xffffffffu && job_.launch.count_banks) flush_banks(thread.warp);
  for (int lane = 0; lane < 32; ++lane) {
    if (lane != thread.lane && (mask >> lane & 1)) make_ready(first_thread(thread.warp) + lane);
  }
}

}  // namespace microsdpa::emulator
