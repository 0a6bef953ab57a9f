// Memory: bounds, alignment, poison, races, asynchronous copies and bank conflicts.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

struct ThreadStorage {
  std::uintptr_t image;
  std::size_t bytes;
};

// Size of the thread-local segment of the library that is loaded at `image`.
std::size_t thread_local_bytes(std::uintptr_t image) {
  ThreadStorage found{image, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& wanted = *static_cast<ThreadStorage*>(data);
        if (info->dlpi_addr != wanted.image) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type == PT_TLS) wanted.bytes = info->dlpi_phdr[i].p_memsz;
        }
        return 1;
      },
      &found);
  return found.bytes;
}

// This OS thread's thread-local segment of that library.
void* thread_local_data(std::uintptr_t image) {
  std::pair<std::uintptr_t, void*> found{image, nullptr};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& wanted = *static_cast<std::pair<std::uintptr_t, void*>*>(data);
        if (info->dlpi_addr != wanted.first) return 0;
        wanted.second = info->dlpi_tls_data;
        return 1;
      },
      &found);
  return found.second;
}

}  // namespace

void Processor::locate_code() {
  std::pair<std::uintptr_t, std::size_t> found{job_.launch.image, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& wanted = *static_cast<std::pair<std::uintptr_t, std::size_t>*>(data);
        if (info->dlpi_addr != wanted.first) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type == PT_LOAD && header.p_flags & PF_X) {
            wanted.second = std::max<std::size_t>(wanted.second, header.p_vaddr + header.p_memsz);
          }
        }
        return 1;
      },
      &found);
  code_bytes_ = found.second;
  if (code_bytes_ <= std::size_t(1) << PLACE_BITS) return;
  const std::lock_guard<std::mutex> lock(job_.mutex);
  job_.stop = true;
  job_.outcome.failed = 1;
  std::snprintf(job_.outcome.message, MESSAGE_BYTES, "%zu bytes of code, where places are found in %d at most",
                code_bytes_, 1 << PLACE_BITS);
}

