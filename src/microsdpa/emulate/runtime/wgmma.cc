// wgmma: tensor cores that read shared memory, and write registers, later.
//
// A warp's quarter of an operation runs when the warp waits for its group (late), or at once (early). Until the wait
// its tiles and the registers of A must not be written, and in the late schedule its accumulators hold poison.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "processor.h"

namespace microsdpa::emulator {

namespace {

constexpr std::uint32_t POISON = 0xffffffffu;  // NaN, and no integer sum that occurs

float from_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return bits >> 15 ? -value : value;
}

float from_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return NAN;
  const float value = exponent ? std::ldexp(static_cast<float>(fraction + 8), exponent - 10)
                               : std::ldexp(static_cast<float>(fraction), -9);
  return bits >> 7 ? -value : value;
}

// Decoded once: a kernel decodes the same few values many millions of times.
struct Tables {
  std::vector<float> half, e4m3;
  Tables() : half(1 << 16), e4m3(1 << 8) {
    for (int i = 0; i < 1 << 16; ++i) half[i] = from_half(static_cast<std::uint16_t>(i));
    for (int i = 0; i < 1 << 8; ++i) e4m3[i] = from_e4m3(static_cast<std::uint8_t>(i));
  }
};

int bytes_of(Element element) { return element == Element::F16 || element == Element::BF16 ? 2 : 1; }

