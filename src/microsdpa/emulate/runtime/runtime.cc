// The runtime's exported functions: what Python calls, what device code calls, and what the compiler inserts.
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "processor.h"

#define EXPORTED __attribute__((visibility("default")))

namespace microsdpa::emulator {

EXPORTED Coordinates thread_index() {
  Processor& processor = *Processor::current();
  return {static_cast<unsigned>(processor.self().id % processor.job().launch.threads), 0, 0};
}

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
  Processor& processor = *Processor::current();
  processor.async_copy(shared, global, bytes, valid_bytes, processor.place_of(__builtin_frame_address(0)), place);
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

EXPORTED std::uint32_t shared_address(const void* shared, Place place) {
  return Processor::current()->shared_address(shared, place);
}

EXPORTED std::uint32_t peer_address(const void* shared, int rank, Place place) {
  return Processor::current()->peer_address(shared, rank, place);
}

EXPORTED void mbarrier_init(std::uint32_t barrier, int arrivals, Place place) {
  Processor::current()->mbarrier_init(barrier, arrivals, place);
}

EXPORTED void mbarrier_init_fence() { Processor::current()->mbarrier_init_fence(); }

EXPORTED void mbarrier_arrive(std::uint32_t barrier, int expected_bytes, Place place) {
  Processor::current()->mbarrier_arrive(barrier, expected_bytes, place);
}

EXPORTED bool mbarrier_test(std::uint32_t barrier, int parity, Place place) {
  return Processor::current()->mbarrier_test(barrier, parity, place);
}

EXPORTED void mbarrier_wait(std::uint32_t barrier, int parity, bool cluster_scope, Place place) {
  Processor::current()->mbarrier_wait(barrier, parity, cluster_scope, place);
}

EXPORTED void bulk_load(std::uint32_t shared, const void* map, std::uint32_t barrier, BoxOrigin origin, unsigned ctas,
                        Place place) {
  Processor::current()->bulk_load(shared, map, barrier, origin, ctas, place);
}

EXPORTED void bulk_load_bytes(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier, Place place) {
  Processor::current()->bulk_load_bytes(shared, global, bytes, barrier, place);
}

EXPORTED void bulk_reduce_add(float* global, std::uint32_t shared, int bytes, Place place) {
  Processor::current()->bulk_reduce_add(global, shared, bytes, place);
}

EXPORTED void bulk_store(const void* map, std::uint32_t shared, BoxOrigin origin, Place place) {
  Processor::current()->bulk_store(map, shared, origin, place);
}

EXPORTED void wait_for_turn(const std::int32_t* number, std::int32_t turn, Place place) {
  Processor::current()->wait_for_turn(number, turn, place);
}

EXPORTED void end_turn(std::int32_t* number, std::int32_t next, Place place) {
  Processor::current()->end_turn(number, next, place);
}

EXPORTED void bulk_commit() { Processor::current()->bulk_commit(); }

EXPORTED void bulk_wait_read(int pending_groups) {
  Processor::current()->bulk_wait_read(static_cast<std::size_t>(pending_groups));
}

EXPORTED void bulk_to_peer(std::uint32_t target, std::uint32_t shared, int bytes, std::uint32_t barrier, Place place) {
  Processor::current()->bulk_to_peer(target, shared, bytes, barrier, place);
}

EXPORTED void store_async(std::uint32_t target, const void* data, int bytes, std::uint32_t barrier, Place place) {
  Processor::current()->store_async(target, data, bytes, barrier, place);
}

EXPORTED void peer_access(std::uint32_t target, void* data, int bytes, bool write, Place place) {
  Processor::current()->peer_access(target, data, bytes, write, place);
}

EXPORTED void fence_proxy_async() { Processor::current()->fence_proxy_async(); }

EXPORTED void fence_proxy_async_global() { Processor::current()->fence_proxy_async_global(); }

EXPORTED int cluster_rank() { return Processor::current()->self().cta; }

EXPORTED void cluster_arrive(bool release, Place place) { Processor::current()->cluster_arrive(release, place); }

EXPORTED void cluster_wait(Place place) { Processor::current()->cluster_wait(place); }

EXPORTED bool elect_one(Place place) { return Processor::current()->elect_one(place); }

EXPORTED void set_registers(int registers, bool up, Place place) {
  Processor::current()->set_registers(registers, up, place);
}

EXPORTED void grid_dependency_wait() { Processor::current()->grid_dependency_wait(); }

EXPORTED void wgmma(const Wgmma& operation, Place place) { Processor::current()->wgmma(operation, place); }

EXPORTED void wgmma_fence(Place place) { Processor::current()->wgmma_fence(place); }

EXPORTED void wgmma_commit(Place place) { Processor::current()->wgmma_commit(place); }

EXPORTED void wgmma_wait(int pending_groups, Place place) {
  Processor::current()->wgmma_wait(static_cast<std::size_t>(pending_groups), place);
}

EXPORTED std::uint32_t atomic_add(std::uint32_t* global, std::uint32_t value, Place) {
  Processor& processor = *Processor::current();
  return processor.atomic_add(global, value, processor.place_of(__builtin_frame_address(0)));
}

EXPORTED void thread_fence() { Processor::current()->thread_fence(); }

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

namespace {

void lack_memory(Outcome& outcome) {
  outcome.failed = 1;
  std::snprintf(outcome.message, MESSAGE_BYTES,
                "the emulator lacks memory for this launch: give it smaller tensors, or the process more memory");
}

// All processors of a launch; each has an operating system's thread.
void run_processors(Job& job) {
  const auto work = [&job] {
    try {
      Processor processor(job);
      Processor::current() = &processor;
      processor.run();
    } catch (const std::bad_alloc&) {  // of stacks and shared memory: no fiber is running
      const std::lock_guard<std::mutex> lock(job.mutex);
      if (!job.stop.exchange(true)) lack_memory(job.outcome);
    }
    Processor::current() = nullptr;
  };
  std::vector<std::thread> workers;
  try {
    for (int i = 0; i < job.launch.workers; ++i) workers.emplace_back(work);
  } catch (const std::system_error&) {  // those that there are do it all
    if (workers.empty()) work();
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

// Runs a launch to its end or its first failure.
extern "C" EXPORTED void microsdpa_emulate(const Launch* launch, Outcome* outcome) {
  try {
    Job job{*launch, {}, {}, {}, *outcome};
    run_processors(job);
  } catch (const std::bad_alloc&) {  // of what is known of global memory
    lack_memory(*outcome);
  }
}

namespace {

inline void accessed(const void* address, std::size_t bytes, bool write, bool aligned, const void* frame) {
  Processor* processor = Processor::current();
  if (!processor || processor->is_local(address) || processor->in_runtime) return;
  processor->access(address, bytes, write, aligned, processor->place_of(frame));
}

constexpr bool is_vector(std::size_t bytes) { return bytes == 4 || bytes == 8 || bytes == 16; }

}  // namespace

}  // namespace microsdpa::emulator

// The compiler's -fsanitize=thread calls these before every access to memory; here they are the emulator's eyes. Those
// with a second name are called by it, where include/hooks.h has let accesses to local variables return.
extern "C" {
#define HOOK(NAME, BYTES, WRITE, ALIGNED)                                                      \
  EXPORTED void __tsan_##NAME(void* address) {                                                 \
    microsdpa::emulator::accessed(address, BYTES, WRITE, ALIGNED, __builtin_frame_address(0)); \
  }                                                                                            \
  EXPORTED void microsdpa_##NAME(void*) __attribute__((alias("__tsan_" #NAME)));
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
  microsdpa::emulator::accessed(address, bytes, false, false, __builtin_frame_address(0));
}
EXPORTED void __tsan_write_range(void* address, std::size_t bytes) {
  microsdpa::emulator::accessed(address, bytes, true, false, __builtin_frame_address(0));
}
// What clang puts in the place of the copies and fills that it makes of assignments: those of a vector's size are taken
// for one.
EXPORTED void* __tsan_memcpy(void* target, const void* source, std::size_t bytes) {
  microsdpa::emulator::accessed(source, bytes, false, microsdpa::emulator::is_vector(bytes),
                                __builtin_frame_address(0));
  microsdpa::emulator::accessed(target, bytes, true, microsdpa::emulator::is_vector(bytes), __builtin_frame_address(0));
  return std::memcpy(target, source, bytes);
}
EXPORTED void* __tsan_memmove(void* target, const void* source, std::size_t bytes) {
  microsdpa::emulator::accessed(source, bytes, false, microsdpa::emulator::is_vector(bytes),
                                __builtin_frame_address(0));
  microsdpa::emulator::accessed(target, bytes, true, microsdpa::emulator::is_vector(bytes), __builtin_frame_address(0));
  return std::memmove(target, source, bytes);
}
EXPORTED void* __tsan_memset(void* target, int value, std::size_t bytes) {
  microsdpa::emulator::accessed(target, bytes, true, microsdpa::emulator::is_vector(bytes), __builtin_frame_address(0));
  return std::memset(target, value, bytes);
}
EXPORTED void __tsan_init() {}
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
}
