// The runtime's exported functions: what Python calls, what device code calls, and what the compiler inserts.
#include <thread>

#include "processor.h"

#define EXPORTED __attribute__((visibility("default")))

namespace microsdpa::emulator {

EXPORTED Coordinates thread_index() { return {static_cast<unsigned>(Processor::current()->self().id), 0, 0}; }

EXPORTED Coordinates block_index() { return Processor::current()->self().block; }

EXPORTED Coordinates block_size() { return {static_cast<unsigned>(Processor::current()->job().launch.threads), 1, 1}; }

EXPORTED Coordinates grid_size() {
  const std::int64_t* grid = Processor::current()->job().launch.grid;
  return {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])};
}

EXPORTED void block_barrier(Place place) { Processor::current()->block_barrier(place); }

EXPORTED void named_barrier(int id, int threads, bool wait, Place place) {
  Processor::current()->named_barrier(id, threads, wait, place);
}

EXPORTED void warp_barrier(std::uint32_t mask, Place place) { Processor::current()->warp_barrier(mask, place); }

EXPORTED void warp_collective(const char* operation, std::uint32_t mask, void* mine, Apply apply, const void* uniform,
                              Place place) {
  Processor::current()->warp_collective(operation, mask, mine, apply, uniform, place);
}

EXPORTED void async_copy(void* shared, const void* global, int bytes, int valid_bytes, Place place) {
  const auto pc = reinterpret_cast<std::uint64_t>(__builtin_return_address(0)) - 1;
  Processor::current()->async_copy(shared, global, bytes, valid_bytes, pc, place);
}

EXPORTED void async_commit(Place) { Processor::current()->async_commit(); }

EXPORTED void async_wait(int pending_groups, Place) {
  Processor::current()->async_wait(static_cast<std::size_t>(pending_groups));
}

EXPORTED std::byte* dynamic_shared(std::size_t bytes, Place place) {
  Processor& processor = *Processor::current();
  const auto available = static_cast<std::size_t>(processor.job().launch.dynamic_shared_bytes);
  if (bytes > available)
    processor.fail(place, "%zu bytes of dynamic shared memory, launched with %zu", bytes, available);
  return processor.dynamic_shared();
}

EXPORTED void count_shuffle() { ++Processor::current()->counters.warp_shuffles; }

EXPORTED void count_tensor(int flops) {
  Counters& counters = Processor::current()->counters;
  ++counters.tensor_instructions;
  counters.tensor_flops += static_cast<std::uint64_t>(flops);
}

EXPORTED void count_exp2(int operations) {
  Processor::current()->counters.exp2_operations += static_cast<std::uint64_t>(operations);
}

EXPORTED void fail(const char* message, Place place) { Processor::current()->fail(place, "%s", message); }

// Runs a launch to its end or its first failure.
extern "C" EXPORTED void microsdpa_emulate(const Launch* launch, Outcome* outcome) {
  Job job{*launch, {}, {}, {}, *outcome};
  auto work = [&job] {
    Processor processor(job);
    Processor::current() = &processor;
    processor.run();
    Processor::current() = nullptr;
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < launch->workers; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
}

namespace {

inline void accessed(const void* address, std::size_t bytes, bool write, bool aligned, void* caller) {
  Processor* processor = Processor::current();
  if (!processor || processor->in_runtime) return;
  processor->access(address, bytes, write, aligned, reinterpret_cast<std::uint64_t>(caller) - 1);
}

}  // namespace

}  // namespace microsdpa::emulator

// The compiler's -fsanitize=thread calls these before every access to memory; here they are the emulator's eyes.
extern "C" {
#define HOOK(NAME, BYTES, WRITE, ALIGNED)                                                       \
  EXPORTED void __tsan_##NAME(void* address) {                                                  \
    microsdpa::emulator::accessed(address, BYTES, WRITE, ALIGNED, __builtin_return_address(0)); \
  }
HOOK(read1, 1, false, true)
HOOK(read2, 2, false, true)
HOOK(read4, 4, false, true)
HOOK(read8, 8, false, true)
HOOK(read16, 16, false, true)
HOOK(write1, 1, true, true)
HOOK(write2, 2, true, true)
HOOK(write4, 4, true, true)
HOOK(write8, 8, true, true)
HOOK(write16, 16, true, true)
HOOK(unaligned_read2, 2, false, false)
HOOK(unaligned_read4, 4, false, false)
HOOK(unaligned_read8, 8, false, false)
HOOK(unaligned_read16, 16, false, false)
HOOK(unaligned_write2, 2, true, false)
HOOK(unaligned_write4, 4, true, false)
HOOK(unaligned_write8, 8, true, false)
HOOK(unaligned_write16, 16, true, false)
#undef HOOK

EXPORTED void __tsan_read_range(void* address, std::size_t bytes) {
  microsdpa::emulator::accessed(address, bytes, false, false, __builtin_return_address(0));
}
EXPORTED void __tsan_write_range(void* address, std::size_t bytes) {
  microsdpa::emulator::accessed(address, bytes, true, false, __builtin_return_address(0));
}
EXPORTED void __tsan_init() {}
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
}
