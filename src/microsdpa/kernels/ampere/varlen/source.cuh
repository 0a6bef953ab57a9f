// A tile of rows with the keys that it sees, and how tiles of K and V come from the cache, and from new keys, to a
// group's ring.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "embedding.cuh"
#include "masks.cuh"
#include "rows.cuh"
#include "scheduler.cuh"
#include "shared.cuh"

namespace microsdpa::ampere::varlen {

// A tile of rows, the keys that it sees, and how many of their tiles are its part.
template <typename C, typename MASKS, int PACK, Layout LAYOUT, int CLUSTER, bool APPENDS>
struct Segment {
  WorkTile work;
  Sequence sequence;
  Keys<LAYOUT> keys;
  int rows;       // of the tile
  int from, end;  // keys that are read: no row of the tile sees others
  int new_from;   // those from here on are new ones, and not in the cache yet
  int first_tile, count;
  int misplaced = 0;  // whether this thread met a page that the cache does not have

  __device__ __forceinline__ Segment(const VarlenParams& params, const WorkTile& work)
      : work(work), sequence(params, work.b), keys(params, sequence, work.b, work.head_kv) {
    const Visibility<MASKS, PACK> visibility(sequence);
    rows = min(C::BLOCK_M, sequence.queries * PACK - work.first_row);
    from = visibility.first(params, work.first_row);
    end = visibility.end(params, work.first_row + rows - 1);
    new_from = APPENDS && params.appends ? min(max(sequence.length, from), end) : end;
    first_tile = CLUSTER > 1 ? from / C::TILE + work.part : max(work.first_tile, from / C::TILE);
    const int end_tile = min(work.end_tile, (end + C::TILE - 1) / C::TILE);
    count = max(0, (end_tile - first_tile + CLUSTER - 1) / CLUSTER);
  }
  // The first key of a group's tile.
  __device__ __forceinline__ int first_key(int i, int group) const {
    return (first_tile + i * CLUSTER) * C::TILE + group * C::BLOCK_N;
  }
  // Whether a key is read from the cache, and whether it is read from the new ones.
  __device__ __forceinline__ bool is_cached(int key) const { return key >= from && key < new_from; }
  __device__ __forceinline__ bool is_new(int key) const { return APPENDS && key >= new_from && key < end; }
};

// Tiles of K and V on their way to a group's ring. A thread copies one chunk of every ROWS-th row of each part of
// Tile::PART columns. What a row has beside whole parts is copied in narrower ones: threads that share a row in the
// former share several of its rows there.
template <typename C, Layout LAYOUT>
struct Source {
  using Tile = typename C::KeyTile;
  using T = typename C::Cached;
  static constexpr int SHARING = Tile::PART / Tile::CHUNK;  // threads that share a row
  static constexpr int ROWS = C::GROUP_THREADS / SHARING, PASSES = C::BLOCK_N / ROWS;
  static_assert(C::BLOCK_N % ROWS == 0, "the threads copy whole rows");
  static constexpr bool APART = LAYOUT == ANY_PAGES;  // every row has a page of its own
  // Pages that a thread looks up for a tile, each for so many of its rows.
  static constexpr int SPANS = APART ? PASSES : LAYOUT == HALF_TILES ? 2 : 1, SPAN = PASSES / SPANS;
  static_assert(PASSES % SPANS == 0, "a thread has as many rows of each half");

  // Where each span of a tile lies, for ANY_PAGES the thread's row of it.
  struct Pages {
    int page[SPANS], within[SPANS];
  };

  __device__ __forceinline__ static unsigned row() { return threadIdx.x % C::GROUP_THREADS / SHARING; }

  // What the span of a pass has that is not known to the compiler.
  __device__ __forceinline__ static int of_pass(const int (&spans)[SPANS], int pass) {
    int found = spans[0];
#pragma unroll
    for (int i = 1; i < SPANS; ++i) {
      if (pass >= i * SPAN) found = spans[i];
    }
    return found;
  }

