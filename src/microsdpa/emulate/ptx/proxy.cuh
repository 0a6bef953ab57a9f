// Order with bulk copies for the emulator; kernels/ptx/proxy.cuh says what each function does.
#pragma once

namespace microsdpa {

inline void fence_proxy_async_global() { emulator::fence_proxy_async_global(); }

}  // namespace microsdpa
