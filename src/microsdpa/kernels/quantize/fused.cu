// Quantizes Q, K and V in one launch: quantized values, scales and, with SMOOTH, the mean that is taken off K.
//
// A CTA has 32 rows of HEAD_DIM / 8 threads; a thread has 8 channels of a row. Blocks of the grid, the longest first:
//   keys: one for each tile of rows, or with SMOOTH for each part of a head
//   values (where VALUE is a format): one for each part of a head   queries: one for each tile of a head's rows
// Q and K have a scale for each BLOCK rows, or for each row where BLOCK is 1; V has one for each channel. K's mean over
// its rows is taken off first; then Q and K are rotated, with HADAMARD, by a normalized Hadamard matrix. With TERMS 2 a
// row of Q's quantized values is followed by the residual terms. With HEAD_SCALE all keys of a head share a scale, from
// a bound on rotated rows that the pass for the mean finds: the sum of |x| over a row, over sqrt(D).
// With CLUSTER the CTAs of a head's PARTS parts are a cluster: each reads its own rows for the mean, or for the
// channels' scales, and has the others' sums, or maxima, from their shared memory. Without, up to a quarter of the rows
// is a part, and its CTA reads the whole head. Then a CTA encodes its own rows. Loads are ahead of what is done with
// them. Bound by: memory, and the latency of reading a head's part for the mean and the scales of channels.
#include "../common/formats.cuh"
#include "../common/softmax.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::quantize {

// Distances in bytes; rows are dense.
struct RowStrides {
  int64 batch;
  int64 head;
  int64 row;
};

struct QuantizeParams {
  const void* query;               // [B, H, S_q, D]
  const void* key;                 // [B, H_kv, S_k, D]
  const void* value;               // [B, H_kv, S_k, D]
  unsigned char* quantized_query;  // [B, H, S_q, TERMS * D], contiguous
  unsigned char* quantized_key;    // [B, H_kv, S_k, D], contiguous
  unsigned char* quantized_value;  // [B, H_kv, S_k, D], contiguous
  float* query_scale;              // [B, H, blocks of S_q]
  float* key_scale;                // [B, H_kv, blocks of S_k]
  float* value_scale;              // [B, H_kv, D]
  float* key_mean;                 // [B, H_kv, D]
  RowStrides query_strides;
  RowStrides key_strides;
  RowStrides value_strides;
  int32 batch;
  int32 heads;
  int32 heads_kv;
  int32 seqlen_q;
  int32 seqlen_k;
  int32 tile_rows;  // of Q, and of K whose mean is not taken: rows of a CTA, a multiple of ROWS_OF_CTA
  int32 part_rows;  // of K where its mean is taken, and of V, likewise
  int32 sum_rows;   // of K and V, that are one of PARTS in their sum and maximum: a multiple of GROUPS
  float root;       // 1 / sqrt(D)
};

constexpr int GROUPS = 32;    // rows that a CTA has in its hands at a time
constexpr int CHUNK = 8;      // channels of a thread
constexpr int PARTS = 8;      // of a head's rows, whose sums are added in their order
constexpr int AT_A_TIME = 1;  // rows of a thread on their way beside those that it encodes
constexpr int AHEAD = 4;      // the same, where rows are only looked at

template <int HEAD_DIM>
struct SharedStorage {
  float channels[GROUPS][HEAD_DIM + 4];
  float rows[GROUPS];
  float part[HEAD_DIM];  // the sums, or maxima, of the CTA's part of a head
};

// Largest sums of |x| over a chunk of a row, for a bound on K's rotated rows.
template <int HEAD_DIM>
struct Peaks {
  static constexpr bool KEPT = true;
  static constexpr int CHUNKS = HEAD_DIM / CHUNK;
  float of_rows[GROUPS][CHUNKS];
  float part[CHUNKS];  // of the CTA's part of a head, or of the parts so far
};
struct NoPeaks {
  static constexpr bool KEPT = false;
};

// Which row of 32 and which chunk of its channels per thread has.
template <int HEAD_DIM>
struct Place {
  static constexpr int CHUNKS = HEAD_DIM / CHUNK;
  static constexpr int THREADS = GROUPS * CHUNKS;
  int row = threadIdx.x / CHUNKS;
  int chunk = threadIdx.x % CHUNKS;
};

// One head of one tensor.
template <typename T>
struct Rows {
  const char* base;
  int64 stride;  // bytes
  int count;

  __device__ __forceinline__ Rows(const void* tensor, const RowStrides& strides, int index, int heads, int count)
      : base(static_cast<const char*>(tensor) + index / heads * strides.batch + index % heads * strides.head),
        stride(strides.row),
        count(count) {}

