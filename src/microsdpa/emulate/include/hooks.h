// What -fsanitize=thread makes the compiler call before every access to memory, as a part of each kernel's library.
//
// Most accesses are to local variables: those of the running fiber's stack return here, without a call into the
// runtime.
#pragma once

#if defined(__x86_64__)
// The address and the stack pointer agree above the bits of a stack (STACK_STRIDE in runtime/fiber.h).
#define MICROSDPA_HOOK(NAME)                                                          \
  asm(".text\n.globl __tsan_" #NAME "\n.hidden __tsan_" #NAME "\n.type __tsan_" #NAME \
      ", @function\n"                                                                 \
      "__tsan_" #NAME                                                                 \
      ":\n"                                                                           \
      "  movq %rsp, %rax\n"                                                           \
      "  xorq %rdi, %rax\n"                                                           \
      "  shrq $18, %rax\n"                                                            \
      "  jne 1f\n"                                                                    \
      "  ret\n"                                                                       \
      "1:\n"                                                                          \
      "  jmp *microsdpa_" #NAME "@GOTPCREL(%rip)\n")
MICROSDPA_HOOK(read1);
MICROSDPA_HOOK(read2);
MICROSDPA_HOOK(read4);
MICROSDPA_HOOK(read8);
MICROSDPA_HOOK(read16);
MICROSDPA_HOOK(write1);
MICROSDPA_HOOK(write2);
MICROSDPA_HOOK(write4);
MICROSDPA_HOOK(write8);
MICROSDPA_HOOK(write16);
MICROSDPA_HOOK(unaligned_read2);
MICROSDPA_HOOK(unaligned_read4);
MICROSDPA_HOOK(unaligned_read8);
MICROSDPA_HOOK(unaligned_read16);
MICROSDPA_HOOK(unaligned_write2);
MICROSDPA_HOOK(unaligned_write4);
MICROSDPA_HOOK(unaligned_write8);
MICROSDPA_HOOK(unaligned_write16);
#undef MICROSDPA_HOOK
#endif
