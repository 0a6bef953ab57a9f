// Bulk copies and the async proxy.
//
// A bulk copy's bytes arrive when a thread waits for the phase that they count towards and nothing else is missing from
// it (late), or at once (early). Who has not waited for the phase does not know of them, and is in a race.
#include <algorithm>
#include <cstring>
#include <optional>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

constexpr int RANK_SHIFT = 24;  // an address in a cluster: the CTA's rank above the position in its shared memory

// Where in global memory the element of a box lies that is `at` bytes into it, or nothing outside the tensor.
std::optional<std::uintptr_t> element_address(const TensorView& view, BoxOrigin origin, std::size_t at) {
  const auto pitch = static_cast<std::size_t>(view.box_columns * view.element_bytes);
  const auto within = static_cast<std::int64_t>(at / pitch);
  const std::int64_t row = origin.row + within % view.inner_rows(), head = origin.head + within / view.inner_rows();
  const std::int64_t column = origin.column + static_cast<std::int64_t>(at % pitch) / view.element_bytes;
  const std::int64_t position[] = {column, row, head, origin.batch};
  for (int axis = 0; axis < 4; ++axis) {
    if (position[axis] < 0 || position[axis] >= view.sizes[axis]) return std::nullopt;
  }
  return view.address + static_cast<std::uintptr_t>(column * view.element_bytes + row * view.strides[0] +
                                                    head * view.strides[1] + origin.batch * view.strides[2]);
}

// Where in shared memory the 16 bytes of an unswizzled address lie.
std::size_t swizzled(const TensorView& view, std::size_t address) {
  if (!view.swizzle) return address;
  return address ^ (address >> 7 & (static_cast<std::size_t>(view.swizzle) / 16 - 1)) << 4;
}

std::size_t box_alignment(const TensorView& view) {
  return view.swizzle ? 8 * static_cast<std::size_t>(view.swizzle) : 128;
}

}  // namespace

std::size_t Processor::cluster_offset(std::uint32_t address, std::size_t bytes, const char* operation, Place place) {
  const std::size_t rank = address >> RANK_SHIFT, within = address & ((1u << RANK_SHIFT) - 1);
  const std::size_t cta = rank ? rank - 1 : static_cast<std::size_t>(self_->cta);
  if (cta >= ctas_.size()) fail(place, "%s: CTA %zu of a cluster of %zu", operation, cta, ctas_.size());
  if (within + bytes > dynamic_offset_ + dynamic_bytes_) {
    fail(place, "%s: bytes %zu to %zu of %zu of shared memory", operation, within, within + bytes,
         dynamic_offset_ + dynamic_bytes_);
  }
  if (ctas_[cta].live == 0) fail(place, "%s: CTA %zu of the cluster has ended", operation, cta);
  return cta * cta_bytes_ + within;
}

std::uint32_t Processor::peer_address(const void* shared, int rank, Place place) {
  if (rank < 0 || rank >= static_cast<int>(ctas_.size())) {
    fail(place, "mapa: CTA %d of a cluster of %zu", rank, ctas_.size());
  }
  return static_cast<std::uint32_t>(rank + 1) << RANK_SHIFT | shared_address(shared, place);
}

// The bytes are there now, and count.
void Processor::arrive_bytes(Mbarrier& barrier, const Delivery& delivery, std::size_t offset) {
  const int agent = barrier.agent;
  const std::uint32_t clock = ++agent_clocks_[agent];
  std::size_t source = delivery.source;
  if (delivery.source_bytes) shadow_.end_leaving(delivery.source, delivery.source_bytes);
  for (const Piece& piece : delivery.pieces) {
    const std::byte* data = delivery.source_bytes ? memory_at(source) : piece.data.data();
    std::memcpy(memory_at(piece.offset), data, piece.data.size());
    source += piece.data.size();
    shadow_.set_arriving(piece.offset, piece.data.size(), 0);
    shadow_.mark_write(piece.offset, piece.data.size(), epoch_of(clock, agent), 0);
  }
  if (delivery.source_bytes) {
    Knowledge copier;
    copier.reset(agents_);
    copier.clock[agent] = clock;
    shadow_.mark_read(delivery.source, delivery.source_bytes, agent, copier, 0);
  }
  barrier.arriving.clock[agent] = clock;
  barrier.arriving.fenced[agent] = clock;
  barrier.peer = barrier.peer || delivery.peer;
  barrier.bytes -= delivery.bytes;
  complete_if_due(barrier, offset);
}

