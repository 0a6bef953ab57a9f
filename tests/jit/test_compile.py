from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from compiled import VERIFIED, VERIFIED_TARGET, check_that_they_fit

from microsdpa.errors import CompileError
from microsdpa.jit import compile_kernel, is_compiled, nvrtc
from microsdpa.jit.cache import keep_failed_source
from microsdpa.jit.inspect import (
    Resources,
    count_instructions,
    disassemble,
    resources_from_cubin,
    resources_from_log,
    tensor_instructions,
)
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import FAMILIES, KernelSpec, catalogue
from microsdpa.runtime import launcher

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_120")
PARTS = 4
NAMES = {target: Counter(spec.name for spec in catalogue(target)) for target in TARGETS}
"""How many kernels each family has in a target's catalogue."""


def test_every_family_is_compiled() -> None:
    assert {spec.name for target in TARGETS for spec in catalogue(target)} >= {family.name for family in FAMILIES}


def in_turn(target: str) -> list[KernelSpec]:
    """Of each family's kernels those whose turn it is on `target`, every third one where no other target has them.

    A catalogue asks every target for nearly the same problems in one order, so most of them are compiled for one.
    `microsdpa compile` compiles every kernel for every target, and refuses what spills.
    """
    homes = {family: [at for at in TARGETS if family in NAMES[at]] for family in NAMES[target]}
    homes |= {family: [*found, "none", "none"] for family, found in homes.items() if len(found) == 1}
    seen: Counter[str] = Counter()
    specs = []
    for spec in catalogue(target):
        if target == VERIFIED_TARGET and spec.name in VERIFIED:
            continue
        at, home = seen[spec.name], homes[spec.name]
        seen[spec.name] += 1
        # The turn moves on in each round: a target meets both dtypes and every mask, not the same of them again.
        if (at + at // len(home) + at // 8) % len(home) == home.index(target) or NAMES[target][spec.name] < len(home):
            specs.append(spec)
    return specs


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_its_turn_at_every_family_and_dtype(target: str) -> None:
    specs = in_turn(target)
    elsewhere = VERIFIED if target == VERIFIED_TARGET else set()
    assert {spec.name for spec in specs} == set(NAMES[target]) - elsewhere
    for family in {"ampere/mma", "ampere/varlen"} - elsewhere:
        assert {dict(spec.template_args)["T"] for spec in specs if spec.name == family} == {"__half", "__nv_bfloat16"}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit_the_chip(target: str, part: int) -> None:
    check_that_they_fit(in_turn(target)[part::PARTS], target)


@pytest.mark.parametrize("target", TARGETS)
def test_sass_is_counted_and_rung_01_has_no_tensor_instruction(target: str) -> None:
    spec = next(spec for spec in catalogue(target) if spec.name == "ladder/01_scalar")
    counts = count_instructions(compile_kernel(spec, target).cubin)
    assert counts["FFMA"] >= 100
    assert counts["MUFU"] >= 4
    assert counts["BAR"] >= 2
    assert counts["LDS"] >= 8
    assert counts["STL"] == counts["LDL"] == 0
    assert tensor_instructions(counts) == {}


def test_counts_agree_with_the_disassembly(spec: KernelSpec) -> None:
    cubin = compile_kernel(spec, "sm_89").cubin
    text = disassemble(cubin)
    counts = count_instructions(cubin)
    assert counts["FFMA"] == len(re.findall(r"\bFFMA\b", text))
    assert counts.total() == text.count(";\n")  # one semicolon an instruction


def test_tensor_instructions_are_found_where_there_are_some(tmp_path: Path) -> None:
    source = """
        extern "C" __global__ void probe(float* out, const unsigned* in) {
          float d[4] = {};
          asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
                       "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]));
          out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
        }
        template <int> __global__ void unused();
    """
    cubin = nvrtc.compile_cubin(source, "probe.cu", "probe", "sm_89", ("-std=c++17",))
    assert tensor_instructions(count_instructions(cubin.code)) == {"HMMA": 1}


def test_a_kernel_that_spills_is_refused_unless_its_spec_says_why(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spilled = Resources(255, 0, 64, 32, 32)
    monkeypatch.setattr("microsdpa.jit.build.resources_from_log", lambda log: spilled)
    with pytest.raises(CompileError, match="64 bytes of stack, 32 of spill stores") as caught:
        compile_kernel(spec, "sm_89", tmp_path / "a")
    assert caught.value.source is not None
    assert "rung_01" in Path(caught.value.source).read_text()
    excused = dataclasses.replace(spec, local_memory="a test")
    assert compile_kernel(excused, "sm_89", tmp_path / "b").resources == spilled


def test_a_call_runs_a_kernel_that_spills_and_says_so_once(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microsdpa.jit.build.resources_from_log", lambda log: Resources(255, 0, 8, 4, 4))
    monkeypatch.setattr("microsdpa.jit.build._memory", {})
    monkeypatch.setattr(launcher, "_kernels", {})
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "microsdpa"):
        for _ in range(2):
            assert launcher._compiled(spec, "sm_89").resources.uses_local_memory
    (line,) = (record.message for record in caplog.records)
    assert "uses local memory (8 bytes of stack" in line
    assert "results are right" in line
    with pytest.raises(CompileError, match="its spec does not say why it may"):
        compile_kernel(spec, "sm_89")


def test_a_compile_error_holds_the_log_and_the_source(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cu").write_text("__global__ void broken() { int x = undeclared; }\n")
    monkeypatch.setattr("microsdpa.jit.signature.expand", lambda source: expand_from(tmp_path, source))
    monkeypatch.setattr("microsdpa.jit.build.expand", lambda source: expand_from(tmp_path, source))
    broken = dataclasses.replace(spec, source="broken.cu", template="broken", template_args=(("N", "1"),))
    with pytest.raises(CompileError, match="NVRTC refused broken<1> for sm_89") as caught:
        compile_kernel(broken, "sm_89", tmp_path / "cache")
    assert '"undeclared" is undefined' in caught.value.log
    assert "broken.cu(1)" in caught.value.log  # the original file and line, not the expanded ones
    assert caught.value.source is not None
    assert "undeclared" in Path(caught.value.source).read_text()


def test_a_source_that_fails_again_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = keep_failed_source("one")
    assert first == keep_failed_source("one") != keep_failed_source("two")
    assert len(list(tmp_path.iterdir())) == 2
    assert first is not None
    Path(first).unlink()
    again = keep_failed_source("one")
    assert again is not None
    assert Path(again).read_text() == "one"


def expand_from(root: Path, source: str) -> str:
    from microsdpa.jit import source as sources

    return sources.expand(source, root)


def test_a_target_that_nvrtc_does_not_know_is_named(spec: KernelSpec, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"generates no code for sm_70 \(it does for .*sm_89") as caught:
        compile_kernel(spec, "sm_70", tmp_path)
    assert caught.value.source is None  # nothing is wrong with it


def test_many_threads_may_be_the_first_to_compile(tmp_path: Path) -> None:
    """The first calls of a threaded server import and ask the compiler at once."""
    code = textwrap.dedent("""
        import sys, threading
        from pathlib import Path
        from microsdpa.jit import compile_kernel
        from microsdpa.kernels import catalogue
        sys.setswitchinterval(1e-6)
        specs, done = catalogue("sm_89")[:8], []
        start = threading.Barrier(len(specs))
        def work(spec):
            start.wait()
            done.append(compile_kernel(spec, "sm_89", Path(sys.argv[1])))
        threads = [threading.Thread(target=work, args=(spec,)) for spec in specs]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len({kernel.signature for kernel in done}) == len(specs)
    """)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=240)


def test_a_log_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a 'ptxas -v' log"):
        resources_from_log("nothing")


@pytest.mark.parametrize("data", [b"", b"text", b"\x7fELF\x01"])
def test_other_bytes_than_a_cubin_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cubin: expected"):
        resources_from_cubin(data, "sm_89")


def test_a_log_without_figures_is_made_up_for_by_the_cubin(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = compile_kernel(spec, "sm_89", tmp_path / "a").resources
    monkeypatch.setattr("microsdpa.jit.build.resources_from_log", lambda log: resources_from_log("a warning"))
    assert compile_kernel(spec, "sm_89", tmp_path / "b").resources == whole


def test_resources_are_read_from_the_log() -> None:
    log = (
        "ptxas         .     8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 61 registers, used 1 barriers, 20736 bytes smem, 400 bytes cmem[0]"
    )
    assert resources_from_log(log) == Resources(61, 20736, 8, 16, 24)


def test_is_compiled_sees_memory_and_disk(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MICROSDPA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("microsdpa.jit.build._memory", {})
    assert not is_compiled(spec, "sm_80")
    compile_kernel(spec, "sm_80", tmp_path)
    assert is_compiled(spec, "sm_80")


def test_the_sources_ship_with_the_package() -> None:
    assert (KERNELS_DIR / "ladder/01_scalar.cu").is_file()


def test_a_virtual_target_gives_ptx_that_a_driver_can_take(spec: KernelSpec, tmp_path: Path) -> None:
    kernel = compile_kernel(spec, "compute_89", tmp_path)
    text = kernel.cubin.decode()
    assert ".target sm_89" in text
    assert kernel.symbol in text
    assert text.endswith("\0")
    assert kernel.resources == compile_kernel(spec, "sm_89").resources
    assert kernel.signature != compile_kernel(spec, "sm_89").signature
    broken = dataclasses.replace(spec, template_args=(*spec.template_args[:-1], ("LOAD_BYTES", "none")))
    with pytest.raises(CompileError, match=r"refused .* for compute_89") as caught:
        compile_kernel(broken, "compute_89", tmp_path)
    assert "none" in caught.value.log


def test_without_nvrtc_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "import microsdpa; from microsdpa.jit import nvrtc\n"
        "try: nvrtc.version()\nexcept microsdpa.CompileError as error: print(error.summary)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "NVRTC 13 cannot be loaded: install it with pip install 'microsdpa[compiler]'" in ended.stdout
