// The launch of one call, for whoever has its arguments.
#pragma once

#include <cstdint>

#include "call.h"
#include "framework.h"

namespace microsdpa {

// Launches the plan of a call. Gives None when there is none, or else what LseArgument gives for `lse`. With `node`,
// it must be a plan that the node of this operator was allowed for.
ffi::Any attend(const Arguments& arguments, ffi::AnyView lse, Optional<double> scale, Optional<double> softcap,
                std::int64_t node = 0);

}  // namespace microsdpa
