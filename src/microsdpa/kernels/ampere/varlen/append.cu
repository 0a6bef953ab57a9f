// What happens to a cache before attention: new keys and values are written behind those that it has.
//
// With norms or rotary embeddings (RoPE), new keys are changed on their way, and queries too, into memory of their own.
// A token of a sequence stands at the number of keys that the cache had, and the tokens before it. Key heads, then
// value heads, then query heads of a token are rows; a lane moves 16 bytes of one. For a cache of 8 bits keys, once
// they are rotated, and values are divided by their scale and rounded. Where every token has scales, the row's largest
// magnitude decides about its own. Bound by: the launch, and one trip to memory.
#include "../../common/element.cuh"
#include "../../common/sequence.cuh"
#include "../../ptx/control.cuh"
#include "cache.cuh"
#include "embedding.cuh"
#include "masks.cuh"

namespace microsdpa::ampere::varlen {

using namespace sequences;

// The sequence that a query of packed tensors belongs to; B or -1 where it belongs to none.
__device__ __forceinline__ int sequence_of(const VarlenParams& params, int query) {
  int first = 0, end = params.batch + 1;  // the first offset past the query is in between
  while (first < end) {
    const int middle = (first + end) / 2;
    if (params.query_offsets[middle] > query) {
      end = middle;
    } else {
      first = middle + 1;
    }
  }
  return first - 1;
}

// Where a row goes in a cache of 8 bits.
struct NarrowRow {
  unsigned char* values = nullptr;
  const float* scale = nullptr;
};

// Eight columns of a row of 8-bit values; LANES lanes have the row. All lanes of a warp take part.
template <typename CACHE, int LANES, typename T>
__device__ __forceinline__ void store_narrow(const NarrowRow& to, const Chunk<T>& chunk, int column) {
  using Encoder = typename CACHE::Format::Encoder;
  float scale = 1.0f;
  if constexpr (CACHE::EACH_TOKEN) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = larger_magnitude<Encoder>(largest, to_float(chunk.data[i]));
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) {
      largest = larger<Encoder>(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
    }
    scale = scale_of<Encoder>(largest);
  } else if (to.values != nullptr) {
    scale = *to.scale;
  }
  if (to.values == nullptr) return;
  Vector<unsigned char, 8> values;
#pragma unroll
  for (int i = 0; i < 8; ++i) values.data[i] = Encoder::encode(to_float(chunk.data[i]) / scale);
  *reinterpret_cast<Vector<unsigned char, 8>*>(to.values + column) = values;
  if (CACHE::EACH_TOKEN && column == 0) *const_cast<float*>(to.scale) = scale;
}

template <typename T, int HEAD_DIM, typename EMBEDDING, bool PAGED, bool PROGRAMMATIC, typename CACHE,
          int VALUE_DIM = HEAD_DIM>
__global__ void __launch_bounds__(128)
    append(const __grid_constant__ typename AppendGiven<EMBEDDING::NORM, CACHE>::Params params) {
  using OwnChunk = RowChunk<T, HEAD_DIM, HEAD_DIM, EMBEDDING>;
  const VarlenParams& call = params.call;
  const int new_rows = params.new_key != nullptr ? 2 * call.heads_kv : 0;
  const int rows = new_rows + (EMBEDDING::CHANGES ? call.heads : 0);
  const int64 row = (static_cast<int64>(blockIdx.x) * 128 + threadIdx.x) / OwnChunk::LANES;
  if (PROGRAMMATIC) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  // Where the row comes from and goes to; null where nothing is to be done.
  const T* from = nullptr;
  T* to = nullptr;
  [[maybe_unused]] NarrowRow narrow;
  bool is_value = false, is_query = false;
  int position = 0;
  const auto find = [&]() {
    // mutation: such a row is of no sequence
    if (row >= static_cast<int64>(params.queries) * rows || OwnChunk::column() >= HEAD_DIM) return;
    const int query = static_cast<int>(row / rows), kind = static_cast<int>(row % rows);
    const bool packed = call.query_offsets != nullptr;
    const int b = packed ? sequence_of(call, query) : query / call.most_queries;
    if (b < 0 || b >= call.batch) return;
    const int number = packed ? query - max(call.query_offsets[b], 0) : query % call.most_queries;
    const int place = packed ? query : number;
    position = min(max(call.lengths[b], 0), call.most_keys) + number;
    const auto row_of = [&](const void* base, const Strides& strides, int head) {
      return static_cast<const T*>(base) + (packed ? 0 : b * strides.batch) + head * strides.head + place * strides.row;
    };
    if (kind >= new_rows) {
      is_query = true;
      from = row_of(call.query, call.query_strides, kind - new_rows);
      to = static_cast<T*>(params.rotated) + (static_cast<int64>(query) * call.heads + kind - new_rows) * HEAD_DIM;
      return;
    }
    if (position >= call.most_keys) return;
    is_value = kind >= call.heads_kv;
    if (is_value && OwnChunk::column() >= VALUE_DIM) return;
    const int head = is_value ? kind - call.heads_kv : kind;
    const Keys<PAGED ? ANY_PAGES : CONTIGUOUS> keys(call, Sequence(call, b), b, head);
    const auto at = keys.place(call, position);
    const int page = PAGED ? keys.table[at.number] : 0;
    if (PAGED && static_cast<uint32>(page) >= static_cast<uint32>(call.pages)) return;
    if constexpr (PRESENT<CACHE>) {
      const Sequence sequence(call, b);
      const auto values_at = [&](const void* values, int64 offset) {
        return static_cast<unsigned char*>(const_cast<void*>(values)) + offset;
      };
      const auto scale_offset = [&](const Strides strides) {
        if (!CACHE::EACH_TOKEN) return b * strides.batch + head * strides.head;
        return keys.start(strides, call, sequence, b, head) + keys.offset(strides, page, at.within);
      };
      if (is_value) {
        from = row_of(params.new_value, params.new_value_strides, head);
        narrow.values = values_at(call.value, keys.value + keys.offset(call.value_strides, page, at.within));
        narrow.scale = params.value_scale + scale_offset(params.value_scale_strides);
      } else {
        from = row_of(params.new_key, params.new_key_strides, head);
        narrow.values = values_at(call.key, keys.key + keys.offset(call.key_strides, page, at.within));
        narrow.scale = params.key_scale + scale_offset(params.key_scale_strides);
      }
      return;
    }
    if (is_value) {
      from = row_of(params.new_value, params.new_value_strides, head);
      to = static_cast<T*>(const_cast<void*>(call.value)) + keys.value +
           keys.offset(call.value_strides, page, at.within);
    } else {
      from = row_of(params.new_key, params.new_key_strides, head);
      to = static_cast<T*>(const_cast<void*>(call.key)) + keys.key + keys.offset(call.key_strides, page, at.within);
    }
  };
  find();
  const OwnChunk chunk(from, position, params, NormOf<EMBEDDING>(params, !is_query));
  const Chunk<T> embedded = chunk.embedded();
  if constexpr (PRESENT<CACHE>) {
    const Chunk<T> own = is_value ? chunk.as_it_was() : embedded;
    store_narrow<CACHE, OwnChunk::LANES>(narrow, own, OwnChunk::column());
  }
  if (to != nullptr) *reinterpret_cast<Chunk<T>*>(to + OwnChunk::column()) = is_value ? chunk.as_it_was() : embedded;
}

}  // namespace microsdpa::ampere::varlen