  // Eight channels of a row, those from 8 * `chunk` on; zeros where there is no such row.
  using Chunk = Vector<T, CHUNK>;
  __device__ __forceinline__ Chunk fetch(int row, int chunk) const {
    Chunk fetched{};
    if (row < count) fetched = *reinterpret_cast<const Chunk*>(base + row * stride + chunk * sizeof(Chunk));
    return fetched;
  }
  __device__ __forceinline__ static void widen(float (&x)[CHUNK], const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) x[i] = to_float(chunk.data[i]);
  }
  __device__ __forceinline__ void load(float (&x)[CHUNK], int row, int chunk) const { widen(x, fetch(row, chunk)); }

  // Calls body(x, row) for a thread's rows, which are GROUPS apart and lie in [first, last), in their order: N rows at
  // a time, and the next N are on their way.
  template <int N, typename Body>
  __device__ __forceinline__ void for_each(int first, int last, int chunk, Body body) const {
    Chunk next[N];
#pragma unroll
    for (int j = 0; j < N; ++j) next[j] = fetch(first + j * GROUPS, chunk);
    for (int row = first; row < last; row += N * GROUPS) {
      Chunk now[N];
#pragma unroll
      for (int j = 0; j < N; ++j) now[j] = next[j], next[j] = fetch(row + (N + j) * GROUPS, chunk);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float x[CHUNK];
        widen(x, now[j]);
        body(x, row + j * GROUPS);
      }
    }
  }
};

// Multiplies a row, which CHUNKS neighbouring lanes hold, with the Hadamard matrix of its size, and with `root`.
template <int CHUNKS>
__device__ __forceinline__ void rotate(float (&x)[CHUNK], int chunk, float root) {
#pragma unroll
  for (int step = 1; step < CHUNK; step *= 2) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i | step];
      x[i] = a + b;
      x[i | step] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < CHUNKS; step *= 2) {
    const float sign = chunk & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      const float other = __shfl_xor_sync(FULL_WARP, x[i], step);
      x[i] = fmaf(x[i], sign, other);
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) x[i] *= root;
}

using Bytes = Vector<unsigned char, CHUNK>;

// Sum of |x|, in the order of channels.
__device__ __forceinline__ float sum_of_magnitudes(const float (&x)[CHUNK]) {
  float sum = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < CHUNK; ++i) sum += fabsf(x[i]);
  return sum;
}

// Calls body(x, part) with what each CTA of the cluster left in `parts`, in their order, for the element of a thread.
// All threads of the cluster call it, and leave it when nobody reads `parts` any more.
template <int COUNT, typename Body>
__device__ __forceinline__ void for_each_part(float (&parts)[COUNT], Body body) {
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x < COUNT) {
#pragma unroll 1  // registers are few
    for (int part = 0; part < PARTS; ++part) body(load_peer(peer_address(&parts[threadIdx.x], part)), part);
  }
  cluster_arrive();
  cluster_wait();
}

// Sums of the rows [first, last) of a head, in shared.part: row r is added to the sum of r % 32, in order; then the
// sums are added in halves. Peaks, where they are kept, are those of these rows and of what peaks.part has already.
template <typename Format, int HEAD_DIM, typename Peaks, typename T>
__device__ __forceinline__ void sum_rows(SharedStorage<HEAD_DIM>& shared, Peaks& peaks, const Rows<T>& rows, int first,
                                         int last) {
  const Place<HEAD_DIM> place;
  float sum[CHUNK] = {};
  [[maybe_unused]] float peak = 0.0f;
  rows.template for_each<AHEAD>(first + place.row, last, place.chunk, [&](const float (&x)[CHUNK], int row) {
    if (row >= last) return;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) sum[i] += x[i];
    if constexpr (Peaks::KEPT) peak = larger_magnitude<Format>(peak, sum_of_magnitudes(x));
  });
  if constexpr (Peaks::KEPT) peaks.of_rows[place.row][place.chunk] = peak;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) shared.channels[place.row][place.chunk * CHUNK + i] = sum[i];
  for (int half = GROUPS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (place.row < half) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const int c = place.chunk * CHUNK + i;
        shared.channels[place.row][c] += shared.channels[place.row + half][c];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) shared.part[threadIdx.x] = shared.channels[0][threadIdx.x];
  if constexpr (Peaks::KEPT) {
    if (threadIdx.x < Peaks::CHUNKS) {
      for (int row = 0; row < GROUPS; ++row) {
        peaks.part[threadIdx.x] = fmaxf(peaks.part[threadIdx.x], peaks.of_rows[row][threadIdx.x]);
      }
    }
  }
  __syncthreads();
}

