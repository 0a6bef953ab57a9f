// Shadow of shared memory, of a cluster's CTAs one behind the other: what was written, what is still in flight, and who
// must have synchronised with whom.
//
// Races are found by happens-before, not by luck of the schedule: every thread carries a vector clock, every two bytes
// carry the epoch of their last write and of their reads since (FastTrack: Flanagan and Freund, PLDI 2009). Units that
// work beside the threads (bulk copies, a warp's tensor cores) are agents: they have epochs, as threads do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace microsdpa::emulator {

using Epoch = std::uint32_t;  // clock << 13 | thread or agent
constexpr int THREAD_BITS = 13;
constexpr std::uint32_t MAX_CLOCK = (1u << (31 - THREAD_BITS)) - 1;
constexpr Epoch SHARED_READ = 0x80000000u;  // the reads of several threads: the low bits number a list of epochs

inline Epoch epoch_of(std::uint32_t clock, int thread) { return clock << THREAD_BITS | static_cast<Epoch>(thread); }
inline int thread_of(Epoch epoch) { return static_cast<int>(epoch & ((1u << THREAD_BITS) - 1)); }
inline std::uint32_t clock_of(Epoch epoch) { return epoch >> THREAD_BITS; }

using VectorClock = std::vector<std::uint32_t>;

// What is known of the threads of other clusters, which have no place in a vector clock.
using Heard = std::map<std::int64_t, std::shared_ptr<const VectorClock>>;

// One loop for one pair of clocks, which the compiler makes vectors of.
inline void raise(VectorClock& mine, const VectorClock& other) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], other[i]);
}

// Whether `known` has all that `other` has.
inline bool has_all(const Heard& known, const Heard& other) {
  return std::all_of(other.begin(), other.end(), [&](const auto& entry) {
    const auto found = known.find(entry.first);
    if (found == known.end()) return false;
    const VectorClock &mine = *found->second, &theirs = *entry.second;
    return &mine == &theirs || std::equal(theirs.begin(), theirs.end(), mine.begin(), std::less_equal<>());
  });
}

// Both together; one of them where it has all that the other one has, so that later comparisons end at once.
inline std::shared_ptr<const Heard> together(const std::shared_ptr<const Heard>& a,
                                             const std::shared_ptr<const Heard>& b) {
  if (!b || a == b) return a;
  if (!a || has_all(*b, *a)) return b;
  if (has_all(*a, *b)) return a;
  auto both = std::make_shared<Heard>(*a);
  for (const auto& [cluster, clock] : *b) {
    std::shared_ptr<const VectorClock>& mine = (*both)[cluster];
    if (!mine) {
      mine = clock;
    } else if (mine != clock) {
      auto raised = std::make_shared<VectorClock>(*mine);
      raise(*raised, *clock);
      mine = std::move(raised);
    }
  }
  return both;
}

// What a thread knows: the latest clock of every thread that happened before its present, and how much of that has
// passed a proxy fence on its way here, so that asynchronous units see it as well, in shared or in global memory. The
// same of other clusters, and how much of both has passed a __threadfence(), so that a thread of another cluster sees
// it that finds a later atomic operation: a fence may lie ahead of a barrier, and the operation behind it (PTX ISA,
// "Fence-SC order").
struct Knowledge {
  VectorClock clock, fenced;
  VectorClock fenced_global, released;  // empty until there is such a fence
  std::shared_ptr<const Heard> heard, released_of_others;

  void reset(int size) {
    clock.assign(size, 0);
    fenced.assign(size, 0);
    fenced_global.clear(), released.clear();
    heard.reset(), released_of_others.reset();
  }
  void learn(const Knowledge& other) {
    if (other.clock.empty()) return;
    raise(clock, other.clock);
    raise(fenced, other.fenced);
    heard = together(heard, other.heard);
    if (!other.fenced_global.empty()) {
      fenced_global.resize(clock.size());
      raise(fenced_global, other.fenced_global);
    }
    if (other.released.empty()) return;
    released.resize(clock.size());
    raise(released, other.released);
    released_of_others = together(released_of_others, other.released_of_others);
  }
  void release() { released = clock, released_of_others = heard; }
  // What is known of the threads of another cluster; null for nothing.
  const VectorClock* of_cluster(std::int64_t cluster) const {
    if (!heard) return nullptr;
    const auto found = heard->find(cluster);
    return found == heard->end() ? nullptr : found->second.get();
  }
  bool knows(Epoch epoch) const { return epoch == 0 || clock_of(epoch) <= clock[thread_of(epoch)]; }
  bool fenced_off(Epoch epoch) const { return clock_of(epoch) <= fenced[thread_of(epoch)]; }
};

