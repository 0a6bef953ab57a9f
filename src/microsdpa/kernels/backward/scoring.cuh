// What decides about the scores of a call: for one product of a query and a key, and for a tile of them.
#pragma once

#include "../common/masks.cuh"
#include "params.cuh"

namespace microsdpa::backward {

// Stores a sum in the type of what it is the gradient of.
__device__ __forceinline__ void store_as(float* to, float x) { *to = x; }
__device__ __forceinline__ void store_as(__half* to, float x) { *to = from_float<__half>(x); }
__device__ __forceinline__ void store_as(__nv_bfloat16* to, float x) { *to = from_float<__nv_bfloat16>(x); }

// The masks that a kernel is compiled for.
template <typename MASK, bool LEFT_, bool RIGHT_, bool SOFTCAP_, bool ALIBI_>
struct Scoring {
  using Mask = MASK;
  static constexpr bool LEFT = LEFT_, RIGHT = RIGHT_, SOFTCAP = SOFTCAP_, ALIBI = ALIBI_;
  static constexpr bool READS = PRESENT<Mask>, RANGED = is_range<Mask>, HIDES = is_bool<Mask> || RANGED;
  static constexpr bool ADDS = READS && !HIDES;
  static constexpr bool WEIGHTED = ADDS;
};

// What a mask has for a query and a key: a number, or whether it shows the key; nothing where there is no mask.
template <typename MASK>
struct Element {
  MASK value;
};
template <>
struct Element<KeyRange> {
  bool value;
};
template <>
struct Element<void> {};

// The scores of one query head.
template <typename M>
struct HeadScores {
  const MaskedParams& params;
  const char* mask = nullptr;
  float alibi = 0.0f;  // slope, base 2

  __device__ __forceinline__ HeadScores(const MaskedParams& params, int64 batch, int64 head) : params(params) {
    const MaskParams& masks = params.masks;
    if constexpr (M::READS) {
      mask = static_cast<const char*>(masks.mask) +
             BYTES_OF<typename M::Mask> * (batch * masks.mask_strides.batch + head * masks.mask_strides.head);
    }
    if constexpr (M::ALIBI) {
      constexpr float LOG2_E = 1.44269504088896340736f;
      alibi = LOG2_E * masks.slopes[batch * masks.slope_batch_stride + head * masks.slope_head_stride];
    }
  }

  // The mask's element for a query and a key, or for the last ones.
  __device__ __forceinline__ Element<typename M::Mask> element(int query, int key) const {
    if constexpr (M::RANGED) {
      const int64 row = min(query, params.call.seqlen_q - 1);
      const int32* ends = reinterpret_cast<const int32*>(mask) + row * params.masks.mask_strides.row;
      return {key >= ends[0] && key < ends[params.masks.mask_column_stride]};
    } else if constexpr (M::READS) {
      const int64 row = min(query, params.call.seqlen_q - 1), column = min(key, params.call.seqlen_k - 1);
      const auto* elements = reinterpret_cast<const typename M::Mask*>(mask);
      return {elements[row * params.masks.mask_strides.row + column * params.masks.mask_column_stride]};
    } else {
      return {};
    }
  }

  // Whether bounds let a query see a key, both of which exist.
  __device__ __forceinline__ bool is_within(int query, int key) const {
    bool seen = query < params.call.seqlen_q && key < params.call.seqlen_k;
    if constexpr (M::RIGHT) seen = seen && key <= query + params.call.diagonal;
    if constexpr (M::LEFT) seen = seen && key >= query + params.masks.lowest;
    return seen;
  }

  // Whether bounds let none of some queries see any of some keys; both ends are among them.
  __device__ __forceinline__ bool sees_none(int first_query, int last_query, int first_key, int last_key) const {
    bool none = false;
    if constexpr (M::RIGHT) none = first_key > last_query + params.call.diagonal;
    if constexpr (M::LEFT) none = none || last_key < first_query + params.masks.lowest;
    return none;
  }

  // Whether they all exist and bounds let every query see every key.
  __device__ __forceinline__ bool sees_all(int first_query, int last_query, int first_key, int last_key) const {
    bool all = last_query < params.call.seqlen_q && last_key < params.call.seqlen_k;
    if constexpr (M::RIGHT) all = all && last_key <= first_query + params.call.diagonal;
    if constexpr (M::LEFT) all = all && first_key >= last_query + params.masks.lowest;
    return all;
  }

  // The logarithm, base 2, of a probability before the row's factor; `bend` becomes the derivative of the soft cap.
  __device__ __forceinline__ float exponent(float product, const Element<typename M::Mask>& element, int query, int key,
                                            float lse, float& bend) const {
    if constexpr (!M::SOFTCAP && !M::ALIBI && !M::ADDS) {
      return fmaf(product, params.call.scale_log2, -lse);
    } else {
      float x = product * params.call.scale_log2;
      if constexpr (M::SOFTCAP) {
        const float cap = params.masks.softcap_log2, bent = tanhf(x / cap);
        x = cap * bent;
        bend = 1.0f - bent * bent;
      }
      if constexpr (M::ALIBI) x -= alibi * fabsf(static_cast<float>(query + params.masks.position - key));
      if constexpr (M::ADDS) x = add_mask(x, element.value);
      return x - lse;
    }
  }
};

}  // namespace microsdpa::backward