// Takes in a delivery for the barrier at an offset: for later, or now.
void Processor::send(std::size_t offset, Delivery delivery, Place place) {
  Mbarrier& barrier = mbarrier_at(offset, "a bulk copy", true, place);
  for (const Piece& piece : delivery.pieces) {
    check_async_target(piece.offset, piece.data.size(), flights_[delivery.number - 1].operation,
                       !delivery.peer || delivery.source_bytes, place);
    shadow_.set_arriving(piece.offset, piece.data.size(), delivery.number);
    if (job_.launch.late) std::memset(memory_at(piece.offset), 0xff, piece.data.size());
  }
  if (delivery.source_bytes) shadow_.begin_leaving(delivery.source, delivery.source_bytes, delivery.number);
  if (job_.launch.late) {
    barrier.deliveries.push_back(std::move(delivery));
    deliver_due(barrier, offset);
  } else {
    arrive_bytes(barrier, delivery, offset);
  }
}

const TensorView& Processor::tensor_view(const void* map, Place place) {
  const auto& view = *static_cast<const TensorView*>(map);
  if (view.magic != TENSOR_VIEW_MAGIC) fail(place, "bulk copy: not a tensor map that the launch was given");
  return view;
}

// That nobody uses the range any more, and that what threads wrote there is behind a proxy fence when a bulk copy
// comes.
void Processor::check_async_target(std::size_t offset, std::size_t bytes, const char* operation, bool async_proxy,
                                   Place place) {
  if (const std::string fault = shared_fault(offset, bytes, true); !fault.empty()) {
    fail(place, "%s: %s", operation, fault.c_str());
  }
  if (!async_proxy) return;
  if (const Conflict conflict = shadow_.unfenced(offset, bytes, threads(), self_->known); conflict.found) {
    fail(place, "%s to byte %zu, which %s wrote, with no fence.proxy.async between the two", operation,
         offset % cta_bytes_, who(conflict.thread).c_str());
  }
}

// What is wrong with an asynchronous unit's read for someone with this knowledge, or nothing.
std::string Processor::async_read_fault(std::size_t offset, std::size_t bytes, const Knowledge& known,
                                        const char* operation) {
  const auto at = [&] {
    return std::string(operation) + " of byte " + std::to_string(offset % cta_bytes_) + " of shared memory";
  };
  if (const std::uint32_t number = shadow_.arriving(offset, bytes)) {
    const Flight& flight = flights_[number - 1];
    return at() + " that " + flight.operation + " of " + who(flight.thread) + " at line " +
           std::to_string(flight.issued.line) + " has in flight: a wait is missing";
  }
  if (shadow_.first_unwritten(offset, bytes) >= 0) return at() + " that nothing has written";
  if (const Conflict c = shadow_.check_read(offset, bytes, -1, known); c.found) {
    return "race: " + at() + " that " + who(c.thread) + " wrote with no barrier between the two";
  }
  if (const Conflict c = shadow_.unfenced(offset, bytes, threads(), known); c.found) {
    return at() + " that " + who(c.thread) + " wrote, with no fence.proxy.async between the two";
  }
  return "";
}

