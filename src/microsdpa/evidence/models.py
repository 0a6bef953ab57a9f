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
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import microsdpa
from microsdpa.attention import api
from microsdpa.call import tensors
from microsdpa.evidence import model_processes, results, tiny
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.model_processes import EagerLost
from microsdpa.evidence.step import Progress, Step, no_progress
from microsdpa.evidence.tiny import LENGTH, Candidate, NotTiny

SUITE = "models"
NOT_RECORDED = "*Not recorded yet: `microsdpa models --output benchmarks/results` writes the result file.*\n"
FP32_TOLERANCE = 2.0**-15
"""Of the largest output. Sums in another order differ by far less, and a key that is lost or added by far more."""
SEEDS = 3
"""A rounding may send a token to another expert: in half precision a model is wrong if it is with all of these."""
OUTCOMES = ("agrees", "differs", "refused", "own attention", "not made")
TIMED_RUNS = 5
COMPILED = "compiled"
REASON_LENGTH = 100
NOTHING_LOST: Mapping[str, str] = {}

Run = Callable[[Any], torch.Tensor]


@dataclass
class Outcome:
    """What became of one scenario."""

    name: str
    error: float | None = None
    allowed: float | None = None
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the outputs differ."""
        return self.error is not None and self.allowed is not None and not self.error <= self.allowed


@dataclass
class Found:
    """What became of one model."""

    candidate: Candidate
    outcome: str
    reason: str = ""
    model: str = ""
    scenarios: list[Outcome] = field(default_factory=list)
    calls: int = 0
    shape: tuple[int, ...] = (1, 1, 1, 1, 1, 1)
    ours_us: list[float] = field(default_factory=list)
    stock_us: list[float] = field(default_factory=list)


@contextlib.contextmanager
def float32_through_torch() -> Iterator[None]:
    """Let sdpa take float32 on a CPU, where torch computes it: half precision would hide small differences."""
    tensors.DTYPES[torch.float32] = "float32"  # type: ignore[assignment]
    try:
        yield
    finally:
        del tensors.DTYPES[torch.float32]


def _logits(output: Any) -> torch.Tensor:
    for name in ("sample", "logits", "logits_per_image", "last_hidden_state", "image_embeds", "pooler_output"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found.float().cpu()
    first = output[0] if isinstance(output, (tuple, list)) else next(iter(output.values()))
    if not isinstance(first, torch.Tensor):
        raise NotTiny(f"its output is a {type(output).__name__}, which is not known here")
    return first.float().cpu()


def _seen(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows of tokens that are no padding."""
    mask = mask[:, -logits.shape[1] :].cpu().bool()
    return logits[mask] if logits.dim() >= 2 and logits.shape[:2] == mask.shape else logits


def _forward(model: Any, side: str = "", call: Any = None, **options: Any) -> torch.Tensor:
    """One forward pass, by `call` or else the model; with padding on a side if there is one."""
    if isinstance(model, functools.partial):  # of diffusers, with its inputs
        return _logits(model())
    given = {name: value.to(model.device) for name, value in tiny.inputs(model).items()}
    given = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in given.items()}
    call = model if call is None else call
    if not side:
        return _logits(call(**given, **options))
    mask = tiny.padding(side).to(model.device)
    found = _logits(call(**given, attention_mask=mask, **options))
    return found if model.config.is_encoder_decoder else _seen(found, mask)


def _chunks(model: Any) -> torch.Tensor:
    """A prompt in chunks of 7 and 5 tokens, then three tokens one at a time."""
    return _cached(model, None, (7, 5, 1, 1, 1))


def _static(model: Any) -> torch.Tensor:
    """The same with a static cache, and a chunk of 3 at the end."""
    from transformers import StaticCache

    return _cached(model, StaticCache(config=model.config, max_cache_len=24), (LENGTH, 1, 1, 3))


def _cached(model: Any, cache: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    total = sum(lengths)
    ids = tiny.tokens(total).to(model.device)
    mask = tiny.padding("left", total).to(model.device)
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(_logits(output))
        start = stop
    return _seen(torch.cat(parts, dim=1), mask)


def _kept(model: Any) -> torch.Tensor:
    return _forward(model, logits_to_keep=3)


def _kept_static(model: Any) -> torch.Tensor:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=24)
    return _forward(model, logits_to_keep=1, past_key_values=cache, use_cache=True)


def _generated(model: Any, **options: Any) -> torch.Tensor:
    """The chosen tokens, as numbers that differ by one or more where a token does."""
    given = {"input_ids": tiny.tokens().to(model.device), "attention_mask": tiny.padding("left").to(model.device)}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "disable_compile": True} | options
    return model.generate(**given, **options).float().cpu()  # type: ignore[no-any-return]


def _assisted(model: Any) -> torch.Tensor:
    given = {"input_ids": tiny.tokens()[:1].to(model.device)}
    assistant = copy.deepcopy(model)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    return model.generate(**given, assistant_model=assistant, **options).float().cpu()  # type: ignore[no-any-return]


def _side(model: Any) -> str:
    return "left" if "input_ids" in tiny.inputs(model) else ""


def _compiled(model: Any) -> torch.Tensor:
    torch._dynamo.reset()
    return _forward(model, _side(model), torch.compile(model, backend="eager"))


