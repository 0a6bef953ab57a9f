#include "fiber.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl microsdpa_switch
.hidden microsdpa_switch
.type microsdpa_switch, @function
microsdpa_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size microsdpa_switch, .-microsdpa_switch
)");
#endif