// Mean over all rows of a head, in shared.channels[0]: the sums of its PARTS parts are added in their order.
template <bool CLUSTER, typename Format, int HEAD_DIM, typename Peaks, typename T>
__device__ __forceinline__ void mean_of_rows(SharedStorage<HEAD_DIM>& shared, Peaks& peaks, const Rows<T>& rows,
                                             int rows_each) {
  float sum = 0.0f;
  const auto add = [&](float x, int part) { sum = part == 0 ? x : sum + x; };
  if constexpr (CLUSTER) {
    const int first = cluster_rank() * rows_each;
    sum_rows<Format>(shared, peaks, rows, first, min(first + rows_each, rows.count));
    for_each_part(shared.part, add);
  } else {
    for (int part = 0; part < PARTS; ++part) {
      sum_rows<Format>(shared, peaks, rows, part * rows_each, min((part + 1) * rows_each, rows.count));
      if (threadIdx.x < HEAD_DIM) add(shared.part[threadIdx.x], part);
    }
  }
  if (threadIdx.x < HEAD_DIM) shared.channels[0][threadIdx.x] = sum / static_cast<float>(rows.count);
  __syncthreads();
}

// The scale of all keys of a head, whose mean is in shared.channels[0]. No number of a row that a normalized Hadamard
// matrix rotates is larger than the sum of |x| over the row, over sqrt(D).
template <bool CLUSTER, typename Format, int HEAD_DIM>
__device__ __forceinline__ float scale_of_head(SharedStorage<HEAD_DIM>& shared, Peaks<HEAD_DIM>& peaks, float root) {
  constexpr int CHUNKS = Peaks<HEAD_DIM>::CHUNKS;
  float peak = 0.0f;
  if constexpr (CLUSTER) {
    for_each_part(peaks.part, [&](float x, int) { peak = fmaxf(peak, x); });
  } else if (threadIdx.x < CHUNKS) {
    peak = peaks.part[threadIdx.x];
  }
  if (threadIdx.x < CHUNKS) {
    float mean[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) mean[i] = shared.channels[0][threadIdx.x * CHUNK + i];
    peaks.of_rows[0][threadIdx.x] = peak + sum_of_magnitudes(mean);
  }
  __syncthreads();
  float sum = peaks.of_rows[0][0];
  for (int chunk = 1; chunk < CHUNKS; ++chunk) sum += peaks.of_rows[0][chunk];
  return scale_of<Format>(larger_magnitude<Format>(0.0f, sum * root));
}

// Quantizes rows [first, last) of a head. `given` is the scale of all of them where BLOCK is 0.
template <typename Format, int HEAD_DIM, int TERMS, int BLOCK, bool SMOOTH, bool HADAMARD, typename T>
__device__ __forceinline__ void quantize_rows(SharedStorage<HEAD_DIM>& shared, const Rows<T>& rows, int first, int last,
                                              unsigned char* quantized, float* scales, float root, float given = 0.0f) {
  const Place<HEAD_DIM> place;
  const auto change = [&](float (&x)[CHUNK], int row) {
    if (SMOOTH && row < rows.count) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) x[i] -= shared.channels[0][place.chunk * CHUNK + i];
    }
    if (HADAMARD) rotate<HEAD_DIM / CHUNK>(x, place.chunk, root);
  };
  const auto load = [&](float (&x)[CHUNK], int row) {
    rows.load(x, row, place.chunk);
    change(x, row);
  };
  const auto largest_of_row = [&](const float (&x)[CHUNK]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) largest = larger_magnitude<Format>(largest, x[i]);
