"""Tables of the ladder, from its result file."""

from __future__ import annotations

from typing import Any

from microsdpa.evidence import environment, roofline
from microsdpa.evidence.devices import DEVICES, Device
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.results import Result, Row
from microsdpa.evidence.wording import provenance

HEAD = [
    *("rung", "us", "rung before / this", "best torch / this", "TFLOP/s", "share of the floor"),
    *("registers", "shared KB", "CTAs an SM", "occupancy", "spilled B", "bank conflicts", "tensor instr.", "max error"),
    "L4 by the roofline, not measured: us at least",
]
FIRST_OF_8_BITS = "ladder/08_fp8_scalar"
"""It is no step from the rung before, which has 16 bits."""
EIGHT_BIT_NOTE = (
    "\nRungs from 08 on take E4M3 values with a scale per head. Their errors are those against attention on the"
    " dequantized values, and the time of quantizing is not in theirs. Hopper's `mma.sync` has no E4M3: the compiler"
    " turns QMMA into conversions and HMMA there, so that these times say nothing of Ada.\n"
)
EIGHT_BITS = ("e4m3",)
NOT_RECORDED = "*Not recorded yet: `microsdpa ladder --output benchmarks/results`, on a GPU, writes the result file.*\n"


def columns(rows: list[Row], device: Device | None, best_us: float | None = None) -> list[list[str]]:
    """A header and one line a rung; cells of what a row does not have stay empty."""
    lines = [HEAD]
    times = {row["kernel"]: row.get("median_us") for row in rows}
    for row in rows:
        us, before = row.get("median_us"), times.get(rung_before(row["kernel"], list(times)))
        timed = ["" for _ in range(5)]
        if us is not None:
            limit = roofline.floor(_case(row), device, row["dtype"]) if device else None
            timed = [
                f"{us:.2f}",
                f"{before / us:.2f}x" if before else "",
                f"{best_us / us:.2f}x" if best_us and row["dtype"] not in EIGHT_BITS else "",
                f"{row['tflops']:.1f}",
                f"{limit.warm_us / us:.0%}" if limit else "",
            ]
        elif row.get("status", "ok") != "ok":
            timed[0] = row["status"]
        lines.append([row["kernel"], *timed, *_figures(row)])
    return lines


def rung_before(rung: str, rungs: list[str]) -> str:
    """The one of `rungs` that a rung adds an idea to; empty when there is none."""
    at = rungs.index(rung)
    return rungs[at - 1] if at and rung != FIRST_OF_8_BITS else ""


def _figures(row: Row) -> list[str]:
    found: dict[str, Any] = row.get("figures") or {}
    if not found:
        return [""] * 9
    conflicts = found["bank_conflicts"]
    error = row["error"]["max_abs"] if row.get("error") else found["emulated_error"]
    return [
        str(found["registers"]),
        f"{found['shared_bytes'] / 1024:.1f}",
        f"{found['ctas']} ({found['limit']})",
        f"{found['occupancy']:.0%}",
        str(found["spill_bytes"]),
        "wmma: not modelled" if conflicts is None else f"{conflicts} of {found['bank_wavefronts']:,}",
        _instructions(found),
        f"{error:.1e}",
        f"{found['ada_least_us']:.1f}" if found.get("ada_least_us") else "",
    ]


def _instructions(found: dict[str, Any]) -> str:
    """Of the target, and those for sm_89 where they are others."""
    here, ada = found["tensor_instructions"], found.get("ada_tensor_instructions") or ""
    kinds = [{word for word in words.split() if word.isalpha()} for words in (here, ada)]
    return here if not ada or kinds[0] == kinds[1] else f"{here} (sm_89: {ada})"


def mission(result: Result) -> list[list[str]]:
    """The rungs at the first shape of the file."""
    first = [row for row in result["rows"] if _key(row) == _key(result["rows"][0])]
    device = DEVICES.get(environment.gpu_slug(result["environment"]["gpu"]))
    return columns(_ours(first), device, _best_torch(first))


def shapes(result: Result) -> list[list[str]]:
    """Microseconds of every rung, and of torch's backends, at every shape: one line a shape."""
    kernels = [row["kernel"] for row in _ours(result["rows"])]
    peers = [row["impl"] for row in result["rows"] if row["impl"] != "microsdpa"]
    names = [*dict.fromkeys(kernels), *dict.fromkeys(peers)]
    lines = [["(B, H, S_q, S_k, D)", *names]]
    for key in dict.fromkeys(_key(row) for row in result["rows"]):
        by_name = {row["kernel"] or row["impl"]: row for row in result["rows"] if _key(row) == key}
        cells = [by_name.get(name) for name in names]
        lines.append([key, *(_us(cell) for cell in cells)])
    return lines


def markdown(result: Result, options: dict[str, str], stale: set[str]) -> str:
    """The table that a marker asks for, and where it is from: all rungs, rung=NN with the one before it, table=shapes.

    `stale` names the kernels that have changed since they were measured. A file without the rungs gives a line that
    says so.
    """
    lines = shapes(result) if options.get("table") == "shapes" else mission(result)
    if not _ours(result["rows"]):
        return NOT_RECORDED  # the suite was run with another kernel
    if rung := options.get("rung"):
        at = next((i for i, line in enumerate(lines) if line[0].startswith(f"ladder/{rung}_")), None)
        if at is None:
            return f"*Rung {rung} is not in the recorded run.*\n"
        before = rung_before(lines[at][0], [line[0] for line in lines[1:]])
        lines = [lines[0], *(line for line in lines[1:at] if line[0] == before), lines[at]]
    renamed = [[f"{cell} (stale)" if cell in stale else cell for cell in line] for line in lines]
    ruled = [renamed[0], ["---"] + ["---:"] * (len(renamed[0]) - 1), *renamed[1:]]
    text = "".join(f"| {' | '.join(line)} |\n" for line in ruled)
    has_eight_bits = any(row["dtype"] in EIGHT_BITS for row in _ours(result["rows"]))
    note = EIGHT_BIT_NOTE if has_eight_bits and "rung" not in options else ""
    return f"{text}{note}\n{provenance(result)}"


def _ours(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["impl"] == "microsdpa" and (row["kernel"] or "").startswith("ladder/")]


def _best_torch(rows: list[Row]) -> float | None:
    peers = [row["median_us"] for row in rows if row["impl"] != "microsdpa" and row["median_us"] is not None]
    return min(peers, default=None)


def _us(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['median_us']:.2f}" if row["median_us"] is not None else str(row["status"])


def _key(row: Row) -> str:
    s = row["shape"]
    return f"({s['b']}, {s['h']}, {s['s_q']}, {s['s_k']}, {s['d']}){'' if row['mask'] == 'none' else ', causal'}"


def _case(row: Row) -> Case:
    s = row["shape"]
    mask = None if row["mask"] == "none" else row["mask"]
    return Case(s["b"], s["h"], s["s_q"], s["s_k"], s["d"], heads_kv=s["h_kv"], causal=mask)