def scenarios(family: str, device: str) -> dict[str, Run]:
    """What a model of a family is run through."""
    found: dict[str, Run] = {"plain": _forward}
    if family in ("decoder", "encoder", "encoder-decoder"):
        found |= {"padded right": lambda m: _forward(m, "right"), "padded left": lambda m: _forward(m, "left")}
    if family == "decoder":
        found |= {"last logits": _kept, "chunks": _chunks, "static cache": _static, "static first": _kept_static}
    # Tokens are compared where no rounding can make a tie.
    if family in ("decoder", "encoder-decoder") and device == "cpu":
        found |= {
            "generate": _generated,
            "generate static": lambda m: _generated(m, cache_implementation="static"),
            "beam search": lambda m: _generated(m, num_beams=2),
        }
    if family == "decoder" and device == "cpu":
        found["assisted"] = _assisted
    if device == "cpu" and family != "diffusion":
        found[COMPILED] = _compiled
    return found


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

    run_eager, run_ours = (lambda m: _forward(m, _side(m))) if name == COMPILED else run, run
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
                    _forward(model)
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


def _row(found: Found, dtype: torch.dtype) -> results.Row:
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim = (max(1, size) for size in found.shape)
    name = str(dtype).removeprefix("torch.")
    compared = [outcome for outcome in found.scenarios if outcome.error is not None]
    worst = max(compared, key=lambda o: (o.error or 0.0) / max(o.allowed or 0.0, 1e-30), default=None)
    error = None
    if worst is not None and _finite(worst.error) is not None and _finite(worst.allowed) is not None:
        nothing = {"rmse": None, "rel_l1": None, "cosine": None}
        error = {"max_abs": worst.error, **nothing, "tolerance": {"max_abs": worst.allowed, **nothing}}
    ok = found.outcome == "agrees"
    timed = bool(found.ours_us) and ok
    return results.row(
        Case(batch, heads, seqlen_q, seqlen_k, head_dim, heads_kv),
        dtype=name,
        version=microsdpa.__version__,
        op="model",
        mode="eager" if timed else "verify",
        case=str(found.candidate),
        label=found.candidate.family,
        model=found.model,
        outcome=found.outcome,
        calls=found.calls,
        scenarios={
            o.name: {"error": _finite(o.error), "allowed": _finite(o.allowed), "reason": o.reason}
            for o in found.scenarios
        },
        worst="" if worst is None else worst.name,
        error=error,
        median_us=statistics.median(found.ours_us) if timed else None,
        min_us=min(found.ours_us) if timed else None,
        samples_us=found.ours_us if timed else [],
        stock_us=statistics.median(found.stock_us) if timed and found.stock_us else None,
        status="ok" if ok else "wrong" if found.outcome == "differs" else "unavailable",
        reason=found.reason if not ok else "",
        note=found.reason if ok else "",
    )


def _finite(number: float | None) -> float | None:
    """A number that JSON has, or None."""
    return number if number is not None and math.isfinite(number) else None


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
        return _row(Found(candidate, outcome, reason), used)

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
    table += [[row["case"], row["outcome"], _use(row), row["reason"] or row["note"]] for row in rows]
    return Step(SUITE, "failed" if wrong else "passed", summary, table, data=result)


def _use(row: results.Row) -> str:
    error = row["error"]
    if error is None or not error["tolerance"]["max_abs"]:
        return ""
    return f"{error['max_abs'] / error['tolerance']['max_abs']:.2f}"


def markdown(result: results.Result) -> str:
    """A line for each family and outcome, and the names of the models; then why the others are not among them."""
    lines = [["models", "outcome", "number", "largest error / allowed", "types"], ["---"] * 2 + ["---:"] * 2 + ["---"]]
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["label"], row["outcome"]), []).append(row)
    for (family, outcome), rows in groups.items():
        use = max((_use(row) for row in rows), default="")
        names = ", ".join(row["case"].partition(": ")[2] for row in rows)
        lines.append([family, outcome, str(len(rows)), use, names])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    timed = [row["stock_us"] / row["median_us"] for row in result["rows"] if row.get("stock_us")]
    if timed:
        middle = statistics.median(timed)
        text += f'\nTime of a forward pass with "sdpa" over that with microsdpa: {middle:.2f} in the median.\n'
    reasons: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["outcome"] in ("differs", "refused", "not made"):
            kinds = reasons.setdefault(_short(row["reason"]), [])
            kind = row["case"].partition(": ")[2]
            kinds += [kind] if kind not in kinds else []
    listed = [f"\n- {reason}: {', '.join(kinds)}" for reason, kinds in reasons.items()]
    return text + "".join(listed) + "\n"


def _short(reason: str) -> str:
    """A reason without what is a model's own in it, so that models share it."""
    reason = re.sub(r"^[\w ]+: (refused|not run): ", "", reason.removeprefix("not run: "))
    reason = re.sub(r"modeling_\w+ has", "the model has", reason.partition("; nearest")[0])
    reason = re.sub(r"^(\w+Error: )\w+ (does not support)", r"\1the model \2", reason)
    return reason if len(reason) <= REASON_LENGTH else f"{reason[:REASON_LENGTH]}..."


def main() -> None:
    """Check models and print a row of each: for a process of its own."""
    device, name, todo = sys.argv[1:]
    dtype = getattr(torch, name)
    _quiet()
    torch.set_num_threads(1)
    for family, kind, lost in json.loads(todo):
        try:
            row = _row(check_again(Candidate(family, kind), device, dtype, lost=lost), dtype)
        except EagerLost as error:
            print(json.dumps({"eager_lost": error.scenario, "line": error.line}), flush=True)
            return
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
