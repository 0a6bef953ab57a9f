// Scheduling and synchronisation of the threads of a block.
#include "processor.h"

#include <cstdio>
#include <cstring>
#include <map>

namespace microsdpa::emulator {

namespace {

// "0-31, 64": a set of threads for a person.
std::string ranges(const std::vector<int>& threads) {
  std::string text;
  for (std::size_t i = 0; i < threads.size();) {
    std::size_t end = i;
    while (end + 1 < threads.size() && threads[end + 1] == threads[end] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(threads[i]);
    if (end > i) text += "-" + std::to_string(threads[end]);
    i = end + 1;
  }
  return text;
}

std::string name(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

// A set bit of `bits`, which is not zero: the first one from position `turn` on, round the corner.
int set_bit(std::uint32_t bits, int turn) {
  const std::uint32_t rotated = turn ? bits >> turn | bits << (32 - turn) : bits;
  return (__builtin_ctz(rotated) + turn) % 32;
}

bool same(const char* a, const char* b) { return a == b || !std::strcmp(a, b); }

bool same(Place a, Place b) { return a.line == b.line && same(a.file, b.file); }

}  // namespace

thread_local Processor* Processor::current_ = nullptr;

Processor::Processor(Job& job)
    : job_(job), stacks_(job.launch.threads), threads_(job.launch.threads), warps_((job.launch.threads + 31) / 32) {
  locate_shared();
}

void Processor::run() {
  const std::int64_t blocks = job_.launch.grid[0] * job_.launch.grid[1] * job_.launch.grid[2];
  for (std::int64_t block; !job_.stop && (block = job_.next_block++) < blocks;) run_block(block);
  finish_memory();
}

void Processor::run_block(std::int64_t block) {
  const Launch& launch = job_.launch;
  block_ = block;
  random_state_ = launch.seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(block) * 0xbf58476d1ce4e5b9u + 1;
  run_ahead_ = random() % 2;  // one warp as far as it gets, or all of them mixed
  chosen_warp_ = -1;
  live_ = launch.threads;
  at_block_barrier_.clear();
  for (Barrier& barrier : named_) barrier = {};
  for (Warp& warp : warps_) warp = {};
  copies_.clear();
  shadow_.reset(dynamic_offset_ + dynamic_bytes_, launch.threads);
  // 0xff is NaN in every floating-point type.
  if (static_bytes_) std::memset(reinterpret_cast<void*>(static_begin_), 0xff, static_bytes_);
  if (dynamic_bytes_) std::memset(dynamic_shared(), 0xff, dynamic_bytes_);

  const auto grid_x = static_cast<unsigned>(launch.grid[0]), grid_y = static_cast<unsigned>(launch.grid[1]);
  for (int id = 0; id < launch.threads; ++id) {
    Thread& thread = threads_[id];
    thread.id = id, thread.lane = id % 32, thread.warp = id / 32;
    thread.finished = false;
    thread.block = {static_cast<unsigned>(block % grid_x), static_cast<unsigned>(block / grid_x % grid_y),
                    static_cast<unsigned>(block / grid_x / grid_y)};
    thread.clock.assign(launch.threads, 0);
    thread.clock[id] = 1;
    thread.groups.clear();
    thread.open_group.clear();
    thread.bank_log.clear();
    thread.context.start(stacks_.at(id), thread_main);
    warps_[thread.warp].live |= 1u << thread.lane;
    make_ready(id);
  }
  schedule();
}

void Processor::schedule() {
  while (!aborted_ && live_ > 0) {
    if (!ready_warps_) {
      report_deadlock();
      break;
    }
    self_ = &pick();
    Context::switch_to(scheduler_, self_->context);
  }
  self_ = nullptr;
  ready_warps_ = 0;
}

// A ready thread, in an order that the seed decides.
Thread& Processor::pick() {
  if (!run_ahead_ || chosen_warp_ < 0 || !(ready_warps_ >> chosen_warp_ & 1)) {
    chosen_warp_ = set_bit(ready_warps_, static_cast<int>(random() % 32));
  }
  Warp& warp = warps_[chosen_warp_];
  const int lane = set_bit(warp.ready, static_cast<int>(random() % 32));
  warp.ready &= ~(1u << lane);
  if (!warp.ready) ready_warps_ &= ~(1u << chosen_warp_);
  return threads_[chosen_warp_ * 32 + lane];
}

void Processor::thread_main() {
  Processor& processor = *current();
  const Launch& launch = processor.job_.launch;
  reinterpret_cast<void (*)(const void*)>(launch.entry)(reinterpret_cast<const void*>(launch.params));
  processor.thread_exit();
}

void Processor::thread_exit() {
  Thread& thread = *self_;
  if (!thread.open_group.empty() || !thread.groups.empty()) {
    // The hardware lets copies finish after the thread; a kernel that relies on it has forgotten a wait.
    async_wait(0);
  }
  thread.finished = true;
  Warp& warp = warps_[thread.warp];
  warp.live &= ~(1u << thread.lane);
  for (const Collective& open : warp.open) {
    if (open.mask >> thread.lane & 1) {
      fail(open.place, "%s waits for this lane, which has returned from the kernel", open.operation);
    }
  }
  if (!warp.live && job_.launch.count_banks) flush_banks(thread.warp);
  --live_;
  if (live_ > 0 && static_cast<int>(at_block_barrier_.size()) == live_) release_block_barrier();
  Context::switch_to(thread.context, scheduler_);
  __builtin_unreachable();
}

void Processor::make_ready(int thread) {
  threads_[thread].waits_for = nullptr;
  warps_[thread / 32].ready |= 1u << (thread % 32);
  ready_warps_ |= 1u << (thread / 32);
}

void Processor::wait(const char* what, Place place) {
  Thread& thread = *self_;
  thread.waits_for = what;
  thread.waits_at = place;
  Context::switch_to(thread.context, scheduler_);
}

// What each of `threads` did before happens before what any of them does from now on.
void Processor::join(const std::vector<int>& threads) {
  VectorClock all = threads_[threads[0]].clock;
  for (int id : threads) {
    const VectorClock& one = threads_[id].clock;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], one[i]);
  }
  for (int id : threads) {
    threads_[id].clock = all;
    ++threads_[id].clock[id];
  }
}

void Processor::block_barrier(Place place) {
  for (int id : at_block_barrier_) {
    if (!same(threads_[id].waits_at, place)) {
      fail(place, "divergent __syncthreads: thread %d waits at %s", id, name(threads_[id].waits_at).c_str());
    }
  }
  at_block_barrier_.push_back(self_->id);
  self_->waits_for = "__syncthreads";
  self_->waits_at = place;
  if (static_cast<int>(at_block_barrier_.size()) == live_) {
    release_block_barrier();  // this thread is ready again too, and waits its turn
  }
  Context::switch_to(self_->context, scheduler_);
}

void Processor::release_block_barrier() {
  ++counters.block_barriers;
  join(at_block_barrier_);
  if (job_.launch.count_banks) {
    for (std::size_t warp = 0; warp < warps_.size(); ++warp) flush_banks(static_cast<int>(warp));
  }
  for (int id : at_block_barrier_) make_ready(id);
  at_block_barrier_.clear();
}

void Processor::named_barrier(int id, int threads, bool wait_for_it, Place place) {
  if (id < 0 || id >= NAMED_BARRIERS) fail(place, "barrier %d: expected a number from 0 to %d", id, NAMED_BARRIERS - 1);
  if (threads <= 0 || threads % 32 || threads > job_.launch.threads) {
    fail(place, "barrier %d: expected a multiple of 32 threads, at most the block's %d, got %d", id,
         job_.launch.threads, threads);
  }
  Barrier& barrier = named_[id];
  if (barrier.arrived.empty()) barrier.expected = threads;
  if (barrier.expected != threads) {
    fail(place, "barrier %d: %d threads expected here, but %d by thread %d", id, threads, barrier.expected,
         barrier.arrived[0]);
  }
  barrier.arrived.push_back(self_->id);
  if (wait_for_it) {
    barrier.waiting.push_back(self_->id);
    self_->waits_for = "a named barrier";
    self_->waits_at = place;
  }
  if (static_cast<int>(barrier.arrived.size()) == threads) {
    ++counters.named_barriers;
    // Those that only arrived publish what they did; those that wait learn of it.
    VectorClock all(threads_.size(), 0);
    for (int other : barrier.arrived) {
      const VectorClock& one = threads_[other].clock;
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], one[i]);
    }
    for (int other : barrier.waiting) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        threads_[other].clock[i] = std::max(threads_[other].clock[i], all[i]);
      }
      make_ready(other);
    }
    for (int other : barrier.arrived) ++threads_[other].clock[other];
    barrier = {};
  }
  if (wait_for_it) Context::switch_to(self_->context, scheduler_);
}

