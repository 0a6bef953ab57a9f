// Shadow of the global memory that a launch may write: who wrote and who read it last. Who meets others there must have
// synchronised with them: in its own cluster as in shared memory, with other clusters by counters or by turns.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "launch.h"
#include "shadow.h"

namespace microsdpa::emulator {

// An access: a thread of a cluster, at its clock. Zero stands for none, since clocks begin with one.
struct Access {
  std::int64_t cluster;
  int thread;
  std::uint32_t clock;

  std::uint64_t packed() const { return static_cast<std::uint64_t>(cluster) << 32 | epoch_of(clock, thread); }
  static Access of(std::uint64_t packed) {
    const auto epoch = static_cast<Epoch>(packed);
    return {static_cast<std::int64_t>(packed >> 32), thread_of(epoch), clock_of(epoch)};
  }
  bool is_known(std::int64_t own_cluster, int own_thread, const Knowledge& known) const {
    if (clock == 0) return true;
    if (cluster == own_cluster) return thread == own_thread || clock <= known.clock[thread];
    const VectorClock* others = known.of_cluster(cluster);
    return others && clock <= (*others)[thread];
  }
};

struct GlobalConflict {
  Access access{};
  std::uint64_t place = 0;
  const char* kind = nullptr;  // what the other one did; null for no conflict
};

class GlobalShadow {
 public:
  static constexpr std::size_t GRANULE = 2;  // bytes

  explicit GlobalShadow(const Launch& launch) {
    for (int i = 0; i < launch.buffer_count; ++i) {
      const Buffer& buffer = launch.buffers[i];
      if (buffer.writable && buffer.bytes) ranges_.emplace_back(buffer);
    }
  }

  // Records an access by someone with this knowledge, and gives an earlier one of which it knows nothing: for a read a
  // write, for a write a read of another cluster. Several may write the same to one place. Where they do not, or where
  // lanes of a warp read ahead of a vote and write behind it, the output would change with the order of threads. Of
  // several readers the last one is kept, and single bytes have no shadow.
  GlobalConflict record(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place, const Access& own,
                        const Knowledge& known) {
    GlobalConflict found;
    const auto check = [&](const Cell& cell, const char* kind) {
      const Access other = Access::of(__atomic_load_n(&cell.access, __ATOMIC_RELAXED));
      if ((write && other.cluster == own.cluster) || other.is_known(own.cluster, own.thread, known)) return;
      found = {other, __atomic_load_n(&cell.place, __ATOMIC_RELAXED), kind};
    };
    for (Range& range : ranges_) {
      if (address - range.begin >= range.bytes || bytes < GRANULE) continue;
      const std::size_t first = (address - range.begin) / GRANULE, last = (address + bytes - 1 - range.begin) / GRANULE;
      for (std::size_t g = first; g <= last; ++g) {
        write ? check(range.reads[g], "read") : check(range.writes[g], "wrote");
        Cell& cell = (write ? range.writes : range.reads)[g];
        __atomic_store_n(&cell.place, place, __ATOMIC_RELAXED);
        __atomic_store_n(&cell.access, own.packed(), __ATOMIC_RELAXED);
      }
      break;
    }
    return found;
  }

  // A write of these bytes that a bulk copy by someone with this knowledge does not follow: of another cluster without
  // knowing of it, or of its own cluster with no proxy fence behind it.
  GlobalConflict unfenced(std::uintptr_t address, std::size_t bytes, std::int64_t own_cluster, const Knowledge& known) {
    for (Range& range : ranges_) {
      if (address - range.begin >= range.bytes || bytes < GRANULE) continue;
      const std::size_t first = (address - range.begin) / GRANULE, last = (address + bytes - 1 - range.begin) / GRANULE;
      for (std::size_t g = first; g <= last; ++g) {
        const Access other = Access::of(__atomic_load_n(&range.writes[g].access, __ATOMIC_RELAXED));
        if (other.clock == 0) continue;
        const VectorClock& fenced = known.fenced_global;
        const bool follows = other.cluster == own_cluster ? !fenced.empty() && other.clock <= fenced[other.thread]
                                                          : other.is_known(own_cluster, -1, known);
        if (!follows) return {other, __atomic_load_n(&range.writes[g].place, __ATOMIC_RELAXED), "wrote"};
      }
      break;
    }
    return {};
  }

 private:
  struct Cell {
    std::uint64_t access, place;
  };
  // Cells of pages that nobody touches take no memory: tensors of large strides are mostly such pages.
  class Cells {
   public:
    explicit Cells(std::size_t count) : bytes_(count * sizeof(Cell)) {
      void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      cells_ = static_cast<Cell*>(mapped);
    }
    Cells(Cells&& other) noexcept : bytes_(other.bytes_), cells_(std::exchange(other.cells_, nullptr)) {}
    Cells& operator=(Cells&&) = delete;
    ~Cells() {
      if (cells_) munmap(cells_, bytes_);
    }
    Cell& operator[](std::size_t i) { return cells_[i]; }

   private:
    std::size_t bytes_;
    Cell* cells_;
  };

  struct Range {
    std::uintptr_t begin;
    std::size_t bytes;
    Cells writes{granules()}, reads{granules()};

    explicit Range(const Buffer& buffer) : begin(buffer.address), bytes(buffer.bytes) {}
    std::size_t granules() const { return (bytes + GRANULE - 1) / GRANULE; }
  };

  std::vector<Range> ranges_;
};

// What threads leave at numbers in global memory by which clusters synchronise: counters, and turns.
struct Rendezvous {
  std::mutex mutex;
  std::map<std::uintptr_t, std::shared_ptr<const Heard>> left;
};

}  // namespace microsdpa::emulator