void Processor::bulk_load(std::uint32_t shared, const void* map, std::uint32_t barrier, BoxOrigin origin, unsigned ctas,
                          Place place) {
  const TensorView& view = tensor_view(map, place);
  const auto pitch = static_cast<std::size_t>(view.box_columns * view.element_bytes);
  const auto bytes = pitch * static_cast<std::size_t>(view.rows());
  const std::size_t alignment = box_alignment(view);
  if (shared % alignment) {
    fail(place, "bulk tensor copy: expected shared memory aligned to %zu bytes, got byte %u", alignment, shared);
  }
  if (view.swizzle && pitch != static_cast<std::size_t>(view.swizzle)) {
    fail(place, "bulk tensor copy: rows of %zu bytes, where the swizzle repeats after %d", pitch,
         static_cast<int>(view.swizzle));
  }
  if (ctas >> ctas_.size()) fail(place, "bulk tensor copy: multicast mask %#x in a cluster of %zu", ctas, ctas_.size());
  // 16 bytes at a time: positions in the box, swizzled by the address that they go to.
  std::vector<std::pair<std::size_t, std::vector<std::byte>>> chunks;
  std::uint64_t valid = 0;
  for (std::size_t at = 0; at < bytes; at += 16) {
    std::vector<std::byte> data(16, std::byte{0});
    for (std::size_t byte = 0; byte < 16; byte += static_cast<std::size_t>(view.element_bytes)) {
      const auto address = element_address(view, origin, at + byte);
      if (!address) continue;
      if (const std::string fault = global_fault(*address, static_cast<std::size_t>(view.element_bytes), false);
          !fault.empty()) {
        fail(place, "bulk tensor copy: %s", fault.c_str());
      }
      check_async_global(*address, static_cast<std::size_t>(view.element_bytes), "bulk tensor copy", place);
      std::memcpy(data.data() + byte, reinterpret_cast<const void*>(*address),
                  static_cast<std::size_t>(view.element_bytes));
      valid += static_cast<std::uint64_t>(view.element_bytes);
    }
    chunks.emplace_back(swizzled(view, shared + at), std::move(data));
  }
  counters.global_read_bytes += valid;
  const unsigned receivers = ctas ? ctas : 1u << self_->cta;
  for (unsigned rank = 0; rank < ctas_.size(); ++rank) {
    if (!(receivers >> rank & 1)) continue;
    const std::uint32_t peer = (rank + 1) << RANK_SHIFT;
    Delivery delivery;
    delivery.number = take_flight("a bulk tensor copy", place);
    delivery.bytes = static_cast<int>(bytes);
    for (const auto& [target, data] : chunks) {
      delivery.pieces.push_back(
          {cluster_offset(peer | static_cast<std::uint32_t>(target), 16, "a bulk tensor copy", place), data});
    }
    counters.bulk_copy_bytes += bytes;
    send(cluster_offset(peer | barrier, 8, "a bulk tensor copy", place), std::move(delivery), place);
  }
}

void Processor::bulk_load_bytes(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier,
                                Place place) {
  const auto source = reinterpret_cast<std::uintptr_t>(global);
  if (bytes <= 0 || bytes % 16 || shared % 16 || source % 16) {
    fail(place, "bulk copy: expected a multiple of 16 bytes on addresses aligned to 16, got %d bytes", bytes);
  }
  const auto size = static_cast<std::size_t>(bytes);
  if (const std::string fault = global_fault(source, size, false); !fault.empty()) {
    fail(place, "bulk copy: %s", fault.c_str());
  }
  check_async_global(source, size, "bulk copy", place);
  Delivery delivery;
  delivery.number = take_flight("a bulk copy", place);
  delivery.bytes = bytes;
  const auto* first = static_cast<const std::byte*>(global);
  delivery.pieces.push_back(
      {cluster_offset(shared, size, "a bulk copy", place), std::vector<std::byte>(first, first + bytes)});
  counters.global_read_bytes += size, counters.bulk_copy_bytes += size;
  send(cluster_offset(barrier, 8, "a bulk copy", place), std::move(delivery), place);
}

