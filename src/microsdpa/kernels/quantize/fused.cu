// Quantizes Q, K and V in one launch: quantized values, scales and, with SMOOTH, the mean that is taken off K.
//
// Blocks of the grid, the longest first:
//   keys: one for each tile of rows, or with SMOOTH for each part of a head
//   values (where VALUE is a format): one for each part of a head   queries: one for each tile of a head's rows
// Q and K have a scale for each BLOCK rows, or for each row where BLOCK is 1; V has one for each channel. K's mean over
// its rows is taken off first; then Q and K are rotated, with HADAMARD, by a normalized Hadamard matrix. With TERMS 2 a
// row of Q's quantized values is followed by the residual terms. With HEAD_SCALE all keys of a head share a scale, from
// a bound on rotated rows that the pass for the mean finds: the sum of |x| over a row, over sqrt(D).
// With CLUSTER the CTAs of a head's PARTS parts are a cluster: each reads its own rows for the mean, or for the
// channels' scales, and has the others' sums, or maxima, from their shared memory. Without, up to a quarter of the rows
// is a part, and its CTA reads the whole head. Then a CTA encodes its own rows. Other warps hide a warp's loads. Few
// threads share a row, each with chunks of 8 channels all over it: most steps of a rotation stay in a thread.
// Rows of usual numbers take a short way, rows with NaN, infinities or tiny scales a long one with the same bits.
// Bound by: what passes L2, where K and V are read twice, and instructions.
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

constexpr int GROUPS = 32;  // sums of rows, by their number modulo 32
constexpr int CHUNK = 8;    // channels that are loaded at once
constexpr int PARTS = 8;    // of a head's rows, whose sums are added in their order
constexpr int AHEAD = 4;    // chunks of a thread that are loaded together where rows are only looked at, or a row's

// CHUNKS chunks of a row for each thread, LANES chunks apart: which row of ROWS, and which of them.
template <int HEAD_DIM, int CHUNKS_>
struct Share {
  static constexpr int CHUNKS = CHUNKS_;
  static constexpr int NUMBERS = CHUNKS * CHUNK;
  static constexpr int LANES = HEAD_DIM / NUMBERS;
  int row = threadIdx.x / LANES;
  int lane = threadIdx.x % LANES;
  // Chunk of the row, and first channel, of a thread's chunk j.
  __device__ __forceinline__ int chunk(int j) const { return j * LANES + lane; }
  __device__ __forceinline__ int channel(int j) const { return chunk(j) * CHUNK; }
};
// Where rows are added up: GROUPS of them at a time.
template <int HEAD_DIM>
using SumShare = Share<HEAD_DIM, (HEAD_DIM > 64 ? HEAD_DIM / 64 : 1)>;
template <int HEAD_DIM>
constexpr int THREADS = GROUPS * SumShare<HEAD_DIM>::LANES;
// Where rows of Q and K are encoded, and those of V.
template <int HEAD_DIM>
using RowShare = Share<HEAD_DIM, (HEAD_DIM > 64 ? 4 : 2)>;
template <int HEAD_DIM>
using ValueShare = Share<HEAD_DIM, 2>;
template <int HEAD_DIM, typename Share>
constexpr int ROWS = THREADS<HEAD_DIM> / Share::LANES;

template <int HEAD_DIM>
struct SharedStorage {
  static constexpr int GROUPS_OF_VALUE = ROWS<HEAD_DIM, ValueShare<HEAD_DIM>>;
  float channels[GROUPS_OF_VALUE > GROUPS ? GROUPS_OF_VALUE : GROUPS][HEAD_DIM + 4];
  float rows[ROWS<HEAD_DIM, RowShare<HEAD_DIM>>];
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

  // Eight channels of a row.
  __device__ __forceinline__ uint4 fetch(int row, int channel) const {
    return *reinterpret_cast<const uint4*>(base + row * stride + channel * sizeof(T));
  }
  // Number i of a thread's chunks, as FP32.
  template <int CHUNKS>
  __device__ __forceinline__ static float number(const uint4 (&chunks)[CHUNKS], int i) {
    return to_float(reinterpret_cast<const Vector<T, CHUNK>*>(&chunks[i / CHUNK])->data[i % CHUNK]);
  }

