"""Generated mutations: where they are, that a comment explains one, and what becomes of three of a real kernel."""

from __future__ import annotations

import dataclasses
import re
import shutil
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
    found = {site for _, spec, _ in computed for stage in spec.stages for site in sites(stage.source, KERNELS_DIR)}
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
    found = mutate.outcomes(kernel, mutate.names([wait, harmless, proved, comment]), 2)
    assert [outcome.verdict for outcome in found] == [CAUGHT, SURVIVED, REDUNDANT, SAME]
    assert re.search("in flight|race|nothing has written", found[0].said)
    assert found[2].said == "nobody sees the tile"


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        ("ampere/varlen", "cp_async_wait<AHEAD - 1>();"),
        ("hopper/varlen", "mbarrier_wait(shared.value_arrived[stage],"),
    ],
)
def test_mutations_of_packed_sequences_are_caught(kernel: str, line: str, tmp_path: Path) -> None:
    site = next(site for site in mutate.all_sites(kernel) if site.text.startswith(line))
    root = tmp_path / "kernels"
    shutil.copytree(KERNELS_DIR, root)
    site.apply(root)
    verdict, said = mutate.tried(kernel, root)
    assert verdict == CAUGHT
    assert said.startswith("VarlenCall(")


def _all_but_one_caught(
    kernel: str, chosen: dict[Site, str], jobs: int, advance: object, log: Path | None
) -> list[Outcome]:
    *caught, last = chosen
    return [Outcome(site, CAUGHT, "race") for site in caught] + [Outcome(last, SURVIVED)]


def test_the_table_is_recorded_and_a_survivor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "outcomes", _all_but_one_caught)
    step = mutate.step(output=tmp_path)
    assert step.status == "failed"
    (path,) = tmp_path.rglob("mutations.json")
    result = results.read(path)
    text = mutate.markdown(result, is_stale)
    for kernel in mutate.kernels():
        rows = [row for row in result["rows"] if row["kernel"] == kernel]
        assert [row["status"] for row in rows] == ["ok"] * (len(rows) - 1) + ["wrong"]
        assert f"| {kernel} | {len(rows)} | {len(rows) - 1} | 0 | 0 | 0 | 1 |" in text
    assert text.count("- survived: `") == len(mutate.kernels())


def test_a_part_of_the_mutations_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "outcomes", _all_but_one_caught)
    step = mutate.step(_general(), sample=5)
    assert "5 of " in step.summary
    assert "4 caught, 1 survived" in step.summary
    with pytest.raises(InvalidArgument, match="output: expected all mutations, got a part"):
        mutate.step(_general(), sample=5, output=tmp_path)
    with pytest.raises(InvalidArgument, match="only: expected the place of a mutation, got 'nowhere'"):
        mutate.step(_general(), only="nowhere")


def test_a_run_goes_on_where_its_log_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Site | None] = []

    def outcome(kernel: str, site: Site | None, cache: str) -> tuple[str, str]:
        tried.append(site)
        return SURVIVED, ""

    monkeypatch.setattr(mutate, "_outcome", outcome)
    kernel, log = _general(), tmp_path / "log.jsonl"
    first, second, *_ = mutate.all_sites(kernel).items()
    mutate.outcomes(kernel, dict([first]), 1, path=log)
    assert tried == [None, first[0]]
    with log.open("a") as file:
        file.write('{"tested": "cut sh')
    tried.clear()
    assert [one.site for one in mutate.outcomes(kernel, dict([first, second]), 1, path=log)] == [first[0], second[0]]
    assert tried == [None, second[0]]
    monkeypatch.setattr(mutate, "tested", lambda kernel: "another code")
    tried.clear()
    mutate.outcomes(kernel, dict([first]), 1, path=log)
    assert tried == [None, first[0]]


def test_a_comment_changes_no_name() -> None:
    commented = TEXT.replace("named_barrier_sync(1, threads(2));", "named_barrier_sync(1, threads(2));  // why")
    before, after = (mutate.names(of_text("a.cu", text)).values() for text in (TEXT, "// first\n" + commented))
    assert list(before) == list(after)
    assert len(set(before)) == len(before)
