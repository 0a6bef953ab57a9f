"""The pictures of the kernels' schedules, docs/schedules/*.svg, drawn from the table below.

    python .ci/schedules.py          # draws them
    python .ci/schedules.py --check  # fails if a picture is not what the table says, or a kernel's page has not one
                                     # picture in at most 150 lines

Time runs to the right. A label that does not fit its block is an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

MOST_LINES = 150
FOLDER = Path(__file__).resolve().parents[1] / "docs/schedules"
WIDTH, LEFT, LANE, GAP, LETTER = 560, 104, 24, 5, 6.9
KINDS = {
    "copy": ("#8ec5ee", "copies"),
    "product": ("#f5b942", "products"),
    "softmax": ("#6fcfae", "exponentials"),
    "exchange": ("#e3a8cb", "exchange"),
    "store": ("#c4c4c4", "stores"),
    "other": ("#e8e4a0", "other work"),
    "wait": ("none", "waits"),
}
STYLE = """text{font:11px system-ui,-apple-system,Segoe UI,Roboto,sans-serif}.paper{fill:#fff}.out{fill:#222}
.in{fill:#111}
.wait{stroke:#888;stroke-dasharray:3 2}.in.wait-text{fill:#555}.axis{stroke:#999}
@media (prefers-color-scheme:dark){.paper{fill:#1e2129}.out{fill:#ddd}.in.wait-text{fill:#bbb}}"""

Block = tuple[float, float, str, str]
"""(start, end, kind, label)"""


@dataclass(frozen=True)
class Schedule:
    """A picture: its caption, its lanes from top to bottom, and what the axis says."""

    caption: str
    lanes: dict[str, list[Block]]
    axis: str = "time, schematic"


def turns(first: float, period: float, count: int, *blocks: tuple[float, float, str, str]) -> list[Block]:
    """Blocks (offset, length, kind, label) once each turn; {j} and {k} in a label are the turn and the next one."""
    return [
        (first + turn * period + at, first + turn * period + at + long, kind, label.format(j=turn, k=turn + 1))
        for turn in range(count)
        for at, long, kind, label in blocks
    ]


SPLIT_TURNS: list[Block] = [
    *turns(12, 22, 3, (0, 10, "product", "S{k} PV"), (10, 11, "softmax", "P{k}")),
    (78, 90, "exchange", "combine"),
    (90, 98, "store", "O"),
]
SCHEDULES = {
    "hopper-latency": Schedule(
        "hopper/latency: one CTA of a pair, two tiles of 64 keys per warpgroup",
        {
            "one thread": [(0, 370, "copy", "Q, K, V")],
            "warpgroup 1": [
                (370, 570, "wait", "Q, K"),
                (570, 770, "product", "S0"),
                (770, 845, "softmax", ""),
                (845, 1235, "softmax", "P0"),
                (1235, 1450, "softmax", "peer"),
                (1450, 1620, "product", "P V"),
                (1620, 1760, "exchange", "send"),
                (1760, 1850, "softmax", "P1"),
                (1850, 2015, "exchange", "sums"),
                (2015, 2125, "wait", ""),
                (2125, 2265, "store", "O"),
            ],
            "warpgroup 2": [
                (370, 580, "wait", "Q, K"),
                (580, 800, "product", "S0"),
                (800, 865, "softmax", ""),
                (865, 1315, "softmax", "P0"),
                (1315, 1535, "softmax", "peer"),
                (1535, 1680, "product", "P V"),
                (1680, 1790, "exchange", ""),
                (1790, 1875, "softmax", "P1"),
                (1875, 2030, "exchange", "sums"),
                (2030, 2155, "wait", ""),
                (2155, 2305, "store", "O"),
            ],
            "the other CTA": [(1760, 2125, "exchange", "its rows"), (2125, 2305, "store", "O")],
        },
        "2.3 us since a warpgroup's first instruction; to scale",
    ),
    "hopper-throughput": Schedule(
        "hopper/throughput: two consumers of 64 queries, D = 128",
        {
            "one thread": turns(0, 26, 4, (0, 24, "copy", "K{k}, V{k}")),
            "1: wgmma": turns(0, 26, 4, (0, 5.1, "product", "S{k}"), (5.1, 5.1, "product", "PV{j}")),
            "1: ex2": turns(0, 26, 4, (5.5, 14, "softmax", "P{k}")),
            "2: wgmma": turns(0, 26, 4, (10.2, 5.1, "product", "S{k}"), (15.3, 5.1, "product", "PV{j}")),
            "2: ex2": turns(0, 26, 3, (15.7, 14, "softmax", "P{k}")),
            "storing warp": [(60, 84, "store", "the last O")],
        },
        "tiles of 128 keys; 2,600 clocks each",
    ),
    "causal-schedule": Schedule(
        "hopper/throughput, causal: 4 CTAs, heads a and b with 4 query tiles each",
        {
            "CTA 0": [(0, 40, "product", "a, tile 3"), (40, 50, "softmax", "b, 0")],
            "CTA 1": [(0, 40, "product", "b, tile 3"), (40, 50, "softmax", "a, 0")],
            "CTA 2": [(0, 30, "product", "a, tile 2"), (30, 50, "softmax", "b, tile 1")],
            "CTA 3": [(0, 30, "product", "b, tile 2"), (30, 50, "softmax", "a, tile 1")],
        },
        "the first round, and the second one backwards: 5 tiles of keys each",
    ),
    "hopper-split": Schedule(
        "hopper/split: two tiles of queries, a and b, and two parts of the keys",
        {
            "one thread": [(0, 70, "copy", "K and V of both parts, in the order of need")],
            **dict.fromkeys(("a, keys 0 2 4", "a, keys 1 3 5", "b, keys 0 2 4", "b, keys 1 3 5"), SPLIT_TURNS),
        },
        "a turn takes 2,150 clocks: 1,000 for S, 1,100 for the exponentials",
    ),
    "hopper-varlen": Schedule(
        "hopper/varlen: two segments of a CTA, one after the other",
        {
            "describe": [(0, 14, "other", "segment 1"), (30, 44, "other", "segment 2")],
            "queries": [(14, 28, "copy", "Q 1"), (44, 58, "copy", "Q 2")],
            "keys, values": [(14, 52, "copy", "K, V by pages, 1"), (52, 92, "copy", "K, V by pages, 2")],
            "zeros": [(46, 54, "other", "end"), (86, 94, "other", "end")],
            "consumer 1": [
                (28, 37, "product", "S PV"),
                (37, 46, "softmax", "P"),
                (46, 55, "product", "S PV"),
                (55, 64, "softmax", "P"),
                (64, 73, "product", "S PV"),
                (73, 82, "softmax", "P"),
                (82, 91, "product", "S PV"),
                (91, 100, "store", "O"),
            ],
            "consumer 2": [
                (37, 46, "product", "S PV"),
                (46, 55, "softmax", "P"),
                (55, 64, "product", "S PV"),
                (64, 73, "softmax", "P"),
                (73, 82, "product", "S PV"),
                (82, 91, "softmax", "P"),
                (91, 100, "product", "S PV"),
            ],
        },
    ),
    "hopper-8bit": Schedule(
        "hopper/throughput_8bit: two consumers that take turns, D = 128",
        {
            "one thread": turns(0, 24, 4, (0, 22, "copy", "K{k}, V{k}")),
            "warps 1 and 2": turns(8, 24, 3, (0, 16, "other", "V{k} to V^T")),
            "consumer 1": turns(
                0, 24, 4, (0, 6, "product", "S{k}"), (6, 6, "product", "PV{j}"), (12, 12, "softmax", "P{k}, O +=")
            ),
            "consumer 2": turns(
                12, 24, 3, (0, 6, "product", "S{k}"), (6, 6, "product", "PV{j}"), (12, 12, "softmax", "P{k}, O +=")
            ),
        },
        "tiles of 128 keys; 2,300 clocks each",
    ),
    "hopper-backward": Schedule(
        "hopper/backward: two consumers, which each own 64 keys",
        {
            "one warp": [(0, 12, "copy", "K, V"), *turns(12, 44, 2, (0, 40, "copy", "Q{k}, dO{k}, LSE{k}, D{k}"))],
            "consumer 1": turns(
                12,
                44,
                2,
                (0, 7, "product", "S dP"),
                (7, 8, "softmax", "P{j}"),
                (15, 8, "softmax", "dS{j}"),
                (23, 14, "product", "dV dQ dK"),
                (37, 7, "store", "dQ"),
            ),
            "consumer 2": [
                *turns(
                    34,
                    44,
                    1,
                    (0, 7, "product", "S dP"),
                    (7, 8, "softmax", "P0"),
                    (15, 8, "softmax", "dS0"),
                    (23, 14, "product", "dV dQ dK"),
                    (37, 7, "store", "dQ"),
                ),
                (78, 85, "product", "S dP"),
                (85, 93, "softmax", "P1"),
                (93, 100, "softmax", "dS1"),
            ],
            "two warps": [(56, 68, "store", "dQ +="), (78, 90, "store", "dQ +=")],
        },
        "dQ is that of the tile before",
    ),
    "backward": Schedule(
        "backward: a CTA that owns keys, and a CTA that owns queries",
        {
            "cp.async, TMA": turns(0, 32, 3, (0, 28, "copy", "Q{j}, dO{j}")),
            "owns K, V": turns(
                6,
                32,
                3,
                (0, 11, "product", "S dP"),
                (11, 8, "softmax", "P dS"),
                (19, 11, "product", "dV dK"),
            ),
            "cp.async, TMA ": turns(0, 32, 3, (0, 28, "copy", "K{j}, V{j}")),
            "owns Q, dO": turns(
                6,
                32,
                3,
                (0, 11, "product", "S dP"),
                (11, 8, "softmax", "P dS"),
                (19, 9, "product", "dQ"),
            ),
        },
    ),
    "ampere-mma": Schedule(
        "ampere/mma: a CTA of two groups of warps; each has every second tile of keys",
        {
            "cp.async, 0": turns(0, 22, 3, (0, 20, "copy", "K, V")),
            "group 0": turns(12, 22, 3, (0, 7, "product", "S"), (7, 8, "softmax", "P"), (15, 7, "product", "PV")),
            "cp.async, 1": turns(0, 22, 3, (0, 20, "copy", "K, V")),
            "group 1": turns(12, 22, 3, (0, 7, "product", "S"), (7, 8, "softmax", "P"), (15, 7, "product", "PV")),
            "both": [(78, 90, "exchange", "combine"), (90, 98, "store", "O")],
        },
    ),
    "ampere-stream": Schedule(
        "ampere/stream: two warps of a scheduler, which drift apart",
        {
            "cp.async": turns(0, 30, 3, (0, 28, "copy", "K{k}, V{k}")),
            "warp 0": turns(
                4, 30, 3, (0, 9, "product", "S{j}"), (9, 10, "softmax", "P{j}"), (19, 11, "product", "PV{j}")
            ),
            "warp 1": turns(
                16, 30, 2, (0, 9, "product", "S{j}"), (9, 10, "softmax", "P{j}"), (19, 11, "product", "PV{j}")
            ),
        },
        "no branch between S and P V, so that units overlap",
    ),
    "ampere-general": Schedule(
        "ampere/general: one warp with a mask tensor",
        {
            "cp.async": turns(0, 32, 3, (0, 28, "copy", "K{k}, V{k}")),
            "mask, lanes": turns(4, 32, 3, (0, 20, "copy", "mask of {k}")),
            "warp": turns(
                4, 32, 3, (0, 8, "product", "S{j}"), (8, 13, "softmax", "mask, P{j}"), (21, 9, "product", "PV{j}")
            ),
        },
        "a tile that the mask hides from a warp costs it no product",
    ),
    "ampere-varlen": Schedule(
        "ampere/varlen: two CTAs share the keys of a long sequence",
        {
            "CTA 0: pages": turns(0, 20, 3, (0, 12, "other", "page")),
            "cp.async": turns(12, 20, 3, (0, 18, "copy", "K, V")),
            "warps": [*turns(24, 18, 2, (0, 16, "product", "S P PV")), (60, 74, "exchange", "part")],
            "CTA 1: pages": turns(4, 20, 3, (0, 12, "other", "page")),
            "cp.async ": turns(16, 20, 3, (0, 18, "copy", "K, V")),
            "warps ": [
                *turns(28, 18, 2, (0, 16, "product", "S P PV")),
                (64, 78, "exchange", "part"),
                (78, 92, "exchange", "combine"),
                (92, 99, "store", "O"),
            ],
        },
        "the CTA that is ready last combines the parts, in their order",
    ),
    "ada-8bit": Schedule(
        "ada/mma_8bit: one group of warps; K and V are waited for apart",
        {
            "cp.async, K": turns(0, 28, 3, (0, 24, "copy", "K{j}")),
            "cp.async, V": turns(12, 28, 3, (0, 24, "copy", "V{j}")),
            "group": [
                *turns(6, 28, 3, (0, 9, "product", "S{j}"), (9, 10, "softmax", "P{j}"), (19, 9, "product", "PV{j}")),
                (90, 99, "store", "O"),
            ],
        },
        "groups have every second tile, and are combined at the end",
    ),
    "quantize": Schedule(
        "quantize: CTAs of K with its mean, of V, and of Q, in one launch",
        {
            "K": [
                (0, 34, "copy", "read the head"),
                (34, 50, "exchange", "mean"),
                (50, 88, "other", "rotate, scale, encode"),
            ],
            "V": [(0, 34, "copy", "read the head"), (34, 50, "exchange", "scales"), (50, 74, "other", "encode")],
            "Q": [(8, 22, "copy", "rows"), (22, 62, "other", "rotate, scale, encode")],
        },
    ),
}


def drawn(schedule: Schedule) -> str:
    """The picture as SVG; raises ValueError where a label does not fit or blocks of a lane overlap."""
    end = max(block[1] for blocks in schedule.lanes.values() for block in blocks)
    scale = (WIDTH - LEFT - 4) / end
    kinds = [kind for kind in KINDS if any(b[2] == kind for blocks in schedule.lanes.values() for b in blocks)]
    top, body = 24, []
    for number, (lane, blocks) in enumerate(schedule.lanes.items()):
        y = top + number * (LANE + GAP)
        body.append(f'<text class="out" x="{LEFT - 6}" y="{y + 16}" text-anchor="end">{escape(lane.strip())}</text>')
        last = 0.0
        for start, stop, kind, label in sorted(blocks):
            x, width = LEFT + start * scale, (stop - start) * scale
            if len(label) * LETTER > width + 2 or start < last - 1e-9:
                raise ValueError(
                    f"{schedule.caption}: {lane}: {label!r} at {start} needs {len(label) * LETTER:.0f}"
                    f" of {width:.0f}, and the block before ends at {last}"
                )
            last = stop
            dashed = ' class="wait"' if kind == "wait" else ""
            fill = KINDS[kind][0]
            body.append(
                f'<rect{dashed} x="{x + 0.5:.1f}" y="{y}" width="{width - 1:.1f}" height="{LANE}" rx="2" '
                f'fill="{fill}"/>'
            )
            if label:
                text = "in wait-text" if kind == "wait" else "in"
                body.append(
                    f'<text class="{text}" x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle">'
                    f"{escape(label)}</text>"
                )
    y = top + len(schedule.lanes) * (LANE + GAP) + 4
    body.append(f'<path class="axis" d="M{LEFT} {y}H{WIDTH - 4}m-6 -3l6 3l-6 3" fill="none"/>')
    body.append(f'<text class="out" x="{LEFT}" y="{y + 15}">{escape(schedule.axis)}</text>')
    x, y = LEFT, y + 25
    for kind in kinds:
        fill, name = KINDS[kind]
        dashed = ' class="wait"' if kind == "wait" else ""
        body.append(f'<rect{dashed} x="{x}" y="{y}" width="12" height="12" rx="2" fill="{fill}"/>')
        body.append(f'<text class="out" x="{x + 16}" y="{y + 10}">{name}</text>')
        x += round(16 + len(name) * LETTER + 8)
    height = y + 18
    title = escape(schedule.caption)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{1.3 * WIDTH:.0f}"'
        f' role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
        f'<text class="out" x="4" y="14" font-weight="600">{title}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def faults_of_pages() -> list[str]:
    """What is wrong with the pages of the kernels, docs/NAME.md for each picture."""
    faults = []
    for name in SCHEDULES:
        text = (FOLDER.parent / f"{name}.md").read_text(encoding="utf-8")
        if text.count("](schedules/") != 1 or f"](schedules/{name}.svg)" not in text:
            faults.append(f"docs/{name}.md does not show schedules/{name}.svg, and no other schedule, once")
        if text.count("\n") > MOST_LINES:
            faults.append(f"docs/{name}.md has {text.count(chr(10))} lines, at most {MOST_LINES}: logs go to docs/log")
    return faults


def main(arguments: list[str]) -> int:
    """Draws, or compares; 1 if a picture is not what the table says, or a page of a kernel is not as it should be."""
    wanted = {f"{name}.svg": drawn(schedule) for name, schedule in SCHEDULES.items()}
    if arguments == ["--check"]:
        found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        faults = [f"docs/schedules/{name} is not what .ci/schedules.py draws: run it" for name in wrong]
        faults += faults_of_pages()
        print("\n".join(faults), end="\n" if faults else "")
        return int(bool(faults))
    FOLDER.mkdir(exist_ok=True)
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