  // Calls body(x, row) for a thread's rows, which are STEP apart and lie in [first, last), in their order: N rows are
  // loaded together. Rows from `end` on, which is at most `last`, are that before it again.
  template <int N, int STEP, typename Share, typename Body>
  __device__ __forceinline__ void for_each(const Share& share, int first, int last, int end, Body body) const {
    for (int row = first; row < last; row += N * STEP) {
      uint4 chunks[N][Share::CHUNKS];
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int j = 0; j < Share::CHUNKS; ++j) {
          chunks[n][j] = fetch(min(row + n * STEP, end - 1), share.channel(j));
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float x[Share::NUMBERS];
#pragma unroll
        for (int i = 0; i < Share::NUMBERS; ++i) x[i] = number(chunks[n], i);
        body(x, row + n * STEP);
      }
    }
  }
};

// One step of the rotation on two numbers.
__device__ __forceinline__ void butterfly(float& low, float& high) {
  const float a = low, b = high;
  low = a + b;
  high = a - b;
}

// Multiplies a row with the Hadamard matrix of its size, and with `root`. Gives the largest magnitude among a thread's
// numbers, or infinity or NaN where one of them is.
template <typename Share>
__device__ __forceinline__ float rotate(float (&x)[Share::NUMBERS], const Share& share, float root) {
#pragma unroll
  for (int step = 1; step < CHUNK; step *= 2) {
#pragma unroll
    for (int i = 0; i < Share::NUMBERS; ++i) {
      if (!(i & step)) butterfly(x[i], x[i | step]);
    }
  }
#pragma unroll
  for (int step = 1; step < Share::LANES; step *= 2) {
    const float sign = share.lane & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < Share::NUMBERS; ++i) {
      const float other = __shfl_xor_sync(FULL_WARP, x[i], step);
      x[i] = fmaf(x[i], sign, other);
    }
  }
  int32 largest = 0;  // as bits, of which those of NaN are the largest
#pragma unroll
  for (int step = CHUNK; step < Share::NUMBERS; step *= 2) {
#pragma unroll
    for (int i = 0; i < Share::NUMBERS; ++i) {
      if (i & step) continue;
      // Of a sum and a difference the larger magnitude is the sum of the magnitudes, rounded alike.
      if (2 * step == Share::NUMBERS) {
        largest = max(largest, __float_as_int(fabsf(x[i]) + fabsf(x[i | step])));
      }
      butterfly(x[i], x[i | step]);
    }
  }
#pragma unroll
  for (int i = 0; i < Share::NUMBERS; ++i) x[i] *= root;
  return __int_as_float(largest) * root;
}

// The same magnitude of numbers that are not rotated.
template <int N>
__device__ __forceinline__ float largest_of(const float (&x)[N]) {
  int32 largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = max(largest, __float_as_int(fabsf(x[i])));
  return __int_as_float(largest);
}

// The larger one of two such magnitudes.
__device__ __forceinline__ float larger_of(float a, float b) {
  return __int_as_float(max(__float_as_int(a), __float_as_int(b)));
}

// Sum of |x| over a thread's chunk j, in the order of channels.
template <int N>
__device__ __forceinline__ float sum_of_magnitudes(const float (&x)[N], int j) {
  float sum = fabsf(x[j * CHUNK]);
#pragma unroll
  for (int i = 1; i < CHUNK; ++i) sum += fabsf(x[j * CHUNK + i]);
  return sum;
}

// A thread's quantized values of a row, four in a word.
template <int TERMS, int NUMBERS>
struct Encoded {
  uint32 words[TERMS][NUMBERS / 4];
};

// Of numbers without NaN that their scale makes no larger than the format's largest.
template <typename Format, int TERMS, int N>
__device__ __forceinline__ Encoded<TERMS, N> encode_usual(const float (&y)[N]) {
  Encoded<TERMS, N> encoded;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float four[4] = {y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]};
    encoded.words[0][i] = Format::encode4(four);
    if constexpr (TERMS == 2) encoded.words[1][i] = Format::residual4(four, encoded.words[0][i]);
  }
  return encoded;
}

