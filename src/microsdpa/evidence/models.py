"""The models sweep: every tiny model of transformers and diffusers with microsdpa, against its "eager" attention.

A model runs in scenarios: padded on the right and on the left, with a dynamic and a static cache, in chunks, with the
last logits only, by greedy, beam and assisted generation, and compiled. On a CPU everything is FP32. The call goes
through torch there, so all that could differ is what this library makes of masks and arguments. On a GPU everything is
in half precision, and an error may be twice that of "eager" in the same type.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import microsdpa
from microsdpa.attention import api
from microsdpa.call import tensors
from microsdpa.evidence import model_processes, results, tiny
from microsdpa.evidence.model_processes import EagerLost
from microsdpa.evidence.model_results import SUITE, Found, Outcome, row_of, share_of_allowed
from microsdpa.evidence.model_scenarios import COMPILED, Run, forward, padded_side, scenarios
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.tiny import Candidate, NotTiny

FP32_TOLERANCE = 2.0**-15
"""Of the largest output. Sums in another order differ by far less, and a key that is lost or added by far more."""
SEEDS = 3
"""A rounding may send a token to another expert: in half precision a model is wrong if it is with all of these."""
OUTCOMES = ("agrees", "differs", "refused", "own attention", "not made")
TIMED_RUNS = 5
NOTHING_LOST: Mapping[str, str] = {}


@contextlib.contextmanager
def float32_through_torch() -> Iterator[None]:
    """Let sdpa take float32 on a CPU, where torch computes it: half precision would hide small differences."""
    tensors.DTYPES[torch.float32] = "float32"  # type: ignore[assignment]
    try:
        yield
    finally:
        del tensors.DTYPES[torch.float32]


def absence() -> str:
    """Why there are no models here, and what to install; empty when there are."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "transformers is not installed: pip install 'microsdpa[integrations]'"
    return ""


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
    logging.getLogger("microsdpa").setLevel(logging.ERROR)
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore")


class Models:
    """One tiny model, with the same weights under every name of an attention, made when it is asked for."""

    def __init__(self, candidate: Candidate, seed: int) -> None:
        config_class, self.model_class = candidate.classes()
        self.name: str = self.model_class.__name__
        self.note = ""
        self._made: dict[tuple[str, str, torch.dtype], Any] = {}
        self._config = tiny.configuration(config_class)
        self._seed = seed
        model = tiny.make(self.model_class, self._configured("eager"), seed)
        self._weights = model.state_dict()
        tiny.inputs(model)
        self._ours = self._name_of_ours()

    def _name_of_ours(self) -> str:
        """The registered name; torch's, with microsdpa enabled, where a model looks for its attention by other names.

        Raises:
            Exception: the model takes neither.
        """
        from microsdpa.integrations.transformers import NAME_FOR_ALL, register

        register()
        try:
            self._named(NAME_FOR_ALL)
            return NAME_FOR_ALL
        except KeyError:
            self._named("sdpa")
            self.note = f"the model knows its own names only, not {NAME_FOR_ALL}: through microsdpa.enable()"
            return "sdpa"

    def _configured(self, implementation: str) -> Any:
        config = copy.deepcopy(self._config)
        config._attn_implementation = implementation
        return config

    def _named(self, implementation: str) -> Any:
        torch.manual_seed(self._seed)
        model = self.model_class(self._configured(implementation)).eval()
        model.load_state_dict(self._weights)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            model.generation_config.decoder_start_token_id = 1
        return model

    @contextlib.contextmanager
    def named(self, which: str, device: str, dtype: torch.dtype) -> Iterator[Any]:
        """The model: with "eager" attention, with transformers' own "sdpa", or with "ours"; made once."""
        made = which, device, dtype
        if made not in self._made:
            self._made[made] = self._named(self._ours if which == "ours" else which).to(device, dtype)
        model = self._made[made]
        enabled = which == "ours" and self._ours == "sdpa"
        with microsdpa.enabled() if enabled else contextlib.nullcontext():
            yield model


