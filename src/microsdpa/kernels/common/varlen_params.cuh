// The parameter of kernels for sequences of many lengths: packed tensors and paged caches.
#pragma once

#include "params.cuh"

namespace microsdpa {

// Sequence b has queries `query_offsets[b]` to `query_offsets[b + 1]` of packed Q, or all of its row of dense Q. Its
// keys are those of its pages, of packed K or of its row of dense K, `lengths[b]` of them at most. Whatever the device
// says is brought into the bounds that the host knows.
struct VarlenParams {
  const void* query;           // [queries, H, D] packed, or [B, S_q, H, D]
  const void* key;             // [pages, page, H_kv, D], [keys, H_kv, D] packed, or [B, S_k, H_kv, D]
  const void* value;           // like key
  void* out;                   // like query
  float* lse;                  // [H, queries] packed, or [B, H, S_q]; null when not wanted
  void* workspace;             // partial outputs, two for each CTA
  uint32* arrivals;            // of parts that are combined, one for each CTA; zero between launches
  const int32* query_offsets;  // [B + 1]; null for dense Q
  const int32* key_offsets;    // [B + 1]; null unless K is packed
  const int32* lengths;        // [B]: keys of each sequence; null for all that there are
  const int32* page_table;     // [B, n]; null without pages
  const float* slopes;         // [B, H]: ALiBi's; null when there are none
  const void* sinks;           // [H]: a logit of each head; null when there are none
  Strides query_strides;
  Strides key_strides;  // `batch` is from page to page, or from sequence to sequence
  Strides value_strides;
  Strides out_strides;
  int64 lse_batch_stride;
  int64 lse_head_stride;
  int64 slope_batch_stride;
  int64 slope_head_stride;
  int64 sink_head_stride;
  int64 table_stride;  // from sequence to sequence
  uint64 page_factor;  // a key's page is key * page_factor >> page_shift
  int32 page_shift;
  int32 page_size;
  int32 pages;      // of the cache
  int32 most_keys;  // of a sequence, or of all packed ones
  int32 most_queries;
  int32 batch;
  int32 heads;
  int32 heads_kv;
  int32 left;     // a query at key p sees keys from p - left
  int32 right;    // to p + right
  int32 appends;  // whether a sequence's keys are `lengths`, and behind them one for each of its queries
  // Key heads of which a CTA takes a part of all keys, equal to that of others; 0 where each has a tile of queries.
  int32 part_heads;
  float scale_log2;    // softmax scale times log2(e)
  float softcap_log2;  // times log2(e)
};

// The same where all sequences have one length, of which the host has counted what CTAs compute: runtime/sequences.h.
struct OneLengthParams : VarlenParams {
  int32 units;      // tiles of rows, of all key heads and sequences
  int32 row_tiles;  // of a key head
  int32 key_tiles;  // tiles of keys that a tile of rows sees at most
  int32 parts;      // into which the keys of each tile of rows are divided
  int32 each;       // tiles of keys of a CTA, where all of them are numbered; else 0
};

// What the kernel gets that writes new keys and values to a cache, and changes queries and new keys, before attention.
struct AppendParams {
  VarlenParams call;       // its query is as the caller gave it
  const void* new_key;     // [queries, H_kv, D] packed, or [B, S_q, H_kv, D]; null where there are none
  const void* new_value;   // like new_key
  const void* rotary_cos;  // [positions, ROTARY / 2]
  const void* rotary_sin;  // [positions, ROTARY / 2]
  void* rotated;           // [queries, H, D]: queries with their norm and rotary embedding
  Strides new_key_strides;
  Strides new_value_strides;
  int64 cos_stride;  // from position to position
  int64 sin_stride;
  int32 positions;
  int32 queries;  // of all sequences
};

// What a kernel gets whose cache has 8 bits an element. A value times its scale is the number that it stands for.
struct CacheParams : AppendParams {
  const float* key_scale;
  const float* value_scale;
  Strides key_scale_strides;  // like those of keys, where each token has a scale; else of batch entries and heads
  Strides value_scale_strides;
};

// What a kernel gets that makes norms of queries and new keys. Without an 8-bit cache it has no scales.
struct NormedParams : CacheParams {
  const void* query_norm;  // [D]: weights of the RMS norm of queries; null for none
  const void* key_norm;    // [D]: of new keys
  float norm_eps;
};

}  // namespace microsdpa
