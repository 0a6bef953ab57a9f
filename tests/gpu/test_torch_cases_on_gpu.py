"""torch's own test cases through the enabled function on a GPU: a sample; `microsdpa verify --torch-cases` has all."""

from __future__ import annotations

import pytest

from microsdpa.evidence.survey import compile_ahead
from microsdpa.evidence.torch_cases import corners, sample
from microsdpa.evidence.verify_torch import OURS, check
from microsdpa.runtime import launcher

pytestmark = pytest.mark.gpu

CASES, SEED = 600, 0


def test_a_sample_of_the_space() -> None:
    cases = sample(CASES, SEED)
    target = launcher.target_of_device()
    assert compile_ahead(case.problem(target) for case in cases)
    outcomes = [check(str(case), case.call("cuda")) for case in cases]
    wrong = [f"{o.name}: by {o.by}: {o.failure}" for o in outcomes if o.failure or o.by != OURS]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", corners("cpu"))
def test_corners(name: str) -> None:
    assert check(name, corners("cuda")[name]()).failure == ""
