"""First calls on a GPU: what they import, in processes of their own, and that suite start measures them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from microsdpa.evidence import results, start
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.start_program import SLOW

pytestmark = pytest.mark.gpu

CALLS = (
    "microsdpa.sdpa(q, k, v)",
    "microsdpa.explain(q, k, v)",
    "microsdpa.plan(q, k, v)(q, k, v)",
    "microsdpa.sdpa(q, k, v, precision='int8_fp8')",
    "microsdpa.explain(q, k, v, precision='int8_fp8')",
    "microsdpa.sdpa(*leaves).sum().backward()",
    "microsdpa.sdpa(*leaves, is_causal=True).sum().backward()",
    "microsdpa.sdpa(*leaves, attn_mask=mask).sum().backward()",
    "microsdpa.sdpa(*leaves, return_lse=True)[1].sum().backward()",
    "microsdpa.sdpa(*leaves, softcap=5.0, sinks=sinks).sum().backward()",
    "torch.ops.microsdpa.attention(*leaves)[0].sum().backward()",
    "microsdpa.enable(); F.scaled_dot_product_attention(*leaves, mask).sum().backward()",
)
CODE = """
import sys, torch
import torch.nn.functional as F
known = set(sys.modules)
import microsdpa
q, k, v = (torch.randn(1, 2, 64, 64, device="cuda").half() for _ in range(3))
leaves = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
mask, sinks = torch.ones(64, 64, device="cuda").bool(), torch.zeros(2, device="cuda", requires_grad=True)
for call in {calls!r}:
    exec(call)
    late = [name for name in {slow!r} if name in sys.modules and name not in known]
    assert not late, f"{{call}} imported {{late}}"
"""


def test_no_eager_call_imports_what_compiling_needs() -> None:
    code = CODE.format(calls=CALLS, slow=SLOW)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_suite_start_measures_first_calls() -> None:
    rows = start.run(Case(1, 8, 512, 512, 64), rounds=1)
    assert [(row["door"], row["case"], row["reason"]) for row in rows if row["status"] != "ok"] == []
    assert {row["door"] for row in rows} == {one.door for one in start.STARTS}
    ours = [row for row in rows if row["impl"] == "microsdpa" and row["door"] != "import microsdpa"]
    assert all(row["code_signature"] for row in ours)
    results.validate(results.make("start", "microsdpa bench --suite start", rows), "suite start")