struct Conflict {
  bool found = false;
  int thread = 0;           // the other thread or agent
  std::uint64_t place = 0;  // where it accessed
  const char* kind = "";    // what it did
};

class Shadow {
 public:
  static constexpr int GRANULE = 2;  // bytes: two threads may write the two halves of a word

  void reset(std::size_t bytes) {
    const std::size_t granules = (bytes + GRANULE - 1) / GRANULE;
    write_.assign(granules, 0);
    read_.assign(granules, 0);
    write_place_.resize(granules);
    read_place_.resize(granules);
    written_.assign(bytes, 0);
    arriving_.assign(granules, 0);
    leaving_.assign(granules, 0);
    leaving_count_.assign(granules, 0);
    for (std::size_t list = 0; list < lists_.size(); ++list) lists_[list].clear();
    free_lists_.clear();
    for (std::size_t list = 0; list < lists_.size(); ++list) free_lists_.push_back(static_cast<std::uint32_t>(list));
  }

  // First byte of [offset, offset + bytes) that nothing wrote since the block began, or -1.
  long first_unwritten(std::size_t offset, std::size_t bytes) const {
    for (std::size_t i = offset; i < offset + bytes; ++i) {
      if (!written_[i]) return static_cast<long>(i);
    }
    return -1;
  }

  // Number of the asynchronous operation whose data a range awaits, or 0.
  std::uint32_t arriving(std::size_t offset, std::size_t bytes) const { return first_in(arriving_, offset, bytes); }

