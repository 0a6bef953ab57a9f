// Gradients of exact attention, on wgmma or mma.sync, for every call that has a forward pass. No atomics: the same bits
// each time.
//
// With P = 2^(scores - LSE) and dS = P (dP - delta), where dP = dO V^T: dV = P^T dO, dK = scale dS^T Q, dQ = scale dS
// K. A CTA owns BLOCK_OWN rows and walks over tiles of the other side's rows. CTAs that own keys walk over the queries
// of every query head of their key head, and sum dK and dV. CTAs that own queries sum dQ. Both make S and dP again:
// seven products in all.
// Tiles:    the owned rows [BLOCK_OWN, D] of two tensors; each warp has 16 ROW_TILES of them, as A operands. The walked
//           rows [BLOCK_WALK, D] of two tensors in a ring of STAGES; D is HEAD_DIM, filled up to TILE_COLUMNS.
// Pipeline: 1. cp.async or bulk copies fill the ring, one tile ahead
//           2. S and dP of STEP walked rows; where keys are owned, their transposes
//           3. P and dS in registers, which are A operands
//           4. the sums
// Bound by: shared memory, which each product of a warp reads one operand from, beside the tensor cores.
#include "../common/backward_work.cuh"
#include "../common/dropout.cuh"
#include "../ptx/address.cuh"
#include "../ptx/control.cuh"
#include "../ptx/mbarrier.cuh"
#include "rows.cuh"
#include "scoring.cuh"
#include "warpgroup.cuh"

namespace microsdpa::backward {

// What a CTA sums. dK and dV of a large head do not fit the registers together.
enum Role { KEYS_AND_VALUES, KEYS, VALUES, QUERIES };

// Columns of a tile: whole steps of mma.sync, or whole panels of 32 or 64 for wgmma.
template <int HEAD_DIM, bool WGMMA>
constexpr int TILE_COLUMNS = !WGMMA            ? (HEAD_DIM + 15) / 16 * 16
                             : HEAD_DIM <= 160 ? (HEAD_DIM + 31) / 32 * 32
                                               : (HEAD_DIM + 63) / 64 * 64;

template <typename T_, int HEAD_DIM_, int ROW_TILES_, int WARPS_, int BLOCK_WALK_, int STEP_, int STAGES_,
          int LOAD_BYTES_, bool WGMMA_, bool BULK_>
struct Tiles {
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_, ROW_TILES = ROW_TILES_, BLOCK_WALK = BLOCK_WALK_, STEP = STEP_;
  static constexpr int STAGES = STAGES_, LOAD_BYTES = LOAD_BYTES_, THREADS = 32 * WARPS_;
  static constexpr bool WGMMA = WGMMA_, BULK = BULK_;
  static constexpr int COLUMNS = TILE_COLUMNS<HEAD_DIM, WGMMA>;
  static constexpr int WARP_ROWS = 16 * ROW_TILES, BLOCK_OWN = WARP_ROWS * WARPS_;
  using Owned = SwizzledTile<T, BLOCK_OWN, COLUMNS>;
  using Walked = SwizzledTile<T, BLOCK_WALK, COLUMNS>;
  static constexpr int UNIT = WGMMA ? 64 : WARP_ROWS;  // rows whose warps multiply together
  static_assert(BLOCK_WALK % STEP == 0 && STEP % 16 == 0, "a tile has whole steps, and a step whole products");
};

template <typename C, bool WEIGHTED>
struct Shared {
  typename C::Owned owned[2];               // K and V, or Q and dO
  typename C::Walked walked[2][C::STAGES];  // Q and dO, or K and V
  RowTerms<WEIGHTED> terms[C::STAGES][C::BLOCK_WALK];
  Mbarrier full[C::STAGES];        // of bulk copies
  int32 seen[2][C::THREADS / 32];  // whether a warp sees anything of a step, in turn
};

// Descriptions of the tensors for bulk copies; null where there are none.
struct Maps {
  const TensorMap *query = nullptr, *key = nullptr, *value = nullptr, *grad_out = nullptr;
};

// `SLOPES`: whether the CTAs that own queries sum the gradient of ALiBi's slopes too.
template <typename C, typename M, Role ROLE, bool SLOPES, typename DROPOUT>
struct Walk {
  using Given = typename DROPOUT::template Params<BackwardParams>;
  using T = typename C::T;
  using Terms = RowTerms<M::WEIGHTED>;
  using Sums = float[C::ROW_TILES][C::COLUMNS / 8][4];
  using Products = float[C::ROW_TILES][C::STEP / 8][4];
  static constexpr bool BY_KEYS = ROLE != QUERIES;
  using Kept = KeptOf<DROPOUT, BY_KEYS, C::ROW_TILES, C::STEP>;
  static constexpr bool SUMS_VALUES = ROLE == KEYS_AND_VALUES || ROLE == VALUES, SUMS_OTHERS = ROLE != VALUES;

