"""Options that several commands have, and what they stand for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microsdpa_cli import names

if TYPE_CHECKING:
    from microsdpa.evidence.inputs import Case


class Dtype(str, Enum):
    """Types of the tensors."""

    float16 = "float16"
    bfloat16 = "bfloat16"


class Alignment(str, Enum):
    """Causal alignments."""

    upper_left = "upper_left"
    lower_right = "lower_right"


Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Impl = Annotated[str, typer.Option(help="'auto' or the name of a kernel, such as ladder/01_scalar.")]
Output = Annotated[Path | None, typer.Option(help="Directory of result files to write <gpu>/<suite>.json to.")]
Shape = Annotated[str, typer.Option(help="B,H,S_q,S_k,D or B,H,H_kv,S_q,S_k,D.")]
TensorDtype = Annotated[Dtype, typer.Option("--dtype", help="Type of the tensors.")]
Causal = Annotated[Alignment | None, typer.Option(help="Causal alignment.")]
ResultsBelow = Annotated[Path, typer.Option("--results", help="Directory of result files.")]
ReportDirectory = Annotated[Path, typer.Option("--report", help="Directory to write the report to.")]
Suite = Annotated[str, typer.Option(help=f"Suite of cases: {', '.join(names.SUITES)}.")]


@contextmanager
def writable(option: str, directory: Path) -> Iterator[None]:
    """What is done with a directory that must be written to; an error of the file system names the option."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, "Permission denied", str(directory))
        yield
    except OSError as error:
        raise typer.BadParameter(
            f"{option}: expected a directory that can be written, got {str(directory)!r} ({error.strerror}); "
            f"name another with --{option}"
        ) from None


def existing(option: str, directory: Path) -> Path:
    """The directory of an option, which must be there."""
    if not directory.is_dir():
        raise typer.BadParameter(
            f"{option}: expected a directory of result files, got {str(directory)!r}, which is none; "
            "run it in a checkout of the project, or name one"
        )
    return directory


def case_of(shape: str, dtype: Dtype, causal: Alignment | None, seed: int = 0) -> Case:
    """The case of the options --shape, --dtype and --causal."""
    from microsdpa.evidence.inputs import Case

    numbers = shape.split(",")
    if len(numbers) not in (5, 6) or not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"shape: expected B,H,S_q,S_k,D or B,H,H_kv,S_q,S_k,D, got {shape!r}")
    batch, heads, *heads_kv, seqlen_q, seqlen_k, head_dim = map(int, numbers)
    case = Case(
        batch,
        heads,
        seqlen_q,
        seqlen_k,
        head_dim,
        heads_kv=heads_kv[0] if heads_kv else 0,
        dtype=dtype.value,
        causal=causal.value if causal else None,
        seed=seed,
    )
    if heads % case.kv_heads:
        raise typer.BadParameter(f"shape: H_kv must divide H, got {shape!r}")
    return case
