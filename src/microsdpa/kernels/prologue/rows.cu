// Norms and rotary embedding of Q and K in a launch ahead of attention, which then takes the rows that it leaves.
//
// A warp changes rows of one position, of as many heads as it can: they share angles, and so a read of them. A CTA has
// WARPS consecutive such tiles of positions. Blocks of the grid along x: tiles of Q, and then tiles of K, as far as
// they change; batch entries along z.
// Pipeline: all that a thread reads is on its way at once; then the norm, the rotation and one store.
// Bound by: a round trip to memory, and for many rows its bandwidth: each of Q and K is read and written once.
#include "../common/element.cuh"
#include "../common/prologue.cuh"
#include "../ptx/control.cuh"

namespace microsdpa::prologue {

constexpr int WARPS = 8;

// Changes the rows of one tile of Q or K. `to` is [B, heads, rows, D], contiguous.
template <typename T, int HEAD_DIM, bool KEY, int HEADS, bool VECTORS, bool PROGRAMMATIC, typename PROLOGUE>
__device__ __forceinline__ void change_tile(const PrologueParams& params, const T* from, const Strides& strides, T* to,
                                            int heads, int rows, int index) {
  using Row = PrologueRow<PROLOGUE, KEY, T, HEAD_DIM>;
  static_assert(Row::AT_ONCE % HEADS == 0, "a warp has whole positions");
  constexpr int POSITIONS = WARPS * Row::AT_ONCE / HEADS;
  const int groups = heads / HEADS, batch = static_cast<int>(blockIdx.z);
  const int slot = static_cast<int>(threadIdx.x) / Row::LANES;
  const int head = index % groups * HEADS + slot % HEADS;
  const int wanted = index / groups * POSITIONS + slot / HEADS, row = min(wanted, rows - 1);
  from += batch * strides.batch + head * strides.head + row * strides.row;
  to += ((static_cast<int64>(batch) * heads + head) * rows + row) * HEAD_DIM;

  // All before this line overlaps with the kernel ahead; what follows reads what that one may have written.
  if (PROGRAMMATIC) {
    prefetch_line(from);
    Row::prefetch(params, PROLOGUE::template counted<KEY>(params, row));
    grid_dependency_wait();
  }
  Row changed;
  typename Row::Angles angles;
  typename Row::Elements x[1];
  Row::template load<VECTORS>(x[0], [&](int column) { return from + column; });
  changed.fetch_weights(params);
  Row::fetch(angles, params, PROLOGUE::template position<KEY>(params, batch, row));
  changed.change(x, &angles, params.eps);
  if (wanted < rows) Row::store(x[0], [&](int column) { return to + column; });
}

// QUERY_HEADS, KEY_HEADS: heads of a tile, which divide those of Q and K; 0 for what stays as it is. LOAD_BYTES: 16
// where every row starts on as many, else the size of an element. The rows of Q go to `out`, and those of K to
// `workspace`.
template <typename T, int HEAD_DIM, int QUERY_HEADS, int KEY_HEADS, int LOAD_BYTES, bool PROGRAMMATIC,
          typename PROLOGUE>
__global__ void __launch_bounds__(32 * WARPS) change_rows(const __grid_constant__ Prologued given) {
  constexpr bool VECTORS = LOAD_BYTES == 16;
  const AttentionParams& call = given.masked.call;
  if (PROGRAMMATIC) grid_dependency_launch();
  int index = static_cast<int>(blockIdx.x);
  if constexpr (QUERY_HEADS > 0) {
    constexpr int AT_ONCE = PrologueRow<PROLOGUE, false, T, HEAD_DIM>::AT_ONCE;
    constexpr int POSITIONS = WARPS * AT_ONCE / QUERY_HEADS;
    const int tiles = (call.seqlen_q + POSITIONS - 1) / POSITIONS * (call.heads / QUERY_HEADS);
    if (KEY_HEADS == 0 || index < tiles) {
      change_tile<T, HEAD_DIM, false, QUERY_HEADS, VECTORS, PROGRAMMATIC, PROLOGUE>(
          given.prologue, static_cast<const T*>(call.query), call.query_strides, static_cast<T*>(call.out), call.heads,
          call.seqlen_q, index);
      return;
    }
    index -= tiles;
  }
  if constexpr (KEY_HEADS > 0) {
    change_tile<T, HEAD_DIM, true, KEY_HEADS, VECTORS, PROGRAMMATIC, PROLOGUE>(
        given.prologue, static_cast<const T*>(call.key), call.key_strides, static_cast<T*>(call.workspace),
        call.heads_kv, call.seqlen_k, index);
  }
}

}  // namespace microsdpa::prologue
