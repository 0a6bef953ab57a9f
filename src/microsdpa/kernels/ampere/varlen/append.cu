// What happens to a cache before attention: new keys and values are written behind those that it has.
//
// With rotary embeddings (RoPE), new keys are rotated on their way, and queries too, into memory of their own. A token
// of a sequence stands at the number of keys that the cache had, and the tokens before it. Key heads, then value heads,
// then query heads of a token are rows; a thread moves 16 bytes of one.
// Bound by: the launch, and one trip to memory.
#include "../../common/element.cuh"
#include "../../common/sequence.cuh"
#include "../../ptx/control.cuh"

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

template <typename T>
using Chunk = Vector<T, 8>;

__device__ __forceinline__ float angle(const float* from, int64 at) { return from[at]; }
template <typename T>
__device__ __forceinline__ float angle(const T* from, int64 at) {
  return to_float(from[at]);
}

// Rotates eight elements of a row, from `column` on, as the row's position says. Of ROTARY columns, pairs are
// neighbours, or as far apart as half of them.
template <typename T, int ROTARY, bool INTERLEAVED, typename ANGLE>
__device__ __forceinline__ Chunk<T> rotate(const T* row, int column, int position, const AppendParams& params) {
  Chunk<T> chunk = *reinterpret_cast<const Chunk<T>*>(row + column);
  if (column >= ROTARY) return chunk;
  constexpr int HALF = ROTARY / 2;
  position = min(position, params.positions - 1);
  const ANGLE* cos = static_cast<const ANGLE*>(params.rotary_cos) + position * params.cos_stride;
  const ANGLE* sin = static_cast<const ANGLE*>(params.rotary_sin) + position * params.sin_stride;
  Chunk<T> rotated;
  if constexpr (INTERLEAVED) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float c = angle(cos, (column + i) / 2), s = angle(sin, (column + i) / 2);
      const float x = to_float(chunk.data[i]), y = to_float(chunk.data[i + 1]);
      rotated.data[i] = from_float<T>(x * c - y * s);
      rotated.data[i + 1] = from_float<T>(x * s + y * c);
    }
  } else {
    const bool second = column >= HALF;
    const Chunk<T> other = *reinterpret_cast<const Chunk<T>*>(row + (second ? column - HALF : column + HALF));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = column % HALF + i;
      const float c = angle(cos, at), s = angle(sin, at), x = to_float(chunk.data[i]), y = to_float(other.data[i]);
      rotated.data[i] = from_float<T>(x * c + (second ? y : -y) * s);
    }
  }
  return rotated;
}

// ROTARY: columns that are rotated, a multiple of 16; 0 for none. ANGLE: the type of cosines and sines.
template <typename T, int HEAD_DIM, int ROTARY, bool INTERLEAVED, typename ANGLE, bool PAGED, bool PROGRAMMATIC>
__global__ void __launch_bounds__(128) append(const __grid_constant__ AppendParams params) {
  const VarlenParams& call = params.call;
  constexpr int CHUNKS = HEAD_DIM / 8;
  const int rows = (params.new_key != nullptr ? 2 * call.heads_kv : 0) + (ROTARY > 0 ? call.heads : 0);
  const int64 index = static_cast<int64>(blockIdx.x) * 128 + threadIdx.x;
  const int column = static_cast<int>(index % CHUNKS) * 8;
  const int64 row = index / CHUNKS;
  if (PROGRAMMATIC) {
    grid_dependency_wait();
    grid_dependency_launch();
  }
  if (row >= static_cast<int64>(params.queries) * rows) return;
  const int query = static_cast<int>(row / rows);
  int kind = static_cast<int>(row % rows);
  const bool packed = call.query_offsets != nullptr;
  const int b = packed ? sequence_of(call, query) : query / call.most_queries;
  if (b < 0 || b >= call.batch) return;
  const int number = packed ? query - max(call.query_offsets[b], 0) : query % call.most_queries;
  const int place = packed ? query : number;
  const int position = max(call.lengths[b], 0) + number;
  const auto row_of = [&](const void* base, const Strides& strides, int head) {
    return static_cast<const T*>(base) + (packed ? 0 : b * strides.batch) + head * strides.head + place * strides.row;
  };
  if (params.new_key != nullptr && kind < 2 * call.heads_kv) {
    const bool is_key = kind < call.heads_kv;
    const int head = is_key ? kind : kind - call.heads_kv;
    if (position >= call.most_keys) return;
    const Keys<PAGED ? ANY_PAGES : CONTIGUOUS> keys(call, Sequence(call, b), b, head);
    const auto at = keys.place(call, position);
    const int page = PAGED ? keys.table[at.number] : 0;
    if (PAGED && static_cast<uint32>(page) >= static_cast<uint32>(call.pages)) return;
    if (is_key) {
      const T* from = row_of(params.new_key, params.new_key_strides, head);
      T* to = static_cast<T*>(const_cast<void*>(call.key)) + keys.key + keys.offset(call.key_strides, page, at.within) +
              column;
      if constexpr (ROTARY > 0) {
        *reinterpret_cast<Chunk<T>*>(to) = rotate<T, ROTARY, INTERLEAVED, ANGLE>(from, column, position, params);
      } else {
        *reinterpret_cast<Chunk<T>*>(to) = *reinterpret_cast<const Chunk<T>*>(from + column);
      }
    } else {
      const T* from = row_of(params.new_value, params.new_value_strides, head);
      T* to = static_cast<T*>(const_cast<void*>(call.value)) + keys.value +
              keys.offset(call.value_strides, page, at.within) + column;
      *reinterpret_cast<Chunk<T>*>(to) = *reinterpret_cast<const Chunk<T>*>(from + column);
    }
    return;
  }
  if constexpr (ROTARY > 0) {
    if (params.new_key != nullptr) kind -= 2 * call.heads_kv;
    const T* from = row_of(call.query, call.query_strides, kind);
    T* to = static_cast<T*>(params.rotated) + (static_cast<int64>(query) * call.heads + kind) * HEAD_DIM + column;
    *reinterpret_cast<Chunk<T>*>(to) = rotate<T, ROTARY, INTERLEAVED, ANGLE>(from, column, position, params);
  }
}

}  // namespace microsdpa::ampere::varlen