// Of any numbers.
template <typename Format, int TERMS, int N>
__device__ __forceinline__ Encoded<TERMS, N> encode_any(const float (&y)[N]) {
  Encoded<TERMS, N> encoded{};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned char first = Format::encode(y[i]);
    encoded.words[0][i / 4] |= static_cast<uint32>(first) << i % 4 * 8;
    if constexpr (TERMS == 2) {
      const unsigned char second = Format::encode((y[i] - Format::decode(first)) * Format::STEPS);
      encoded.words[1][i / 4] |= static_cast<uint32>(second) << i % 4 * 8;
    }
  }
  return encoded;
}

// `row` is where the first of TERMS * HEAD_DIM bytes goes.
template <int HEAD_DIM, int TERMS, typename Share>
__device__ __forceinline__ void store(const Encoded<TERMS, Share::NUMBERS>& encoded, unsigned char* row,
                                      const Share& share) {
#pragma unroll
  for (int term = 0; term < TERMS; ++term) {
#pragma unroll
    for (int j = 0; j < Share::CHUNKS; ++j) {
      const uint2 words = make_uint2(encoded.words[term][2 * j], encoded.words[term][2 * j + 1]);
      *reinterpret_cast<uint2*>(row + term * HEAD_DIM + share.channel(j)) = words;
    }
  }
}

// Calls body(x, part) with what each CTA of the cluster left in `parts` ahead of a barrier, in their order, for the
// element of a thread.
template <int COUNT, typename Body>
__device__ __forceinline__ void for_each_part(float (&parts)[COUNT], Body body) {
  if (threadIdx.x >= COUNT) return;
  float found[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) found[part] = load_peer(peer_address(&parts[threadIdx.x], part));
#pragma unroll
  for (int part = 0; part < PARTS; ++part) body(found[part], part);
}

// Sums of the rows [first, last) of a head, in shared.part: row r is added to the sum of r % 32, in order; then the
// sums are added in halves. Peaks, where they are kept, are those of these rows and of what peaks.part has already.
template <typename Format, int HEAD_DIM, typename Peaks, typename T>
__device__ __forceinline__ void sum_rows(SharedStorage<HEAD_DIM>& shared, Peaks& peaks, const Rows<T>& rows, int first,
                                         int last) {
  using Share = SumShare<HEAD_DIM>;
  const Share share;
  float sum[Share::NUMBERS] = {};
  [[maybe_unused]] float peak[Share::CHUNKS] = {};
  constexpr int ROWS_AHEAD = AHEAD > Share::CHUNKS ? AHEAD / Share::CHUNKS : 1;
  rows.template for_each<ROWS_AHEAD, GROUPS>(share, first + share.row, last, last,
                                             [&](const float (&x)[Share::NUMBERS], int row) {
                                               if (row >= last) return;
#pragma unroll
                                               for (int i = 0; i < Share::NUMBERS; ++i) sum[i] += x[i];
                                               if constexpr (Peaks::KEPT) {
#pragma unroll
                                                 for (int j = 0; j < Share::CHUNKS; ++j)
                                                   peak[j] = larger_magnitude<Format>(peak[j], sum_of_magnitudes(x, j));
                                               }
                                             });
#pragma unroll
  for (int j = 0; j < Share::CHUNKS; ++j) {
    if constexpr (Peaks::KEPT) peaks.of_rows[share.row][share.chunk(j)] = peak[j];
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
      const int n = j * CHUNK + i;
      *reinterpret_cast<float4*>(&shared.channels[share.row][share.channel(j) + i]) =
          make_float4(sum[n], sum[n + 1], sum[n + 2], sum[n + 3]);
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float of_group[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) of_group[group] = shared.channels[group][threadIdx.x];
#pragma unroll
    for (int half = 1; half < GROUPS; half *= 2) {
#pragma unroll
      for (int group = 0; group < GROUPS / 2; ++group) {
        if (group < GROUPS / 2 / half) of_group[group] += of_group[group + GROUPS / 2 / half];
      }
    }
    shared.part[threadIdx.x] = of_group[0];
  }
  if constexpr (Peaks::KEPT) {
    if (threadIdx.x < Peaks::CHUNKS) {
      float largest = peaks.part[threadIdx.x];
#pragma unroll
      for (int row = 0; row < GROUPS; ++row) largest = fmaxf(largest, peaks.of_rows[row][threadIdx.x]);
      peaks.part[threadIdx.x] = largest;
    }
  }
  __syncthreads();
}