  void set_arriving(std::size_t offset, std::size_t bytes, std::uint32_t operation) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) arriving_[g] = operation;
  }

  // Number of an asynchronous operation that still has to read some of a range, or 0.
  std::uint32_t leaving(std::size_t offset, std::size_t bytes) const { return first_in(leaving_, offset, bytes); }

  void begin_leaving(std::size_t offset, std::size_t bytes, std::uint32_t operation) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      leaving_[g] = operation;
      ++leaving_count_[g];
    }
  }

  void end_leaving(std::size_t offset, std::size_t bytes) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (--leaving_count_[g] == 0) leaving_[g] = 0;
    }
  }

  // Whether nothing stands against an access: nothing in flight, nothing unwritten, no conflict.
  bool is_clear(std::size_t offset, std::size_t bytes, bool write, int thread, const Knowledge& known) const {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (arriving_[g] | (write ? leaving_[g] : 0)) return false;
      const Epoch last = write_[g], reads = read_[g];
      if (thread_of(last) != thread && !known.knows(last)) return false;
      if (!write) {
        if (last == 0) return false;
      } else if (reads & SHARED_READ) {
        for (const Epoch one : lists_[reads & ~SHARED_READ]) {
          if (one && thread_of(one) != thread && !known.knows(one)) return false;
        }
      } else if (reads && thread_of(reads) != thread && !known.knows(reads)) {
        return false;
      }
    }
    return write || first_unwritten(offset, bytes) < 0;
  }

  // A write among [offset, offset + bytes) by a thread below `threads` that no proxy fence lies behind, for whoever has
  // this knowledge.
  Conflict unfenced(std::size_t offset, std::size_t bytes, int threads, const Knowledge& known) const {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      const Epoch last = write_[g];
      if (last && thread_of(last) < threads && !known.fenced_off(last)) {
        return {true, thread_of(last), write_place_[g], "wrote"};
      }
    }
    return {};
  }

  // Whether a read by someone with this knowledge follows every write of the range.
  Conflict check_read(std::size_t offset, std::size_t bytes, int reader, const Knowledge& known) const {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (thread_of(write_[g]) != reader && !known.knows(write_[g])) {
        return {true, thread_of(write_[g]), write_place_[g], "wrote"};
      }
    }
    return {};
  }

  // Records a read by a thread or agent at its present epoch.
  void mark_read(std::size_t offset, std::size_t bytes, int reader, const Knowledge& known, std::uint64_t place) {
    const Epoch mine = epoch_of(known.clock[reader], reader);
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      Epoch& reads = read_[g];
      read_place_[g] = place;
      if (reads == mine) continue;
      if (reads & SHARED_READ) {
        put(lists_[reads & ~SHARED_READ], mine);
      } else if (thread_of(reads) == reader || known.knows(reads)) {
        reads = mine;
      } else {
        const std::uint32_t number = take_list();
        lists_[number].assign(4, 0);
        put(lists_[number], reads);
        put(lists_[number], mine);
        reads = SHARED_READ | number;
      }
    }
  }

  // Whether a write by someone with this knowledge follows every access of the range.
  Conflict check_write(std::size_t offset, std::size_t bytes, int writer, const Knowledge& known) const {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (thread_of(write_[g]) != writer && !known.knows(write_[g])) {
        return {true, thread_of(write_[g]), write_place_[g], "wrote"};
      }
      const Epoch reads = read_[g];
      if (reads & SHARED_READ) {
        for (const Epoch one : lists_[reads & ~SHARED_READ]) {
          if (one && thread_of(one) != writer && !known.knows(one))
            return {true, thread_of(one), read_place_[g], "read"};
        }
      } else if (reads && thread_of(reads) != writer && !known.knows(reads)) {
        return {true, thread_of(reads), read_place_[g], "read"};
      }
    }
    return {};
  }

  // Records a write by a thread or agent; all earlier reads are known to it.
  void mark_write(std::size_t offset, std::size_t bytes, Epoch epoch, std::uint64_t place) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (read_[g] & SHARED_READ) free_lists_.push_back(read_[g] & ~SHARED_READ);
      read_[g] = 0;
      write_[g] = epoch;
      write_place_[g] = place;
    }
    std::fill(written_.begin() + static_cast<long>(offset), written_.begin() + static_cast<long>(offset + bytes), 1);
  }

 private:
  // Sets a reader's epoch in a list where each reader has a place of its own, by its number; the list grows until no
  // two readers meet.
  static void put(std::vector<Epoch>& list, Epoch epoch) {
    for (;;) {
      const auto thread = static_cast<std::size_t>(thread_of(epoch));
      // Lanes of one warp that read the same bytes, and the same lane of several warps, stay apart.
      Epoch& slot = list[(thread ^ thread / 32) & (list.size() - 1)];
      if (slot == 0 || thread_of(slot) == thread_of(epoch)) {
        slot = epoch;
        return;
      }
      const std::vector<Epoch> old = std::move(list);
      list.assign(2 * old.size(), 0);
      for (const Epoch one : old) {
        if (one) put(list, one);
      }
    }
  }

  static std::uint32_t first_in(const std::vector<std::uint32_t>& numbers, std::size_t offset, std::size_t bytes) {
    for (std::size_t g = offset / GRANULE; g <= (offset + bytes - 1) / GRANULE; ++g) {
      if (numbers[g]) return numbers[g];
    }
    return 0;
  }

  std::uint32_t take_list() {
    if (free_lists_.empty()) {
      lists_.emplace_back();
      return static_cast<std::uint32_t>(lists_.size() - 1);
    }
    const std::uint32_t number = free_lists_.back();
    free_lists_.pop_back();
    return number;
  }

  std::vector<Epoch> write_, read_;
  std::vector<std::uint64_t> write_place_, read_place_;
  std::vector<std::uint8_t> written_;
  std::vector<std::uint32_t> arriving_, leaving_;
  std::vector<std::uint16_t> leaving_count_;
  std::vector<std::vector<Epoch>> lists_;
  std::vector<std::uint32_t> free_lists_;
};

}  // namespace microsdpa::emulator
