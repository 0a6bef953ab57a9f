// Scheduling of the threads of a cluster, and how a launch fails.
#include "processor.h"

#include <algorithm>
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

// A set bit of `bits`, which is not zero: the first one from position `turn` on, round the corner.
int set_bit(std::uint32_t bits, int turn) {
  const std::uint32_t rotated = turn ? bits >> turn | bits << (32 - turn) : bits;
  return (__builtin_ctz(rotated) + turn) % 32;
}

}  // namespace

thread_local Processor* Processor::current_ = nullptr;

Processor::Processor(Job& job)
    : job_(job),
      stacks_(job.launch.threads * job.launch.cluster),
      threads_(job.launch.threads * job.launch.cluster),
      warps_((job.launch.threads + 31) / 32 * job.launch.cluster),
      ctas_(job.launch.cluster),
      agents_(static_cast<int>(threads_.size() + ctas_.size() * COPY_AGENTS + warps_.size()) + 1) {
  locate_code();
  locate_shared();
}

void Processor::run() {
  const std::int64_t blocks = job_.launch.grid[0] * job_.launch.grid[1] * job_.launch.grid[2];
  const std::int64_t clusters = blocks / job_.launch.cluster;
  for (std::int64_t turn; !job_.stop && (turn = job_.next_cluster++) < clusters;) {
    run_cluster(job_.launch.backwards ? clusters - 1 - turn : turn);
  }
  finish_memory();
}

int Processor::first_thread(int warp) const {
  const int warps = static_cast<int>(warps_.size() / ctas_.size());
  return warp / warps * job_.launch.threads + warp % warps * 32;
}

void Processor::run_cluster(std::int64_t cluster) {
  const Launch& launch = job_.launch;
  cluster_ = cluster;
  random_state_ = launch.seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(cluster) * 0xbf58476d1ce4e5b9u + 1;
  run_ahead_ = random() % 2;  // one warp as far as it gets, or all of them mixed
  chosen_warp_ = -1;
  live_ = threads();
  // What ptxas gives the threads of a kernel that moves registers between whole warpgroups: at most an equal share.
  const int registers = std::min(65536 / ((launch.threads + 127) / 128 * 128) / 8 * 8, 256);
  for (Cta& cta : ctas_) {
    cta = {};
    cta.live = launch.threads;
    cta.registers_left = 0;  // what the shares leave over belongs to no one
    cta.issued.resize(static_cast<std::size_t>(launch.threads + 127) / 128);
  }
  for (Warp& warp : warps_) {
    warp = {};
    warp.registers = registers;
  }
  ready_warps_.clear();
  copies_.clear();
  flights_.clear();
  mbarriers_.clear();
  agent_clocks_.assign(agents_, 0);
  cluster_arrived_ = 0, cluster_phase_ = 0;
  cluster_known_.reset(agents_);
  at_cluster_barrier_.clear();
  shadow_.reset(cta_bytes_ * ctas_.size());
  // 0xff is NaN in every floating-point type.
  if (static_bytes_) std::memset(reinterpret_cast<void*>(static_begin_), 0xff, static_bytes_);
  for (int cta = 0; dynamic_bytes_ && cta < launch.cluster; ++cta)
    std::memset(dynamic_shared(cta), 0xff, dynamic_bytes_);

  const auto grid_x = static_cast<unsigned>(launch.grid[0]), grid_y = static_cast<unsigned>(launch.grid[1]);
  const int warps = static_cast<int>(warps_.size() / ctas_.size());
  for (int id = 0; id < threads(); ++id) {
    Thread& thread = threads_[id];
    const int in_cta = id % launch.threads;
    thread.id = id, thread.lane = in_cta % 32, thread.cta = id / launch.threads;
    thread.warp = thread.cta * warps + in_cta / 32;
    thread.finished = false;
    thread.waits_on = NOWHERE;
    const std::int64_t block = cluster * launch.cluster + thread.cta;
    thread.block = {static_cast<unsigned>(block % grid_x), static_cast<unsigned>(block / grid_x % grid_y),
                    static_cast<unsigned>(block / grid_x / grid_y)};
    thread.known.reset(agents_);
    thread.known.clock[id] = 1;
    thread.acquired.reset();
    thread.groups.clear();
    thread.open_group.clear();
    thread.store_groups.clear();
    thread.open_stores.clear();
    thread.bank_log.clear();
    thread.cluster_arrivals = 0, thread.cluster_waits = 0;
    thread.wgmma_fenced = false;
    thread.failed_tests = 0;
    thread.context.start(stacks_.at(id), Stacks::unused(id), thread_main);
    warps_[thread.warp].live |= 1u << thread.lane;
    make_ready(id);
  }
  schedule();
}

void Processor::schedule() {
  while (!aborted_ && live_ > 0) {
    if (ready_warps_.empty()) {
      report_deadlock();
      break;
    }
    self_ = &pick();
    stack_ = reinterpret_cast<std::uintptr_t>(stacks_.at(self_->id));
    Context::switch_to(scheduler_, self_->context);
  }
  self_ = nullptr;
}

// A ready thread, in an order that the seed decides.
Thread& Processor::pick() {
  if (!run_ahead_ || chosen_warp_ < 0 || warps_[chosen_warp_].position < 0) {
    chosen_warp_ = ready_warps_[random() % ready_warps_.size()];
  }
  Warp& warp = warps_[chosen_warp_];
  const int lane = set_bit(warp.ready, static_cast<int>(random() % 32));
  warp.ready &= ~(1u << lane);
  if (!warp.ready) {
    const int last = ready_warps_.back();
    ready_warps_[warp.position] = last;
    warps_[last].position = warp.position;
    ready_warps_.pop_back();
    warp.position = -1;
  }
  return threads_[first_thread(chosen_warp_) + lane];
}

