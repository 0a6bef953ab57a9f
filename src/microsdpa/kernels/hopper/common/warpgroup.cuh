// Warpgroups that compute 64 queries each: sizes, tiles in shared memory, and the barriers among their warps.
#pragma once

#include "../../ptx/wgmma.cuh"

namespace microsdpa::hopper {

constexpr int WARPGROUP_THREADS = 128;
constexpr int ROWS = 64;  // queries of a warpgroup: one wgmma's rows

// Columns of a box: one repetition of the swizzle pattern.
template <int HEAD_DIM>
constexpr int PANEL = HEAD_DIM % 64 == 0 ? 64 : 32;
template <int HEAD_DIM>
constexpr Swizzle PATTERN = PANEL<HEAD_DIM> == 64 ? Swizzle::BYTES_128 : Swizzle::BYTES_64;

// Barriers among warps: from each on, one for every consumer warpgroup. The last one's QUERY_NEGATED is barrier 0,
// which
// __syncthreads has used before the roles part.
enum NamedBarrier : int { PINGPONG = 1, OUT_FULL = 5, OUT_EMPTY = 9, QUERY_NEGATED = 13, BARRIERS = 16 };
constexpr int OUT_THREADS = WARPGROUP_THREADS + 32;  // of a consumer, and the warp that stores for it

}  // namespace microsdpa::hopper
