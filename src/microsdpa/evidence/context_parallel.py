"""Suite context_parallel: sequences over several GPUs, beside one GPU and torch's own context parallelism.

    torchrun --nproc-per-node 2 -m microsdpa bench --suite context_parallel

Every rank runs it, and one writes the rows. A sample is the time of the slowest rank; rows have the medians of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import microsdpa
from microsdpa import distributed
from microsdpa.evidence import results, statistics
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call
from microsdpa.evidence.wording import case_name, provenance, quoted_us

SUITE = "context_parallel"
OURS = "microsdpa"
ALONE, AUTO = "one GPU", "auto"
"""Variants that others are held against."""
SAMPLES, LEAST_CALLS, SAMPLE_MS = 15, 2, 20.0
ATOL, RTOL = 1e-2, 2**-6
"""Outputs are averages of many numbers around 1, rounded to BF16's 8 bits by each of two ways to compute them."""


@dataclass(frozen=True)
class Way:
    """An implementation of the suite.

    Attributes:
        bind: makes its call of whole query, key and value, and a context to be in while it is called. The call gives
            the output of this rank's shard, or of the whole sequence.
        spread: whether it gives this rank's shard.
    """

    name: str
    variant: str
    bind: Callable[[list[torch.Tensor], Case], tuple[Call, AbstractContextManager[Any]]]
    spread: bool = True


def _ours(**options: Any) -> Callable[[list[torch.Tensor], Case], tuple[Call, AbstractContextManager[Any]]]:
    def bind(inputs: list[torch.Tensor], case: Case) -> tuple[Call, AbstractContextManager[Any]]:
        parts = [distributed.shard(tensor).contiguous() for tensor in inputs]
        given: dict[str, Any] = {"causal": case.causal, "enable_gqa": True, "lengths": case.seqlen_q, **options}
        return lambda: distributed.attention(*parts, **given), nullcontext()

    return bind


def _one_gpu(inputs: list[torch.Tensor], case: Case) -> tuple[Call, AbstractContextManager[Any]]:
    return lambda: microsdpa.sdpa(*inputs, causal=case.causal, enable_gqa=True), nullcontext()


class _Torch:
    """torch's context_parallel with one of its backends."""

    def __init__(self, backend: SDPBackend) -> None:
        self.backend = backend

    def __call__(self, inputs: list[torch.Tensor], case: Case) -> tuple[Call, AbstractContextManager[Any]]:
        from torch.distributed.tensor.experimental import context_parallel

        query, key, value = (tensor.clone() for tensor in inputs)
        mesh = init_device_mesh(query.device.type, (dist.get_world_size(),))
        context = context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2])

        def call() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                gqa = case.kv_heads != case.heads
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)

        return call, context


WAYS: tuple[Way, ...] = (
    Way(OURS, ALONE, _one_gpu, spread=False),
    Way(OURS, AUTO, _ours()),
    Way(OURS, "all_gather by NCCL", _ours(method="all_gather", transport="collective")),
    Way(OURS, "ring", _ours(method="ring")),
    Way(OURS, "heads", _ours(method="heads")),
    Way("torch cuDNN", "context_parallel", _Torch(SDPBackend.CUDNN_ATTENTION)),
    Way("torch FLASH", "context_parallel", _Torch(SDPBackend.FLASH_ATTENTION)),
)


def absence() -> str:
    """Why the suite cannot be run here; empty where it can."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return "it is run by torchrun, on two GPUs or more: torchrun --nproc-per-node 2 -m microsdpa bench --suite ..."
    return ""


def is_first() -> bool:
    """Whether this process writes what all have found."""
    return int(os.environ.get("RANK", "0")) == 0


def run(
    cases: Sequence[Case],
    advance: Callable[[str], None] = lambda message: None,
    keep: Callable[[list[results.Row]], None] = lambda rows: None,
) -> list[results.Row]:
    """Rows of these cases; every rank calls it. `keep` is given the rows so far after every case."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=device)
    return results.gathered(((list(_measure(case, device)), str(case)) for case in cases), advance, keep)


