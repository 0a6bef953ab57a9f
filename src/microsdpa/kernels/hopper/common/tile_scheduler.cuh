// The order in which the CTAs of a persistent kernel take the query tiles.
#pragma once

#include "../../common/head.cuh"

namespace microsdpa::hopper {

// A query tile of one head.
struct alignas(16) WorkTile {
  int batch;
  int head;
  int first_row;
  int tiles;  // of keys that its rows see; 0: there is no more work
};

// Query tiles whose description is in shared memory at once: those of the ring, the one whose output is being written,
// and one that not all consumers have come to.
constexpr int WORK_TILES = 4;

// Tiles of keys that `rows` queries from `first_row` on see; at least one, so that rows without keys are written too.
template <bool CAUSAL, int BLOCK_N, typename Params>
__device__ __forceinline__ int key_tiles(const Params& params, int first_row, int rows) {
  return max(1, (keys_seen<CAUSAL>(params, first_row, rows) + BLOCK_N - 1) / BLOCK_N);
}

// Which query tiles a CTA computes, in rounds: in each, every CTA gets one.
//
// Without a mask the tiles of a head follow each other, so that CTAs that run at the same time read the same K and V;
// the heads' last tiles, where these have fewer rows, come after all others, to fill the last rounds. Under a causal
// mask they are dealt in sections: of as many heads as leave their keys in L2, or more if all have a CTA for each tile;
// a launch of few rounds is one section, as the longest tiles of two would often come to the same CTAs, unless all
// tiles are about as long. In each the longest tiles come first. Every other round goes through the CTAs backwards, so
// that none always gets the longer tile, and each section begins at another CTA, so that none always is without a tile
// in a section's last round. CLUSTER: CTAs that compute the same query tiles, and stand for one here.
template <bool CAUSAL, int BLOCK_M, int BLOCK_N, int HEAD_DIM, int CLUSTER = 1>
struct Schedule {
  static constexpr int FEW_ROUNDS = CLUSTER > 1 ? 3 : 2;
  static constexpr int SECTION_BYTES = 16 << 20;  // of K and V; an L2 has 50 MB, and keeps some lines twice

  const AttentionParams& params;
  int tiles;          // of a head
  int heads;          // of all batch entries
  int section_heads;  // the last section may have fewer
  int rounds;         // of a section
  int shift;          // CTAs by which a section begins later than the one before

  __device__ __forceinline__ explicit Schedule(const AttentionParams& params)
      : params(params),
        tiles((params.seqlen_q + BLOCK_M - 1) / BLOCK_M),
        heads(params.batch * params.heads),
        section_heads(heads) {
    const int ctas = static_cast<int>(gridDim.x) / CLUSTER;
    if (CAUSAL) {
      constexpr int ROW_BYTES = 2 * HEAD_DIM * 2;  // of K and V
      const int group = params.heads / params.heads_kv, at_once = max(ctas / (group * tiles), 1);
      // No more of them than there are: their query heads fit 32 bits.
      const int most = params.batch * params.heads_kv;
      section_heads = min(heads, min(max(SECTION_BYTES / ROW_BYTES / params.seqlen_k, at_once), most) * group);
      // mutation: the order of tiles changes no result
      if (heads * tiles <= FEW_ROUNDS * ctas && params.seqlen_k / 2 < params.seqlen_q) section_heads = heads;
    }
    rounds = (section_heads * tiles + ctas - 1) / ctas;
    // A round and one backwards make sums alike, but of the CTAs that the last round has no tile for: those move on by
    // as many. A round without its pair leaves sums that fall from CTA to CTA: the sections begin all around them.
    if (rounds == 1) {
      shift = 0;
    } else if (rounds % 2 == 0) {
      shift = rounds * ctas - section_heads * tiles;
    } else {
      shift = ctas / ((heads + section_heads - 1) / section_heads);
    }
  }

  __device__ __forceinline__ bool has(int round) const { return round / rounds * section_heads < heads; }

  // The CTA's query tile of a round; one without tiles of keys when there is none.
  __device__ __forceinline__ WorkTile work(int round) const {
    const int ctas = static_cast<int>(gridDim.x) / CLUSTER;
    const int section = round / rounds, round_of_section = round - section * rounds;
    int cta = static_cast<int>(blockIdx.x) / CLUSTER;
    if (CAUSAL) cta = (cta + section % ctas * (ctas - shift)) % ctas;
    const int first_head = section * section_heads;
    const int in_section = min(section_heads, heads - first_head);
    const int whole = params.seqlen_q / BLOCK_M;  // tiles of a head
    const int turn = rounds > 1 ? round_of_section : round;
    const bool backwards = CAUSAL ? turn % 2 == 1 : round * ctas >= whole * heads;
    const int index = round_of_section * ctas + (backwards ? ctas - 1 - cta : cta);
    if (index >= in_section * tiles) return {0, 0, 0, 0};
    return tile_of(first_head, in_section, index);
  }

  // Query tiles of all heads.
  __device__ __forceinline__ int count() const { return heads * tiles; }

  // One of count(), for CTAs that take the next one when they are done with one: in the order of the sections, the
  // longest tiles first.
  __device__ __forceinline__ WorkTile numbered(int number) const {
    const int section = number / (section_heads * tiles), first_head = section * section_heads;
    return tile_of(first_head, min(section_heads, heads - first_head), number - first_head * tiles);
  }

 private:
  // By its place in a section of `in_section` heads.
  __device__ __forceinline__ WorkTile tile_of(int first_head, int in_section, int index) const {
    const int whole = params.seqlen_q / BLOCK_M;  // tiles of a head
    int head, tile;
    if (CAUSAL) {
      head = first_head + index % in_section, tile = tiles - 1 - index / in_section;
    } else if (index < whole * heads) {
      head = index / whole, tile = index % whole;
    } else {
      head = index - whole * heads, tile = whole;
    }
    const int first_row = tile * BLOCK_M;
    return {head / params.heads, head % params.heads, first_row,
            key_tiles<CAUSAL, BLOCK_N>(params, first_row, BLOCK_M)};
  }
};

}  // namespace microsdpa::hopper
