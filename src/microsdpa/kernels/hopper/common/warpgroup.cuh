// Warpgroups that compute 64 queries each: sizes, tiles in shared memory, and the barriers among their warps.
#pragma once

#include "../../ptx/wgmma.cuh"

namespace microsdpa::hopper {

constexpr int WARPGROUP_THREADS = 128;
constexpr int ROWS = 64;  // queries of a warpgroup: one wgmma's rows

// A tile of HEAD_DIM columns lies in panels of PANEL columns, one repetition of the swizzle pattern. The last one may
// have columns that nobody reads; or it is a narrow one, of TAIL columns and a pattern of its own: its rows cost a bulk
// copy less time than those of a panel that is filled with zeros.
template <int HEAD_DIM>
constexpr int PANEL = HEAD_DIM % 64 == 32 ? 32 : 64;
template <int HEAD_DIM>
constexpr int TAIL = HEAD_DIM % 64 == 16 ? 16 : 0;
template <int HEAD_DIM>
constexpr int PANELS = (HEAD_DIM - TAIL<HEAD_DIM> + PANEL<HEAD_DIM> - 1) / PANEL<HEAD_DIM>;
// Columns in shared memory.
template <int HEAD_DIM>
constexpr int STORED_COLUMNS = PANELS<HEAD_DIM> * PANEL<HEAD_DIM> + TAIL<HEAD_DIM>;
template <int HEAD_DIM>
constexpr Swizzle PATTERN = PANEL<HEAD_DIM> == 64 ? Swizzle::BYTES_128 : Swizzle::BYTES_64;
constexpr Swizzle TAIL_PATTERN = Swizzle::BYTES_32;

// Barriers among warps: from each on, one for every consumer warpgroup. The last one's QUERY_NEGATED is barrier 0,
// which
// __syncthreads has used before the roles part.
enum NamedBarrier : int { PINGPONG = 1, OUT_FULL = 5, OUT_EMPTY = 9, QUERY_NEGATED = 13, BARRIERS = 16 };
constexpr int OUT_THREADS = WARPGROUP_THREADS + 32;  // of a consumer, and the warp that stores for it

}  // namespace microsdpa::hopper
