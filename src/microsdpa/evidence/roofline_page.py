"""`microsdpa roofline`: the floors of a shape on a device, what is reachable, and where measured kernels stand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from microsdpa.errors import MicrosdpaError
from microsdpa.evidence import environment, results
from microsdpa.evidence.devices import EXP2_PER_CLOCK, Device
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.roofline import ELEMENT_BYTES, Floor, floor, flops, tensor_bytes, visible_scores
from microsdpa.evidence.step import Step
from microsdpa.evidence.timing import ON_DEVICE
from microsdpa.evidence.wording import quoted_us
from microsdpa.jit import compile_kernel
from microsdpa.jit.occupancy import occupancy
from microsdpa.kernels import FAMILIES
from microsdpa.kernels.select import select

ARITHMETIC = ("float16", "e4m3", "int8")
MISSION = Case(1, 8, 512, 512, 64)
TARGETS_US = (16.0, 12.0, 10.0, 8.0, 5.0)
"""What the notes that this project began with set out to reach on an L4, at the headline shape."""

TECHNIQUES: tuple[tuple[str, str, str, float, float], ...] = (
    ("fusion into one kernel", "", "", 3.0, 10.0),
    ("FP8 instead of FP16", "ladder/04_mma_sync", "ladder/11_8bit_cp_async", 1.5, 2.0),
    ("cp.async double buffering", "ladder/02_wmma", "ladder/03_cp_async", 1.1, 1.3),
    ("persistent CTAs", "ladder/05_warp_roles", "ladder/06_persistent", 1.1, 1.4),
    ("swizzle and micro-optimisations", "ladder/06_persistent", "ladder/07_tuned", 1.05, 1.15),
)
"""(technique, rungs without and with it, least and largest gain that the notes predict)."""


def step(case: Case, device: Device, directory: Path) -> Step:
    """Floors by type, then every kernel that the result files of that device have for the case."""
    floors = {name: floor(case, device, name) for name in ARITHMETIC}
    measured = standings(case, device, directory)
    table = [
        ["arithmetic", "products us", "exp2 us", "memory us", "warm floor us", "cold floor us", "warm is bound by"]
    ]
    for name, found in floors.items():
        if found is None:
            table.append([name, f"no tensor-core instruction on {device.name}", *[""] * 5])
            continue
        parts = (found.matmul_us, found.exp2_us, found.dram_us, found.warm_us, found.cold_us)
        table.append([name, *(f"{part:.3f}" for part in parts), found.binding()])
    standing = [["implementation", "mode", "arithmetic", "us", "floor us", "share of the floor"]]
    standing += [
        [m.name, m.mode, m.arithmetic, f"{m.us:.2f}", f"{m.floor_us:.3f}", f"{m.floor_us / m.us:.0%}"] for m in measured
    ]
    sections = [
        ("Kernels, compiled for this device", _kernels(case, device)),
        ("Techniques: what the notes predict, and what their rungs gained", _gains(device, directory)),
        ("Sources", [["figure"], *([source] for source in device.sources)]),
    ]
    if measured:
        sections.insert(0, ("Measured", standing))
    if case == MISSION:
        sections.insert(0, ("What the notes' targets need", _reachable(floors)))
    summary = (
        f"{device.name}: {flops(case) / 1e6:.0f} MFLOP, {visible_scores(case):,} exponentials, "
        f"{tensor_bytes(case) / 2**20:.1f} MiB; {len(measured)} measured rows"
    )
    if not measured:
        summary += f" (no {device.name} was measured at this shape)"
    data = {
        "device": asdict(device),
        "exp2_per_clock": EXP2_PER_CLOCK,
        "floors": {n: asdict(f) | {"warm_us": f.warm_us, "cold_us": f.cold_us} for n, f in floors.items() if f},
        "measured": [asdict(m) for m in measured],
    }
    return Step("roofline", "passed", summary, table, sections, data)


def _reachable(floors: dict[str, Floor | None]) -> list[list[str]]:
    """What each of the notes' targets needs of the device, warm and cold."""
    lines = [["target us", "float16 warm", "float16 cold", "e4m3 warm", "e4m3 cold"]]
    for target in TARGETS_US:
        cells = []
        for name in ("float16", "e4m3"):
            found = floors[name]
            limits = (found.warm_us, found.cold_us) if found else (None, None)
            cells += ["" if limit is None else _needs(limit, target) for limit in limits]
        lines.append([f"{target:g}", *cells])
    return lines


