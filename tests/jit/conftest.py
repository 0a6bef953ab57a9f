from __future__ import annotations

import pytest

from microsdpa.kernels import KernelSpec
from microsdpa.kernels.problem import Problem
from microsdpa.kernels.select import select


@pytest.fixture
def spec() -> KernelSpec:
    return select(Problem(1, 8, 8, 512, 512, 32, "float16", target="sm_89"), "ladder/01").spec
