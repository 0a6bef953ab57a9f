// Shadow of a block's shared memory: what was written, what is still in flight, and who must have synchronised with
// whom.
//
// Races are found by happens-before, not by luck of the schedule: every thread carries a vector clock, every two bytes
// carry the epoch of their last write and of their reads since (FastTrack: Flanagan and Freund, PLDI 2009).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace microsdpa::emulator {

using Epoch = std::uint32_t;  // clock << 11 | thread
constexpr int THREAD_BITS = 11;
constexpr Epoch SHARED_READ = 0x80000000u;  // the reads of several threads: the low bits number a row of clocks

inline Epoch epoch_of(std::uint32_t clock, int thread) { return clock << THREAD_BITS | static_cast<Epoch>(thread); }
inline int thread_of(Epoch epoch) { return static_cast<int>(epoch & ((1u << THREAD_BITS) - 1)); }
inline std::uint32_t clock_of(Epoch epoch) { return epoch >> THREAD_BITS; }

// What a thread knows: the latest clock of every thread that happened before its present.
using VectorClock = std::vector<std::uint32_t>;

struct Conflict {
  bool found = false;
  int thread = 0;           // the other thread
  std::uint64_t place = 0;  // where it accessed
  const char* kind = "";    // what it did
};

class Shadow {
 public:
  static constexpr int GRANULE = 2;  // bytes: two threads may write the two halves of a word

  void reset(std::size_t bytes, int threads) {
    const std::size_t granules = (bytes + GRANULE - 1) / GRANULE;
    threads_ = threads;
    write_.assign(granules, 0);
    read_.assign(granules, 0);
    write_place_.resize(granules);
    read_place_.resize(granules);
    written_.assign(bytes, 0);
    in_flight_.assign(granules, 0);
    rows_.clear();
    free_rows_.clear();
  }

  // First byte of [offset, offset + bytes) that nothing wrote since the block began, or -1.
  long first_unwritten(std::size_t offset, std::size_t bytes) const {
    for (std::size_t i = offset; i < offset + bytes; ++i) {
      if (!written_[i]) return static_cast<long>(i);
    }
    return -1;
  }

  // Number of the asynchronous copy that a range awaits, or 0.
  std::uint32_t in_flight(std::size_t offset, std::size_t bytes) const {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (in_flight_[g]) return in_flight_[g];
    }
    return 0;
  }

  void set_in_flight(std::size_t offset, std::size_t bytes, std::uint32_t copy) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) in_flight_[g] = copy;
  }

  Conflict read(std::size_t offset, std::size_t bytes, int thread, const VectorClock& now, std::uint64_t place) {
    const Epoch mine = epoch_of(now[thread], thread);
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (!known(write_[g], thread, now)) return {true, thread_of(write_[g]), write_place_[g], "wrote"};
      Epoch& reads = read_[g];
      read_place_[g] = place;
      if (reads == mine) continue;
      if (reads & SHARED_READ) {
        rows_[reads & ~SHARED_READ][thread] = now[thread];
      } else if (known(reads, thread, now)) {
        reads = mine;
      } else {
        const std::uint32_t row = take_row();
        rows_[row][thread_of(reads)] = clock_of(reads);
        rows_[row][thread] = now[thread];
        reads = SHARED_READ | row;
      }
    }
    return {};
  }

  Conflict write(std::size_t offset, std::size_t bytes, int thread, const VectorClock& now, std::uint64_t place) {
    const Epoch mine = epoch_of(now[thread], thread);
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (!known(write_[g], thread, now)) return {true, thread_of(write_[g]), write_place_[g], "wrote"};
      if (const Epoch reads = read_[g]) {
        if (reads & SHARED_READ) {
          const std::uint32_t row = reads & ~SHARED_READ;
          for (int other = 0; other < threads_; ++other) {
            if (other != thread && rows_[row][other] > now[other]) return {true, other, read_place_[g], "read"};
          }
          free_rows_.push_back(row);
        } else if (!known(reads, thread, now)) {
          return {true, thread_of(reads), read_place_[g], "read"};
        }
        read_[g] = 0;
      }
      write_[g] = mine;
      write_place_[g] = place;
    }
    for (std::size_t i = offset; i < offset + bytes; ++i) written_[i] = 1;
    return {};
  }

 private:
  // Whether an epoch of another thread happened before what `thread` does now.
  static bool known(Epoch epoch, int thread, const VectorClock& now) {
    return epoch == 0 || thread_of(epoch) == thread || clock_of(epoch) <= now[thread_of(epoch)];
  }

  std::uint32_t take_row() {
    if (free_rows_.empty()) {
      rows_.emplace_back(threads_, 0u);
      return static_cast<std::uint32_t>(rows_.size() - 1);
    }
    const std::uint32_t row = free_rows_.back();
    free_rows_.pop_back();
    std::fill(rows_[row].begin(), rows_[row].end(), 0u);
    return row;
  }

  int threads_ = 0;
  std::vector<Epoch> write_, read_;
  std::vector<std::uint64_t> write_place_, read_place_;
  std::vector<std::uint8_t> written_;
  std::vector<std::uint32_t> in_flight_;
  std::vector<std::vector<std::uint32_t>> rows_;
  std::vector<std::uint32_t> free_rows_;
};

}  // namespace microsdpa::emulator