float decode(Element element, const std::byte* data) {
  static const Tables tables;
  if (bytes_of(element) == 1) {
    const auto bits = std::to_integer<std::uint8_t>(*data);
    return element == Element::E4M3 ? tables.e4m3[bits] : static_cast<std::int8_t>(bits);
  }
  std::uint16_t bits;
  std::memcpy(&bits, data, 2);
  if (element == Element::F16) return tables.half[bits];
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Exponent of a term's leading bit; that of zero is far below all others.
int exponent_of(double x) { return x == 0 ? -1000 : std::ilogb(x); }

// Sum of E4M3 products and of what was there, as an H200 makes it (docs/numerics.md): every term is cut, towards zero,
// 13 bits below the largest exponent, which for a product is the sum of its factors'; so is the sum, below its own.
float sum_of_e4m3(double before, const double* x, const int* x_exponent, const double* y, const int* y_exponent,
                  int count) {
  constexpr int BITS = 13;
  int largest = exponent_of(before);
  double check = before;  // NaN where a term is
  for (int k = 0; k < count; ++k) {
    largest = std::max(largest, x_exponent[k] + y_exponent[k]);
    check += x[k] * y[k];
  }
  if (!std::isfinite(check)) return static_cast<float>(check);
  if (largest < -500) return 0;
  const double unit = std::ldexp(1.0, BITS - largest);
  auto sum = static_cast<std::int64_t>(before * unit);
  for (int k = 0; k < count; ++k) sum += static_cast<std::int64_t>(x[k] * y[k] * unit);
  const int spare = sum == 0 ? 0 : std::ilogb(static_cast<double>(sum)) - BITS;
  if (spare > 0) sum = sum / (std::int64_t{1} << spare) * (std::int64_t{1} << spare);
  return static_cast<float>(static_cast<double>(sum) / unit);
}

struct Descriptor {
  std::size_t start, leading, stride, swizzle;
};

Descriptor parse(std::uint64_t bits) {
  constexpr std::size_t SWIZZLE[] = {0, 128, 64, 32};
  return {(bits & 0x3fff) << 4, (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4, SWIZZLE[bits >> 62]};
}

}  // namespace

// Addresses of the 16-byte chunks that a warp's quarter reads: of A its 16 rows, of B all of it. Along K: chunk 2 r + c
// is the c-th half of row r. Along M or N: chunk k C + c holds elements 8 c onwards of row k of K.
void Processor::operand_chunks(const Wgmma& operation, bool second, int warp, std::vector<std::size_t>& chunks,
                               Place place) {
  const std::uint64_t bits = second ? operation.b_descriptor : operation.a_descriptor;
  const bool along_mn = second ? operation.b_along_n : operation.a_along_m;
  const Descriptor d = parse(bits);
  if (bits & (3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52)) {
    fail(place, "wgmma: illegal matrix descriptor %#llx: reserved bits are set", static_cast<unsigned long long>(bits));
  }
  if (bits >> 49 & 7) fail(place, "wgmma: matrix descriptor with a base offset, which is not emulated");
  if (along_mn && bytes_of(operation.element) == 1) fail(place, "wgmma: 8-bit tiles must be contiguous along K");
  const std::size_t rows = second ? static_cast<std::size_t>(operation.n) : 16, first = second ? 0 : 16u * (warp % 4);
  chunks.clear();
  const auto add = [&](std::size_t address) {
    if (d.swizzle) address ^= (address >> 7 & (d.swizzle / 16 - 1)) << 4;
    chunks.push_back(cluster_offset(static_cast<std::uint32_t>(address), 16, "wgmma", place));
  };
  if (!along_mn) {
    for (std::size_t r = first; r < first + rows; ++r) {
      for (std::size_t c = 0; c < 2; ++c) {
        add(d.start + r / 8 * d.stride + (d.swizzle ? r % 8 * d.swizzle + 16 * c : r % 8 * 16 + c * d.leading));
      }
    }
    return;
  }
  for (std::size_t k = 0; k < 16; ++k) {
    for (std::size_t c = first / 8; c < (first + rows) / 8; ++c) {
      if (d.swizzle) {
        const std::size_t per = d.swizzle / 16;
        add(d.start + c / per * d.leading + k / 8 * d.stride + k % 8 * d.swizzle + c % per * 16);
      } else {
        add(d.start + c * d.stride + k / 8 * d.leading + k % 8 * 16);
      }
    }
  }
}

void Processor::wgmma_fence(Place place) {
  warp_collective("wgmma.fence", 0xffffffffu, self_, [](void* const(&)[32], const void*) {}, nullptr, place);
  self_->wgmma_fenced = true;
}

void Processor::wgmma(const Wgmma& operation, Place place) {
  if (!self_->wgmma_fenced) {
    fail(place, "wgmma with no wgmma.fence since the last group was committed");
  }
  struct Context {
    Processor* processor;
    Place place;
  } context{this, place};
  Wgmma mine = operation;
  warp_collective(
      "wgmma.mma_async", 0xffffffffu, &mine,
      [](void* const(&lanes)[32], const void* uniform) {
        const auto& c = *static_cast<const Context*>(uniform);
        c.processor->issue_mma(lanes, c.place);
      },
      &context, place);
}

void Processor::issue_mma(void* const (&lanes)[32], Place place) {
  const Wgmma& first = *static_cast<const Wgmma*>(lanes[0]);
  Warp& own = warp();
  const int in_cta = self_->warp % static_cast<int>(warps_.size() / ctas_.size());
  std::vector<IssuedMma>& issued = cta().issued[static_cast<std::size_t>(in_cta / 4)];
  const IssuedMma entry{first.element, first.n, first.a ? 0 : first.a_descriptor, first.b_descriptor, place};
  if (own.mmas_issued < issued.size()) {
    const IssuedMma& other = issued[own.mmas_issued];
    if (other.n != entry.n || other.a != entry.a || other.b != entry.b || other.element != entry.element) {
      fail(place, "divergent warpgroup: another of its warps has issued another wgmma, at line %d", other.place.line);
    }
  } else {
    issued.push_back(entry);
  }
  ++own.mmas_issued;

  WarpMma mma{first, take_flight("wgmma", place), {}, {}, {}, place, {}, {}};
  const auto registers = static_cast<std::size_t>(first.n) / 2;
  for (int lane = 0; lane < 32; ++lane) {
    const Wgmma& one = *static_cast<const Wgmma*>(lanes[lane]);
    if (one.b_descriptor != first.b_descriptor || (!first.a && one.a_descriptor != first.a_descriptor) ||
        one.accumulate != first.accumulate) {
      fail(place, "wgmma: lanes of a warp have different descriptors");
    }
    mma.d[lane] = one.d;
    if (first.a) {
      std::memcpy(mma.a[lane], one.a, sizeof(mma.a[lane]));
      mma.a_registers[lane] = one.a;
    }
  }
  if (!first.a) operand_chunks(first, false, in_cta, mma.a_chunks, place);
  operand_chunks(first, true, in_cta, mma.b_chunks, place);
  for (const std::vector<std::size_t>* chunks : {&mma.a_chunks, &mma.b_chunks}) {
    for (const std::size_t offset : *chunks) {
      if (const std::string fault = async_read_fault(offset, 16, self_->known, "wgmma's read"); !fault.empty()) {
        fail(place, "%s", fault.c_str());
      }
      shadow_.begin_leaving(offset, 16, mma.number);
    }
  }
  count_tensor(2 * 16 * first.n * 32 / bytes_of(first.element));
  Accumulators& sums = own.accumulators[mma.d[0]];
  if (sums.operations++ == 0) {
    sums.values.resize(32 * registers);
    for (int lane = 0; lane < 32; ++lane) {
      std::memcpy(&sums.values[lane * registers], mma.d[lane], 4 * registers);
      std::fill_n(static_cast<std::uint32_t*>(mma.d[lane]), registers, POISON);
    }
  }
  if (!job_.launch.late) run_mma(mma);
  own.open_mmas.push_back(std::move(mma));
}

// Multiplies with what the tiles hold now, into the accumulators' values.
void Processor::run_mma(WarpMma& mma) {
  const Wgmma& op = mma.operation;
  const std::size_t bytes = bytes_of(op.element), depth = 32 / bytes, per = 16 / bytes, n = op.n;
  // A as [row][k] and B as [k][column], but for sums of E4M3, which want all of a column at once.
  const bool by_column = op.element == Element::E4M3;
  std::vector<double> a(16 * depth), b(n * depth);
  const auto load = [&](bool second, const std::vector<std::size_t>& chunks, std::size_t rows) {
    const bool along_mn = second ? op.b_along_n : op.a_along_m;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const std::byte* data = memory_at(chunks[i]);
      for (std::size_t e = 0; e < per; ++e) {
        const std::size_t row = along_mn ? i % (rows / 8) * 8 + e : i / 2;
        const std::size_t k = along_mn ? i / (rows / 8) : i % 2 * per + e;
        const double value = decode(op.element, data + e * bytes);
        (second ? b : a)[second && !by_column ? k * n + row : row * depth + k] = value;
      }
    }
  };
  load(true, mma.b_chunks, n);
  if (op.a) {
    for (std::size_t lane = 0; lane < 32; ++lane) {
      for (std::size_t r = 0; r < 4; ++r) {
        for (std::size_t e = 0; e < 4 / bytes; ++e) {
          const std::size_t row = lane / 4 + 8 * (r % 2), k = 4 / bytes * (lane % 4) + e + depth / 2 * (r / 2);
          a[row * depth + k] = decode(op.element, reinterpret_cast<const std::byte*>(&mma.a[lane][r]) + e * bytes);
        }
      }
    }
  } else {
    load(false, mma.a_chunks, 16);
  }
  std::vector<int> a_exponents, b_exponents;
  if (by_column) {
    for (const double x : a) a_exponents.push_back(exponent_of(x));
    for (const double y : b) b_exponents.push_back(exponent_of(y));
  }
  Accumulators& all = warp().accumulators[mma.d[0]];
  std::vector<double> sums(n);
  for (std::size_t row = 0; row < 16; ++row) {
    const auto slot = [&](std::size_t column) -> std::uint32_t& {
      const std::size_t lane = row % 8 * 4 + column % 8 / 2;
      return all.values[lane * n / 2 + column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (std::size_t column = 0; column < n; ++column) {
      const std::uint32_t bits = slot(column);
      float before;
      std::memcpy(&before, &bits, 4);
      const double sum = op.element == Element::S8 ? static_cast<double>(static_cast<std::int32_t>(bits)) : before;
      sums[column] = op.accumulate ? sum : 0;
    }
    const double* x = &a[row * depth];
    for (std::size_t k = 0; k < depth && !by_column; ++k) {  // column by column the same order of additions
      for (std::size_t column = 0; column < n; ++column) sums[column] += x[k] * b[k * n + column];
    }
    for (std::size_t column = 0; column < n; ++column) {
      const float rounded = by_column ? sum_of_e4m3(sums[column], x, &a_exponents[row * depth], &b[column * depth],
                                                    &b_exponents[column * depth], static_cast<int>(depth))
                                      : static_cast<float>(sums[column]);
      if (op.element == Element::S8) {
        slot(column) = static_cast<std::uint32_t>(static_cast<std::int64_t>(sums[column]));
      } else {
        std::memcpy(&slot(column), &rounded, 4);
      }
    }
  }
}

void Processor::wgmma_commit(Place place) {
  warp_collective(
      "wgmma.commit_group", 0xffffffffu, this,
      [](void* const(&)[32], const void* processor) {
        Warp& own = static_cast<Processor*>(const_cast<void*>(processor))->warp();
        own.mma_groups.push_back(std::move(own.open_mmas));
        own.open_mmas.clear();
      },
      this, place);
  self_->wgmma_fenced = false;
}

void Processor::wgmma_wait(std::size_t pending_groups, Place place) {
  struct Context {
    Processor* processor;
    std::size_t pending;
  } context{this, pending_groups};
  warp_collective(
      "wgmma.wait_group", 0xffffffffu, this,
      [](void* const(&)[32], const void* uniform) {
        const auto& c = *static_cast<const Context*>(uniform);
        c.processor->finish_mmas(c.pending);
      },
      &context, place);
  // The tiles have been read, and every lane knows.
  const int agent = tensor_agent(self_->warp);
  self_->known.clock[agent] = std::max(self_->known.clock[agent], agent_clocks_[agent]);
}

void Processor::finish_mmas(std::size_t pending_groups) {
  Warp& own = warp();
  const int agent = tensor_agent(self_->warp);
  Knowledge reader;
  reader.reset(agents_);
  while (own.mma_groups.size() > pending_groups) {
    reader.clock[agent] = ++agent_clocks_[agent];
    for (WarpMma& mma : own.mma_groups.front()) {
      for (int lane = 0; mma.operation.a && lane < 32; ++lane) {
        if (std::memcmp(mma.a[lane], mma.a_registers[lane], sizeof(mma.a[lane]))) {
          fail(mma.place, "registers of A of lane %d were written while this wgmma was in flight", lane);
        }
      }
      if (job_.launch.late) run_mma(mma);
      for (const std::vector<std::size_t>* chunks : {&mma.a_chunks, &mma.b_chunks}) {
        for (const std::size_t offset : *chunks) {
          shadow_.end_leaving(offset, 16);
          shadow_.mark_read(offset, 16, agent, reader, 0);
        }
      }
      auto sums = own.accumulators.find(mma.d[0]);
      if (--sums->second.operations) continue;
      const auto registers = static_cast<std::size_t>(mma.operation.n) / 2;
      for (int lane = 0; lane < 32; ++lane) {
        auto* d = static_cast<std::uint32_t*>(mma.d[lane]);
        if (std::any_of(d, d + registers, [](std::uint32_t bits) { return bits != POISON; })) {
          fail(mma.place, "accumulators of lane %d were written while this wgmma was in flight", lane);
        }
        std::memcpy(d, &sums->second.values[static_cast<std::size_t>(lane) * registers], 4 * registers);
      }
      own.accumulators.erase(sums);
    }
    own.mma_groups.pop_front();
  }
}

}  // namespace microsdpa::emulator
