"""Which tests make the quick tier, `pytest -m quick`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
QUICK = (
    *("attention", "call", "execution", "kernels", "package", "runtime"),
    *("distributed/test_layout_and_model.py", "distributed/test_symmetric.py"),
    *("emulate/test_detections.py", "integrations/test_dropin.py"),
    *("jit/test_cache.py", "jit/test_occupancy.py", "jit/test_signature.py"),
    *("evidence/test_compare.py", "evidence/test_inputs_and_verify.py", "evidence/test_regress.py"),
    *("evidence/test_results.py", "evidence/test_statistics.py", "evidence/test_suites.py"),
)
"""Folders and files whose tests make the quick tier, `pytest -m quick`: together under two minutes on two cores."""
NOT_QUICK = ("package/test_eager_imports.py",)


def is_quick(path: Path) -> bool:
    """Whether the tests of a file are of the quick tier."""
    name = path.relative_to(TESTS).as_posix()
    return name not in NOT_QUICK and any(name == one or name.startswith(f"{one}/") for one in QUICK)