void Processor::warp_barrier(std::uint32_t mask, Place place) {
  struct Context {
    Processor* processor;
    std::uint32_t mask;
    int warp;
  } uniform{this, mask, self_->warp};
  warp_collective(
      "__syncwarp", mask, self_,
      [](void* const(&)[32], const void* context) {
        const auto& c = *static_cast<const Context*>(context);
        std::vector<int> participants;
        for (int lane = 0; lane < 32; ++lane) {
          if (c.mask >> lane & 1) participants.push_back(c.warp * 32 + lane);
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
    if (lane != thread.lane && (mask >> lane & 1)) make_ready(thread.warp * 32 + lane);
  }
}

void Processor::report_deadlock() {
  std::map<std::string, std::vector<int>> waiting;
  for (const Thread& thread : threads_) {
    if (!thread.finished && thread.waits_for) {
      waiting[std::string(thread.waits_for) + " at " + name(thread.waits_at)].push_back(thread.id);
    }
  }
  std::string text = "deadlock";
  for (const auto& [what, threads] : waiting) text += "; threads " + ranges(threads) + " wait for " + what;
  const std::lock_guard<std::mutex> lock(job_.mutex);
  if (!job_.stop.exchange(true)) {
    job_.outcome.failed = 1;
    std::snprintf(job_.outcome.message, MESSAGE_BYTES, "block %lld: %s", static_cast<long long>(block_), text.c_str());
  }
  aborted_ = true;
}

void Processor::fail(Place place, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  abort(name(place), format, arguments);
}

void Processor::fail_at(std::uint64_t place, const char* format, ...) {
  char where[32];
  std::snprintf(where, sizeof(where), "{0x%llx}", static_cast<unsigned long long>(place));
  std::va_list arguments;
  va_start(arguments, format);
  abort(where, format, arguments);
}

void Processor::abort(const std::string& where, const char* format, std::va_list arguments) {
  char text[2048];
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  {
    const std::lock_guard<std::mutex> lock(job_.mutex);
    if (!job_.stop.exchange(true)) {
      job_.outcome.failed = 1;
      std::snprintf(job_.outcome.message, MESSAGE_BYTES, "block %lld, warp %d, lane %d, %s: %s",
                    static_cast<long long>(block_), self_->warp, self_->lane, where.c_str(), text);
    }
  }
  aborted_ = true;
  // The block's fibers are never resumed; their stacks hold nothing that needs to be destroyed.
  Context::switch_to(self_->context, scheduler_);
  __builtin_unreachable();
}

std::uint64_t Processor::random() {  // xorshift64
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

}  // namespace microsdpa::emulator