  const Given& given;
  const BackwardParams& params;
  const AttentionParams& call;
  const Maps& maps;
  Shared<C, M::WEIGHTED>& shared;
  int batch, head, group;  // the first query head, and how many there are
  int first, rows;         // owned: the CTA's first, and all there are
  int first_tile, tiles;   // walked, of a head
  float slope_sum = 0.0f;  // of dS times the distance, of this lane
  int votes = 0;           // of what a warpgroup sees

  __device__ __forceinline__ Walk(const Given& given, const Maps& maps, Shared<C, M::WEIGHTED>& shared,
                                  const Work& work)
      : given(given), params(DROPOUT::call(given)), call(params.forward.call), maps(maps), shared(shared) {
    const int shared_by = call.heads / call.heads_kv, heads = BY_KEYS ? call.heads_kv : call.heads;
    batch = work.head / heads;
    head = work.head % heads * (BY_KEYS ? shared_by : 1);
    group = BY_KEYS ? shared_by : 1;
    first = work.tile * C::BLOCK_OWN;
    rows = BY_KEYS ? call.seqlen_k : call.seqlen_q;
    const int last = min(first + C::BLOCK_OWN, rows) - 1;
    int begin = 0, end = BY_KEYS ? call.seqlen_q : call.seqlen_k;
    if constexpr (BY_KEYS) {
      if (M::RIGHT) begin = max(begin, first - call.diagonal);
      if (M::LEFT) end = min(end, last - params.forward.masks.lowest + 1);
    } else {
      if (M::RIGHT) end = min(end, last + call.diagonal + 1);
      if (M::LEFT) begin = max(begin, first + params.forward.masks.lowest);
    }
    first_tile = begin / C::BLOCK_WALK;
    tiles = begin < end ? (end + C::BLOCK_WALK - 1) / C::BLOCK_WALK - first_tile : 0;
  }

  __device__ __forceinline__ const T* at(const void* tensor, const Strides& strides, int head, int row) const {
    return static_cast<const T*>(tensor) + batch * strides.batch + head * strides.head + row * strides.row;
  }

  // Starts to bring the owned rows, of Q and dO or of K and V.
  __device__ __forceinline__ void load_owned() const {
    const int valid = rows - first, head_kv = head / (call.heads / call.heads_kv);
    if constexpr (BY_KEYS) {
      load_rows<C>(shared.owned[0], at(call.key, call.key_strides, head_kv, first), call.key_strides.row, valid);
      if constexpr (SUMS_OTHERS) {
        load_rows<C>(shared.owned[1], at(call.value, call.value_strides, head_kv, first), call.value_strides.row,
                     valid);
      }
    } else {
      load_rows<C>(shared.owned[0], at(call.query, call.query_strides, head, first), call.query_strides.row, valid);
      load_rows<C>(shared.owned[1], at(params.grad_out, params.grad_out_strides, head, first),
                   params.grad_out_strides.row, valid);
    }
  }

  // Starts to bring the walked rows of a turn: of K and V, or of Q and dO and what is known of these rows.
  __device__ __forceinline__ void load_walked(int turn) const {
    const int stage = turn % C::STAGES, row = (first_tile + turn % tiles) * C::BLOCK_WALK;
    if constexpr (BY_KEYS) {
      const int own_head = head + turn / tiles, valid = call.seqlen_q - row;
      if constexpr (C::BULK) {
        copy_bulk(*maps.query, *maps.grad_out, stage, own_head, row);
      } else {
        load_rows<C>(shared.walked[0][stage], at(call.query, call.query_strides, own_head, row), call.query_strides.row,
                     valid);
        load_rows<C>(shared.walked[1][stage], at(params.grad_out, params.grad_out_strides, own_head, row),
                     params.grad_out_strides.row, valid);
      }
      const Terms* terms = terms_of(own_head);
      for (int i = threadIdx.x; i < C::BLOCK_WALK; i += C::THREADS) {
        cp_async<sizeof(Terms)>(&shared.terms[stage][i], i < valid ? terms + row + i : terms,
                                i < valid ? sizeof(Terms) : 0);
      }
    } else {
      const int head_kv = head / (call.heads / call.heads_kv), valid = call.seqlen_k - row;
      if constexpr (C::BULK) {
        copy_bulk(*maps.key, *maps.value, stage, head_kv, row);
      } else {
        load_rows<C>(shared.walked[0][stage], at(call.key, call.key_strides, head_kv, row), call.key_strides.row,
                     valid);
        load_rows<C>(shared.walked[1][stage], at(call.value, call.value_strides, head_kv, row), call.value_strides.row,
                     valid);
      }
    }
  }