void Processor::bulk_to_peer(std::uint32_t target, std::uint32_t shared, int bytes, std::uint32_t barrier,
                             Place place) {
  if (bytes <= 0 || bytes % 16 || shared % 16 || target % 16) {
    fail(place, "bulk copy: expected a multiple of 16 bytes on addresses aligned to 16, got %d bytes", bytes);
  }
  if (target >> RANK_SHIFT != barrier >> RANK_SHIFT) {
    fail(place, "bulk copy: target and mbarrier must lie in one CTA's shared memory");
  }
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t source = cluster_offset(shared, size, "a bulk copy", place);
  if (const std::string fault = async_read_fault(source, size, self_->known, "bulk copy"); !fault.empty()) {
    fail(place, "%s", fault.c_str());
  }
  Delivery delivery;
  delivery.number = take_flight("a bulk copy", place);
  delivery.pieces.push_back({cluster_offset(target, size, "a bulk copy", place), std::vector<std::byte>(size)});
  delivery.source = source, delivery.source_bytes = size, delivery.bytes = bytes, delivery.peer = true;
  counters.peer_bytes += size;
  send(cluster_offset(barrier, 8, "a bulk copy", place), std::move(delivery), place);
}

void Processor::store_async(std::uint32_t target, const void* data, int bytes, std::uint32_t barrier, Place place) {
  if (target % static_cast<unsigned>(bytes)) fail(place, "st.async: misaligned store of %d bytes", bytes);
  if (target >> RANK_SHIFT != barrier >> RANK_SHIFT) {
    fail(place, "st.async: target and mbarrier must lie in one CTA's shared memory");
  }
  const auto* first = static_cast<const std::byte*>(data);
  Delivery delivery;
  delivery.number = take_flight("st.async", place);
  delivery.pieces.push_back({cluster_offset(target, static_cast<std::size_t>(bytes), "st.async", place),
                             std::vector<std::byte>(first, first + bytes)});
  delivery.bytes = bytes, delivery.peer = true;
  counters.peer_bytes += static_cast<std::uint64_t>(bytes);
  send(cluster_offset(barrier, 8, "st.async", place), std::move(delivery), place);
}

void Processor::bulk_store(const void* map, std::uint32_t shared, BoxOrigin origin, Place place) {
  const TensorView& view = tensor_view(map, place);
  const auto pitch = static_cast<std::size_t>(view.box_columns * view.element_bytes);
  const auto bytes = pitch * static_cast<std::size_t>(view.rows());
  const std::size_t alignment = box_alignment(view);
  if (shared % alignment) {
    fail(place, "bulk tensor store: expected shared memory aligned to %zu bytes, got byte %u", alignment, shared);
  }
  if (origin.column < 0 || origin.row < 0 || origin.head < 0 || origin.batch < 0) {
    fail(place, "bulk tensor store: negative coordinates are an illegal instruction");
  }
  BulkStore store;
  store.number = take_flight("a bulk tensor store", place);
  store.target_bytes = static_cast<int>(view.element_bytes);
  for (std::size_t at = 0; at < bytes; at += static_cast<std::size_t>(view.element_bytes)) {
    const std::size_t offset =
        cluster_offset(static_cast<std::uint32_t>(swizzled(view, shared + at)),
                       static_cast<std::size_t>(view.element_bytes), "a bulk tensor store", place);
    const auto address = element_address(view, origin, at);
    if (!address) continue;
    if (const std::string fault =
            async_read_fault(offset, static_cast<std::size_t>(view.element_bytes), self_->known, "bulk tensor store");
        !fault.empty()) {
      fail(place, "%s", fault.c_str());
    }
    if (const std::string fault = global_fault(*address, static_cast<std::size_t>(view.element_bytes), true);
        !fault.empty()) {
      fail(place, "bulk tensor store: %s", fault.c_str());
    }
    check_async_global(*address, static_cast<std::size_t>(view.element_bytes), "bulk tensor store", place);
    shadow_.begin_leaving(offset, static_cast<std::size_t>(view.element_bytes), store.number);
    store.targets.emplace_back(*address, offset);
    counters.global_write_bytes += static_cast<std::uint64_t>(view.element_bytes);
  }
  counters.bulk_copy_bytes += bytes;
  if (!job_.launch.late) move_store(store);
  self_->open_stores.push_back(std::move(store));
}