#pragma unroll
    for (int step = 1; step < HEAD_DIM / CHUNK; step *= 2) {
      largest = larger<Format>(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    return largest;
  };
  const auto store = [&](const float (&x)[CHUNK], int row, float scale) {
    unsigned char* to = quantized + static_cast<int64>(row) * TERMS * HEAD_DIM + place.chunk * CHUNK;
    Bytes encoded[TERMS];
    float y[CHUNK], same_scale[CHUNK], inverse[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) same_scale[i] = scale, inverse[i] = 1.0f / scale;
    divide(y, x, same_scale, inverse);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      encoded[0].data[i] = Format::encode(y[i]);
      if constexpr (TERMS == 2) {
        encoded[1].data[i] = Format::encode((y[i] - Format::decode(encoded[0].data[i])) * Format::STEPS);
      }
    }
#pragma unroll
    for (int term = 0; term < TERMS; ++term) *reinterpret_cast<Bytes*>(to + term * HEAD_DIM) = encoded[term];
  };

  if constexpr (BLOCK <= 1) {
    // All lanes of a row go on together: they shuffle.
    const int rounds = (last - first + GROUPS - 1) / GROUPS;
    rows.template for_each<AT_A_TIME>(first + place.row, first + place.row + rounds * GROUPS, place.chunk,
                                      [&](float (&x)[CHUNK], int row) {
                                        change(x, row);
                                        float scale = given;
                                        if constexpr (BLOCK == 1) scale = scale_of<Format>(largest_of_row(x));
                                        if (row >= last) return;
                                        store(x, row, scale);
                                        if (BLOCK == 1 && place.chunk == 0) scales[row] = scale;
                                      });
  } else {
    for (int block = first; block < last; block += BLOCK) {
      const int end = min(block + BLOCK, last);
      float x[CHUNK], largest = 0.0f;
      for (int r = 0; r < end - block; r += GROUPS) {
        load(x, block + r + place.row);
        const float of_row = largest_of_row(x);
        if (block + r + place.row < end) largest = larger<Format>(largest, of_row);
      }
      __syncthreads();  // everyone has read the last block's maximum
      if (place.chunk == 0) shared.rows[place.row] = largest;
      __syncthreads();
      largest = shared.rows[threadIdx.x % 32];
      for (int offset = 16; offset > 0; offset /= 2) {
        largest = larger<Format>(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
      }
      const float scale = scale_of<Format>(largest);
      if (threadIdx.x == 0) scales[block / BLOCK] = scale;
      for (int r = 0; r < end - block; r += GROUPS) {
        load(x, block + r + place.row);
        if (block + r + place.row < end) store(x, block + r + place.row, scale);
      }
    }
  }
}

// Quantizes rows [first, last) of a head of V, with a scale for each channel of the head.
template <bool CLUSTER, typename Format, int HEAD_DIM, typename T>
__device__ __forceinline__ void quantize_channels(SharedStorage<HEAD_DIM>& shared, const Rows<T>& rows, int rows_each,
                                                  int first, int last, unsigned char* quantized, float* scales) {
  const Place<HEAD_DIM> place;
  float largest[CHUNK] = {};
  const int looked = CLUSTER ? cluster_rank() * rows_each : 0;
  const int end = CLUSTER ? min(looked + rows_each, rows.count) : rows.count;
  rows.template for_each<AHEAD>(looked + place.row, end, place.chunk, [&](const float (&x)[CHUNK], int row) {
    if (row >= end) return;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) largest[i] = larger_magnitude<Format>(largest[i], x[i]);
  });
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) shared.channels[place.row][place.chunk * CHUNK + i] = largest[i];
  __syncthreads();
  const int channel = threadIdx.x;  // of the first HEAD_DIM threads
  float m = 0.0f;
  if (channel < HEAD_DIM) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) m = larger<Format>(m, shared.channels[group][channel]);
  }
  if constexpr (CLUSTER) {
    if (channel < HEAD_DIM) shared.part[channel] = m;
    for_each_part(shared.part, [&](float x, int) { m = larger<Format>(m, x); });
  }
  __syncthreads();
  if (channel < HEAD_DIM) {
    const float scale = scale_of<Format>(m);
    shared.channels[0][channel] = scale;
    shared.channels[1][channel] = 1.0f / scale;
    if (first == 0) scales[channel] = scale;
  }
  __syncthreads();
  float scale[CHUNK], inverse[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    scale[i] = shared.channels[0][place.chunk * CHUNK + i];
    inverse[i] = shared.channels[1][place.chunk * CHUNK + i];
  }
  rows.template for_each<AT_A_TIME>(first + place.row, last, place.chunk, [&](const float (&x)[CHUNK], int row) {
    if (row >= last) return;
    float y[CHUNK];
    divide(y, x, scale, inverse);
    Bytes encoded;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) encoded.data[i] = Format::encode(y[i]);
    *reinterpret_cast<Bytes*>(quantized + static_cast<int64>(row) * HEAD_DIM + place.chunk * CHUNK) = encoded;
  });
}

// Of a head's rows, a CTA takes this many: whole blocks.
template <int BLOCK>
constexpr int ROWS_OF_CTA = BLOCK < 2 * GROUPS ? 2 * GROUPS : BLOCK;  // or a multiple: params.tile_rows

template <typename T, int HEAD_DIM, typename Format, typename Value, int TERMS, int BLOCK, bool SMOOTH, bool HADAMARD,
          bool CLUSTER, bool HEAD_SCALE = false>
