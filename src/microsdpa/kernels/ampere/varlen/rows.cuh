// Rows of a CTA's queries, and of new keys and values, on their way to shared memory.
#pragma once

#include "../../common/sequence.cuh"
#include "../../ptx/prefetch.cuh"
#include "cache.cuh"
#include "embedding.cuh"
#include "scheduler.cuh"
#include "shared.cuh"

namespace microsdpa::ampere::varlen {

using namespace sequences;

// Rows of a tile of queries in Q, O and LSE.
template <int PACK>
struct Rows {
  int64 b;
  int head;         // the first of the PACK
  int first_query;  // of the sequence, in packed tensors
  int first_row;    // of the tile, in the sequence

  __device__ __forceinline__ Rows(const WorkTile& work, const Sequence& sequence, int pack)
      : b(work.b), head(work.head_kv * pack), first_query(sequence.first_query), first_row(work.first_row) {}

  template <typename Pointer>
  __device__ __forceinline__ Pointer at(Pointer base, const Strides& strides, int r) const {
    r += first_row;
    return base + b * strides.batch + (head + r % PACK) * strides.head + (first_query + r / PACK) * strides.row;
  }
  __device__ __forceinline__ float* lse(const VarlenParams& params, int r) const {
    return at(params.lse, Strides{params.lse_batch_stride, params.lse_head_stride, 1}, r);
  }
};

// A tile of queries that are rotated, or become FP16, comes through registers, ROWS of its rows at a time.
template <typename C, int PACK, typename EMBEDDING>
struct RotatedRows {
  using T = typename C::T;
  using OwnChunk = RowChunk<T, C::COLUMNS, C::HEAD_DIM, EMBEDDING>;
  static constexpr int ROWS = C::THREADS / OwnChunk::LANES;

  __device__ __forceinline__ static int row(int first) {
    return first + static_cast<int>(threadIdx.x) / OwnChunk::LANES;
  }
  // Starts loading the rows from `first` on.
  template <typename PARAMS, typename Segment>
  __device__ __forceinline__ static OwnChunk load(const PARAMS& append, const Segment& segment, int first) {
    const Rows<PACK> place(segment.work, segment.sequence, PACK);
    const T* query = static_cast<const T*>(append.call.query);
    const bool valid = row(first) < segment.rows && OwnChunk::column() < C::HEAD_DIM;
    return OwnChunk(valid ? place.at(query, append.call.query_strides, row(first)) : nullptr,
                    segment.sequence.length + (segment.work.first_row + row(first)) / PACK, append,
                    NormOf<EMBEDDING>(append, false));
  }
  // `scales` are those of the tile's rows, where the cache is of 8 bits.
  __device__ __forceinline__ static void store(typename C::QueryTile& tile, float* scales, int first,
                                               const OwnChunk& chunk) {
    const Chunk<T> embedded = chunk.embedded();
    if constexpr (C::NARROW) {
      store_narrow(tile, scales, first, embedded);
      return;
    }
    if (row(first) < C::BLOCK_M && OwnChunk::column() < C::COLUMNS) {
      *reinterpret_cast<Chunk<T>*>(tile.at(row(first), OwnChunk::column())) = embedded;
    }
  }
  template <typename PARAMS, typename Segment>
  __device__ __forceinline__ static void copy(typename C::QueryTile& tile, float* scales, const PARAMS& append,
                                              const Segment& segment, int first) {
    for (; first < C::BLOCK_M; first += ROWS) store(tile, scales, first, load(append, segment, first));
  }

 private:
  __device__ __forceinline__ static void store_narrow(typename C::QueryTile& tile, float* scales, int first,
                                                      const Chunk<T>& chunk) {
    Chunk<__half> halves;
    const float scale = narrow_row<OwnChunk::LANES>(halves, chunk);
    if (row(first) >= C::BLOCK_M || OwnChunk::column() >= C::COLUMNS) return;
    if (OwnChunk::column() == 0) scales[row(first)] = scale;
    const auto& pairs = reinterpret_cast<const Vector<uint32, 4>&>(halves);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Vector<uint32, 2> two = {{pairs.data[i], pairs.data[i + 2]}};
      const int column = place_of_pair(OwnChunk::column() + 2 * i);
      *reinterpret_cast<Vector<uint32, 2>*>(tile.at(row(first), column)) = two;
    }
  }
};

// Rows that a CTA of a cluster changes on their way to shared memory: its queries, and the new keys and values of its
// tiles. They are numbered: the queries, then a key and its value for each new token. A thread has a chunk of one of
// AT_ONCE rows.
template <typename C, int PACK, typename EMBEDDING, Layout LAYOUT, int CLUSTER>
class ClusterRows {
 public:
  using T = typename C::T;
  using OwnChunk = RowChunk<T, C::COLUMNS, C::HEAD_DIM, EMBEDDING>;
  static constexpr int AT_ONCE = C::THREADS / OwnChunk::LANES;