// `__shared__` variables are the only thread-local variables of a kernel library: its segment is the shared memory.
void Processor::locate_shared() {
  reinterpret_cast<void* (*)()>(job_.launch.anchor)();  // makes the loader allocate this OS thread's segment
  static_begin_ = reinterpret_cast<std::uintptr_t>(thread_local_data(job_.launch.image));
  static_bytes_ = static_begin_ ? thread_local_bytes(job_.launch.image) : 0;
  constexpr std::size_t ALIGNMENT = 1024;
  dynamic_bytes_ = static_cast<std::size_t>(job_.launch.dynamic_shared_bytes);
  dynamic_offset_ = (static_bytes_ + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  dynamic_stride_ = (dynamic_bytes_ + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  cta_bytes_ = dynamic_offset_ + dynamic_stride_;
  if (dynamic_bytes_) {
    dynamic_.reset(new std::byte[dynamic_stride_ * ctas_.size() + ALIGNMENT]);
    dynamic_begin_ = (reinterpret_cast<std::uintptr_t>(dynamic_.get()) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
}

void Processor::access(const void* pointer, std::size_t bytes, bool write, bool aligned, std::uint64_t place) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (is_local(pointer)) return;
  if (aligned && bytes <= 16 && address % bytes) {
    fail_at(place, "misaligned %s of %zu bytes at address %#zx", write ? "write" : "read", bytes,
            static_cast<std::size_t>(address));
  }
  if (address - static_begin_ < static_bytes_) {
    if (address + bytes > static_begin_ + static_bytes_) fail_at(place, "access past the end of shared memory");
    const std::uint64_t *guards = job_.launch.guards, *end = guards + job_.launch.guard_count;
    if (std::find(guards, end, address - static_begin_) != end) return;
    if (ctas_.size() > 1) {
      fail_at(place, "static shared memory in a cluster, where the emulator has dynamic shared memory alone");
    }
    shared_access(address - static_begin_, bytes, write, place);
  } else if (address - dynamic_begin_ < dynamic_stride_ * ctas_.size()) {
    const std::size_t offset = address - dynamic_begin_ - self_->cta * dynamic_stride_;
    if (offset >= dynamic_stride_) fail_at(place, "access to another CTA's shared memory by an address of this one's");
    if (offset + bytes > dynamic_bytes_) {
      fail_at(place, "access past the end of the %zu bytes of dynamic shared memory", dynamic_bytes_);
    }
    shared_access(self_->cta * cta_bytes_ + dynamic_offset_ + offset, bytes, write, place);
  } else if (!write && address - job_.launch.params < job_.launch.params_bytes) {
    return;  // the kernel's parameters, which a GPU has in constant memory
  } else {
    check_global(address, bytes, write, place);
    global_access(address, bytes, write, place);
    (write ? counters.global_write_bytes : counters.global_read_bytes) += bytes;
  }
}

std::byte* Processor::memory_at(std::size_t offset) {
  const std::size_t cta = offset / cta_bytes_, within = offset % cta_bytes_;
  return within < dynamic_offset_ ? reinterpret_cast<std::byte*>(static_begin_ + within)
                                  : dynamic_shared(static_cast<int>(cta)) + (within - dynamic_offset_);
}

std::uint32_t Processor::shared_address(const void* shared, Place place) {
  const auto address = reinterpret_cast<std::uintptr_t>(shared);
  if (address - static_begin_ < static_bytes_) return static_cast<std::uint32_t>(address - static_begin_);
  const std::size_t offset = address - dynamic_begin_ - self_->cta * dynamic_stride_;
  if (offset >= dynamic_stride_) fail(place, "an address outside this CTA's shared memory");
  return static_cast<std::uint32_t>(dynamic_offset_ + offset);
}

// What is wrong with an access to global memory, or nothing.
std::string Processor::global_fault(std::uintptr_t address, std::size_t bytes, bool write) {
  const Launch& launch = job_.launch;
  const Buffer* nearest = nullptr;
  std::uintptr_t distance = ~std::uintptr_t(0);
  for (int i = 0; i < launch.buffer_count; ++i) {
    const Buffer& buffer = launch.buffers[i];
    if (address >= buffer.address && address + bytes <= buffer.address + buffer.bytes) {
      if (write && !buffer.writable) return std::string("write to ") + buffer.name + ", which is an input";
      if (launch.programmatic && !self_->known.clock[grid_agent()]) {
        return std::string(write ? "write to " : "read of ") + buffer.name +
               " before griddepcontrol.wait: the kernel ahead may still use it";
      }
      return "";
    }
    const std::uintptr_t gap =
        address < buffer.address ? buffer.address - address : address + bytes - buffer.address - buffer.bytes;
    if (gap < distance) distance = gap, nearest = &buffer;
  }
  Dl_info info;  // constants of the kernel library
  if (!write && dladdr(reinterpret_cast<void*>(address), &info) &&
      reinterpret_cast<std::uintptr_t>(info.dli_fbase) == launch.image) {
    return "";
  }
  std::string text =
      std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes outside every buffer";
  if (!nearest) return text;
  const long long offset = static_cast<long long>(address) - static_cast<long long>(nearest->address);
  return text + ": at byte " + std::to_string(offset) + " of " + nearest->name + ", which has " +
         std::to_string(nearest->bytes);
}

void Processor::check_global(std::uintptr_t address, std::size_t bytes, bool write, std::uint64_t place) {
  if (const std::string fault = global_fault(address, bytes, write); !fault.empty())
    fail_at(place, "%s", fault.c_str());
}

std::uint32_t Processor::take_flight(const char* operation, Place place, std::uint64_t pc) {
  flights_.push_back({operation, self_->id, pc, place});
  return static_cast<std::uint32_t>(flights_.size());
}

// What is wrong with an access to shared memory by the running thread, or nothing.
std::string Processor::shared_fault(std::size_t offset, std::size_t bytes, bool write) {
  const auto in_flight = [&](std::uint32_t number, const char* what) {
    const Flight& flight = flights_[number - 1];
    char where[64];
    if (flight.place) {
      std::snprintf(where, sizeof(where), "{0x%llx}", static_cast<unsigned long long>(flight.place));
    } else {
      std::snprintf(where, sizeof(where), "line %d", flight.issued.line);
    }
    return std::string(write ? "write" : "read") + " of shared memory that " + flight.operation + " of " +
           who(flight.thread) + " at " + where + " " + what + ": a wait is missing";
  };
  if (const std::uint32_t number = shadow_.arriving(offset, bytes)) return in_flight(number, "has in flight");
  if (write) {
    if (const std::uint32_t number = shadow_.leaving(offset, bytes)) return in_flight(number, "still reads");
  } else if (const long byte = shadow_.first_unwritten(offset, bytes); byte >= 0) {
    return "read of shared memory that nothing has written: byte " +
           std::to_string(static_cast<std::size_t>(byte) % cta_bytes_);
  }
  const Conflict conflict = write ? shadow_.check_write(offset, bytes, self_->id, self_->known)
                                  : shadow_.check_read(offset, bytes, self_->id, self_->known);
  if (!conflict.found) return "";
  char where[32];
  std::snprintf(where, sizeof(where), "{0x%llx}", static_cast<unsigned long long>(conflict.place));
  return std::string("race: this ") + (write ? "writes" : "reads") + " byte " + std::to_string(offset % cta_bytes_) +
         " of shared memory that " + who(conflict.thread) + " " + conflict.kind +
         (conflict.place ? std::string(" at ") + where : "") + " with no barrier between the two";
}

void Processor::shared_access(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place) {
  (write ? counters.shared_write_bytes : counters.shared_read_bytes) += bytes;
  if (!shadow_.is_clear(offset, bytes, write, self_->id, self_->known)) {
    fail_at(place, "%s", shared_fault(offset, bytes, write).c_str());
  }
  if (write) {
    shadow_.mark_write(offset, bytes, epoch_of(self_->known.clock[self_->id], self_->id), place);
  } else {
    shadow_.mark_read(offset, bytes, self_->id, self_->known, place);
  }
  if (job_.launch.count_banks) log_bank(offset % cta_bytes_, bytes, write, place);
}

// The copy's bytes arrive now, whenever "now" is in the schedule.
void Processor::deliver(const AsyncCopy& copy) {
  std::byte* target = memory_at(copy.offset);
  if (copy.valid_bytes) std::memcpy(target, copy.source, static_cast<std::size_t>(copy.valid_bytes));
  std::memset(target + copy.valid_bytes, 0, static_cast<std::size_t>(copy.bytes - copy.valid_bytes));
}

void Processor::async_copy(void* shared, const void* global, int bytes, int valid_bytes, std::uint64_t place,
                           Place issued) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail(issued, "cp.async: expected 4, 8 or 16 bytes, got %d", bytes);
  if (valid_bytes < 0 || valid_bytes > bytes) fail(issued, "cp.async: %d valid bytes of %d", valid_bytes, bytes);
  const auto target = reinterpret_cast<std::uintptr_t>(shared), source = reinterpret_cast<std::uintptr_t>(global);
  if (target % bytes || source % bytes) fail_at(place, "misaligned cp.async of %d bytes", bytes);
  if (valid_bytes) {
    check_global(source, static_cast<std::size_t>(valid_bytes), false, place);
    global_access(source, static_cast<std::size_t>(valid_bytes), false, place);
  }
  const std::uintptr_t dynamic_begin = dynamic_begin_ + self_->cta * dynamic_stride_;
  std::size_t offset;
  if (target - static_begin_ < static_bytes_ && target + bytes <= static_begin_ + static_bytes_) {
    offset = target - static_begin_;
  } else if (target - dynamic_begin < dynamic_bytes_ && target + bytes <= dynamic_begin + dynamic_bytes_) {
    offset = self_->cta * cta_bytes_ + dynamic_offset_ + (target - dynamic_begin);
  } else {
    fail_at(place, "cp.async to an address outside shared memory");
  }
  counters.async_copy_bytes += static_cast<std::uint64_t>(valid_bytes);
  counters.global_read_bytes += static_cast<std::uint64_t>(valid_bytes);
  shared_access(offset, static_cast<std::size_t>(bytes), true, place);  // who still reads or writes there is in a race
  copies_.push_back({take_flight("cp.async", issued, place), offset, global, bytes, valid_bytes, place});
  shadow_.set_arriving(offset, static_cast<std::size_t>(bytes), copies_.back().number);
  if (job_.launch.late) {
    auto* poisoned = reinterpret_cast<void*>(target);
    std::memset(poisoned, 0xff, static_cast<std::size_t>(bytes));
  } else {
    deliver(copies_.back());
  }
  self_->open_group.push_back(static_cast<std::uint32_t>(copies_.size() - 1));
}

void Processor::async_commit() {
  self_->groups.push_back(std::move(self_->open_group));
  self_->open_group.clear();
}

void Processor::async_wait(std::size_t pending_groups) {
  auto& groups = self_->groups;
  while (groups.size() > pending_groups) {
    for (const std::uint32_t number : groups.front()) {
      const AsyncCopy& copy = copies_[number];
      const auto bytes = static_cast<std::size_t>(copy.bytes);
      if (job_.launch.late) deliver(copy);
      shadow_.set_arriving(copy.offset, bytes, 0);
      // From here the data are as if this thread had written them: others need a barrier to see them.
      shadow_.mark_write(copy.offset, bytes, epoch_of(self_->known.clock[self_->id], self_->id), copy.place);
    }
    groups.erase(groups.begin());
  }
}

void Processor::log_bank(std::size_t offset, std::size_t bytes, bool write, std::uint64_t place) {
  self_->bank_log.push_back({place, static_cast<std::uint32_t>(offset), static_cast<std::uint16_t>(bytes), write});
}

// Groups what the lanes of a warp accessed since they last met: the k-th access of a place by each lane is one request.
void Processor::flush_banks(int warp) {
  const int first = first_thread(warp);
  const int last = std::min(first + 32, (threads_[first].cta + 1) * job_.launch.threads);
  std::map<std::uint64_t, std::vector<const BankAccess*>> occurrences[32];
  std::map<std::uint64_t, std::size_t> longest;
  for (int id = first; id < last; ++id) {
    for (const BankAccess& access : threads_[id].bank_log) {
      auto& list = occurrences[id - first][access.place];
      list.push_back(&access);
      auto& length = longest[access.place];
      length = std::max(length, list.size());
    }
  }
  for (const auto& [place, length] : longest) {
    for (std::size_t k = 0; k < length; ++k) {
      const BankAccess* lanes[32] = {};
      for (int lane = 0; lane < last - first; ++lane) {
        auto found = occurrences[lane].find(place);
        if (found != occurrences[lane].end() && k < found->second.size()) lanes[lane] = found->second[k];
      }
      count_group(place, lanes);
    }
  }
  for (int id = first; id < last; ++id) threads_[id].bank_log.clear();
}

// 32 banks of 4 bytes. Accesses of 8 and 16 bytes are served 16 and 8 lanes at a time; lanes that want the same word
// share.
void Processor::count_group(std::uint64_t place, const BankAccess* const (&lanes)[32]) {
  std::size_t widest = 4;
  for (const BankAccess* access : lanes) {
    if (access) widest = std::max<std::size_t>(widest, access->bytes);
  }
  const int step = widest > 8 ? 8 : widest > 4 ? 16 : 32;
  std::uint64_t wavefronts = 0, ideal = 0;
  for (int begin = 0; begin < 32; begin += step) {
    std::vector<std::uint32_t> words[32];
    for (int lane = begin; lane < begin + step; ++lane) {
      if (!lanes[lane]) continue;
      for (std::uint32_t w = lanes[lane]->offset / 4; w <= (lanes[lane]->offset + lanes[lane]->bytes - 1u) / 4; ++w) {
        auto& bank = words[w % 32];
        if (std::find(bank.begin(), bank.end(), w) == bank.end()) bank.push_back(w);
      }
    }
    std::size_t most = 0, total = 0;
    for (const auto& bank : words) most = std::max(most, bank.size()), total += bank.size();
    wavefronts += most;
    ideal += (total + 31) / 32;
  }
  auto site = std::find_if(sites_.begin(), sites_.end(), [&](const Site& s) { return s.place == place; });
  if (site == sites_.end()) site = sites_.insert(sites_.end(), {place, 0, 0, 0});
  ++site->requests, site->wavefronts += wavefronts, site->ideal += ideal;
}

// Adds this processor's counters to the launch's.
void Processor::finish_memory() {
  const std::lock_guard<std::mutex> lock(job_.mutex);
  Outcome& outcome = job_.outcome;
  for (const Site& site : sites_) {
    counters.bank_requests += site.requests;
    counters.bank_wavefronts += site.wavefronts;
    counters.bank_ideal += site.ideal;
    SiteCounters* end = outcome.sites + outcome.site_count;
    SiteCounters* known =
        std::find_if(outcome.sites, end, [&](const SiteCounters& s) { return s.place == site.place; });
    if (known == end) {
      if (outcome.site_count == MAX_SITES) continue;
      ++outcome.site_count;
      *known = {site.place, 0, 0, 0};
    }
    known->requests += site.requests, known->wavefronts += site.wavefronts, known->ideal += site.ideal;
  }
  auto* sums = reinterpret_cast<std::uint64_t*>(&outcome.counters);
  const auto* mine = reinterpret_cast<const std::uint64_t*>(&counters);
  for (std::size_t i = 0; i < sizeof(Counters) / sizeof(std::uint64_t); ++i) sums[i] += mine[i];
}

}  // namespace microsdpa::emulator
