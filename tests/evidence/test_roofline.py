from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import results, roofline, roofline_page
from microsdpa.evidence.devices import DEVICES, EXP2_PER_CLOCK, named
from microsdpa.evidence.inputs import Case
from microsdpa_cli import app as cli

MISSION = Case(1, 8, 512, 512, 64)


def test_the_mission_on_an_l4_is_what_the_design_says() -> None:
    assert roofline.flops(MISSION) == 536_870_912
    assert roofline.tensor_bytes(MISSION) == 2 * 2**20
    half = roofline.floor(MISSION, named("l4"))
    eight = roofline.floor(MISSION, named("l4"), "e4m3")
    assert half is not None
    assert eight is not None
    assert half.warm_us == pytest.approx(4.4, abs=0.05)
    assert half.cold_us == pytest.approx(7.0, abs=0.05)
    assert eight.warm_us == pytest.approx(2.2, abs=0.05)
    assert eight.cold_us == pytest.approx(3.5, abs=0.05)
    assert half.binding() == "matrix products"
    assert half.binding(cold=True) == "memory"


def test_exp2_bounds_as_much_as_the_tensor_cores_at_64_on_hopper() -> None:
    floor = roofline.floor(Case(1, 32, 4096, 4096, 64), named("h200"))
    assert floor is not None
    assert floor.exp2_us == pytest.approx(floor.matmul_us, rel=0.01)
    eight = roofline.floor(Case(1, 32, 4096, 4096, 64), named("h200"), "e4m3")
    assert eight is not None
    assert eight.binding() == "exp2"


def test_peaks_are_what_the_clock_and_the_units_give() -> None:
    """Hopper's SM does 4096 dense FP16 operations a clock, Ada's and Ampere's 1024 and 2048."""
    for name, operations in (("h100", 4096), ("h200", 4096), ("a100", 2048), ("l4", 1024), ("rtx4090", 512)):
        device = named(name)
        peak = device.multiprocessors * operations * device.boost_mhz * 1e6 / 1e12
        assert device.peak("float16") == pytest.approx(peak, rel=0.01)
        assert device.sources
    assert EXP2_PER_CLOCK == 16


def test_a_causal_call_needs_its_visible_scores_and_is_quoted_with_half_of_all() -> None:
    assert roofline.visible_scores(Case(1, 1, 4, 4, 64, causal="upper_left")) == 1 + 2 + 3 + 4
    assert roofline.visible_scores(Case(1, 1, 2, 4, 64, causal="lower_right")) == 3 + 4
    assert roofline.visible_scores(Case(1, 1, 4, 2, 64, causal="lower_right")) == 0 + 0 + 1 + 2
    assert roofline.visible_scores(Case(2, 3, 4, 5, 64)) == 2 * 3 * 4 * 5
    assert roofline.flops(Case(1, 1, 4, 4, 64, causal="upper_left")) == 4 * 8 * 64


def test_what_a_tensor_core_does_not_have_has_no_floor() -> None:
    assert roofline.floor(MISSION, named("a100"), "e4m3") is None
    assert DEVICES["a100"].peak("bfloat16") == DEVICES["a100"].peak("float16")


def test_an_unknown_device_names_the_known() -> None:
    with pytest.raises(InvalidArgument, match="one of h200, h100, a100, l4, rtx4090, got 't4'"):
        named("t4")


def test_the_page_of_a_device_that_was_never_measured_says_so(tmp_path: Path) -> None:
    step = roofline_page.step(MISSION, named("l4"), tmp_path)
    assert "no l4 was measured" in step.summary
    sections = dict(step.sections)
    targets = {line[0]: line for line in sections["What the notes' targets need"]}
    assert targets["5"][1:3] == ["89% of the peak", "impossible: the floor is 7.0"]
    kernels = {line[0]: line for line in sections["Kernels, compiled for this device"]}
    assert int(kernels["ladder/01_scalar"][1]) > 16
    assert all(line[2] == "not measured" for line in list(sections.values())[2][1:])
    assert "Measured" not in sections
    assert step.data["floors"]["float16"]["warm_us"] == pytest.approx(4.437, abs=0.001)


def test_measured_rows_stand_beside_their_floor_and_rungs_beside_their_prediction(tmp_path: Path) -> None:
    def row(kernel: str, median: float, **fields: object) -> results.Row:
        ours = {"impl": "microsdpa", "kernel": kernel, "median_us": median, "min_us": median, "samples_us": [median]}
        return results.row(MISSION, **(ours | fields))

    rows = [row("ladder/02_wmma", 12.0), row("ladder/03_cp_async", 8.0), row("", 2.0, impl="empty kernel", op="empty")]
    for suite, found in (("ladder", rows), ("mission", [*rows, row("ladder/03_cp_async", 9.0)])):
        made = results.make(suite, "microsdpa bench", found)
        made["environment"] = made["environment"] | {"gpu": "NVIDIA H200"}
        results.write(made | {"checksum": results.checksum(made)}, tmp_path)
    step = roofline_page.step(MISSION, named("h200"), tmp_path)
    measured = dict(step.sections)["Measured"]
    assert [line[0] for line in measured[1:]] == ["microsdpa ladder/03_cp_async", "microsdpa ladder/02_wmma"]
    assert measured[1][3:] == ["8.00", "0.543", "7%"]
    gains = {
        line[0]: line[2]
        for line in dict(step.sections)["Techniques: what the notes predict, and what their rungs gained"]
    }
    assert gains["cp.async double buffering"] == "1.50x (ladder/03_cp_async over ladder/02_wmma)"


def test_the_command(tmp_path: Path) -> None:
    shape = ["--shape", "1,32,8,4096,4096,128", "--causal", "upper_left", "--results", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["roofline", "--device", "a100", *shape])
    assert result.exit_code == 0, result.output
    assert "no tensor-core instruction on a100" in result.stdout
    assert "targets" not in result.stdout
    unknown = CliRunner().invoke(cli.app, ["roofline", "--device", "t4"])
    assert isinstance(unknown.exception, InvalidArgument)
