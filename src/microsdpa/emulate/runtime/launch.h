// What the Python side hands over and gets back: plain structs, mirrored in emulate/abi.py.
#pragma once

#include <cstdint>

namespace microsdpa::emulator {

constexpr int MAX_BUFFERS = 24;
constexpr int MAX_GUARDS = 16;
constexpr int MAX_SITES = 128;
constexpr int MESSAGE_BYTES = 4096;

// A tensor's memory, as the kernel may use it.
struct Buffer {
  char name[16];
  std::uint64_t address;
  std::uint64_t bytes;
  std::int32_t writable;
  std::int32_t padding;
};

// A tensor as bulk copies see it, in the place of a CUtensorMap: [D, S, H, B], innermost first, or [D, H, S, B] where a
// box has several heads: then its rows are heads, of so many rows that follow each other.
struct TensorView {
  std::uint64_t address;
  std::int64_t sizes[4];    // in elements
  std::int64_t strides[3];  // of the dimensions but the innermost, in bytes
  std::int64_t box_columns, box_rows, swizzle, element_bytes;
  std::uint64_t magic;
  std::int64_t box_heads;  // 0 for a box of one head
  std::uint64_t unused[2];

  // Of a box's second dimension, and of a box.
  std::int64_t inner_rows() const { return box_heads ? box_heads : box_rows; }
  std::int64_t rows() const { return inner_rows() * (box_heads ? box_rows : 1); }
};
constexpr std::uint64_t TENSOR_VIEW_MAGIC = 0x6d736470612e746dull;
static_assert(sizeof(TensorView) == 128, "as large as a CUtensorMap");

struct Launch {
  std::uint64_t entry;   // void (*)(const void* params): runs one thread of the kernel
  std::uint64_t anchor;  // void* (*)(): an address inside the kernel's static shared memory, of the calling OS thread
  std::uint64_t image;   // the kernel library's load address
  std::uint64_t params;
  std::uint64_t params_bytes;
  std::int64_t grid[3];
  std::int32_t threads;
  std::int32_t dynamic_shared_bytes;
  std::int32_t buffer_count;
  std::int32_t workers;       // OS threads
  std::int32_t late;          // asynchronous copies arrive as late as allowed (1) or as early (0)
  std::int32_t count_banks;   // count shared-memory bank conflicts
  std::int32_t cluster;       // CTAs of a cluster, along x
  std::int32_t programmatic;  // begins before the kernel ahead of it has ended
  std::int32_t backwards;     // clusters run from the last one to the first
  std::uint64_t seed;
  std::int64_t guard_count;
  std::uint64_t
      guards[MAX_GUARDS];  // offsets, in static shared memory, of bytes that are the compiler's and not the kernel's
  Buffer buffers[MAX_BUFFERS];
};

// Shared-memory accesses of one place in the code, by whole warps.
struct SiteCounters {
  std::uint64_t place;       // in the kernel library
  std::uint64_t requests;    // warp-wide accesses
  std::uint64_t wavefronts;  // passes that the banks need for them
  std::uint64_t ideal;       // passes without any conflict
};

struct Counters {
  std::uint64_t global_read_bytes, global_write_bytes;
  std::uint64_t shared_read_bytes, shared_write_bytes;
  std::uint64_t async_copy_bytes;
  std::uint64_t block_barriers, named_barriers, warp_barriers, warp_shuffles;
  std::uint64_t tensor_instructions, tensor_flops;
  std::uint64_t exp2_operations;
  std::uint64_t bulk_copy_bytes, peer_bytes;
  std::uint64_t mbarrier_phases, cluster_barriers;
  std::uint64_t bank_requests, bank_wavefronts, bank_ideal;
};

struct Outcome {
  std::int32_t failed;
  std::int32_t site_count;
  Counters counters;
  SiteCounters sites[MAX_SITES];
  char message[MESSAGE_BYTES];  // places in the code are written as {0x...}
};

}  // namespace microsdpa::emulator
