"""Any call of sdpa on a GPU, against FP64: with all checks, from the plan table, and through plan()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import microsdpa
from argument_space import assert_right, calls, forms, moved

pytestmark = pytest.mark.gpu

HEAD_DIMS = st.sampled_from([1, 8, 36, 64, 72, 80, 128, 256])
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
MASK_TENSORS = ("attn_mask", "alibi_slopes", "sinks")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(call=calls(forms(), HEAD_DIMS))
def test_any_call(call: dict[str, Any]) -> None:
    there = moved(call, "cuda")
    first = microsdpa.sdpa(**there, return_lse=True)
    assert_right(*first, call)
    given_out = torch.full_like(there["query"], torch.nan, memory_format=torch.contiguous_format)
    results = [
        microsdpa.sdpa(**there, return_lse=True),  # its plan is there now
        microsdpa.sdpa(**there, return_lse=True, out=given_out),
    ]
    arrays = {name: there[name] for name in MASK_TENSORS if name in there}
    plan = microsdpa.plan(**there, return_lse=True)
    results.append(plan(there["query"], there["key"], there["value"], **arrays))
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(call=calls(forms(), st.sampled_from([64, 128])))
def test_any_call_without_masks_takes_the_kernels_for_them(call: dict[str, Any]) -> None:
    plain = {name: value for name, value in call.items() if name not in (*MASK_TENSORS, "window", "softcap")}
    assert_right(*microsdpa.sdpa(**moved(plain, "cuda"), return_lse=True), plain)
