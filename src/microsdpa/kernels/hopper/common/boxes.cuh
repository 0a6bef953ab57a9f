// The tensor maps of a tensor whose tiles may have a narrow last panel.
#pragma once

#include "../../ptx/tma.cuh"
#include "warpgroup.cuh"

namespace microsdpa::hopper {

// A tensor's boxes: of PANEL columns, and of TAIL where tiles have one.
struct Boxes {
  const TensorMap& panel;
  const TensorMap& tail;
};

template <int NUMBER, typename First, typename... Others>
__device__ __forceinline__ const TensorMap& further(const First& first, const Others&... others) {
  if constexpr (NUMBER == 0) {
    return first;
  } else {
    return further<NUMBER - 1>(others...);
  }
}

// Of a tensor whose maps are further ones, from the NUMBER-th on; those of `other` where it has none.
template <int HEAD_DIM, int NUMBER, bool EXISTS, typename... Maps>
__device__ __forceinline__ Boxes further_boxes_of(const TensorMap& other, const Maps&... maps) {
  if constexpr (!EXISTS) {
    return {other, other};
  } else if constexpr (TAIL<HEAD_DIM> > 0) {
    return {further<NUMBER>(maps...), further<NUMBER + 1>(maps...)};
  } else {
    return {further<NUMBER>(maps...), further<NUMBER>(maps...)};
  }
}

// Of the tensor whose tail, where tiles have one, is the NUMBER-th of further maps.
template <int HEAD_DIM, int NUMBER, typename... Maps>
__device__ __forceinline__ Boxes boxes_of(const TensorMap& panel, const Maps&... maps) {
  if constexpr (TAIL<HEAD_DIM> > 0) {
    return {panel, further<NUMBER>(maps...)};
  } else {
    return {panel, panel};
  }
}

}  // namespace microsdpa::hopper