  // Starts the bulk copies of two tiles, from a row of a head on.
  __device__ __forceinline__ void copy_bulk(const TensorMap& u, const TensorMap& w, int stage, int of_head,
                                            int row) const {
    constexpr int PANEL = C::Walked::PANEL, ROWS = C::BLOCK_WALK < 64 ? C::BLOCK_WALK : 64;
    if (threadIdx.x != 0) return;
    mbarrier_arrive_expect(shared.full[stage], 2 * sizeof(typename C::Walked));
#pragma unroll
    for (int panel = 0; panel < C::COLUMNS / PANEL; ++panel) {
#pragma unroll
      for (int r = 0; r < C::BLOCK_WALK; r += ROWS) {
        const int at = (panel * C::BLOCK_WALK + r) * PANEL;
        tma_load(shared.walked[0][stage].data + at, u, shared.full[stage], panel * PANEL, row + r, of_head, batch);
        tma_load(shared.walked[1][stage].data + at, w, shared.full[stage], panel * PANEL, row + r, of_head, batch);
      }
    }
  }

  // Of a head's rows.
  __device__ __forceinline__ const Terms* terms_of(int head) const {
    return static_cast<const Terms*>(call.workspace) + (static_cast<int64>(batch) * call.heads + head) * call.seqlen_q;
  }

