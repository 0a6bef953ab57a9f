"""The quick tier: it names what there is, and every folder of the package has tests of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers import NOT_QUICK, QUICK, is_quick

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src/microsdpa"


@pytest.mark.parametrize("name", [*QUICK, *NOT_QUICK])
def test_the_tier_names_what_there_is(name: str) -> None:
    assert (TESTS / name).exists()


def test_a_file_is_quick_by_its_folder_or_its_name() -> None:
    assert is_quick(Path(__file__))
    assert is_quick(TESTS / "jit/test_cache.py")
    assert not is_quick(TESTS / "jit/test_compile.py")
    assert not is_quick(TESTS / NOT_QUICK[0])


def test_every_folder_of_the_package_has_tests_of_its_name() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert folders
    # A folder tests/flash_attn would be importable as the package of that name: a file has its tests.
    found = {name: [*(TESTS / name).rglob("test_*.py"), *TESTS.rglob(f"test_{name}.py")] for name in folders}
    assert not [name for name, files in found.items() if not files]
