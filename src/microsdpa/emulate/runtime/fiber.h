// Fibers: the threads of a block, switched by hand on one OS thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace microsdpa::emulator {

// Reserved for a stack and the page below it that may not be touched; pages are committed when touched. Stacks start on
// multiples of it: an address is on the running fiber's stack when it and the stack pointer agree above these bits.
constexpr std::size_t STACK_STRIDE = 256 * 1024;
constexpr std::size_t GUARD_BYTES = 4096;
constexpr std::size_t STACK_BYTES = STACK_STRIDE - GUARD_BYTES;

#if defined(__x86_64__)

// Saves the callee-saved registers and the stack pointer, and continues where `to` was saved. A few nanoseconds, where
// swapcontext() takes two system calls: a kernel makes tens of millions of switches.
extern "C" void microsdpa_switch(void** from, void* to);

class Context {
 public:
  void start(char* stack, std::size_t unused, void (*entry)()) {
    // `ret` pops the entry's address; a function expects the stack 8 bytes off a multiple of 16 on entry.
    auto** top = reinterpret_cast<void**>(stack + STACK_BYTES - unused - 72);
    top[0] = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    pointer_ = top;
  }
  static void switch_to(Context& from, Context& to) { microsdpa_switch(&from.pointer_, to.pointer_); }

 private:
  void* pointer_ = nullptr;
};

#else

class Context {
 public:
  void start(char* stack, std::size_t unused, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = STACK_BYTES - unused;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  static void switch_to(Context& from, Context& to) { swapcontext(&from.context_, &to.context_); }

 private:
  ucontext_t context_;
};

#endif

// One mapping with the stacks of all threads of a block, each above a page that may not be touched.
class Stacks {
 public:
  explicit Stacks(int count) : bytes_((count + 1) * STACK_STRIDE) {
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<char*>(mapped);
    first_ = mapped_ + (-reinterpret_cast<std::uintptr_t>(mapped) & (STACK_STRIDE - 1));
    for (int i = 0; i < count; ++i) mprotect(first_ + i * STACK_STRIDE, GUARD_BYTES, PROT_NONE);
  }
  ~Stacks() { munmap(mapped_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* at(int i) const { return first_ + i * STACK_STRIDE + GUARD_BYTES; }

  // Bytes at the top that a stack leaves free, so that the stacks of a block do not fall into the same lines of a
  // cache.
  static std::size_t unused(int i) { return static_cast<std::size_t>(i % 64) * 320; }

 private:
  std::size_t bytes_;
  char *mapped_, *first_;
};

}  // namespace microsdpa::emulator
