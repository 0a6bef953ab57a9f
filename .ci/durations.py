"""What the tests took: the files that took longest, and the quick tier, from the report of a run of pytest.

.venv/bin/python -m pytest -n 2 --junitxml=build/tests.xml
.venv/bin/python .ci/durations.py build/tests.xml
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from tiers import is_quick  # noqa: E402

SHOWN = 25


def file_of(name: str) -> Path | None:
    """The file of a test by its class name in the report, such as tests.jit.test_cache.TestOfClass.

    None for what is no test, such as a file that could not be read.
    """
    parts = name.split(".")
    while parts and not ROOT.joinpath(*parts).with_suffix(".py").is_file():
        parts.pop()
    return ROOT.joinpath(*parts).with_suffix(".py") if parts else None


def main(report: str) -> None:
    """A table on standard output: seconds of the tests themselves, added up over the processes that ran them."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    seconds: defaultdict[Path, float] = defaultdict(float)
    tests: Counter[Path] = Counter()
    for case in suite.iter("testcase"):
        path = file_of(case.get("classname", ""))
        if path is None:
            continue
        seconds[path] += float(case.get("time", 0))
        tests[path] += 1
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    print(f"{'file':58}{'tests':>8}{'seconds':>10}")
    for path, took in longest[:SHOWN]:
        print(f"{path.relative_to(ROOT).as_posix():58}{tests[path]:>8}{took:>10.1f}")
    quick = [path for path in seconds if is_quick(path)]
    rest = [path for path, _ in longest[SHOWN:]]
    rows = {f"the other {len(rest)} files": rest, f"the quick tier, {len(quick)} files": quick}
    rows[f"all {len(seconds)} files"] = list(seconds)
    for name, paths in rows.items():
        print(f"{name:58}{sum(tests[p] for p in paths):>8}{sum(seconds[p] for p in paths):>10.1f}")
    print(f"{'on the clock':58}{'':>8}{float(suite.get('time', 0)):>10.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