class DiffusionModels:
    """The same of a model of diffusers, whose own attention is torch's: both "eager" and "sdpa"."""

    note = ""

    def __init__(self, candidate: Candidate, seed: int) -> None:
        self.name = candidate.kind
        self._model, self._inputs = tiny.diffusion(candidate.kind, seed)

    @contextlib.contextmanager
    def named(self, which: str, device: str, dtype: torch.dtype) -> Iterator[Any]:
        """The model; as "ours" both through the registry of backends and, where a model asks torch itself, there."""
        from diffusers.models.attention_dispatch import attention_backend

        from microsdpa.integrations.diffusers import NAME, register

        register()
        model = copy.deepcopy(self._model).to(device, dtype)
        there = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in self._inputs.items()}
        there |= {n: x.to(dtype) for n, x in there.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        with attention_backend("native"):  # restored at the end: setting a model's own sets the one in use, too
            if which == "ours":
                model.set_attention_backend(NAME)
            with microsdpa.enabled() if which == "ours" else contextlib.nullcontext():
                yield functools.partial(model, **there)


def check(
    candidate: Candidate,
    device: str,
    dtype: torch.dtype,
    only: tuple[str, ...] = (),
    lost: Mapping[str, str] = NOTHING_LOST,
    seed: int = 0,
) -> Found:
    """Run one model through its scenarios, or `only` some of them. What the model raises becomes its outcome.

    Raises:
        EagerLost: eager attention ended the use of the device, in a scenario that is not yet among `lost`.
        Exception: microsdpa or the library's own attention ended it.
    """
    try:
        kind = DiffusionModels if candidate.family == "diffusion" else Models
        models = kind(candidate, seed)
    except NotTiny as error:
        return Found(candidate, "not made", str(error))
    except Exception as error:
        return Found(candidate, "refused", f"{type(error).__name__}: {tiny._line(error)}")
    found = Found(candidate, "agrees", models.note, models.name)
    fallbacks: list[str] = []
    for name, run in scenarios(candidate.family, device).items():
        if name in lost:
            found.scenarios.append(Outcome(name, reason=f"not run: eager loses the device: {lost[name]}"))
        elif not only or name in only:
            found.scenarios.append(_scenario(models, name, run, device, dtype, found, fallbacks))
            if device != "cpu":
                torch.cuda.synchronize()  # what was lost is lost here, and not in the next scenario
    compared = [outcome for outcome in found.scenarios if outcome.error is not None]
    wrong = [outcome for outcome in compared if outcome.wrong]
    refused = [outcome for outcome in found.scenarios if outcome.reason.startswith("refused")]
    if wrong:
        found.outcome = "differs"
        found.reason = f"{wrong[0].name}: {wrong[0].reason or f'{wrong[0].error:.2g}, allowed {wrong[0].allowed:.2g}'}"
    elif refused:
        found.outcome, found.reason = "refused", f"{refused[0].name}: {refused[0].reason}"
    elif not compared:
        found.outcome, found.reason = "not made", found.scenarios[0].reason
    elif not found.calls and not fallbacks:
        found.outcome, found.reason = "own attention", "the model asks for no attention function"
    elif fallbacks:
        found.reason = f"left to torch, some or all of it: {fallbacks[0]}"
    if found.outcome == "agrees" and device != "cpu":
        _time(models, found, device, dtype)
    return found


def _scenario(
    models: Models | DiffusionModels,
    name: str,
    run: Run,
    device: str,
    dtype: torch.dtype,
    found: Found,
    fallbacks: list[str],
) -> Outcome:
    def output(which: str, at: torch.dtype = dtype) -> torch.Tensor:
        with (
            torch.no_grad(),
            float32_through_torch() if device == "cpu" else contextlib.nullcontext(),
            models.named(which, device, at) as model,
        ):
            torch.manual_seed(0)  # of what a model draws for itself, as ViTMAE does its patches
            return run(model)

    run_eager, run_ours = (lambda m: forward(m, padded_side(m))) if name == COMPILED else run, run
    try:
        run = run_eager  # compiled or not, eager attention gives the same, and compiling takes long
        expected = output("eager", torch.float32)
        plain = output("eager") if dtype != torch.float32 else None
    except Exception as error:
        if lost := _lost(error, device):
            raise EagerLost(name, lost) from error
        return Outcome(name, reason=f"not run: eager raises {type(error).__name__}: {tiny._line(error)}")
    run = run_ours
    try:
        with _counted(found, fallbacks) if name != COMPILED else contextlib.nullcontext():
            ours = output("ours")
    except microsdpa.UnsupportedProblem as error:
        return Outcome(name, reason=f"refused: {tiny._line(error)}")
    except Exception as error:
        if _lost(error, device):
            raise
        raised = f"raises {type(error).__name__}: {tiny._line(error)}"
        with contextlib.suppress(Exception):
            output("sdpa")
            return Outcome(name, float("inf"), 0.0, raised)
        return Outcome(name, reason=f"not run: sdpa raises too; {raised}")
    distance, allowed = _distance(ours, expected), FP32_TOLERANCE * _largest(expected)
    if plain is not None:
        allowed = 2 * _distance(plain, expected) + torch.finfo(dtype).eps * _largest(expected)
    outcome = Outcome(name, distance, allowed)
    if outcome.wrong:
        with contextlib.suppress(Exception):
            stock = output("sdpa")
            if not _distance(stock, expected) <= allowed and _distance(ours, stock) <= allowed:
                return Outcome(
                    name, _distance(ours, stock), allowed, "as transformers' own sdpa, which is not as eager"
                )
    return outcome


def _lost(error: Exception, device: str) -> str:
    """What ended the use of the device in this process: the error, or a kernel launched before it; or nothing."""
    if "CUDA error" in str(error):
        return tiny._line(error)
    if device == "cpu":
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as late:
        return tiny._line(late)
    return ""


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor[tensor.isfinite()].abs().max()) if tensor.numel() else 0.0


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference where the expected output is finite; infinite for another shape or a NaN of ours."""
    if ours.shape != expected.shape:
        return float("inf")
    finite = expected.isfinite()
    difference = (ours - expected)[finite].abs()
    if not difference.numel():
        return 0.0
    return float("inf") if difference.isnan().any() else float(difference.max())


@contextlib.contextmanager
def _counted(found: Found, fallbacks: list[str]) -> Iterator[None]:
    """Count the calls that microsdpa computes, with the sizes of the first, and note why others are left."""
    from microsdpa.integrations import dropin

    sdpa, note = api.sdpa, dropin.note_fallback

    def counting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        result = sdpa(query, key, value, **options)
        if not found.calls:
            found.shape = (*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3])
        found.calls += 1
        return result

    def noting(reason: str) -> None:
        fallbacks.append(reason)
        note(reason)

    api.sdpa, dropin.note_fallback = counting, noting
    try:
        yield
    finally:
        api.sdpa, dropin.note_fallback = sdpa, note


def _time(models: Models | DiffusionModels, found: Found, device: str, dtype: torch.dtype) -> None:
    """Times of a whole forward pass, with ours and with the library's own "sdpa"."""
    times: dict[str, list[float]] = {"ours": [], "sdpa": []}
    with torch.no_grad(), contextlib.suppress(ValueError):  # models without sdpa have nothing to be timed against
        for which in times:
            with models.named(which, device, dtype) as model:
                for turn in range(TIMED_RUNS + 1):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    forward(model)
                    torch.cuda.synchronize()
                    if turn:
                        times[which].append((time.perf_counter() - start) * 1e6)
    found.ours_us, found.stock_us = times["ours"], times["sdpa"]


