"""Running test kernels in the emulator, from the project's sources or from mutated copies of them."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from microsdpa import reference
from microsdpa.emulate import build
from microsdpa.emulate.run import Report, Schedule, Shape, attention, launch
from microsdpa.evidence import compare
from microsdpa.evidence.inputs import Case, make, make_masks, masks_of
from microsdpa.jit.source import KERNELS_DIR
from microsdpa.kernels import KernelSpec, TensorMap
from microsdpa.kernels.problem import Problem

KERNELS = Path(__file__).parent / "kernels"


def tree(directory: Path, edits: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """A copy of the CUDA sources and of the test kernels (below test/), with one replacement in each edited file."""
    root = directory / "cuda"
    shutil.copytree(KERNELS_DIR, root)
    shutil.copytree(KERNELS, root / "test")
    for name, (old, new) in (edits or {}).items():
        text = (root / name).read_text()
        assert text.count(old) == 1, f"{name}: {text.count(old)} places read {old!r}"
        (root / name).write_text(text.replace(old, new))
    return root


@dataclass(frozen=True)
class Replacement:
    """What makes a kernel wrong: one replacement in one file."""

    name: str
    file: str
    old: str
    new: str

    def tree(self, directory: Path) -> Path:
        """A copy of the CUDA sources with it."""
        return tree(directory, {self.file: (self.old, self.new)})


def kernel(text: str, directory: Path, threads: int = 32) -> build.Library:
    """A kernel given as text: `__global__ void kernel<0>(const Params params)` in namespace test."""
    root = tree(directory)
    (root / "test/inline.cu").write_text(PRELUDE + text)
    spec = KernelSpec("test/inline", "test/inline.cu", "test::kernel", (("UNUSED", "0"),), threads, 1)
    return build.load(spec, root, "test::Params")


SHARED_BYTES = 256
"""Dynamic shared memory of every inline kernel."""

PRELUDE = """
#include "../common/softmax.cuh"
#include "../ptx/address.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/control.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/proxy.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include <mma.h>
namespace test {
using namespace microsdpa;
struct Params { const float* in; float* out; };
#line 1 "inline.cu"
"""


class InlineParams(ctypes.Structure):
    _fields_ = (("input", ctypes.c_void_p), ("out", ctypes.c_void_p))


def run_inline(
    text: str,
    directory: Path,
    threads: int = 32,
    schedule: Schedule | None = None,
    blocks: int = 1,
    banks: bool = False,
) -> tuple[torch.Tensor, Report]:
    """Run a kernel given as text on 1024 input floats (0, 1, 2, ...) and 1024 output floats (NaN)."""
    return run_kernel(kernel(text, directory, threads), threads, schedule, blocks, banks)


def run_kernel(
    library: build.Library, threads: int, schedule: Schedule | None = None, blocks: int = 1, banks: bool = False
) -> tuple[torch.Tensor, Report]:
    """run_inline() of a kernel that is built."""
    source, out = torch.arange(1024, dtype=torch.float32), torch.full((1024,), torch.nan)
    report = launch(
        library,
        lambda at: InlineParams(at["in"], at["out"]),
        {"in": (source, False), "out": (out, True)},
        Shape((blocks, 1, 1), threads, SHARED_BYTES),
        schedule=schedule,
        count_banks=banks,
    )
    return out, report


class RowSumsParams(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_int32),
    )


def row_sums(root: Path, keys: int, schedule: Schedule, banks: bool = False) -> tuple[bool, Report]:
    """Run kernels/row_sums.cu of a source tree; gives whether the answer is right."""
    generator = torch.Generator().manual_seed(keys)
    query, key = (torch.randn(rows, 64, generator=generator).half() for rows in (64, keys))
    out = torch.full((2, 64), torch.nan)
    spec = KernelSpec("test/row_sums", "test/row_sums.cu", "test::row_sums", (("UNUSED", "0"),), 128, 64)
    report = launch(
        build.load(spec, root, "test::Params"),
        lambda at: RowSumsParams(at["query"], at["key"], at["out"], keys),
        {"query": (query, False), "key": (key, False), "out": (out, True)},
        Shape((1, 1, 1), 128),
        schedule=schedule,
        count_banks=banks,
    )
    scores = query.double() @ key.double().mT
    largest = scores.max(dim=1).values
    sums = (scores - largest[:, None]).exp2().sum(dim=1)
    expected = torch.stack([largest, sums])
    return bool(torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-3)), report


class ProductParams(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("keys", ctypes.c_int32))


PRODUCT_MAPS = tuple(TensorMap(name, 64, 64, 128) for name in ("query", "key", "value"))  # type: ignore[arg-type]


def hopper_product(root: Path, keys: int, schedule: Schedule) -> tuple[bool, Report]:
    """Run kernels/hopper_product.cu of a source tree; gives whether the answer is right."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(1, 1, rows, 64, generator=generator).half() / 8 for rows in (64, keys, keys))
    out = torch.full((64, 64), torch.nan)
    spec = KernelSpec(
        "test/hopper_product",
        "test/hopper_product.cu",
        "test::product",
        (("UNUSED", "0"),),
        160,
        64,
        tensor_maps=PRODUCT_MAPS,
    )
    report = launch(
        build.load(spec, root, "test::Params"),
        lambda at: ProductParams(at["out"], keys),
        {"query": (query, False), "key": (key, False), "value": (value, False), "out": (out, True)},
        replace(Shape.of(spec, (2, 1, 1)), shared_bytes=66 * 1024, cluster=2, programmatic=True),
        schedule=schedule,
    )
    scores = (query[0, 0].double() @ key[0, 0].double().mT).half().double()
    expected = scores @ value[0, 0].double()
    return bool(torch.allclose(out.double(), expected, rtol=2e-3, atol=2e-3)), report


def check_in_every_order(spec: KernelSpec, problem: Problem, case: Case, *, conflicts: bool = False) -> None:
    """A case by one configuration: right, and the same bits in two orders, late and early.

    Without `conflicts` the kernel may have no bank conflicts.
    """
    (query, key, value), masks = make(case), make_masks(case)
    outs = []
    for schedule in (Schedule(0, late=True), Schedule(1, late=False)):
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan)
        report = attention(
            *(spec, problem, (query, key, value, out, lse), case.scale),
            schedule=schedule,
            count_banks=not conflicts,
            masks=masks_of(case),
        )
        assert conflicts or report.bank_conflicts == 0
        outs.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
    if case.causal == "upper_left" and not masks:  # no query sees keys behind these
        key, value = key[:, :, : case.seqlen_q], value[:, :, : case.seqlen_q]
    expected = reference.oracle(query, key, value, causal=case.causal, scale=case.scale, **masks)
    eager = reference.eager(query, key, value, causal=case.causal, scale=case.scale, **masks)
    for got, exact, plain in zip(outs[0], expected, eager, strict=True):
        assert compare.tolerance(plain, exact, got.dtype).admits(compare.measure(got, exact))
