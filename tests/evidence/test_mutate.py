"""Generated mutations: where they are, that a comment explains one, and what becomes of three of a real kernel."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from microsdpa.errors import InvalidArgument
from microsdpa.evidence import mutate, results
from microsdpa.evidence.mutate import CAUGHT, REDUNDANT, SAME, SURVIVED, Outcome
from microsdpa.evidence.mutate_sites import Site, of_text, sites
from microsdpa.evidence.signatures import is_stale
from microsdpa.jit.source import KERNELS_DIR

TEXT = """\
#include "fence.cuh"
__device__ void mbarrier_wait(int x);  // a declaration: mbarrier_wait(1);
template <int N> void f(const Params& params) {
  const char* words = "cp_async_wait<0>();";
  cp_async<16>(a, b);
  cp_async_commit();
  if (N > 1) named_barrier_sync(1, threads(2));
  this->arrive(DONE);
  // mutation: the next call waits for more
  cp_async_wait<1>();
  const bool valid = row < valid_rows && column <= 3;
  for (int i = 0; i < N; ++i) keys << 1;
  if constexpr (N < KEYS) return;
  while (mbarrier_test_wait(x)) {}
}
"""


def test_sites_are_statements_that_order_memory_and_comparisons_with_lengths() -> None:
    found = of_text("a.cu", TEXT)
    assert [(site.line, site.kind, TEXT[site.start : site.end]) for site in found] == [
        (6, "removed", "cp_async_commit()"),
        (7, "removed", "named_barrier_sync(1, threads(2))"),
        (8, "removed", "this->arrive(DONE)"),
        (10, "removed", "cp_async_wait<1>()"),
        (11, "shifted", "<"),
    ]
    assert [site.explained for site in found] == ["", "", "", "the next call waits for more", ""]
    assert found[-1].new == "<="


def test_a_site_is_applied_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(TEXT)
    of_text("a.cu", TEXT)[1].apply(tmp_path)
    assert (tmp_path / "a.cu").read_text().splitlines()[6] == "  if (N > 1) ;"


@pytest.mark.parametrize("kernel", mutate.kernels())
def test_every_production_kernel_has_cases_and_sites(kernel: str) -> None:
    computed = mutate.specifications(kernel)
    assert len(computed) >= 3
    found = {site for _, spec in computed for stage in spec.stages for site in sites(stage.source, KERNELS_DIR)}
    assert {site.kind for site in found} == {"removed", "shifted"}
    assert not any("ptx" in Path(site.file).parts for site in found)


@pytest.mark.parametrize("kernel", ["ladder/01_scalar", "nonsense"])
def test_other_kernels_are_refused(kernel: str) -> None:
    with pytest.raises(InvalidArgument, match="kernel: expected one of hopper"):
        mutate.step(kernel)


def _general() -> str:
    """The kernel that compiles the fastest."""
    return next(name for name in mutate.kernels() if name.endswith("general"))


def test_mutations_are_caught_survive_or_are_explained() -> None:
    kernel = _general()
    source = mutate.specifications(kernel)[0][1].source
    text = (KERNELS_DIR / source).read_text()
    wait = next(site for site in sites(source, KERNELS_DIR) if "cp_async_wait<0>" in site.text)
    loop = "for (int following; tile < last_tile;"
    found_site = next(site for site in sites(source, KERNELS_DIR) if site.text.startswith(loop))
    harmless = dataclasses.replace(found_site, explained="")
    proved = dataclasses.replace(found_site, explained="nobody sees the tile")
    start = text.index("\nnamespace") + 1
    comment = Site(source, 1, "removed", start, start, "/* nothing */ ", "")
    found = mutate.outcomes(kernel, [wait, harmless, proved, comment], 2)
    assert [outcome.verdict for outcome in found] == [CAUGHT, SURVIVED, REDUNDANT, SAME]
    assert re.search("in flight|race|nothing has written", found[0].said)
    assert found[2].said == "nobody sees the tile"


def test_the_table_is_recorded_and_a_survivor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(kernel: str, chosen: list[Site], jobs: int, advance: object) -> list[Outcome]:
        return [Outcome(site, CAUGHT, "race") for site in chosen[:-1]] + [Outcome(chosen[-1], SURVIVED)]

    monkeypatch.setattr(mutate, "outcomes", outcomes)
    kernel = _general()
    step = mutate.step(kernel, sample=5, output=tmp_path)
    assert step.status == "failed"
    assert "5 of " in step.summary
    assert "4 caught, 1 survived" in step.summary
    (path,) = tmp_path.rglob("mutations_*.json")
    result = results.read(path)
    assert [row["status"] for row in result["rows"]] == ["ok"] * 4 + ["wrong"]
    text = mutate.markdown(result, is_stale)
    assert f"| {kernel} | 5 | 4 | 0 | 0 | 0 | 1 |" in text
    assert text.count("- survived: `") == 1