// Floats are added to those that are there when the thread waits (late), or at once.
void Processor::bulk_reduce_add(float* global, std::uint32_t shared, int bytes, Place place) {
  const auto target = reinterpret_cast<std::uintptr_t>(global);
  if (bytes <= 0 || bytes % 16 || shared % 16 || target % 16) {
    fail(place, "bulk reduction: expected a multiple of 16 bytes on addresses aligned to 16, got %d bytes", bytes);
  }
  const auto size = static_cast<std::size_t>(bytes);
  const std::size_t source = cluster_offset(shared, size, "a bulk reduction", place);
  if (const std::string fault = async_read_fault(source, size, self_->known, "bulk reduction"); !fault.empty()) {
    fail(place, "%s", fault.c_str());
  }
  if (const std::string fault = global_fault(target, size, true); !fault.empty()) {
    fail(place, "bulk reduction: %s", fault.c_str());
  }
  check_async_global(target, size, "bulk reduction", place);
  BulkStore store;
  store.number = take_flight("a bulk reduction", place);
  store.target_bytes = sizeof(float), store.adds = true;
  for (std::size_t at = 0; at < size; at += sizeof(float)) store.targets.emplace_back(target + at, source + at);
  shadow_.begin_leaving(source, size, store.number);
  counters.global_write_bytes += size, counters.bulk_copy_bytes += size;
  if (!job_.launch.late) move_store(store);
  self_->open_stores.push_back(std::move(store));
}

// Brings the bytes of a store to global memory.
void Processor::move_store(const BulkStore& store) {
  const auto bytes = static_cast<std::size_t>(store.target_bytes);
  if (!store.adds) {
    for (const auto& [address, offset] : store.targets) {
      std::memcpy(reinterpret_cast<void*>(address), memory_at(offset), bytes);
    }
    return;
  }
  const std::lock_guard<std::mutex> lock(job_.reductions);
  for (const auto& [address, offset] : store.targets) {
    float sum, added;
    std::memcpy(&sum, reinterpret_cast<const void*>(address), bytes);
    std::memcpy(&added, memory_at(offset), bytes);
    sum += added;
    std::memcpy(reinterpret_cast<void*>(address), &sum, bytes);
  }
}

void Processor::bulk_commit() {
  self_->store_groups.push_back(std::move(self_->open_stores));
  self_->open_stores.clear();
}

void Processor::bulk_wait_read(std::size_t pending_groups) {
  auto& groups = self_->store_groups;
  while (groups.size() > pending_groups) {
    for (const BulkStore& store : groups.front()) finish_store(store);
    groups.erase(groups.begin());
  }
}

void Processor::finish_store(const BulkStore& store) {
  const auto bytes = static_cast<std::size_t>(store.target_bytes);
  if (job_.launch.late) move_store(store);
  for (const auto& [address, offset] : store.targets) {
    shadow_.end_leaving(offset, bytes);
    // From here the reads are as if this thread had made them: who writes next needs a barrier with it.
    shadow_.mark_read(offset, bytes, self_->id, self_->known, 0);
  }
}

void Processor::fence_proxy_async_global() {
  Knowledge& known = self_->known;
  known.fenced_global.resize(known.clock.size());
  raise(known.fenced_global, known.clock);
  advance(self_->id);
}

void Processor::fence_proxy_async() {
  Knowledge& known = self_->known;
  for (std::size_t i = 0; i < known.clock.size(); ++i) known.fenced[i] = std::max(known.fenced[i], known.clock[i]);
  advance(self_->id);
}

}  // namespace microsdpa::emulator
