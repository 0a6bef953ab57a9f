"""Numbers of kernels in 32 bits: each that could be too large is explained."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from index_widths import Widths

from compiler_record import key_of, recorded
from microsdpa.jit import nvrtc
from microsdpa.jit.source import KERNELS_DIR, expand
from microsdpa.kernels import KernelSpec, catalogue
from microsdpa.kernels.spec import ONE_LENGTH_PARAMS

HEADS = "heads of all batch entries: more than 2^31 - 2^13 are refused (kernels/spec.py, oversized)"
TILES = "tiles of a launch: more than 2^31 - 1, less the CTAs of a persistent kernel, are refused"
ROWS = "rows of a head, or of heads tiled together, and a tile past them: more than 2^31 - 2^13 are refused"
KEYS = "keys of a head and some tiles past them: at most 2^30, and 2^31 - 2^13 with the queries"
PLACE = "a place in a tile, in a ring of tiles or in a warp: at most some thousands"
ROUNDS = "2^29 query tiles at most, in rounds of a chip's CTAs and one more round for each section of heads"

WORK = "pieces of work: keys are not divided where they are more than 2^31 - 2^20 (kernels/ampere/varlen/spec.py)"
PARTS = "three times the CTAs of a launch at most"
PACKED = "queries or keys, also packed ones: more than 2^29 are refused (call/sequences.py)"

EXPLAINED: tuple[tuple[str, str, str], ...] = (
    # source file or folder, words of the line, what the numbers are and why they fit 32 bits
    ("hopper/common/eight_bit_masks.cuh", "return own * normalizer(sum);", "numbers of the softmax, in FP32"),
    (
        "ampere/varlen/append.cu",
        "const int new_rows = params.new_key",
        "heads of a token: more than 2^31 - 2^20 are refused",
    ),
    ("ampere/varlen/rows.cuh", "head(work.head_kv * pack)", "query heads of a call"),
    ("ampere/varlen/kernel.cu", "", "a unit of the output of a tile of rows: at most some thousands"),
    ("ampere/varlen/kernel.cu", "column = i % UNITS * 4;", PLACE),
    ("ampere/varlen/kernel.cu", "segment.work.part * units_each));", PLACE),
    ("ampere/varlen/source.cuh", "* C::TILE + group * C::BLOCK_N;", PACKED),
    ("ampere/varlen/kernel.cu", "i % UNITS * 4, values, stats);", PLACE),
    ("ampere/varlen/source.cuh", "first_tile = CLUSTER > 1 ? from / C::TILE + work.part", PACKED),
    ("ampere/varlen/rows.cuh", "head_kv = static_cast<int>(blockIdx.y);", "a place in a grid: at most 65,535"),
    ("ampere/varlen/source.cuh", "count = max(0, (end_tile - first_tile + CLUSTER - 1) / CLUSTER);", PACKED),
    ("ampere/varlen/scheduler.cuh", "return extent.row_tiles * heads() * extent.weight;", WORK),
    ("ampere/varlen/scheduler.cuh", "part() * each_);", WORK),
    ("ampere/varlen/scheduler.cuh", "total += count(Extent(params, b));", WORK),
    ("ampere/varlen/scheduler.cuh", "begin_ += count(extent);", WORK),
    ("ampere/varlen/scheduler.cuh", "while (at_ >= begin_ + count(extent)) {", WORK),
    ("ampere/varlen/scheduler.cuh", "unit / heads()) * BLOCK_M;", PACKED),
    ("ampere/varlen/scheduler.cuh", "work.head_kv = work.head_kv * static_cast<int>(gridDim.x)", "key heads of a call"),
    ("ampere/varlen/scheduler.cuh", "work.owner += static_cast<int>(blockIdx.x)", "CTAs of a launch that divides keys"),
    ("ampere/varlen/parts.cuh", "", "a unit of the output of a tile of rows, or parts: CTAs of a launch"),
    ("common/sequence.cuh", "r / PACK + position - params.left) : 0;", PACKED),
    ("common/sequence.cuh", "index - number * params.page_size};", PACKED),
    ("ampere/varlen/shared.cuh", "return 2 * (owner + part) + (part == 0);", "CTAs of a launch that divides keys"),
    ("hopper/common/main_loop.cuh", "", "what a row's place in its group of heads is taken from: at most the row"),
    ("hopper/varlen/consumer.cuh", "owner * C::CONSUMERS + warpgroup", "counters of a launch: 1,024"),
    ("hopper/varlen/consumer.cuh", "first + part * STEP", "CTAs of a launch"),
    ("hopper/varlen/consumer.cuh", "ROWS * warpgroup >= segment.rows", PLACE),
    ("hopper/varlen/consumer.cuh", "weight[part][1] * four[part].z", PLACE),
    ("hopper/varlen/kernel.cu", "consumer(shared, params, warpgroup - 1);", PLACE),
    ("hopper/varlen/loader.cuh", "segments % SEGMENTS", PLACE),
    ("hopper/varlen/loader.cuh", "tile * C::BLOCK_N", PACKED),
    ("hopper/varlen/loader.cuh", "segment.tiles) * C::BLOCK_N > segment.keys", PACKED),
    ("hopper/varlen/scheduler.cuh", "keys = count_all() * params_.heads_kv;", WORK),
    ("hopper/varlen/scheduler.cuh", "at_(static_cast<int>(blockIdx.x) * (numbered_ ? params.each : 1))", WORK),
    ("hopper/varlen/scheduler.cuh", "params.units * params.key_tiles) : params.units * params.parts)", WORK),
    ("hopper/varlen/scheduler.cuh", "(begin + 2 * middle + end) * own.tiles / 4;", "a quarter of WORK at most"),
    ("hopper/varlen/consumer.cuh", "chunk = make_uint4(chunk.x ^ 0x80008000u", PLACE),
    ("hopper/varlen/scheduler.cuh", "at_ * each_)", WORK),
    (
        "hopper/varlen/scheduler.cuh",
        "taken * ((longest + fitting - 1) / fitting",
        "three times the tiles of a sequence",
    ),
    ("hopper/varlen/scheduler.cuh", "first = part * each;", KEYS),
    ("hopper/varlen/scheduler.cuh", "ctas * taken / total_", PARTS),
    ("hopper/varlen/scheduler.cuh", "total_ *= parts;", PARTS),
    ("hopper/varlen/scheduler.cuh", "segment.slot = unit * parts;", PARTS),
    ("hopper/varlen/scheduler.cuh", "share(warp_total(keys)", WORK),
    ("hopper/varlen/shared.cuh", "const int64 place = segment.slot < 0", PARTS),
    ("hopper/varlen/scheduler.cuh", "tiles * part / CLUSTER", "16 times the tiles of a sequence's keys: 2**27"),
    ("hopper/varlen/scheduler.cuh", "first_head * row_tiles.count", WORK),
    ("hopper/varlen/scheduler.cuh", "first_head = section * heads;", WORK),
    ("hopper/varlen/scheduler.cuh", "* params.heads_kv;", WORK),
    ("hopper/varlen/scheduler.cuh", "* params_.heads_kv, sum_", WORK),
    ("hopper/varlen/scheduler.cuh", "keys / total_ * rounds", WORK),
    ("", "heads = params.batch * params.heads;", HEADS),
    ("", "% q_tiles * BLOCK_M;", ROWS),
    ("ampere/general/kernel.cu", "const int heads = call.batch * call.heads;", HEADS),
    ("ampere/general/kernel.cu", "static_cast<int>(blockIdx.x / heads)) * BLOCK_M;", ROWS),
    ("ampere/general/kernel.cu", "const int first_key = tile * BLOCK_N;", KEYS),
    ("ampere/general/kernel.cu", "following = next_tile(tile + 1);", KEYS),
    ("hopper/throughput/list_tiles.cu", "const int left = params.call.seqlen_k - BLOCK_N * tile", KEYS),
    ("hopper/throughput/list_tiles.cu", "first_row = BLOCK_M * query_tile;", ROWS),
    ("hopper/throughput/list_tiles.cu", "begin = ROWS_AT_ONCE * part; begin < stored;", PLACE),
    ("hopper/throughput/list_tiles.cu", "if (begin + turn < last) found = reader", KEYS),
    ("hopper/throughput/list_tiles.cu", "reader.read(static_cast<int>(tile), true);", KEYS),
    ("hopper/throughput/tile_list.cuh", "return (p.masks.mask_strides.batch != 0 ? p.call.batch : 1)", HEADS),
    ("hopper/throughput/tile_list.cuh", "return has_rows(p) ? WORDS * row : 0;", PLACE),
    ("ampere/combine/kernel.cu", "% tiles * BLOCK_M +", ROWS),
    ("ampere/combine/kernel.cu", "% (HEAD_DIM / 4) * 4;", PLACE),
    ("ampere/mma/kernel.cu", "(first_tile + i * WARPS_N) * BLOCK_N;", KEYS),
    ("ampere/mma/kernel.cu", "if (i + STAGES - 1 < count) {", KEYS),
    ("ampere/mma/kernel.cu", "column = i % (HEAD_DIM / 4) * 4;", PLACE),
    ("ampere/stream/kernel.cu", "index / (together * tiles) * together;", TILES),
    ("ampere/stream/kernel.cu", "rest = index - first * tiles;", TILES),
    ("ampere/stream/kernel.cu", "(tiles - 1 - rest / in_group) * BLOCK_M;", ROWS),
    ("ampere/mma/shared.cuh", "(tiles - 1 - index / columns) * BLOCK_M", ROWS),
    ("backward/kernel.cu", "const int by_keys = key_tiles * key_heads, index = blockIdx.x;", TILES),
    ("backward/kernel.cu", "key_heads = call.batch * call.heads_kv;", HEADS),
    ("backward/kernel.cu", "query_heads = call.batch * call.heads;", HEADS),
    ("backward/kernel.cu", "unit = first + warp_row / C::UNIT * C::UNIT", ROWS),
    ("backward/mask.cu", "", ROWS),
    ("backward/rows.cuh", "*reinterpret_cast<Vector<T, Tile::CHUNK>*>(tile.at(row, column)) = chunk;", PLACE),
    ("common/backward_work.cuh", "section = index / (tiles * together)", TILES),
    ("common/dropout.cuh", "key[1] = static_cast<uint32>(seed >> 32)", "words of the generator's state, which wrap"),
    ("hopper/backward/consumer.cuh", "shared.ds_empty[turn % 2], turn / 2 % 2 ^ 1);", ROWS),
    ("hopper/backward/finish.cu", "first_query = tile * BLOCK_M;", ROWS),
    ("hopper/backward/finish.cu", "const float4 found = from[4 * column];", PLACE),
    ("hopper/backward/finish.cu", "sums + part * PART / 4", PLACE),
    ("hopper/backward/finish.cu", "const int column = 8 * block", PLACE),
    ("hopper/backward/finish.cu", "const int row = pair / 8 * 16", PLACE),
    ("hopper/backward/producer.cuh", "", ROWS),
    ("hopper/backward/producer.cuh", "const int head = walk.batch * call.heads + at.head;", HEADS),
    ("hopper/backward/producer.cuh", "+ part * C::PART;", PLACE),
    ("hopper/backward/producer.cuh", "turn < walk.turns", ROWS),
    ("hopper/backward/prepare.cu", "row = tile * BLOCK_M + row_of_tile;", ROWS),
    ("hopper/backward/prepare.cu", "head * params.grad_out_strides.head;", HEADS),
    ("hopper/backward/products.cuh", "of.walk.batch * of.call.heads + at.head,", HEADS),
    ("hopper/backward/products.cuh", "to[i * WARPGROUP_THREADS] = make_float4(", PLACE),
    ("hopper/backward/wide_consumer.cuh", "", ROWS),
    ("hopper/backward/shared.cuh", "call.batch * call.heads_kv, params.key_heads);", HEADS),
    ("hopper/backward/shared.cuh", "first_head = head_kv * group;", HEADS),
    ("hopper/backward/shared.cuh", "tiles = (call.seqlen_q + BLOCK_M - 1) / BLOCK_M;", ROWS),
    ("hopper/backward/shared.cuh", "turns = tiles * group;", ROWS),
    ("backward/kernel.cu", "row = (first_tile + turn % tiles) * C::BLOCK_WALK;", ROWS),
    ("backward/kernel.cu", "const int turns = tiles * group;", ROWS),
    ("backward/kernel.cu", "first = work.tile * C::BLOCK_OWN;", ROWS),
    ("backward/kernel.cu", "head = work.head % heads * (BY_KEYS ? shared_by : 1);", HEADS),
    ("backward/kernel.cu", "turn + 1 < turns", ROWS),
    ("backward/kernel.cu", "turn / C::STAGES % 2);", PLACE),
    ("backward/kernel.cu", "key, of_row.lse, bend[t][n][e]);", ROWS),
    ("backward/mask.cu", "const int key = key_tile * BLOCK;", KEYS),
    ("backward/mask.cu", "const int query = query_tile * BLOCK;", ROWS),
    ("backward/mask.cu", "i < rows * columns; i += C::THREADS", PLACE),
    ("backward/mask.cu", "mask_head * params.grad_mask_strides.head;", TILES),
    ("prologue/rows.cu", "const int head = index % groups * HEADS", HEADS),
    ("prologue/rows.cu", "const int tiles = (call.seqlen_q + POSITIONS - 1)", TILES),
    ("common/async_tile.cuh", "i < ROWS * PER_ROW", PLACE),
    ("common/eight_bit_params.cuh", "head(index % params.heads),", TILES),
    ("common/eight_bit_params.cuh", "(row >> shift) * step;", ROWS),
    ("common/online_softmax.cuh", "float normalizer(float sum)", PLACE),
    ("common/tile_scheduler.cuh", "heads(params.batch * params.heads)", HEADS),
    ("common/tile_scheduler.cuh", "index < heads * q_tiles;", TILES),
    ("common/tile_scheduler.cuh", "index % q_tiles) * BLOCK_M;", ROWS),
    ("common/tile.cuh", "i % PER_ROW * WIDTH;", PLACE),
    ("hopper/throughput_8bit/scores.cuh", "first_row = next.first_row + ROWS * warpgroup;", ROWS),
    ("hopper/throughput_8bit/scores.cuh", "tile = 0, tiles = next.tiles;", ROWS),
    ("hopper/latency/kernel.cu", "work.first_row = BLOCK_M *", ROWS),
    ("hopper/throughput/kernel.cu", "warpgroup - 1);", PLACE),
    ("hopper/throughput_8bit_qk/kernel.cu", "warp / 4 - 1);", PLACE),
    ("hopper/split/shared.cuh", "first_row[i] = ROWS * tile;", ROWS),
    ("hopper/common/tile_scheduler.cuh", "heads(params.batch * params.heads),", HEADS),
    ("hopper/common/tile_scheduler.cuh", "max(ctas / (group * tiles), 1);", TILES),
    ("hopper/common/tile_scheduler.cuh", "most = params.batch * params.heads_kv;", HEADS),
    ("hopper/common/tile_scheduler.cuh", "at_once), most) * group);", HEADS),
    ("hopper/common/tile_scheduler.cuh", "if (heads * tiles <= FEW_ROUNDS * ctas &&", TILES),
    ("hopper/common/tile_scheduler.cuh", "round / rounds * section_heads < heads;", HEADS),
    ("hopper/common/tile_scheduler.cuh", "(section_heads * tiles + ctas - 1) / ctas;", TILES),
    ("hopper/common/tile_scheduler.cuh", "index >= in_section * tiles", TILES),
    ("hopper/common/tile_scheduler.cuh", "section % ctas * (ctas - shift)", "a chip's CTAs, squared"),
    ("hopper/common/tile_scheduler.cuh", "int cta = static_cast<int>(blockIdx.x) / CLUSTER;", "a chip's CTAs, squared"),
    ("hopper/common/tile_scheduler.cuh", "round * ctas >= whole * heads;", ROUNDS),
    ("hopper/common/tile_scheduler.cuh", "round_of_section * ctas +", ROUNDS),
    ("ladder/01_scalar.cu", "const int first_row = tile * BLOCK_M;", ROWS),
    ("ladder/05_warp_roles.cu", "first_key = tile * BLOCK_N;", KEYS),
    ("ladder/06_persistent.cu", "first_key = next * BLOCK_N;", KEYS),
    ("ladder/06_persistent.cu", "(shared, params, warp * WARP_ROWS);", PLACE),
    ("ladder/06_persistent.cu", "named_barrier_sync(EMPTY + stage", PLACE),
    ("ladder/07_tuned.cu", "(i * Shape::KEY_GROUPS + group) * BLOCK_N;", KEYS),
    ("ladder/07_tuned.cu", "% (Shape::HEAD_DIM / COLUMNS) * COLUMNS;", PLACE),
    ("ladder/08_fp8_scalar.cu", "column = i % (HEAD_DIM / 4) * 4;", PLACE),
    ("ladder/08_fp8_scalar.cu", "(rows(row) + column);", ROWS),
    ("ada/mma_8bit/kernel.cu", "(key_scale + 8 * n);", PLACE),
    ("ada/mma_8bit/kernel.cu", "(i * Shape::KEY_GROUPS + group) * BLOCK_N;", KEYS),
    ("ada/mma_8bit/kernel.cu", "index % q_tiles) * S::BLOCK_M;", ROWS),
    ("ada/mma_8bit/kernel.cu", "columns = params.batch * params.heads / PACK;", HEADS),
    ("ada/mma_8bit/kernel.cu", "start_key(i + STAGES);", KEYS),
    ("ladder/12_8bit_persistent.cu", "first_key = next * Shape::BLOCK_N;", KEYS),
    ("ladder/12_8bit_persistent.cu", "named_barrier_sync(EMPTY + stage", PLACE),
    ("ptx/address.cuh", "__cvta_generic_to_shared(pointer)", PLACE),
    ("quantize/fused.cu", "heads_kv = params.batch * params.heads_kv;", HEADS),
    ("quantize/fused.cu", "if (index < blocks(heads_kv * key_tiles)) {", TILES),
    ("quantize/fused.cu", "if (index < heads_kv * parts) {", TILES),
    ("quantize/fused.cu", "index % key_tiles * key_rows;", KEYS),
    ("quantize/fused.cu", "index % parts * params.part_rows;", KEYS),
    ("quantize/fused.cu", "index % query_tiles * params.tile_rows;", ROWS),
    ("quantize/fused.cu", "if (head >= params.batch * params.heads) return;", HEADS),
    ("quantize/fused.cu", "const int first = cluster_rank() * rows_each;", KEYS),
    ("quantize/fused.cu", "const int looked = CLUSTER ? cluster_rank() * rows_each", KEYS),
    ("quantize/fused.cu", "part * rows_each, min((part + 1) * rows_each, rows.count)", KEYS),
)


def _sources() -> Iterator[tuple[str, KernelSpec, str]]:
    """(source, kernel, target): up to four kernels of each source and target, those that differ most.

    Those for calls of one length come beside them.

    A kernel of both targets is that of the first.
    """
    taken: set[str] = set()
    for target in ("sm_90a", "sm_89"):
        specs: dict[str, list[KernelSpec]] = defaultdict(list)
        for spec in catalogue(target):
            specs[spec.source].append(spec)
        for source, found in specs.items():
            step = max(1, len(found) // 4)
            differing = [*found[::step][:4], *(spec for spec in found if spec.params == ONE_LENGTH_PARAMS)]
            chosen = {spec.expression: spec for spec in differing if spec.expression not in taken}
            taken |= chosen.keys()
            yield from ((source, spec, target) for spec in chosen.values())


def _places(spec: KernelSpec, target: str, root: Path = KERNELS_DIR) -> set[tuple[str, str]]:
    """(source file, line) of every number that could outgrow 32 bits."""
    virtual = target.replace("sm_", "compute_")
    ptx = nvrtc.compile_cubin(expand(spec.source, root), spec.source, spec.expression, virtual, spec.flags).code
    return {
        (name, (root / name).read_text().splitlines()[line - 1].strip() if line else "")
        for name, line in Widths(ptx.decode(), os.getcwd()).places()
    }


def _listed(spec: KernelSpec, target: str) -> list[tuple[str, str]]:
    return sorted(_places(spec, target))


def _explains(entry: tuple[str, str, str], place: tuple[str, str]) -> bool:
    words = entry[1] in place[1] if entry[1] else not place[1]  # the compiler gives no line where it merged some
    return place[0].startswith(entry[0]) and words


def test_every_number_that_could_outgrow_32_bits_is_explained() -> None:
    """A line that this names anew: make it 64 bits wide, or refuse what makes it too large, and then explain it."""
    found = (recorded(key_of("widths", spec, target), partial(_listed, spec, target)) for _, spec, target in _sources())
    places = {(name, line) for of_kernel in found for name, line in of_kernel}
    unexplained = sorted(place for place in places if not any(_explains(entry, place) for entry in EXPLAINED))
    assert unexplained == []
    assert [entry[:2] for entry in EXPLAINED if not any(_explains(entry, place) for place in places)] == []


CUTS = [
    ("quantize/fused.cu", "params.key_mean[static_cast<int64>(head) * HEAD_DIM", "params.key_mean[head * HEAD_DIM"),
    ("quantize/fused.cu", "params.quantized_key + static_cast<int64>(head) *", "params.quantized_key + head *"),
    ("common/head.cuh", "params.lse + static_cast<int64>(index) *", "params.lse + index *"),
]


@pytest.mark.parametrize(("source", "wide", "narrow"), CUTS)
def test_a_number_that_is_cut_to_32_bits_is_found(source: str, wide: str, narrow: str, tmp_path: Path) -> None:
    root = tmp_path / "cuda"
    shutil.copytree(KERNELS_DIR, root)
    text = (root / source).read_text()
    assert text.count(wide) == 1
    (root / source).write_text(text.replace(wide, narrow))
    kernel = source if source.endswith(".cu") else "ladder/04_mma_sync.cu"
    spec = next(spec for name, spec, _ in _sources() if name == kernel)
    found = [p for p in _places(spec, "sm_90a", root) if not any(_explains(entry, p) for entry in EXPLAINED)]
    assert any(name == source for name, _ in found)
