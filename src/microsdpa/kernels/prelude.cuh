// Fixed-width types that mean the same to NVRTC, which has no <cstdint>, and to the host compiler; the tensor map.
#pragma once

namespace microsdpa {

using int32 = int;
using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

static_assert(sizeof(int32) == 4 && sizeof(int64) == 8, "widths are part of the launcher's ABI");

// A CUtensorMap: the driver's description of a tensor for bulk copies. A kernel takes it as a __grid_constant__.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

}  // namespace microsdpa