def _needs(limit_us: float, target_us: float) -> str:
    if limit_us > target_us:
        return f"impossible: the floor is {limit_us:.1f}"
    return f"{limit_us / target_us:.0%} of the peak"


def _kernels(case: Case, device: Device) -> list[list[str]]:
    """Registers, shared memory and occupancy of every kernel that computes the case, compiled for the device."""
    lines = [["kernel", "registers", "shared B", "CTAs an SM", "occupancy", "limit", "waves"]]
    problem = case.problem(device.target)
    for family in FAMILIES:
        try:
            spec = select(problem, family.name).spec
            kernel = compile_kernel(spec, device.target)
        except MicrosdpaError as error:
            lines.append([family.name, f"not on {device.target}: {str(error).splitlines()[0]}", *[""] * 5])
            continue
        shared = kernel.resources.shared_bytes + spec.shared_bytes
        found = occupancy(device.target, spec.threads, kernel.resources.registers, shared)
        waves = spec.grid(problem)[0] / max(1, found.ctas * device.multiprocessors)
        lines.append(
            [
                family.name,
                str(kernel.resources.registers),
                f"{shared:,}",
                str(found.ctas),
                f"{found.fraction:.0%}",
                found.limit,
                f"{waves:.2f}",
            ]
        )
    return lines


@dataclass(frozen=True)
class Standing:
    """A measured row beside its floor."""

    name: str
    suite: str
    mode: str
    arithmetic: str
    us: float
    floor_us: float


def standings(case: Case, device: Device, directory: Path) -> list[Standing]:
    """Rows of the device's result files at this case, by mode, fastest first; of two measurements the best."""
    found: dict[tuple[str, str], Standing] = {}
    for path in sorted((directory / device.name).glob("*.json")):
        result = results.read(path)
        for row in result["rows"]:
            if row["status"] != "ok" or row["mode"] not in ON_DEVICE or row["op"] == "empty" or not _same(row, case):
                continue
            arithmetic = row["dtype"] if row["dtype"] in ELEMENT_BYTES else case.dtype
            limit = floor(case, device, arithmetic)
            if limit is None:
                continue
            name = " ".join(filter(None, (row["impl"], row.get("variant", ""), row["kernel"])))
            bound = limit.cold_us if row["mode"] == "cold" else limit.warm_us
            one = Standing(name, result["suite"], row["mode"], arithmetic, quoted_us(row), bound)
            best = found.get((name, row["mode"]))
            if best is None or one.us < best.us:
                found[name, row["mode"]] = one
    return sorted(found.values(), key=lambda one: (one.mode, one.us))


def _same(row: results.Row, case: Case) -> bool:
    expected = results.row(case)
    inputs = row.get("inputs", row["dtype"])
    return bool((row["shape"], row["mask"], inputs) == (expected["shape"], expected["mask"], case.dtype))


def _gains(device: Device, directory: Path) -> list[list[str]]:
    """The notes' table of what each technique should gain, beside what its rung gained over the one before."""
    measured = ladder_times(directory / device.name / "ladder.json")
    lines = [["technique", "predicted", "measured on the ladder"]]
    for technique, without, rung, least, most in TECHNIQUES:
        gain = ""
        if without in measured and rung in measured:
            gain = f"{measured[without] / measured[rung]:.2f}x ({rung} over {without})"
        lines.append([technique, f"{least:g} to {most:g}x", gain or "not measured"])
    return lines


def ladder_times(path: Path) -> dict[str, float]:
    """Microseconds in a graph at the headline shape of every rung of a ladder's result file, in the rungs' order."""
    if not path.is_file():
        return {}
    rows = [row for row in results.read(path)["rows"] if row["mode"] == "graph" and row["status"] == "ok"]
    ours = {row["kernel"]: quoted_us(row) for row in rows if row["impl"] == "microsdpa" and _same(row, MISSION)}
    return {name: ours[name] for name in sorted(ours) if name.startswith("ladder/")}


def default_device() -> str:
    """Name of the GPU at hand, or the mission's."""
    return environment.gpu_slug(environment.gpu_name()) if environment.gpu_name() else "l4"
