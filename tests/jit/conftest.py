from __future__ import annotations

import pytest

from microsdpa.problem import Problem
from microsdpa.select import select
from microsdpa.specs import KernelSpec


@pytest.fixture
def spec() -> KernelSpec:
    return select(Problem(1, 8, 8, 512, 512, 32, "float16", target="sm_89"), "ladder/01").spec