def check_again(
    candidate: Candidate,
    device: str,
    dtype: torch.dtype,
    only: tuple[str, ...] = (),
    lost: Mapping[str, str] = NOTHING_LOST,
) -> Found:
    """check(), with other weights where a rounding may have changed what a half-precision model chooses."""
    found = check(candidate, device, dtype, only, lost)
    for seed in range(1, SEEDS if dtype != torch.float32 else 1):
        if found.outcome == "differs":
            found = check(candidate, device, dtype, only, lost, seed)
    return found


def step(
    progress: Progress = no_progress,
    sample: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    seconds: float | None = None,
    kinds: tuple[str, ...] = (),
    output: Path | None = None,
    command: str = "microsdpa models",
) -> Step:
    """All models, or some at random, or those of `kinds`; on a GPU in half precision, else in FP32.

    `sample` says how many, and the seed of the choice.
    """
    if reason := absence():
        return Step(SUITE, "not run", reason)
    if device != "cpu" and not torch.cuda.is_available():
        return Step(SUITE, "not run", f"device {device}: torch finds no GPU")
    used = getattr(torch, dtype or ("float32" if device == "cpu" else "float16"))
    todo = tiny.candidates()
    if kinds:
        todo = [candidate for candidate in todo if candidate.kind in kinds]
    if sample is not None and sample[0] < len(todo):
        chosen = torch.randperm(len(todo), generator=torch.Generator().manual_seed(sample[1]))[: sample[0]].tolist()
        todo = [todo[index] for index in sorted(chosen)]
    advance = progress(SUITE, len(todo))
    until = time.monotonic() + (float("inf") if seconds is None else seconds)

    def row_without(candidate: Candidate, outcome: str, reason: str) -> results.Row:
        return row_of(Found(candidate, outcome, reason), used)

    rows = model_processes.rows(todo, device, used, until, advance, row_without)
    wrong = [row for row in rows if row["status"] == "wrong"]
    result = results.make(SUITE, command, rows)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    summary = f"{len(rows)} models: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    if wrong:
        summary += f"; first: {wrong[0]['case']}: {wrong[0]['reason']}"
    if output is not None:
        summary += f"; wrote {results.write(result, output)}"
    table = [["model", "outcome", "worst error / allowed", "reason"]]
    table += [[row["case"], row["outcome"], share_of_allowed(row), row["reason"] or row["note"]] for row in rows]
    return Step(SUITE, "failed" if wrong else "passed", summary, table, data=result)


def main() -> None:
    """Check models and print a row of each: for a process of its own."""
    device, name, todo = sys.argv[1:]
    dtype = getattr(torch, name)
    _quiet()
    torch.set_num_threads(1)
    for family, kind, lost in json.loads(todo):
        try:
            row = row_of(check_again(Candidate(family, kind), device, dtype, lost=lost), dtype)
        except EagerLost as error:
            print(json.dumps({"eager_lost": error.scenario, "line": error.line}), flush=True)
            return
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
