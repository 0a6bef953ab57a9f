// What hopper/throughput/kernel.cu does beside masks: dropout, and going on from an output of other keys.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/masks.cuh"
#include "../common/tile_scheduler.cuh"
#include "divided.cuh"

namespace microsdpa::hopper::throughput {

// In the place of a call's masks: these, of a call that drops probabilities.
template <typename MASKS>
struct Dropping {
  using Params = Dropped<MaskedParams>;
};

// In the place of a call's masks: these, of a call that goes on from its output, of so many COLUMNS, and its LSE.
template <typename MASKS, int COLUMNS>
struct Continuing {
  using Params = typename MASKS::Params;
};

// In the place of a call's masks: these, of a call in which CTAS CTAs of a cluster share the keys of each query tile
// (divided.cuh). COLUMNS: of the output.
template <typename MASKS, int CTAS, int COLUMNS>
struct Dividing {
  using Params = typename MASKS::Params;
};

// Drops nothing.
struct DropsNothing {
  static constexpr bool ANY = false;
  template <typename P>
  __device__ __forceinline__ explicit DropsNothing(const P&) {}
};

// Drops probabilities of a consumer's rows.
struct Drops {
  static constexpr bool ANY = true;

  const Philox philox;
  const KeptNumbers keeps;
  const float scale;  // of what is kept
  int head;           // of all, of the query tile
  int row;            // this lane's first one of it

  __device__ __forceinline__ explicit Drops(const Dropped<MaskedParams>& given)
      : philox(Philox(given.dropout).of_warp()), keeps(given.dropout.kept), scale(given.dropout.scale) {}

  __device__ __forceinline__ void begin(const WorkTile& work, int heads, int tile_row) {
    head = work.batch * heads + work.head, row = work.first_row + tile_row;
  }
  template <int STEPS>
  __device__ __forceinline__ void operator()(uint32 (&p)[STEPS][4], int first_key) const {
    drop_operands(p, philox, keeps, head, row, first_key);
  }
};

// What a kernel makes of the type in the place of its masks: the masks themselves and their parameter, what drops, the
// columns of O that are those of other keys before, 0 for none, and how CTAs share keys.
template <typename MASKS>
struct PoliciesOf {
  static constexpr int CONTINUES = 0;
  using Division = Undivided;
  using Masks = MASKS;
  using Drop = DropsNothing;
  __device__ __forceinline__ static const typename MASKS::Params& masked(const typename MASKS::Params& given) {
    return given;
  }
};
template <typename MASKS>
struct PoliciesOf<Dropping<MASKS>> {
  static constexpr int CONTINUES = 0;
  using Division = Undivided;
  using Masks = MASKS;
  using Drop = Drops;
  __device__ __forceinline__ static const typename MASKS::Params& masked(const Dropped<MaskedParams>& given) {
    if constexpr (MASKS::ANY) {
      return given.call;
    } else {
      return given.call.call;
    }
  }
};
template <typename MASKS, int COLUMNS>
struct PoliciesOf<Continuing<MASKS, COLUMNS>> : PoliciesOf<MASKS> {
  static constexpr int CONTINUES = COLUMNS;
};
template <typename MASKS, int CTAS, int COLUMNS>
struct PoliciesOf<Dividing<MASKS, CTAS, COLUMNS>> : PoliciesOf<MASKS> {
  static_assert(!MASKS::ANY, "tiles of keys that masks leave are not divided");
  using Division = DividedKeys<CTAS, COLUMNS>;
};

}  // namespace microsdpa::hopper::throughput
