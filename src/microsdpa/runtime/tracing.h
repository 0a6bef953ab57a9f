// Whether torch.jit.trace records this thread's calls. torch's C interface does not say; the function behind
// torch.jit.is_tracing() does, by its mangled name, where the process has it.
#pragma once

#include <dlfcn.h>

namespace microsdpa {

inline bool torch_is_tracing() {
  // const std::shared_ptr<TracingState>& torch::jit::tracer::getTracingState(): its first word is null without a trace.
  using State = void* const& (*)();
  static const State state = [] {
    void* torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    return torch ? reinterpret_cast<State>(dlsym(torch, "_ZN5torch3jit6tracer15getTracingStateEv")) : nullptr;
  }();
  return state && state();
}

}  // namespace microsdpa