  // Asks for lines that do not depend on what the device says, so that later loads of them are short. It reads nothing,
  // and so may come before the grid ahead has ended.
  template <typename PARAMS>
  __device__ __forceinline__ static void prefetch(const PARAMS& append) {
    const VarlenParams& params = append.call;
    const int b = static_cast<int>(blockIdx.z), head_kv = static_cast<int>(blockIdx.y);
    if (b >= params.batch) return;  // further tiles of rows
    const int token = static_cast<int>(threadIdx.x) / 32;
    if (token == 0 && params.lengths != nullptr) prefetch<1>(params.lengths + b);
    if (params.appends && token < params.most_queries) {
      const auto row_of = [&](const void* base, const Strides& strides) {
        return static_cast<const T*>(base) + b * strides.batch + head_kv * strides.head + token * strides.row;
      };
      prefetch<C::HEAD_DIM>(row_of(append.new_key, append.new_key_strides));
      prefetch<C::VALUE_DIM>(row_of(append.new_value, append.new_value_strides));
    }
    if (token > 0) return;
    if constexpr (EMBEDDING::NORM) {
      const NormOf<EMBEDDING> of_queries(append, false), of_keys(append, true);
      if (of_queries.weights != nullptr) prefetch<C::HEAD_DIM>(of_queries.weights);
      if (of_keys.weights != nullptr) prefetch<C::HEAD_DIM>(of_keys.weights);
    }
  }

  template <typename Segment>
  __device__ __forceinline__ static int count(const VarlenParams& params, const Segment& segment) {
    return segment.rows + (params.appends ? 2 * segment.sequence.queries : 0);
  }

  // Starts loading the rows from `first` on.
  template <typename PARAMS, typename Segment>
  __device__ __forceinline__ ClusterRows(const PARAMS& append, const Segment& segment, int first) {
    const VarlenParams& params = append.call;
    const int number = first + static_cast<int>(threadIdx.x) / OwnChunk::LANES;
    // mutation: behind the last row would be a key that is not new
    if (number >= count(params, segment)) return;
    const int behind = number - segment.rows;
    const bool is_query = behind < 0;
    is_value_ = !is_query && behind % 2 == 1;
    token_ = is_query ? (segment.work.first_row + number) / PACK : behind / 2;
    key_ = segment.sequence.length + token_;
    if (is_query) {
      row_ = number;
    } else {
      const int tiles = key_ / C::TILE - segment.first_tile;
      if (!segment.is_new(key_) || tiles < 0 || tiles % CLUSTER != 0) return;
      tile_ = tiles / CLUSTER;
    }
    exists_ = OwnChunk::column() < (is_value_ ? C::VALUE_DIM : C::HEAD_DIM);
    if (!exists_) return;
    if (!is_value_) chunk_.turn_to(key_, append);
    chunk_.begin(source(append, segment), NormOf<EMBEDDING>(append, !is_query));
    if (LAYOUT != CONTIGUOUS && !is_query) page_ = segment.keys.table[segment.keys.place(params, key_).number];
  }

  // Stores the rows: queries to their tile, new keys and values to the ring's first stages and to the cache.
  template <typename Streaming, typename Segment>
  __device__ __forceinline__ void store(Streaming& streaming, const VarlenParams& params, Segment& segment) const {
    const Chunk<T> embedded = chunk_.embedded(), own = is_value_ ? chunk_.as_it_was() : embedded;
    const int column = OwnChunk::column();
    if (column >= C::COLUMNS) return;
    if (row_ >= 0) *reinterpret_cast<Chunk<T>*>(streaming.query[0].at(row_, column)) = own;
    if (tile_ < 0) return;
    if (tile_ < C::STAGES - 1) {
      const unsigned key = static_cast<unsigned>(key_) % C::TILE;
      Stage<C>& stage = streaming.ring[key / C::BLOCK_N][tile_];
      auto& rows = is_value_ ? stage.value : stage.key;
      *reinterpret_cast<Chunk<T>*>(rows.at(key % C::BLOCK_N, column)) = own;
    }
    if (!exists_) return;
    if (LAYOUT != CONTIGUOUS && static_cast<uint32>(page_) >= static_cast<uint32>(params.pages)) {
      segment.misplaced = 1;
      return;
    }
    const auto& keys = segment.keys;
    const int within = keys.place(params, key_).within;
    const int64 offset = is_value_ ? keys.value + keys.offset(params.value_strides, page_, within)
                                   : keys.key + keys.offset(params.key_strides, page_, within);
    T* cache = static_cast<T*>(const_cast<void*>(is_value_ ? params.value : params.key));
    *reinterpret_cast<Chunk<T>*>(cache + offset + column) = own;
  }

 private:
  template <int COUNT, typename Number>
  __device__ __forceinline__ static void prefetch(const Number* row) {
    const int first = static_cast<int>(threadIdx.x) % 32 * (128 / sizeof(Number));  // of this lane's line
    if (first < COUNT) prefetch_line(row + first);
  }
  // The row's first element in its tensor.
  template <typename PARAMS, typename Segment>
  __device__ __forceinline__ const T* source(const PARAMS& append, const Segment& segment) const {
    if (row_ >= 0) {
      const Rows<PACK> place(segment.work, segment.sequence, PACK);
      return place.at(static_cast<const T*>(append.call.query), append.call.query_strides, row_);
    }
    const auto row_of = [&](const void* base, const Strides& strides) {
      return static_cast<const T*>(base) + segment.work.b * strides.batch + segment.work.head_kv * strides.head +
             static_cast<int64>(segment.sequence.first_query + token_) * strides.row;
    };
    return is_value_ ? row_of(append.new_value, append.new_value_strides)
                     : row_of(append.new_key, append.new_key_strides);
  }

  OwnChunk chunk_;
  int row_ = -1;                        // of the tile of queries; -1 for none
  int tile_ = -1;                       // of the CTA's tiles, the one that the new key or value lies in; -1 for none
  int token_ = 0, key_ = 0, page_ = 0;  // the row's token, where it stands, and where the cache has that
  bool is_value_ = false, exists_ = false;  // whether this thread's columns exist
};

}  // namespace microsdpa::ampere::varlen