// Mean over all rows of a head, in shared.channels[0]: the sums of its PARTS parts are added in their order. Peaks,
// where they are kept, are those of the head afterwards, for the threads that have one. With CLUSTER the cluster's next
// barrier is arrived at: once it is complete, nobody reads what this CTA left for the others.
template <bool CLUSTER, typename Format, int HEAD_DIM, typename Peaks, typename T>
__device__ __forceinline__ float mean_of_rows(SharedStorage<HEAD_DIM>& shared, Peaks& peaks, const Rows<T>& rows,
                                              int rows_each) {
  float sum = 0.0f, peak = 0.0f;
  const auto add = [&](float x, int part) { sum = part == 0 ? x : sum + x; };
  if constexpr (CLUSTER) {
    const int first = cluster_rank() * rows_each;
    sum_rows<Format>(shared, peaks, rows, first, min(first + rows_each, rows.count));
    cluster_arrive();
    cluster_wait();
    for_each_part(shared.part, add);
    if constexpr (Peaks::KEPT) for_each_part(peaks.part, [&](float x, int) { peak = fmaxf(peak, x); });
    cluster_arrive();
  } else {
    for (int part = 0; part < PARTS; ++part) {
      sum_rows<Format>(shared, peaks, rows, part * rows_each, min((part + 1) * rows_each, rows.count));
      if (threadIdx.x < HEAD_DIM) add(shared.part[threadIdx.x], part);
    }
    if constexpr (Peaks::KEPT) {
      if (threadIdx.x < Peaks::CHUNKS) peak = peaks.part[threadIdx.x];
    }
  }
  if (threadIdx.x < HEAD_DIM) shared.channels[0][threadIdx.x] = sum / static_cast<float>(rows.count);
  __syncthreads();
  return peak;
}

// The scale of all keys of a head, whose mean is in shared.channels[0]; `peak` is that of a thread's chunk. No number
// of a row that a normalized Hadamard matrix rotates is larger than the sum of |x| over the row, over sqrt(D).
template <typename Format, int HEAD_DIM>
__device__ __forceinline__ float scale_of_head(SharedStorage<HEAD_DIM>& shared, Peaks<HEAD_DIM>& peaks, float peak,
                                               float root) {
  constexpr int CHUNKS = Peaks<HEAD_DIM>::CHUNKS;
  if (threadIdx.x < CHUNKS) {
    float mean[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) mean[i] = shared.channels[0][threadIdx.x * CHUNK + i];
    peaks.of_rows[0][threadIdx.x] = peak + sum_of_magnitudes(mean, 0);
  }
  __syncthreads();
  float sum = peaks.of_rows[0][0];
#pragma unroll
  for (int chunk = 1; chunk < CHUNKS; ++chunk) sum += peaks.of_rows[0][chunk];
  return scale_of<Format>(larger_magnitude<Format>(0.0f, sum * root));
}