  // Looks up pages, also of keys that no row sees.
  template <typename Segment>
  __device__ __forceinline__ static void fetch(Pages& pages, const VarlenParams& params, const Segment& segment,
                                               int first_key) {
#pragma unroll
    for (int p = 0; p < SPANS; ++p) {
      const int key = APART ? first_key + p * ROWS + row() : first_key + p * SPAN * ROWS;
      const auto place = segment.keys.place(params, key);
      pages.within[p] = place.within;
      pages.page[p] = LAYOUT != CONTIGUOUS && key < params.most_keys ? segment.keys.table[place.number] : 0;
    }
  }

  // Starts copying a tile; rows that are not read become zeros, and those of new keys stay as they are.
  template <typename Segment>
  __device__ __forceinline__ static void copy_async(Stage<C>& stage, const Pages& pages, const VarlenParams& params,
                                                    Segment& segment, int first_key) {
    const unsigned column = threadIdx.x % SHARING * Tile::CHUNK * C::UNIT;
    const T* key_base = static_cast<const T*>(params.key);
    const T* value_base = static_cast<const T*>(params.value);
    const auto& keys = segment.keys;
    if constexpr (!APART) {
      bool exists = LAYOUT == CONTIGUOUS || static_cast<uint32>(pages.page[0]) < static_cast<uint32>(params.pages);
      if (SPANS > 1) exists &= static_cast<uint32>(pages.page[SPANS - 1]) < static_cast<uint32>(params.pages);
      if (exists && first_key >= segment.from && first_key + C::BLOCK_N <= segment.new_from) {
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
          const int within = pages.within[i] + row(), first = i * SPAN;
          const T* k = key_base + keys.key + keys.offset(params.key_strides, pages.page[i], within) + column;
          const T* v = value_base + keys.value + keys.offset(params.value_strides, pages.page[i], within) + column;
          const int64 key_step = ROWS * params.key_strides.row, value_step = ROWS * params.value_strides.row;
#pragma unroll
          for (int p = 0; p < SPAN; ++p, k += key_step)
            copy_row<C::HEAD_DIM>(stage.key, first + p, column, k, key_base, true);
#pragma unroll
          for (int p = 0; p < SPAN; ++p, v += value_step)
            copy_row<C::VALUE_DIM>(stage.value, first + p, column, v, value_base, true);
        }
        copy_rest(stage, key_base, value_base, [&](int p) {
          const int page = of_pass(pages.page, p), within = of_pass(pages.within, p) + p % SPAN * ROWS + row();
          return CachedRow{keys.key + keys.offset(params.key_strides, page, within),
                           keys.value + keys.offset(params.value_strides, page, within), true, true};
        });
        return;
      }
    }
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int key = first_key + p * ROWS + row(), at = SPANS > 1 ? p / SPAN : 0;
      const int within = pages.within[at] + (APART ? 0 : (SPANS > 1 ? p % SPAN : p) * ROWS + row());
      if (segment.is_new(key)) continue;
      bool valid = segment.is_cached(key);
      if (LAYOUT != CONTIGUOUS && static_cast<uint32>(pages.page[at]) >= static_cast<uint32>(params.pages)) {
        segment.misplaced |= valid;
        valid = false;
      }
      // An address that is not read still has to be one that exists.
      const int64 k = valid ? keys.key + keys.offset(params.key_strides, pages.page[at], within) : 0;
      const int64 v = valid ? keys.value + keys.offset(params.value_strides, pages.page[at], within) : 0;
      copy_row<C::HEAD_DIM>(stage.key, p, column, key_base + k + column, key_base, valid);
      copy_row<C::VALUE_DIM>(stage.value, p, column, value_base + v + column, value_base, valid);
    }
    copy_rest(stage, key_base, value_base, [&](int p) {
      const int key = first_key + p * ROWS + row(), page = of_pass(pages.page, p);
      const int within = of_pass(pages.within, p) + (APART ? 0 : p % SPAN * ROWS + row());
      if (segment.is_new(key)) return CachedRow{0, 0, false, false};
      const bool exists = LAYOUT == CONTIGUOUS || static_cast<uint32>(page) < static_cast<uint32>(params.pages);
      const bool cached = segment.is_cached(key), valid = cached && exists;
      segment.misplaced |= cached && !exists;
      return CachedRow{valid ? keys.key + keys.offset(params.key_strides, page, within) : 0,
                       valid ? keys.value + keys.offset(params.value_strides, page, within) : 0, valid, true};
    });
  }

  // The same where a tile has one address, in one way for whole tiles and others. That is less code and no branch,
  // which counts for CTAs of a cluster: they have few tiles.
  template <typename Segment>
  __device__ __forceinline__ static void copy_each_row_async(Stage<C>& stage, const Pages& pages,
                                                             const VarlenParams& params, Segment& segment,
                                                             int first_key) {
    static_assert(SPANS == 1 && !APART, "tiles of one address");
    const unsigned column = threadIdx.x % SHARING * Tile::CHUNK * C::UNIT;
    const T* key_base = static_cast<const T*>(params.key);
    const T* value_base = static_cast<const T*>(params.value);
    const auto& keys = segment.keys;
    const bool exists = LAYOUT == CONTIGUOUS || static_cast<uint32>(pages.page[0]) < static_cast<uint32>(params.pages);
    const int within = pages.within[0] + row();
    const int64 key_row = keys.key + keys.offset(params.key_strides, pages.page[0], within);
    const int64 value_row = keys.value + keys.offset(params.value_strides, pages.page[0], within);
    const T *k = key_base + key_row + column, *v = value_base + value_row + column;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int key = first_key + p * ROWS + row();
      const bool cached = segment.is_cached(key), valid = cached && exists;
      segment.misplaced |= cached && !exists;
      if (!segment.is_new(key)) {
        copy_row<C::HEAD_DIM>(stage.key, p, column, valid ? k : key_base, key_base, valid);
        copy_row<C::VALUE_DIM>(stage.value, p, column, valid ? v : value_base, value_base, valid);
      }
      k += ROWS * params.key_strides.row, v += ROWS * params.value_strides.row;
    }
    copy_rest(stage, key_base, value_base, [&](int p) {
      const int key = first_key + p * ROWS + row();
      const bool valid = segment.is_cached(key) && exists;
      return CachedRow{valid ? key_row + p * (ROWS * params.key_strides.row) : 0,
                       valid ? value_row + p * (ROWS * params.value_strides.row) : 0, valid, !segment.is_new(key)};
    });
  }

  // Stores the group's new keys and values of a tile, to the tile and to the cache, or to the cache alone.
  template <typename EMBEDDING, typename PARAMS, typename Segment>
  __device__ __forceinline__ static void store_new(Stage<C>* stage, const Pages& pages, const PARAMS& append,
                                                   Segment& segment, int first_key) {
    using KeyChunk = RowChunk<T, C::COLUMNS, C::HEAD_DIM, EMBEDDING>;
    const VarlenParams& params = append.call;
    const Sequence& sequence = segment.sequence;
    const int column = KeyChunk::column(), end = min(first_key + C::BLOCK_N, segment.end);
    for (int first = max(first_key, segment.new_from); first < end; first += C::GROUP_THREADS / KeyChunk::LANES) {
      const int key = first + static_cast<int>(threadIdx.x) % C::GROUP_THREADS / KeyChunk::LANES;
      const bool inside = key < end && column < C::HEAD_DIM;
      const auto row_of = [&](const void* base, const Strides& strides) {
        return static_cast<const T*>(base) + segment.work.b * strides.batch + segment.work.head_kv * strides.head +
               static_cast<int64>(sequence.first_query + key - sequence.length) * strides.row;
      };
      const KeyChunk key_chunk(inside ? row_of(append.new_key, append.new_key_strides) : nullptr, key, append,
                               NormOf<EMBEDDING>(append, true));
      Chunk<T> value_chunk{};
      const bool has_value = inside && column < C::VALUE_DIM;
      if (has_value) {
        const T* value = row_of(append.new_value, append.new_value_strides) + column;
        value_chunk = *reinterpret_cast<const Chunk<T>*>(value);
      }
      const auto place = segment.keys.place(params, key);
      // What was looked up is the page of a row that this thread copies, not of the one that it stores, unless they
      // share it.
      const bool looks_up = LAYOUT != CONTIGUOUS && (APART || SPANS > 1 || stage == nullptr);
      int page = looks_up ? 0 : pages.page[0];
      if (looks_up && inside) page = segment.keys.table[place.number];
      const bool exists = LAYOUT == CONTIGUOUS || static_cast<uint32>(page) < static_cast<uint32>(params.pages);
      segment.misplaced |= inside && !exists;
      const Chunk<T> embedded = key_chunk.embedded();
      if (key >= end || column >= C::COLUMNS) continue;
      if (stage != nullptr) {
        *reinterpret_cast<Chunk<T>*>(stage->key.at(key - first_key, column)) = embedded;
        *reinterpret_cast<Chunk<T>*>(stage->value.at(key - first_key, column)) = value_chunk;
      }
      if (inside && exists) {
        T* key_cache = static_cast<T*>(const_cast<void*>(params.key)) + segment.keys.key + column;
        const auto& keys = segment.keys;
        *reinterpret_cast<Chunk<T>*>(key_cache + keys.offset(params.key_strides, page, place.within)) = embedded;
        if (has_value) {
          T* value_cache = static_cast<T*>(const_cast<void*>(params.value)) + segment.keys.value + column;
          *reinterpret_cast<Chunk<T>*>(value_cache + keys.offset(params.value_strides, page, place.within)) =
              value_chunk;
        }
      }
    }
  }

 private:
  static constexpr int COLUMNS = C::COLUMNS / C::UNIT;  // of a tile
  static constexpr int WIDE = Tile::PANEL == Tile::GROUP ? COLUMNS : COLUMNS / Tile::PART * Tile::PART;

  // A row of K and V: where it begins, whether it is read, and whether its place in a tile is filled from the cache.
  struct CachedRow {
    int64 key, value;
    bool valid, is_copied;
  };

  // Copies the chunks of one pass in all whole parts.
  //   DIM: columns that the row has; those of the tile past them become zeros
  template <int DIM>
  __device__ __forceinline__ static void copy_row(Tile& tile, int pass, unsigned column, const T* from,
                                                  const T* anywhere, bool valid) {
#pragma unroll
    for (int c = 0; c < WIDE * C::UNIT; c += Tile::PART * C::UNIT) {
      const bool inside = C::COLUMNS == DIM || static_cast<int>(column) + c < DIM;
      cp_async<16>(tile.at(pass * ROWS + row(), (column + c) / C::UNIT), inside ? from + c : anywhere,
                   valid && inside ? 16 : 0);
    }
  }

  // Copies what rows have beside whole parts, from column FIRST of the tile on.
  //   row_of_pass(pass): the CachedRow of a pass
  template <int FIRST = WIDE, typename RowOfPass>
  __device__ __forceinline__ static void copy_rest(Stage<C>& stage, const T* key_base, const T* value_base,
                                                   const RowOfPass& row_of_pass) {
    if constexpr (FIRST < COLUMNS) {
      constexpr int WIDTH = COLUMNS - FIRST >= 32 ? 32 : 16, CHUNKS = WIDTH / Tile::CHUNK, AT_ONCE = SHARING / CHUNKS;
      const unsigned thread = opaque(threadIdx.x);  // its place is not worth a register all the time
      const unsigned column = (FIRST + thread % CHUNKS * Tile::CHUNK) * C::UNIT;
#pragma unroll
      for (int p = 0; p < PASSES; p += AT_ONCE) {
        const int pass = p + thread % SHARING / CHUNKS;
        if (PASSES % AT_ONCE != 0 && pass >= PASSES) continue;
        const CachedRow found = row_of_pass(pass);
        if (!found.is_copied) continue;
        const int at = pass * ROWS + row();
        const bool is_key = found.valid && static_cast<int>(column) < C::HEAD_DIM;
        const bool is_value = found.valid && static_cast<int>(column) < C::VALUE_DIM;
        cp_async<16>(stage.key.at(at, column / C::UNIT), is_key ? key_base + found.key + column : key_base,
                     is_key ? 16 : 0);
        cp_async<16>(stage.value.at(at, column / C::UNIT), is_value ? value_base + found.value + column : value_base,
                     is_value ? 16 : 0);
      }
      copy_rest<FIRST + WIDTH>(stage, key_base, value_base, row_of_pass);
    }
  }
};

}  // namespace microsdpa::ampere::varlen
