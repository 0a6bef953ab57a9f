"""What eager calls must not import: torch._dynamo and sympy, which take seconds."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from microsdpa.call.tensors import allocated_strides, allocation_is_aligned, is_aligned
from microsdpa.evidence.start_program import SLOW

CALLS = (
    "import microsdpa",
    "microsdpa.sdpa(q, k, v)",
    "microsdpa.sdpa(q, k, v, attn_mask=mask, return_lse=True)",
    "microsdpa.explain(q, k, v)",
    "microsdpa.plan(q, k, v)(q, k, v)",
    "microsdpa.plan(q, k, v, out=q.clone())(q, k, v)",
    "microsdpa.plan(q, k, v, attn_mask=mask)(q, k, v, attn_mask=mask)",
    "microsdpa.plan(q, k, v, impl='emulate', precision='int8_fp8')(q, k, v)",
    "microsdpa.quantize(q, 'int8', 'block').dequantize()",
    "microsdpa.sdpa(q, k, v, impl='emulate')",
    "microsdpa.explain(q, k, v, impl='emulate')",
    "torch.ops.microsdpa.attention(q, k, v)",
    "torch.ops.microsdpa.attention_output(q, k, v)",
    "microsdpa.enable(); F.scaled_dot_product_attention(q, k, v, mask); microsdpa.disable()",
    "microsdpa.sdpa(*leaves).sum().backward()",
    "microsdpa.sdpa(*leaves, return_lse=True)[1].sum().backward()",
    "microsdpa.sdpa(*leaves, attn_mask=mask, alibi_slopes=slopes, sinks=slopes.clone()).sum().backward()",
    "microsdpa.sdpa(*leaves, impl='emulate').sum().backward()",
    "torch.ops.microsdpa.attention(*leaves)[0].sum().backward()",
    "microsdpa.enable(); F.scaled_dot_product_attention(*leaves, mask).sum().backward()",
    # What torch's own backward passes are reached through on a GPU.
    "nodes._operator_for = lambda *_: nodes.FLASH; nodes.attend(leaves, NO_TENSORS, PLAIN)",
    "nodes._operator_for = lambda *_: nodes.CUDNN; nodes.attend(more, NO_TENSORS, PLAIN)",
)
SETUP = """
import sys, torch
import torch.nn.functional as F
known = set(sys.modules)
import microsdpa
from microsdpa.call.call import NO_TENSORS
from microsdpa.call.options import PLAIN
from microsdpa.execution import nodes
q, k, v = (torch.randn(1, 2, 16, 32).half() for _ in range(3))
leaves, more = (tuple(torch.randn(1, 2, 16, n).half().requires_grad_() for _ in range(3)) for n in (32, 64))
mask, slopes = torch.zeros(16, 16), torch.ones(2, requires_grad=True)
for call in {calls!r}:
    exec(call)
    late = [name for name in {slow!r} if name in sys.modules and name not in known]
    assert not late, f"{{call}} imported {{late}}"
"""


def _run(*calls: str) -> subprocess.CompletedProcess[str]:
    code = SETUP.format(calls=calls, slow=SLOW)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_no_eager_call_imports_what_compiling_needs() -> None:
    ended = _run(*CALLS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("call", ["torch.compile(microsdpa.sdpa)", "torch.empty_like(q.to('meta'))"])
def test_the_check_sees_such_an_import(call: str) -> None:
    assert f"{call} imported" in _run(call).stderr


def _any_tensor(choose: random.Random) -> torch.Tensor:
    """A tensor of four dimensions: dense in some order, with gaps, or with dimensions that are shared."""
    shape = [choose.choice([1, 1, 2, 3, 4]) for _ in range(4)]
    if choose.random() < 0.4:
        strides = [choose.choice([0, 1, 2, 3, 6, 9, 16]) for _ in range(4)]
    else:
        strides, step = [0] * 4, 1
        for dimension in choose.sample(range(4), 4):
            strides[dimension] = choose.choice([step] * 4 + [2 * step, 8 * step, 0])
            step = max(step, strides[dimension]) * shape[dimension]
    size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
    return torch.empty(size, dtype=torch.float16).as_strided(shape, strides)


def test_the_strides_of_an_allocation_are_torchs() -> None:
    choose = random.Random(0)
    for _ in range(4000):
        tensor = _any_tensor(choose)
        made = torch.empty_like(tensor)
        kept = [
            [stride for stride, size in zip(strides, tensor.shape, strict=True) if size > 1]
            for strides in (allocated_strides(tensor.shape, tensor.stride()), made.stride())
        ]
        assert kept[0] == kept[1], (tensor.shape, tensor.stride())
        assert allocation_is_aligned(tensor) == is_aligned(made)