// Quantizes rows [first, last) of a head. `given` is the scale of all of them where BLOCK is 0.
template <typename Format, int HEAD_DIM, int TERMS, int BLOCK, bool SMOOTH, bool HADAMARD, typename T>
__device__ __forceinline__ void quantize_rows(SharedStorage<HEAD_DIM>& shared, const Rows<T>& rows, int first, int last,
                                              unsigned char* quantized, float* scales, float root, float given = 0.0f) {
  using Share = RowShare<HEAD_DIM>;
  constexpr int NUMBERS = Share::NUMBERS, STEP = ROWS<HEAD_DIM, Share>;
  const Share share;
  // Takes the mean off and rotates; gives the largest magnitude of the row, or infinity or NaN where one is among them.
  const auto change = [&](float (&x)[NUMBERS]) {
    if constexpr (SMOOTH) {
#pragma unroll
      for (int i = 0; i < NUMBERS; ++i) x[i] -= shared.channels[0][share.channel(i / CHUNK) + i % CHUNK];
    }
    float largest;
    if constexpr (HADAMARD) {
      largest = rotate(x, share, root);
    } else {
      largest = largest_of(x);
    }
#pragma unroll
    for (int step = 1; step < Share::LANES; step *= 2) {
      largest = larger_of(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    return largest;
  };
  // Largest magnitude of the row among the numbers that count.
  const auto largest_counted = [&](const float (&x)[NUMBERS]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) largest = larger_magnitude<Format>(largest, x[i]);
#pragma unroll
    for (int step = 1; step < Share::LANES; step *= 2) {
      largest = larger<Format>(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    }
    return largest;
  };
  const auto place_of = [&](int row) { return quantized + static_cast<int64>(row) * TERMS * HEAD_DIM; };
  const auto store_any = [&](float (&x)[NUMBERS], int row, float scale) {
    const float factor = factor_of(scale), inverse = 1.0f / (scale * factor);
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) x[i] = __fmul_rn(x[i] * factor, inverse);
    store<HEAD_DIM>(encode_any<Format, TERMS>(x), place_of(row), share);
  };

  if constexpr (BLOCK <= 1) {
    // All lanes of a row go on together: they shuffle.
    const int rounds = (last - first + STEP - 1) / STEP;
    const int begin = first + share.row;
    rows.template for_each<1, STEP>(share, begin, begin + rounds * STEP, last, [&](float (&x)[NUMBERS], int row) {
      const float largest = change(x);
      float scale = BLOCK == 1 ? scale_of<Format>(largest) : given;
      const bool usual = largest < __uint_as_float(0x7f800000u) && factor_of(scale) == 1.0f;
      if (__all_sync(FULL_WARP, usual)) {
        if (row >= last) return;
        // Apart from later sums: a multiplication and an addition would be rounded once.
        const float inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) x[i] = __fmul_rn(x[i], inverse);
        store<HEAD_DIM>(encode_usual<Format, TERMS>(x), place_of(row), share);
      } else {
        if constexpr (BLOCK == 1) scale = scale_of<Format>(largest_counted(x));
        if (row >= last) return;
        store_any(x, row, scale);
      }
      if (BLOCK == 1 && share.lane == 0) scales[row] = scale;
    });
  } else {
    const auto load = [&](float (&x)[NUMBERS], int row) {
      uint4 chunks[Share::CHUNKS];
#pragma unroll
      for (int j = 0; j < Share::CHUNKS; ++j) chunks[j] = rows.fetch(min(row, last - 1), share.channel(j));
#pragma unroll
      for (int i = 0; i < NUMBERS; ++i) x[i] = rows.number(chunks, i);
      change(x);
    };
    for (int block = first; block < last; block += BLOCK) {
      const int end = min(block + BLOCK, last);
      float x[NUMBERS], largest = 0.0f;
      for (int r = 0; r < end - block; r += STEP) {
        load(x, block + r + share.row);
        const float of_row = largest_counted(x);
        if (block + r + share.row < end) largest = larger<Format>(largest, of_row);
      }
      __syncthreads();  // everyone has read the last block's maximum
      if (share.lane == 0) shared.rows[share.row] = largest;
      __syncthreads();
      largest = 0.0f;
      for (int r = 0; r < STEP; r += 32) largest = larger<Format>(largest, shared.rows[r + threadIdx.x % 32]);
      for (int offset = 16; offset > 0; offset /= 2) {
        largest = larger<Format>(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
      }
      const float scale = scale_of<Format>(largest);
      if (threadIdx.x == 0) scales[block / BLOCK] = scale;
      for (int r = 0; r < end - block; r += STEP) {
        load(x, block + r + share.row);
        if (block + r + share.row < end) store_any(x, block + r + share.row, scale);
      }
    }
  }
}

// Quantizes rows [first, last) of a head of V, with a scale for each channel of the head.
template <bool CLUSTER, typename Format, int HEAD_DIM, typename T>
__device__ __forceinline__ void quantize_channels(SharedStorage<HEAD_DIM>& shared, const Rows<T>& rows, int rows_each,
                                                  int first, int last, unsigned char* quantized, float* scales) {
  using Share = ValueShare<HEAD_DIM>;
  constexpr int NUMBERS = Share::NUMBERS, STEP = ROWS<HEAD_DIM, Share>;
  const Share share;
  const float infinity = __uint_as_float(0x7f800000u);
  const int looked = CLUSTER ? cluster_rank() * rows_each : 0;
  const int end = CLUSTER ? min(looked + rows_each, rows.count) : rows.count;
  float largest[NUMBERS] = {};
  // An infinity stays; what NaN does depends on the format.
  rows.template for_each<AHEAD / Share::CHUNKS, STEP>(share, looked + share.row, end, end,
                                                      [&](const float (&x)[Share::NUMBERS], int row) {
                                                        if (row >= end) return;
#pragma unroll
                                                        for (int i = 0; i < NUMBERS; ++i)
                                                          largest[i] = larger<Format>(largest[i], fabsf(x[i]));
                                                      });
  bool has_infinity = false;
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) has_infinity |= largest[i] == infinity;
  if (has_infinity) {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) largest[i] = 0.0f;
    rows.template for_each<1, STEP>(share, looked + share.row, end, end,
                                    [&](const float (&x)[Share::NUMBERS], int row) {
                                      if (row >= end) return;
#pragma unroll
                                      for (int i = 0; i < NUMBERS; ++i)
                                        largest[i] = larger_magnitude<Format>(largest[i], x[i]);
                                    });
  }
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) shared.channels[share.row][share.channel(i / CHUNK) + i % CHUNK] = largest[i];
  __syncthreads();
  const int channel = threadIdx.x;  // of the first HEAD_DIM threads
  float m = 0.0f;
  if (channel < HEAD_DIM) {
#pragma unroll
    for (int group = 0; group < STEP; ++group) m = larger<Format>(m, shared.channels[group][channel]);
  }
  if constexpr (CLUSTER) {
    if (channel < HEAD_DIM) shared.part[channel] = m;
    cluster_arrive();
    cluster_wait();
    for_each_part(shared.part, [&](float x, int) { m = larger<Format>(m, x); });
    cluster_arrive();
  }
  __syncthreads();
  if (channel < HEAD_DIM) {
    const float scale = scale_of<Format>(m), factor = factor_of(scale);
    shared.channels[0][channel] = factor;
    shared.channels[1][channel] = 1.0f / (scale * factor);
    if (first == 0) scales[channel] = scale;
  }
  __syncthreads();
  float inverse[NUMBERS];
  bool usual_scales = true;
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) {
    usual_scales &= shared.channels[0][share.channel(i / CHUNK) + i % CHUNK] == 1.0f;
    inverse[i] = shared.channels[1][share.channel(i / CHUNK) + i % CHUNK];
  }
  rows.template for_each<1, STEP>(share, first + share.row, last, last, [&](float (&x)[NUMBERS], int row) {
    if (row >= last) return;
    unsigned char* to = quantized + static_cast<int64>(row) * HEAD_DIM;
    float sum = 0.0f;  // infinite or NaN where a number is
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) sum += fabsf(x[i]);
    if (usual_scales && sum < infinity) {
#pragma unroll
      for (int i = 0; i < NUMBERS; ++i) x[i] = __fmul_rn(x[i], inverse[i]);
      store<HEAD_DIM>(encode_usual<Format, 1>(x), to, share);
    } else {
#pragma unroll
      for (int i = 0; i < NUMBERS; ++i) {
        x[i] = __fmul_rn(x[i] * shared.channels[0][share.channel(i / CHUNK) + i % CHUNK], inverse[i]);
      }
      store<HEAD_DIM>(encode_any<Format, 1>(x), to, share);
    }
  });
}

// Of a head's rows, a CTA takes this many: whole blocks.
template <int BLOCK>
constexpr int ROWS_OF_CTA = BLOCK < 2 * GROUPS ? 2 * GROUPS : BLOCK;  // or a multiple: params.tile_rows

template <typename T, int HEAD_DIM, typename Format, typename Value, int TERMS, int BLOCK, bool SMOOTH, bool HADAMARD,
          bool CLUSTER, bool HEAD_SCALE = false>
__global__ void __launch_bounds__(THREADS<HEAD_DIM>, 3)
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
        const float peak = mean_of_rows<CLUSTER, Format>(shared, peaks, rows, params.sum_rows);
        scale = scale_of_head<Format>(shared, peaks, peak, params.root);
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
    if constexpr (CLUSTER && SMOOTH) cluster_wait();
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
      if constexpr (CLUSTER) cluster_wait();
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