  // Calls visit(tile, n, element, query, key) for each of a lane's products of the warp's rows and STEP walked ones.
  template <typename Visit>
  __device__ __forceinline__ static void for_each(int own, int walked, Visit visit) {
    const int row = own + lane_index() / 4, column = walked + lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < C::STEP / 8; ++n) {
#pragma unroll
      for (int t = 0; t < C::ROW_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row + 16 * t + 8 * (e / 2), c = column + 8 * n + e % 2;
          BY_KEYS ? visit(t, n, e, c, r) : visit(t, n, e, r, c);
        }
      }
    }
  }

  // Turns S into P; `bend` is the derivative of the soft cap, where there is one.
  template <bool BOUNDED, typename TermsOf, typename Elements>
  __device__ __forceinline__ void weigh(Products& s, Products& bend, const HeadScores<M>& scores,
                                        const Elements& elements, int own, int walked, TermsOf terms) const {
    for_each(own, walked, [&](int t, int n, int e, int query, int key) {
      const Terms& of_row = terms(t, n, e);
      float p = scores.exponent(s[t][n][e], elements[t][n][e], query, key, of_row.lse, bend[t][n][e]);
      p = ex2_approx(p);
      if constexpr (M::WEIGHTED) p *= of_row.weight();
      bool seen = true;
      if constexpr (M::HIDES) seen = elements[t][n][e].value;
      if constexpr (BOUNDED) seen = seen && scores.is_within(query, key);
      s[t][n][e] = (M::HIDES || BOUNDED) && !seen ? 0.0f : p;
    });
  }

  // Turns dP into dS.
  template <typename TermsOf>
  __device__ __forceinline__ void differentiate(Products& dp, const Products& p, const Products& bend, const Kept& kept,
                                                int own, int walked, TermsOf terms) {
    for_each(own, walked, [&](int t, int n, int e, int query, int key) {
      if constexpr (DROPOUT::ANY) dp[t][n][e] = kept.has(t, n, e) ? dp[t][n][e] * given.dropout.scale : 0.0f;
      float ds = p[t][n][e] * (dp[t][n][e] - terms(t, n, e).delta);
      if constexpr (SLOPES && !BY_KEYS) {
        // Past the last key there is no distance to speak of, and P is zero.
        slope_sum = fmaf(ds, fabsf(static_cast<float>(query + params.forward.masks.position - key)), slope_sum);
      }
      if constexpr (M::SOFTCAP) ds *= bend[t][n][e];
      dp[t][n][e] = ds;
    });
  }

  // Drops what is not kept of P, which is scaled where dV is stored.
  __device__ __forceinline__ static void drop(Products& p, const Kept& kept) {
    if constexpr (DROPOUT::ANY) {
      for_each(0, 0, [&](int t, int n, int e, int, int) {
        if (!kept.has(t, n, e)) p[t][n][e] = 0.0f;
      });
    }
  }

  // The sums of a warp's rows over everything that is walked: those of dS, and dV.
  __device__ __forceinline__ void run(Sums& sums, Sums& values) {
    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS, own = first + warp_row, last_own = own + C::WARP_ROWS - 1;
    const int unit = first + warp_row / C::UNIT * C::UNIT, last_of_unit = unit + C::UNIT - 1;
    const int turns = tiles * group;
    if constexpr (C::BULK) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int stage = 0; stage < C::STAGES; ++stage) mbarrier_init(shared.full[stage], 1);
        mbarrier_init_fence();
      }
      __syncthreads();
    }
    load_owned();
    if (C::STAGES > 1 && turns > 0) load_walked(0);
    cp_async_commit();
    Terms own_terms[C::ROW_TILES][2];
    if constexpr (!BY_KEYS) {
#pragma unroll
      for (int i = 0; i < 2 * C::ROW_TILES; ++i) {
        own_terms[i / 2][i % 2] = terms_of(head)[min(own + 8 * i + static_cast<int>(lane_index()) / 4, rows - 1)];
      }
    }

    const DropoutOf<DROPOUT> philox(given);
    for (int turn = 0; turn < turns; ++turn) {
      if constexpr (C::STAGES == 1) {
        __syncthreads();
        load_walked(turn);
        cp_async_commit();
      }
      cp_async_wait<0>();
      if constexpr (C::BULK) mbarrier_wait(shared.full[turn % C::STAGES], turn / C::STAGES % 2);
      if (C::WGMMA && (!C::BULK || turn == 0)) fence_proxy_async();
      __syncthreads();  // the tile is there, and nobody reads the one before it any more
      if (C::STAGES > 1 && turn + 1 < turns) load_walked(turn + 1);
      cp_async_commit();
      const int stage = turn % C::STAGES;
      const auto &u = shared.walked[0][stage], &w = shared.walked[1][stage];
      const int own_head = head + (BY_KEYS ? turn / tiles : 0);
      const HeadScores<M> scores(params.forward, batch, own_head);
#pragma unroll 1
      for (int step = 0; step < C::BLOCK_WALK; step += C::STEP) {
        const int walked = (first_tile + turn % tiles) * C::BLOCK_WALK + step, last_walked = walked + C::STEP - 1;
        const bool nothing = BY_KEYS
                                 ? walked >= call.seqlen_q || scores.sees_none(walked, last_walked, unit, last_of_unit)
                                 : walked >= call.seqlen_k || scores.sees_none(unit, last_of_unit, walked, last_walked);
        if (nothing) continue;
        Element<typename M::Mask> elements[C::ROW_TILES][C::STEP / 8][4];
        if constexpr (M::READS) {
          bool any = false;
          for_each(own, walked, [&](int t, int n, int e, int query, int key) {
            elements[t][n][e] = scores.element(query, key);
            if constexpr (M::HIDES) any = any || elements[t][n][e].value;
          });
          if (M::HIDES && !is_seen(any)) continue;
        }
        const auto terms = [&](int t, int n, int e) -> const Terms& {
          if constexpr (BY_KEYS) {
            return shared.terms[stage][step + 8 * n + lane_index() % 4 * 2 + e % 2];
          } else {
            return own_terms[t][e / 2];
          }
        };
        const bool all = BY_KEYS ? scores.sees_all(walked, last_walked, own, last_own)
                                 : scores.sees_all(own, last_own, walked, last_walked);
        const auto weigh_all = [&](Products& s, Products& bend) {
          if (all) {
            weigh<false>(s, bend, scores, elements, own, walked, terms);
          } else {
            weigh<true>(s, bend, scores, elements, own, walked, terms);
          }
        };
        Products s, dp, bend;
        const auto kept_of_step = [&] { return Kept(philox, given, batch * call.heads + own_head, own, walked); };
        if constexpr (!C::WGMMA) {
          multiply_query_key<T, C::ROW_TILES, C::COLUMNS, C::STEP>(s, operand(shared.owned[0], warp_row), u, step);
          if constexpr (SUMS_OTHERS) {
            multiply_query_key<T, C::ROW_TILES, C::COLUMNS, C::STEP>(dp, operand(shared.owned[1], warp_row), w, step);
          }
          weigh_all(s, bend);
          const Kept kept = kept_of_step();
          if constexpr (SUMS_OTHERS) differentiate(dp, s, bend, kept, own, walked, terms);
          if constexpr (SUMS_VALUES) {
            drop(s, kept);
            multiply_probability_value<T, C::ROW_TILES, C::COLUMNS, C::STEP>(values, s, w, step);
          }
          if constexpr (SUMS_OTHERS) {
            multiply_probability_value<T, C::ROW_TILES, C::COLUMNS, C::STEP>(sums, dp, u, step);
          }
        } else {
          // dP is multiplied while P is made of S, and dV is while dS is made of dP.
          using Wgmma = WarpgroupProducts<C>;
          uint32 p[1][C::STEP / 16][4], ds[1][C::STEP / 16][4];
          Wgmma::scores(s, shared.owned[0], warp_row, u, step);
          if constexpr (SUMS_OTHERS) Wgmma::scores(dp, shared.owned[1], warp_row, w, step);
          const Kept kept = kept_of_step();
          wgmma_wait<SUMS_OTHERS ? 1 : 0>();
          wgmma_fence_registers(flat(s));
          weigh_all(s, bend);
          if constexpr (SUMS_VALUES) {
            if constexpr (DROPOUT::ANY) {
              Products rest;
              for_each(0, 0, [&](int t, int n, int e, int, int) { rest[t][n][e] = s[t][n][e]; });
              drop(rest, kept);
              pack_probabilities<T, 1, C::STEP>(p, rest);
            } else {
              pack_probabilities<T, 1, C::STEP>(p, s);
            }
            Wgmma::sum(values, p, w, step);
          }
          if constexpr (SUMS_OTHERS) {
            wgmma_wait<SUMS_VALUES ? 1 : 0>();
            wgmma_fence_registers(flat(dp));
            differentiate(dp, s, bend, kept, own, walked, terms);
            pack_probabilities<T, 1, C::STEP>(ds, dp);
            Wgmma::sum(sums, ds, u, step);
          }
          wgmma_wait<0>();
          if constexpr (SUMS_VALUES) wgmma_fence_registers(flat(values));
          if constexpr (SUMS_OTHERS) wgmma_fence_registers(flat(sums));
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // also where nothing is walked over, the owned tiles are there to be written over
  }

  // Whether any lane of the warps that multiply together says so.
  __device__ __forceinline__ bool is_seen(bool any) {
    any = __any_sync(FULL_WARP, any);
    if constexpr (!C::WGMMA) return any;
    const int warp = threadIdx.x / 32, first_warp = warp / 4 * 4;
    votes ^= 1;  // what is written now was read before the barrier of the vote before
    if (lane_index() == 0) shared.seen[votes][warp] = any;
    named_barrier_sync(1 + warp / 4, 128);
    int32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= shared.seen[votes][first_warp + i];
    return found != 0;
  }

  __device__ __forceinline__ static QueryOperand<typename C::Owned, C::ROW_TILES, C::COLUMNS, 0> operand(
      const typename C::Owned& tile, int warp_row) {
    return {tile, static_cast<unsigned>(warp_row)};
  }

  // Writes the rows of a sum that exist.
  __device__ __forceinline__ void store(typename C::Owned& staging, const Sums& sums, float factor, void* tensor,
                                        const Strides& strides) const {
    const int warp_row = threadIdx.x / 32 * C::WARP_ROWS, own = first + warp_row;
    const int own_head = BY_KEYS ? head / (call.heads / call.heads_kv) : head;
    store_rows<C>(staging, warp_row, sums, factor, const_cast<T*>(at(tensor, strides, own_head, own)), strides.row,
                  rows - own);
  }

  __device__ __forceinline__ static void compute(const Given& given, const Maps& maps, Shared<C, M::WEIGHTED>& shared,
                                                 const Work& work) {
    const BackwardParams& params = DROPOUT::call(given);
    Walk walk(given, maps, shared, work);
    Sums sums = {}, values = {};
    walk.run(sums, values);
    const float scale = params.forward.call.scale_log2 * LN_2;
    if constexpr (ROLE == QUERIES) {
      walk.store(shared.owned[0], sums, scale, params.grad_query, params.grad_query_strides);
      if constexpr (SLOPES) {
        const float sum = warp_sum(walk.slope_sum);
        const int64 head = static_cast<int64>(walk.batch) * walk.call.heads + walk.head;
        const int part = work.tile * (C::THREADS / 32) + threadIdx.x / 32;
        if (lane_index() == 0) params.slope_parts[head * params.parts_of_slope + part] = sum;
      }
    } else {
      if constexpr (SUMS_OTHERS) walk.store(shared.owned[0], sums, scale, params.grad_key, params.grad_key_strides);
      if constexpr (SUMS_VALUES) {
        float factor = 1.0f;
        if constexpr (DROPOUT::ANY) factor = given.dropout.scale;
        walk.store(shared.owned[1], values, factor, params.grad_value, params.grad_value_strides);
      }
    }
  }
};

// What a CTA does: its work is of one of the roles.
template <typename C, typename M, bool APART, bool SLOPES, bool PROGRAMMATIC, typename DROPOUT>
__device__ __forceinline__ void compute_gradients(const typename DROPOUT::template Params<BackwardParams>& given,
                                                  const Maps& maps) {
  const BackwardParams& params = DROPOUT::call(given);
  const AttentionParams& call = params.forward.call;
  auto& shared = dynamic_shared<Shared<C, M::WEIGHTED>>();
  const int key_tiles = (call.seqlen_k + C::BLOCK_OWN - 1) / C::BLOCK_OWN, key_heads = call.batch * call.heads_kv;
  const int query_tiles = (call.seqlen_q + C::BLOCK_OWN - 1) / C::BLOCK_OWN, query_heads = call.batch * call.heads;
  const int by_keys = key_tiles * key_heads, index = blockIdx.x;
  if (PROGRAMMATIC) grid_dependency_wait();
  if (PROGRAMMATIC) grid_dependency_launch();
  if (index < by_keys) {
    const Work work(index, key_tiles, key_heads, params.key_heads);
    Walk<C, M, APART ? KEYS : KEYS_AND_VALUES, SLOPES, DROPOUT>::compute(given, maps, shared, work);
  } else if (APART && index < 2 * by_keys) {
    const Work work(index - by_keys, key_tiles, key_heads, params.key_heads);
    Walk<C, M, APART ? VALUES : KEYS_AND_VALUES, SLOPES, DROPOUT>::compute(given, maps, shared, work);
  } else {
    Work work(index - by_keys * (APART ? 2 : 1), query_tiles, query_heads, params.query_heads);
    work.tile = query_tiles - 1 - work.tile;  // under a causal mask the last queries see most
    Walk<C, M, QUERIES, SLOPES, DROPOUT>::compute(given, maps, shared, work);
  }
}

template <typename T, int HEAD_DIM, int ROW_TILES, int WARPS, int BLOCK_WALK, int STEP, int STAGES, int CTAS,
          int LOAD_BYTES, bool WGMMA, bool APART, typename MASK, bool LEFT, bool RIGHT, bool SOFTCAP, bool ALIBI,
          bool SLOPES, bool PROGRAMMATIC, typename DROPOUT>
__global__ void __launch_bounds__(32 * WARPS, CTAS)
    gradients(const __grid_constant__ typename DROPOUT::template Params<BackwardParams> given) {
  using C = Tiles<T, HEAD_DIM, ROW_TILES, WARPS, BLOCK_WALK, STEP, STAGES, LOAD_BYTES, WGMMA, false>;
  const Maps none;
  compute_gradients<C, Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>, APART, SLOPES, PROGRAMMATIC, DROPOUT>(given, none);
}

// The same with bulk copies of the walked rows.
template <typename T, int HEAD_DIM, int ROW_TILES, int WARPS, int BLOCK_WALK, int STEP, int STAGES, int CTAS,
          int LOAD_BYTES, bool WGMMA, bool APART, typename MASK, bool LEFT, bool RIGHT, bool SOFTCAP, bool ALIBI,
          bool SLOPES, bool PROGRAMMATIC, typename DROPOUT>
__global__ void __launch_bounds__(32 * WARPS, CTAS)
    gradients_bulk(const __grid_constant__ typename DROPOUT::template Params<BackwardParams> given,
                   const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                   const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap grad_out) {
  using C = Tiles<T, HEAD_DIM, ROW_TILES, WARPS, BLOCK_WALK, STEP, STAGES, LOAD_BYTES, WGMMA, true>;
  const Maps maps{&query, &key, &value, &grad_out};
  compute_gradients<C, Scoring<MASK, LEFT, RIGHT, SOFTCAP, ALIBI>, APART, SLOPES, PROGRAMMATIC, DROPOUT>(given, maps);
}

}  // namespace microsdpa::backward
