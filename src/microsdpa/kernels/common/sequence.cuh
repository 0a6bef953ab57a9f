// One sequence of a call, its keys in memory, and which of them a query sees.
#pragma once

#include "varlen_params.cuh"

namespace microsdpa::sequences {

// What the device says of a sequence, within the bounds that the host knows.
struct Sequence {
  int queries, keys;
  int length;                  // keys before this call
  int first_query, first_key;  // in packed tensors

  __device__ __forceinline__ Sequence(const VarlenParams& params, int b)
      : queries(params.most_queries), keys(params.most_keys), first_query(0), first_key(0) {
    if (params.query_offsets != nullptr) range(params.query_offsets, b, params.most_queries, first_query, queries);
    if (params.key_offsets != nullptr) range(params.key_offsets, b, params.most_keys, first_key, keys);
    length = keys;
    if (params.lengths != nullptr) {
      length = min(keys, max(params.lengths[b], 0));
      keys = min(keys, length + (params.appends ? min(queries, keys) : 0));
    }
  }

 private:
  __device__ __forceinline__ static void range(const int32* offsets, int b, int most, int& first, int& count) {
    first = min(max(offsets[b], 0), most);
    count = max(min(offsets[b + 1], most) - first, 0);
  }
};

// Rows of a tile of queries: row r of a sequence is query r / PACK of the PACK heads that share a key head.
//
// A query stands at the key that is as far from the last one as it is from the last query. Ends that are out of every
// key's reach leave sums in 32 bits.
template <typename MASKS, int PACK>
struct Visibility {
  int position;  // of query 0
  int keys;

  __device__ __forceinline__ explicit Visibility(const Sequence& sequence)
      : position(sequence.keys - sequence.queries), keys(sequence.keys) {}

  // The first key that row r sees, and one past the last.
  __device__ __forceinline__ int first(const VarlenParams& params, int r) const {
    return MASKS::LEFT ? max(0, r / PACK + position - params.left) : 0;
  }
  __device__ __forceinline__ int end(const VarlenParams& params, int r) const {
    return MASKS::RIGHT ? min(keys, r / PACK + position + params.right + 1) : keys;
  }
};

// How keys lie: one behind the other, in pages of whole tiles of BLOCK_N keys, in any pages, or in pages of halves of
// tiles.
enum Layout { CONTIGUOUS, WHOLE_TILES, ANY_PAGES, HALF_TILES };

// Where rows of K and V lie.
template <Layout LAYOUT>
struct Keys {
  static constexpr bool PAGED = LAYOUT != CONTIGUOUS;
  const int32* table;  // of the sequence
  int64 key, value;    // offsets of the sequence's first key, without pages; with them, of the head

  __device__ __forceinline__ Keys(const VarlenParams& params, const Sequence& sequence, int b, int head_kv)
      : table(PAGED ? params.page_table + b * params.table_stride : nullptr),
        key(start(params.key_strides, params, sequence, b, head_kv)),
        value(start(params.value_strides, params, sequence, b, head_kv)) {}

  // A key's page, as the table numbers it, and its place there. Without pages all keys are on one.
  struct Place {
    int number, within;
  };
  __device__ __forceinline__ static Place place(const VarlenParams& params, int index) {
    if constexpr (!PAGED) return {0, index};
    const int number = static_cast<int>(static_cast<uint64>(index) * params.page_factor >> params.page_shift);
    return {number, index - number * params.page_size};
  }

  // Offset of a key from the first one of the head.
  __device__ __forceinline__ static int64 offset(const Strides& strides, int page, int within) {
    const int64 row = static_cast<int64>(within) * strides.row;
    return PAGED ? page * strides.batch + row : row;
  }

  // Offset of the head's first key, without pages the sequence's.
  __device__ __forceinline__ static int64 start(const Strides& strides, const VarlenParams& params,
                                                const Sequence& sequence, int b, int head_kv) {
    const int64 head = head_kv * strides.head;
    if constexpr (PAGED) return head;
    return head + (params.key_offsets != nullptr ? sequence.first_key * strides.row : b * strides.batch);
  }
};

}  // namespace microsdpa::sequences