void Processor::thread_main() {
  Processor& processor = *current();
  const Launch& launch = processor.job_.launch;
  reinterpret_cast<void (*)(const void*)>(launch.entry)(reinterpret_cast<const void*>(launch.params));
  processor.thread_exit();
}

void Processor::thread_exit() {
  Thread& thread = *self_;
  // The hardware lets such operations finish after the thread; a kernel that relies on it has forgotten a wait.
  const auto unfinished = [&](std::uint32_t number) {
    const Flight& flight = flights_[number - 1];
    fail(flight.issued, "%s is in flight when its thread returns from the kernel: a wait is missing", flight.operation);
  };
  thread.groups.push_back(std::move(thread.open_group));
  for (const auto& group : thread.groups) {
    if (!group.empty()) unfinished(copies_[group[0]].number);
  }
  thread.store_groups.push_back(std::move(thread.open_stores));
  for (const auto& group : thread.store_groups) {
    if (!group.empty()) unfinished(group[0].number);
  }
  Warp& warp = warps_[thread.warp];
  warp.mma_groups.push_back(std::move(warp.open_mmas));
  for (const auto& group : warp.mma_groups) {
    if (!group.empty()) unfinished(group[0].number);
  }
  thread.finished = true;
  warp.live &= ~(1u << thread.lane);
  for (const Collective& open : warp.open) {
    if (open.mask >> thread.lane & 1) {
      fail(open.place, "%s waits for this lane, which has returned from the kernel", open.operation);
    }
  }
  if (!warp.live && job_.launch.count_banks) flush_banks(thread.warp);
  Cta& block = cta();
  --block.live, --live_;
  if (block.live > 0 && static_cast<int>(block.at_barrier.size()) == block.live) release_block_barrier(block);
  if (live_ > 0 && cluster_arrived_ == live_ && !at_cluster_barrier_.empty()) release_cluster_barrier();
  if (block.live == 0) {
    for (const auto& [offset, barrier] : mbarriers_) {
      if (static_cast<int>(offset / cta_bytes_) == thread.cta && (barrier.bytes != 0 || !barrier.deliveries.empty())) {
        fail({"the end of the kernel", 0}, "the CTA has ended while bytes are on their way to the mbarrier at byte %zu",
             offset % cta_bytes_);
      }
    }
    for (int id = 0; id < NAMED_BARRIERS; ++id) {
      if (const std::size_t arrived = block.named[id].arrived.size()) {
        fail({"the end of the kernel", 0},
             "%zu threads have arrived at barrier %d, at which nobody waits: a wait is missing", arrived, id);
      }
    }
    for (const auto& issued : block.issued) {
      const std::size_t group = static_cast<std::size_t>(&issued - block.issued.data());
      const std::size_t first = static_cast<std::size_t>(thread.cta) * (warps_.size() / ctas_.size()) + 4 * group;
      for (std::size_t w = first; w < std::min(first + 4, warps_.size()) && !issued.empty(); ++w) {
        if (warps_[w].mmas_issued != issued.size()) {
          fail(issued.back().place, "divergent warpgroup: warp %zu took part in %zu wgmmas of %zu", w % 4,
               warps_[w].mmas_issued, issued.size());
        }
      }
    }
  }
  Context::switch_to(thread.context, scheduler_);
  __builtin_unreachable();
}

void Processor::make_ready(int thread) {
  threads_[thread].waits_for = nullptr;
  threads_[thread].waits_on = NOWHERE;
  const int number = threads_[thread].warp;
  Warp& warp = warps_[number];
  warp.ready |= 1u << threads_[thread].lane;
  if (warp.position < 0) {
    warp.position = static_cast<int>(ready_warps_.size());
    ready_warps_.push_back(number);
  }
}

void Processor::wait(const char* what, Place place) {
  Thread& thread = *self_;
  thread.waits_for = what;
  thread.waits_at = place;
  Context::switch_to(thread.context, scheduler_);
}

// Begins a new epoch of a thread: what it does from now on is not known to those who learned from it so far.
void Processor::advance(int thread) {
  if (++threads_[thread].known.clock[thread] >= MAX_CLOCK) {
    fail({"the emulator", 0}, "more than %u synchronisations of one thread", MAX_CLOCK);
  }
}

// What each of `threads` did before happens before what any of them does from now on.
void Processor::join(const std::vector<int>& threads) {
  Knowledge all = threads_[threads[0]].known;
  for (int id : threads) all.learn(threads_[id].known);
  for (int id : threads) {
    threads_[id].known = all;
    advance(id);
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
    std::snprintf(job_.outcome.message, MESSAGE_BYTES, "%s %lld: %s", ctas_.size() > 1 ? "cluster" : "block",
                  static_cast<long long>(cluster_), text.c_str());
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
                    static_cast<long long>(cluster_ * job_.launch.cluster + self_->cta),
                    self_->id % job_.launch.threads / 32, self_->lane, where.c_str(), text);
    }
  }
  aborted_ = true;
  // The block's fibers are never resumed; their stacks hold nothing that needs to be destroyed.
  Context::switch_to(self_->context, scheduler_);
  __builtin_unreachable();
}

// A thread or an agent, for a person.
std::string Processor::who(int thread) const {
  const int threads = job_.launch.threads;
  if (thread >= this->threads()) {
    return thread < tensor_agent(0) ? "a bulk copy" : "wgmma";
  }
  std::string text = "thread " + std::to_string(thread % threads);
  if (ctas_.size() > 1 && thread / threads != self_->cta) text += " of CTA " + std::to_string(thread / threads);
  return text;
}

std::uint64_t Processor::random() {  // xorshift64
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

}  // namespace microsdpa::emulator
