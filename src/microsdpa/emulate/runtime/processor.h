// Processor: one OS thread that runs clusters, one after the other, their threads as fibers.
#pragma once

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdarg>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../include/emulator.h"
#include "fiber.h"
#include "global_shadow.h"
#include "launch.h"
#include "shadow.h"

namespace microsdpa::emulator {

constexpr int MAX_THREADS = 1024;
constexpr int NAMED_BARRIERS = 16;
constexpr int COPY_AGENTS = 36;  // of a CTA
constexpr std::size_t NOWHERE = ~std::size_t(0);

// An asynchronous operation, for the message about who touches its data too early.
struct Flight {
  const char* operation;
  int thread;
  std::uint64_t place;  // in the kernel library, or 0
  Place issued;
};

// What a function that keeps its frame pointer leaves at it, on x86-64 and on aarch64.
struct Frame {
  const Frame* caller;
  std::uintptr_t return_address;
};

// A place in a kernel library: the calls that led there, innermost first, as offsets of PLACE_BITS bits each.
constexpr int PLACE_BITS = 21, PLACE_CALLS = 3;

struct AsyncCopy {  // cp.async
  std::uint32_t number;
  std::size_t offset;
  const void* source;
  int bytes, valid_bytes;
  std::uint64_t place;
};

struct Piece {
  std::size_t offset;  // in the cluster's shared memory
  std::vector<std::byte> data;
};

// Bytes on their way to one CTA's shared memory, that count on one of its barriers.
struct Delivery {
  std::uint32_t number;
  std::vector<Piece> pieces;
  std::size_t source = 0, source_bytes = 0;  // shared memory that is read when the bytes arrive, if any
  int bytes = 0;
  bool peer = false;  // sent by another CTA's threads
};

struct Mbarrier {
  int expected = 0, pending = 0;
  long bytes = 0;                 // expected and not yet arrived
  std::uint32_t phase = 0;        // completed ones
  Knowledge arriving, completed;  // what those who wait for the phase learn
  bool peer = false, peer_completed = false;
  std::deque<Delivery> deliveries;
  Epoch initialised = 0;
  int agent = 0, initialiser = 0;
  bool published = false;
  std::uint32_t published_in = 0;  // cluster barrier phase that carries the publication
};

struct BulkStore {
  std::uint32_t number;
  std::vector<std::pair<std::size_t, std::size_t>> sources;     // shared memory: offset, bytes
  std::vector<std::pair<std::uintptr_t, std::size_t>> targets;  // global address, offset in shared memory; 16 bytes
  int target_bytes = 16;
  bool adds = false;  // floats, to those that are there
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
  int id, lane, warp, cta;
  const char* waits_for = nullptr;  // null: ready or finished
  Place waits_at{};
  std::size_t waits_on = NOWHERE;  // an mbarrier
  bool finished = false;
  Knowledge known;
  std::shared_ptr<const Heard> acquired;  // what its atomic operations found of other clusters, for its next fence
  std::vector<std::vector<std::uint32_t>> groups;  // committed cp.async groups, oldest first
  std::vector<std::uint32_t> open_group;
  std::vector<std::vector<BulkStore>> store_groups;
  std::vector<BulkStore> open_stores;
  std::vector<BankAccess> bank_log;
  std::uint32_t cluster_arrivals = 0, cluster_waits = 0;
  bool wgmma_fenced = false;
  int failed_tests = 0;
};

struct Collective {
  const char* operation;
  std::uint32_t mask, arrived = 0;
  void* lanes[32] = {};
  Place place;
};

// One warp's quarter of a wgmma.
struct WarpMma {
  Wgmma operation;
  std::uint32_t number;
  std::uint32_t a[32][4];       // as they were when it was issued
  const void* a_registers[32];  // where A is read from until the wait, if not from shared memory
  void* d[32];
  Place place;
  std::vector<std::size_t> a_chunks, b_chunks;  // where the tiles lie, 16 bytes each; of A if it is in shared memory
};

// Accumulators that wgmmas in flight will write: their values so far, while the registers hold poison.
struct Accumulators {
  int operations = 0;
  std::vector<std::uint32_t> values;  // [lane][register]
};

struct Warp {
  std::uint32_t ready = 0, live = 0;
  int position = -1;  // in the list of ready warps
  std::vector<Collective> open;
  std::vector<WarpMma> open_mmas;
  std::deque<std::vector<WarpMma>> mma_groups;
  std::map<void*, Accumulators> accumulators;  // by the first lane's registers
  std::size_t mmas_issued = 0;
  int registers = 0;
};

struct Barrier {
  int expected = 0;
  std::vector<int> arrived;  // threads, waiting or not
  std::vector<int> waiting;
  std::bitset<1024> threads;  // of the block, that have arrived
};

// What a warpgroup's first warp issued, for the others to agree with.
struct IssuedMma {
  Element element;
  int n;
  std::uint64_t a, b;
  Place place;
};

struct Cta {
  int live = 0;
  std::vector<int> at_barrier;
  Barrier named[NAMED_BARRIERS];
  std::vector<std::vector<IssuedMma>> issued;  // by warpgroup
  int registers_left = 0;
  std::vector<int> waiting_for_registers;  // threads
};

inline std::string name(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

// State that all processors of a launch share.
struct Job {
  const Launch& launch;
  std::atomic<std::int64_t> next_cluster{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Outcome& outcome;
  std::mutex reductions;  // to global memory, one after the other
  GlobalShadow global{launch};
  Rendezvous rendezvous{};
};

class Processor {
 public:
  explicit Processor(Job& job);
  void run();  // clusters, until there are none left or one failed

  static Processor*& current() { return current_; }

  Thread& self() { return *self_; }
  Job& job() { return job_; }

  // Whether an address is that of a local variable of the running thread.
  bool is_local(const void* address) const { return reinterpret_cast<std::uintptr_t>(address) - stack_ < STACK_BYTES; }

  // Where the kernel library called a function of the runtime from, given that function's frame.
  std::uint64_t place_of(const void* frame_address) const {
    const auto* frame = static_cast<const Frame*>(frame_address);
    std::uint64_t place = 0;
    for (int call = 0; call < PLACE_CALLS; ++call, frame = frame->caller) {
      const std::uint64_t offset = frame->return_address - 1 - job_.launch.image;
      if (offset >= code_bytes_) break;  // the fiber's first call
      place |= offset << (call * PLACE_BITS);
    }
    return place;
  }

  // Memory (memory.cc).
  void access(const void* address, std::size_t bytes, bool write, bool aligned, std::uint64_t place);
  void async_copy(void* shared, const void* global, int bytes, int valid_bytes, std::uint64_t place, Place issued);
  void async_commit();
  void async_wait(std::size_t pending_groups);
  std::byte* dynamic_shared() { return dynamic_shared(self_->cta); }
  std::uint32_t shared_address(const void* shared, Place place);
  void finish_memory();

  // Global memory that several clusters use (global.cc).
  std::uint32_t atomic_add(std::uint32_t* number, std::uint32_t value, std::uint64_t place);
  void thread_fence();

  // Synchronisation (barriers.cc).
  void block_barrier(Place place);
  void named_barrier(int id, int threads, bool wait, Place place);
  void warp_barrier(std::uint32_t mask, Place place);
  void warp_collective(const char* operation, std::uint32_t mask, void* mine, Apply apply, const void* uniform,
                       Place place);

  // Asynchronous barriers and bulk copies (mbarrier.cc, bulk.cc).
  void mbarrier_init(std::uint32_t barrier, int arrivals, Place place);
  void mbarrier_init_fence();
  void mbarrier_arrive(std::uint32_t barrier, int expected_bytes, Place place);
  bool mbarrier_test(std::uint32_t barrier, int parity, Place place);
  void mbarrier_wait(std::uint32_t barrier, int parity, bool cluster_scope, Place place);
  void bulk_load(std::uint32_t shared, const void* map, std::uint32_t barrier, BoxOrigin origin, unsigned ctas,
                 Place place);
  void bulk_load_bytes(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier, Place place);
  void bulk_reduce_add(float* global, std::uint32_t shared, int bytes, Place place);
  void bulk_store(const void* map, std::uint32_t shared, BoxOrigin origin, Place place);
  void bulk_commit();
  void wait_for_turn(const std::int32_t* number, std::int32_t turn, Place place);
  void end_turn(std::int32_t* number, std::int32_t next, Place place);
  void bulk_wait_read(std::size_t pending_groups);
  void bulk_to_peer(std::uint32_t target, std::uint32_t shared, int bytes, std::uint32_t barrier, Place place);
  void store_async(std::uint32_t target, const void* data, int bytes, std::uint32_t barrier, Place place);
  void fence_proxy_async();
  void fence_proxy_async_global();

  // Clusters and warpgroups (cluster.cc, wgmma.cc).
  std::uint32_t peer_address(const void* shared, int rank, Place place);
  void peer_access(std::uint32_t target, void* data, int bytes, bool write, Place place);
  void cluster_arrive(bool release, Place place);
  void cluster_wait(Place place);
  bool elect_one(Place place);
  void set_registers(int registers, bool up, Place place);
  void grid_dependency_wait();
  void wgmma(const Wgmma& operation, Place place);
  void wgmma_fence(Place place);
  void wgmma_commit(Place place);
  void wgmma_wait(std::size_t pending_groups, Place place);

  [[noreturn]] void fail(Place place, const char* format, ...) __attribute__((format(printf, 3, 4)));
  [[noreturn]] void fail_at(std::uint64_t place, const char* format, ...) __attribute__((format(printf, 3, 4)));

  Counters counters{};
  bool in_runtime = false;  // accesses are the runtime's own

 private:
  static void thread_main();
  void run_cluster(std::int64_t cluster);
  void schedule();
  Thread& pick();
  void wait(const char* what, Place place);
  void make_ready(int thread);
  void thread_exit();
  void join(const std::vector<int>& threads);
  void advance(int thread);
  void release_block_barrier(Cta& cta);
  void release_cluster_barrier();
  void report_deadlock();
  [[noreturn]] void abort(const std::string& where, const char* format, std::va_list arguments);
  std::uint64_t random();
  std::string who(int thread) const;

  // Threads are numbered through the cluster; agents follow: what arrives at each of a CTA's mbarriers, the tensor
  // cores of each warp, and at last the grids ahead in the stream.
  int threads() const { return static_cast<int>(threads_.size()); }
  int tensor_agent(int warp) const { return threads() + static_cast<int>(ctas_.size()) * COPY_AGENTS + warp; }
  int grid_agent() const { return agents_ - 1; }
  Cta& cta() { return ctas_[static_cast<std::size_t>(self_->cta)]; }
  Warp& warp() { return warps_[static_cast<std::size_t>(self_->warp)]; }
  int first_thread(int warp) const;

  void locate_code();
  void locate_shared();
  std::byte* dynamic_shared(int cta) { return reinterpret_cast<std::byte*>(dynamic_begin_ + cta * dynamic_stride_); }
  std::byte* memory_at(std::size_t offset);
  void shared_access(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place);
  std::string shared_fault(std::size_t offset, std::size_t bytes, bool write);
  void check_global(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place);
  void global_access(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place);
  void check_async_global(std::uintptr_t address, std::size_t bytes, const char* operation, Place place);
  std::shared_ptr<const Heard> for_others(const VectorClock& clock, const std::shared_ptr<const Heard>& heard) const;
  std::string global_fault(std::uintptr_t address, std::size_t bytes, bool write);
  void deliver(const AsyncCopy& copy);
  void log_bank(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place);
  void flush_banks(int warp);
  void count_group(std::uint64_t place, const BankAccess* const (&lanes)[32]);

  // A position in a CTA's shared memory, with the CTA's rank above it, as an offset in the cluster's.
  std::size_t cluster_offset(std::uint32_t address, std::size_t bytes, const char* operation, Place place);
  std::uint32_t take_flight(const char* operation, Place place, std::uint64_t pc = 0);
  std::string async_read_fault(std::size_t offset, std::size_t bytes, const Knowledge& known, const char* operation);
  void check_async_target(std::size_t offset, std::size_t bytes, const char* operation, bool async_proxy, Place place);
  const TensorView& tensor_view(const void* map, Place place);
  Mbarrier& mbarrier_at(std::size_t offset, const char* operation, bool copy, Place place);
  void send(std::size_t barrier, Delivery delivery, Place place);
  void arrive_bytes(Mbarrier& barrier, const Delivery& delivery, std::size_t offset);
  void deliver_due(Mbarrier& barrier, std::size_t offset);
  void complete_if_due(Mbarrier& barrier, std::size_t offset);
  bool phase_done(std::uint32_t address, int parity, bool cluster_scope, Place place);
  void finish_store(const BulkStore& store);
  void move_store(const BulkStore& store);

  void run_mma(WarpMma& mma);
  void finish_mmas(std::size_t pending_groups);
  void issue_mma(void* const (&lanes)[32], Place place);
  void operand_chunks(const Wgmma& operation, bool second, int warp, std::vector<std::size_t>& chunks, Place place);

  // Read at every access to memory: the library asks the loader for a fixed place.
  static thread_local Processor* current_ __attribute__((tls_model("initial-exec")));
  Job& job_;
  Context scheduler_;
  Stacks stacks_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Cta> ctas_;
  std::vector<int> ready_warps_;
  std::vector<std::uint32_t> agent_clocks_;  // by agent, of those behind the threads
  int agents_ = 0, live_ = 0, chosen_warp_ = -1;
  bool aborted_ = false, run_ahead_ = false;
  std::int64_t cluster_ = 0;
  std::uint64_t random_state_ = 1;
  Thread* self_ = nullptr;
  std::uintptr_t stack_ = 0;  // where its stack begins

  int cluster_arrived_ = 0;
  std::uint32_t cluster_phase_ = 0;
  Knowledge cluster_known_;
  std::vector<int> at_cluster_barrier_;

  std::size_t code_bytes_ = 0;            // from the kernel library's first byte to the end of its code
  std::unique_ptr<std::byte[]> dynamic_;  // holds the aligned memory
  std::uintptr_t static_begin_ = 0, dynamic_begin_ = 0;
  std::size_t static_bytes_ = 0, dynamic_bytes_ = 0, dynamic_stride_ = 0;
  std::size_t dynamic_offset_ = 0;  // of dynamic shared memory in the shadow, behind the static
  std::size_t cta_bytes_ = 0;       // of a CTA's shared memory in the shadow
  Shadow shadow_;
  std::vector<Flight> flights_;
  std::vector<AsyncCopy> copies_;
  std::map<std::size_t, Mbarrier> mbarriers_;
  struct Site {
    std::uint64_t place, requests, wavefronts, ideal;
  };
  std::vector<Site> sites_;
};

}  // namespace microsdpa::emulator