__global__ void __launch_bounds__(GROUPS* HEAD_DIM / CHUNK, 256 / HEAD_DIM)
    quantize_query_key_value(const __grid_constant__ QuantizeParams params) {
  static_assert(ROWS_OF_CTA<BLOCK> % BLOCK == 0, "CTAs take whole blocks");
  static_assert(SMOOTH || !HEAD_SCALE, "the scale of a head comes with its mean");
  __shared__ SharedStorage<HEAD_DIM> shared;
  const int query_tiles = (params.seqlen_q + params.tile_rows - 1) / params.tile_rows;
  const int key_rows = SMOOTH ? params.part_rows : params.tile_rows;
  const int key_tiles = CLUSTER && SMOOTH ? PARTS : (params.seqlen_k + key_rows - 1) / key_rows;
  const int heads_kv = params.batch * params.heads_kv;
  int index = blockIdx.x;
  // With CLUSTER each of the three begins with a cluster, and CTAs that would be further ones of it have nothing to do.
  const auto blocks = [](int needed) { return CLUSTER ? (needed + PARTS - 1) / PARTS * PARTS : needed; };
  if constexpr (CLUSTER) {
    grid_dependency_launch();
    grid_dependency_wait();
  }

  if (index < blocks(heads_kv * key_tiles)) {
    if (index >= heads_kv * key_tiles) return;
    const int head = index / key_tiles, first = index % key_tiles * key_rows;
    const Rows<T> rows(params.key, params.key_strides, head, params.heads_kv, params.seqlen_k);
    float scale = 0.0f;  // of the head
    if constexpr (SMOOTH) {
      if constexpr (HEAD_SCALE) {
        static_assert(HADAMARD, "the bound is one on rotated rows");
        __shared__ Peaks<HEAD_DIM> peaks;
        if (threadIdx.x < Peaks<HEAD_DIM>::CHUNKS) peaks.part[threadIdx.x] = 0.0f;
        mean_of_rows<CLUSTER, Format>(shared, peaks, rows, params.sum_rows);
        scale = scale_of_head<CLUSTER, Format>(shared, peaks, params.root);
        if (first == 0 && threadIdx.x == 0) params.key_scale[head] = scale;
      } else {
        NoPeaks none;
        mean_of_rows<CLUSTER, Format>(shared, none, rows, params.sum_rows);
      }
      if (first == 0 && threadIdx.x < HEAD_DIM)
        params.key_mean[static_cast<int64>(head) * HEAD_DIM + threadIdx.x] = shared.channels[0][threadIdx.x];
    }
    quantize_rows<Format, HEAD_DIM, 1, HEAD_SCALE ? 0 : BLOCK, SMOOTH, HADAMARD>(
        shared, rows, first, min(first + key_rows, params.seqlen_k),
        params.quantized_key + static_cast<int64>(head) * params.seqlen_k * HEAD_DIM,
        params.key_scale + static_cast<int64>(head) * ((params.seqlen_k + BLOCK - 1) / BLOCK), params.root, scale);
    return;
  }
  index -= blocks(heads_kv * key_tiles);
  if constexpr (Value::LARGEST > 0.0f) {
    const int parts = CLUSTER ? PARTS : (params.seqlen_k + params.part_rows - 1) / params.part_rows;
    if (index < heads_kv * parts) {
      const int head = index / parts, first = index % parts * params.part_rows;
      const Rows<T> rows(params.value, params.value_strides, head, params.heads_kv, params.seqlen_k);
      quantize_channels<CLUSTER, Value, HEAD_DIM>(
          shared, rows, params.sum_rows, first, min(first + params.part_rows, params.seqlen_k),
          params.quantized_value + static_cast<int64>(head) * params.seqlen_k * HEAD_DIM,
          params.value_scale + static_cast<int64>(head) * HEAD_DIM);
      return;
    }
    index -= heads_kv * parts;
  }
  const int head = index / query_tiles, first = index % query_tiles * params.tile_rows;
  if (head >= params.batch * params.heads) return;
  const Rows<T> rows(params.query, params.query_strides, head, params.heads, params.seqlen_q);
  quantize_rows<Format, HEAD_DIM, TERMS, BLOCK, false, HADAMARD>(
      shared, rows, first, min(first + params.tile_rows, params.seqlen_q),
      params.quantized_query + static_cast<int64>(head) * params.seqlen_q * TERMS * HEAD_DIM,
      params.query_scale + static_cast<int64>(head) * ((params.seqlen_q + BLOCK - 1) / BLOCK), params.root);
}

}  // namespace microsdpa::quantize
