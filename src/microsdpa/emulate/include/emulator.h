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

// Position in the CTA's shared memory; the same in every CTA of a cluster. In another CTA's, with its rank.
std::uint32_t shared_address(const void* shared, Place place);
std::uint32_t peer_address(const void* shared, int rank, Place place);

// Barriers in shared memory, at a position, which may be another CTA's for arrivals.
void mbarrier_init(std::uint32_t barrier, int arrivals, Place place);
void mbarrier_init_fence();
void mbarrier_arrive(std::uint32_t barrier, int expected_bytes, Place place);
bool mbarrier_test(std::uint32_t barrier, int parity, Place place);
void mbarrier_wait(std::uint32_t barrier, int parity, bool cluster_scope, Place place);

// Bulk copies. `ctas` 0: to the calling CTA alone.
struct BoxOrigin {
  int column, row, head, batch;
};
void bulk_load(std::uint32_t shared, const void* map, std::uint32_t barrier, BoxOrigin origin, unsigned ctas,
               Place place);
void bulk_load_bytes(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier, Place place);
void bulk_reduce_add(float* global, std::uint32_t shared, int bytes, Place place);
void bulk_store(const void* map, std::uint32_t shared, BoxOrigin origin, Place place);
void bulk_commit();
void wait_for_turn(const std::int32_t* number, std::int32_t turn, Place place);
void end_turn(std::int32_t* number, std::int32_t next, Place place);
void bulk_wait_read(int pending_groups);
void bulk_to_peer(std::uint32_t target, std::uint32_t shared, int bytes, std::uint32_t barrier, Place place);
void store_async(std::uint32_t target, const void* data, int bytes, std::uint32_t barrier, Place place);
void peer_access(std::uint32_t target, void* data, int bytes, bool write, Place place);
void fence_proxy_async();
void fence_proxy_async_global();

// Clusters, and what warps are given.
int cluster_rank();
void cluster_arrive(bool release, Place place);
void cluster_wait(Place place);
bool elect_one(Place place);
void set_registers(int registers, bool up, Place place);
void grid_dependency_wait();

// wgmma: D[64, n] = A B (+ D) by the four warps of a warpgroup, by the descriptors of the PTX ISA.
enum class Element : int { F16, BF16, E4M3, S8 };
struct Wgmma {
  Element element;
  int n;
  bool accumulate, a_along_m, b_along_n;
  const std::uint32_t* a;  // registers, or null
  std::uint64_t a_descriptor, b_descriptor;
  void* d;
};
void wgmma(const Wgmma& operation, Place place);
void wgmma_fence(Place place);
void wgmma_commit(Place place);
void wgmma_wait(int pending_groups, Place place);

// Adds to a number in global memory and gives what it was; and orders the thread's accesses to global memory.
std::uint32_t atomic_add(std::uint32_t* global, std::uint32_t value, Place place);
void thread_fence();

void count_shuffle();
void count_tensor(int flops);
void count_exp2(int operations);

// Ends the launch with a message about the running thread.
[[noreturn]] void fail(const char* message, Place place);

}  // namespace microsdpa::emulator