def _measure(case: Case, device: torch.device) -> Iterator[results.Row]:
    random = torch.Generator(device=device).manual_seed(0)
    shapes = [(case.batch, heads, case.seqlen_q, case.head_dim) for heads in (case.heads, *[case.kv_heads] * 2)]
    inputs = [torch.randn(s, generator=random, device=device, dtype=torch.bfloat16) for s in shapes]
    wanted = microsdpa.sdpa(*inputs, causal=case.causal, enable_gqa=True)
    assert isinstance(wanted, torch.Tensor)
    for way in WAYS:
        fields: dict[str, Any] = {"impl": way.name, "variant": way.variant, "mode": "eager", "inputs": case.dtype}
        fields["case"] = f"{dist.get_world_size()} GPUs"
        fields["version"] = microsdpa.__version__ if way.name == OURS else torch.__version__
        reason, status = "", "unavailable"
        samples: list[float] = []
        try:
            call, context = way.bind(inputs, case)
            with torch.no_grad(), context:
                got = call()
                assert isinstance(got, torch.Tensor)
                expected = distributed.shard(wanted) if way.spread else wanted
                if not torch.allclose(got.float(), expected.float(), atol=ATOL, rtol=RTOL):
                    largest = (got.float() - expected.float()).abs().max().item()
                    reason, status = f"off by {largest:.3g} from one GPU's output", "wrong"
                else:
                    samples = time_calls(call)
        except Exception as failure:  # a row says so, and the others are measured
            torch.cuda.synchronize()
            reason = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:240]
            status = "wrong" if way.name == OURS else "unavailable"
        yield row_of_ranks(case, fields, everybodys(samples, status, reason))


def everybodys(samples: list[float], status: str, reason: str) -> list[tuple[list[float], str, str]]:
    """What every rank has found, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (samples, status, reason))
    return found


def row_of_ranks(case: Case, fields: dict[str, Any], found: list[tuple[list[float], str, str]]) -> results.Row:
    """The row of what all ranks have found: a sample is that of the slowest."""
    for rank, (_, status, reason) in enumerate(found):
        if reason:
            return results.row(case, **fields, status=status, reason=f"rank {rank}: {reason}")
    metrics = {f"rank_{rank}_us": statistics.median(samples).value for rank, (samples, _, _) in enumerate(found)}
    slowest = [max(of_ranks) for of_ranks in zip(*(samples for samples, _, _ in found), strict=True)]
    metrics["gpus"] = float(len(found))
    return results.row(case, **fields, metrics=metrics, **statistics.summary(slowest))


def time_calls(call: Call) -> list[float]:
    """Microseconds a call, of several samples; all ranks begin each together."""
    for _ in range(3):
        call()
    calls = torch.tensor([max(LEAST_CALLS, int(SAMPLE_MS * 1e3 / _elapsed_us(call, 2)))], device="cuda")
    dist.all_reduce(calls, dist.ReduceOp.MIN)
    return [_elapsed_us(call, int(calls)) for _ in range(SAMPLES)]


def _elapsed_us(call: Call, calls: int) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def lines(result: results.Result) -> list[list[str]]:
    """A header, then a line a case: milliseconds of every way, and what the way that is chosen gains.

    Columns are microsdpa's variants and the peers that have run; the best peer of a case is held against "auto".
    """
    columns = list(dict.fromkeys(_column(row) for row in result["rows"] if row["status"] == "ok"))
    cases: dict[str, dict[str, results.Row]] = {}
    for row in result["rows"]:
        cases.setdefault(case_name(row), {})[_column(row)] = row
    found = [["(B, H, S_q, S_k, D), dtype, mask", *columns, f"{ALONE} / {AUTO}", f"best peer / {AUTO}"]]
    for name, rows in cases.items():
        times = {column: quoted_us(row) for column, row in rows.items() if row["status"] == "ok"}
        peers = [times[column] for column in times if rows[column]["impl"] != OURS]
        cells = [
            f"{times[one] / 1e3:.3g}" if one in times else rows[one]["status"] if one in rows else "" for one in columns
        ]
        ratios = [[times[ALONE]] if ALONE in times else [], peers]
        found.append(
            [name, *cells, *(f"{min(one) / times[AUTO]:.2f}x" if one and AUTO in times else "" for one in ratios)]
        )
    return found


def _column(row: results.Row) -> str:
    return str(row["variant"] if row["impl"] == OURS else row["impl"])


def markdown(result: results.Result) -> str:
    """The lines as a table, with where they are from."""
    header, *rest = lines(result)
    ruled = [header, ["---"] + ["---:"] * (len(header) - 1), *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled) + f"\n{provenance(result)}"
