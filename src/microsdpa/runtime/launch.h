// The launch of one call, for whoever has its arguments.
#pragma once

#include <cstdint>

#include "call.h"
#include "framework.h"

namespace microsdpa {

// Nodes of autograd that have the gradient of a plan's call: see torch_nodes.h.
enum Node : std::int64_t { NO_NODE, CUDNN_NODE, FLASH_NODE, OWN_NODE };

// The node of torch's that records a call: gradients of this library are behind cuDNN's.
inline Node recorded_as(std::int64_t node) { return node == OWN_NODE ? CUDNN_NODE : static_cast<Node>(node); }

// Launches the plan of a call. Gives None when there is none, or else what LseArgument gives for `lse`. With `node`,
// which records the call, it must be a plan that this one was allowed for; whose gradient it has is left there. Under a
// mask the node has the bias that one gradient wants: the plan must be allowed for that gradient.
ffi::Any attend(const Arguments& arguments, ffi::AnyView lse, Optional<double> scale, Optional<double> softcap,
                Node* node = nullptr);

// Launches the plan of a call for gradients; false when there is none. `given` are addresses of what is in no key: LSE
// and gradients, 0 for those that there are not.
bool differentiate(const Arguments& arguments, const std::uintptr_t (&given)[OPERANDS], Optional<double> scale);

}  // namespace microsdpa
