// Fixed-width types that mean the same to NVRTC, which has no <cstdint>, and to the host compiler.
#pragma once

namespace microsdpa {

using int32 = int;
using int64 = long long;
using uint32 = unsigned int;

static_assert(sizeof(int32) == 4 && sizeof(int64) == 8, "widths are part of the launcher's ABI");

}  // namespace microsdpa
