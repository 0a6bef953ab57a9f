// What a kernel compiled for the emulator calls: the runtime's interface to device code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace microsdpa::emulator {

// Where device code called from. As a default argument, Place::here() names the caller's line.
struct Place {
  const char* file;
  int line;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Coordinates {
  unsigned x, y, z;
};

Coordinates thread_index();
Coordinates block_index();
Coordinates block_size();
Coordinates grid_size();

// Barriers: all threads of the block, `threads` of them at a numbered barrier, or the lanes of a mask. They order the
// memory accesses of their participants.
void block_barrier(Place place);
void named_barrier(int id, int threads, bool wait, Place place);
void warp_barrier(std::uint32_t mask, Place place);

// One warp-wide operation: when every lane of `mask` has arrived, `apply` runs once over what the lanes brought, with
// null for lanes outside the mask. It orders no memory accesses.
using Apply = void (*)(void* const (&lanes)[32], const void* uniform);
void warp_collective(const char* operation, std::uint32_t mask, void* mine, Apply apply, const void* uniform,
                     Place place);

// cp.async: `bytes` to shared memory, of which the first `valid_bytes` come from global memory and the rest are zeros.
void async_copy(void* shared, const void* global, int bytes, int valid_bytes, Place place);
void async_commit(Place place);
void async_wait(int pending_groups, Place place);

std::byte* dynamic_shared(std::size_t bytes, Place place);

void count_shuffle();
void count_tensor(int flops);
void count_exp2(int operations);

// Ends the launch with a message about the running thread.
[[noreturn]] void fail(const char* message, Place place);

}  // namespace microsdpa::emulator
