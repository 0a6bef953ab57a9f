// Processor: one OS thread that runs blocks, one after the other, their threads as fibers.
#pragma once

#include <atomic>
#include <cstdarg>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../include/emulator.h"
#include "fiber.h"
#include "launch.h"
#include "shadow.h"

namespace microsdpa::emulator {

constexpr int MAX_THREADS = 1024;
constexpr int MAX_WARPS = 32;
constexpr int NAMED_BARRIERS = 16;

struct AsyncCopy {
  std::uint32_t number;  // position + 1 in the processor's list
  std::size_t offset;    // in shared memory
  const void* source;
  int bytes, valid_bytes;
  std::uint64_t place;
  int thread;
  Place issued;
};

struct BankAccess {
  std::uint64_t place;
  std::uint32_t offset;
  std::uint16_t bytes;
  bool write;
};

struct Thread {
  Context context;
  Coordinates block;
  int id, lane, warp;
  const char* waits_for = nullptr;  // null: ready or finished
  Place waits_at{};
  bool finished = false;
  VectorClock clock;
  std::vector<std::vector<std::uint32_t>> groups;  // committed cp.async groups, oldest first
  std::vector<std::uint32_t> open_group;
  std::vector<BankAccess> bank_log;
};

struct Collective {
  const char* operation;
  std::uint32_t mask, arrived = 0;
  void* lanes[32] = {};
  Place place;
};

struct Warp {
  std::uint32_t ready = 0, live = 0;
  std::vector<Collective> open;
};

struct Barrier {
  int expected = 0;
  std::vector<int> arrived;  // threads, waiting or not
  std::vector<int> waiting;
};

// State that all processors of a launch share.
struct Job {
  const Launch& launch;
  std::atomic<std::int64_t> next_block{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Outcome& outcome;
};

class Processor {
 public:
  explicit Processor(Job& job);
  void run();  // blocks, until there are none left or one failed

  static Processor*& current() { return current_; }

  Thread& self() { return *self_; }
  Job& job() { return job_; }

  // Memory (memory.cc).
  void access(const void* address, std::size_t bytes, bool write, bool aligned, std::uint64_t place);
  void async_copy(void* shared, const void* global, int bytes, int valid_bytes, std::uint64_t pc, Place place);
  void async_commit();
  void async_wait(std::size_t pending_groups);
  std::byte* dynamic_shared() { return reinterpret_cast<std::byte*>(dynamic_begin_); }
  void finish_memory();

  // Synchronisation (processor.cc).
  void block_barrier(Place place);
  void named_barrier(int id, int threads, bool wait, Place place);
  void warp_barrier(std::uint32_t mask, Place place);
  void warp_collective(const char* operation, std::uint32_t mask, void* mine, Apply apply, const void* uniform,
                       Place place);

  [[noreturn]] void fail(Place place, const char* format, ...) __attribute__((format(printf, 3, 4)));
  [[noreturn]] void fail_at(std::uint64_t place, const char* format, ...) __attribute__((format(printf, 3, 4)));

  Counters counters{};
  bool in_runtime = false;  // accesses are the runtime's own

 private:
  static void thread_main();
  void run_block(std::int64_t block);
  void schedule();
  Thread& pick();
  void wait(const char* what, Place place);
  void make_ready(int thread);
  void thread_exit();
  void join(const std::vector<int>& threads);
  void release_block_barrier();
  void report_deadlock();
  [[noreturn]] void abort(const std::string& where, const char* format, std::va_list arguments);
  std::uint64_t random();

  void locate_shared();
  void shared_access(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place);
  void check_global(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place);
  void deliver(const AsyncCopy& copy);
  void log_bank(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place);
  void flush_banks(int warp);
  void count_group(std::uint64_t place, const BankAccess* const (&lanes)[32]);

  // Read at every access to memory: the library asks the loader for a fixed place.
  static thread_local Processor* current_ __attribute__((tls_model("initial-exec")));
  Job& job_;
  Context scheduler_;
  Stacks stacks_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::uint32_t ready_warps_ = 0;
  int live_ = 0, chosen_warp_ = -1;
  bool aborted_ = false, run_ahead_ = false;
  std::int64_t block_ = 0;
  std::uint64_t random_state_ = 1;
  Thread* self_ = nullptr;

  std::vector<int> at_block_barrier_;
  Barrier named_[NAMED_BARRIERS];

  std::unique_ptr<std::byte[]> dynamic_;  // holds the aligned memory
  std::uintptr_t static_begin_ = 0, dynamic_begin_ = 0;
  std::size_t static_bytes_ = 0, dynamic_bytes_ = 0;
  std::size_t dynamic_offset_ = 0;  // of dynamic shared memory in the shadow, behind the static
  Shadow shadow_;
  std::vector<AsyncCopy> copies_;
  struct Site {
    std::uint64_t place, requests, wavefronts, ideal;
  };
  std::vector<Site> sites_;
};

}  // namespace microsdpa::emulator
