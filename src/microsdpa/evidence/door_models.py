"""Suite doors, continued: models of transformers and diffusers, a growing cache, and sizes that are new."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import microsdpa
from microsdpa.evidence import compare
from microsdpa.evidence.doors import Door, Side
from microsdpa.evidence.inputs import Case
from microsdpa.evidence.peers import Call, Tensors
from microsdpa.evidence.timing import Runner
from microsdpa.runtime import launcher

CONTEXT, PROMPT, STEPS = 512, 512, 4096
"""Tokens in the cache of a decoding step, of a prompt, and of the long decoding loop."""
VOCABULARY = 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
SHAPE: dict[str, Any] = {"batch": 1, "heads": 8, "heads_kv": 4, "head_dim": 64, "dtype": "bfloat16"}
NAME = "microattention"
NEW_SIZES, FIRST_LENGTH, FIRST_BATCH = 16, 600, 40
PASSES = 30


@dataclass(frozen=True)
class Model:
    """A causal model of transformers with random weights.

    Attributes:
        config: its configuration class.
        sizes: further arguments of it.
        stock: the attention that transformers itself would run: "sdpa", or "eager" for models that refuse it.
    """

    config: str
    sizes: tuple[tuple[str, int], ...] = ()
    stock: str = "sdpa"


WINDOW = ("sliding_window", 128)
MODELS = {
    "Llama": Model("LlamaConfig"),
    "Mistral, window": Model("MistralConfig", (WINDOW,)),
    "Gemma 2, soft cap": Model("Gemma2Config", (WINDOW, ("query_pre_attn_scalar", 64)), "eager"),
    "gpt-oss, sinks": Model("GptOssConfig", (WINDOW, ("num_local_experts", 4), ("num_experts_per_tok", 4)), "eager"),
}


ONE_LAYER = Model("LlamaConfig", (("num_hidden_layers", 1),))
"""Of the long loops: each token's length is new to its only layer."""


def doors() -> list[Door]:
    """All of them; those of a library that is not installed are rows that say so."""
    return [*_new_sizes(), *_language_models(), *_encoder(), *_diffusion()]


def _new_sizes() -> Iterator[Door]:
    """Lengths of K and batch sizes that no call has had, of kernels that are loaded."""
    decoding, prefill = Case(1, 32, 1, FIRST_LENGTH, 128, heads_kv=8), Case(FIRST_BATCH, 8, 256, 256, 128)

    def ours(tensors: Tensors) -> Call:
        return _Growing(lambda q, k, v: microsdpa.sdpa(q, k, v, enable_gqa=True), tensors)

    def torchs(tensors: Tensors) -> Call:
        # The function's name is looked up in every call: enable() replaces it.
        return _Growing(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), tensors)

    for name, side in (("sdpa", Side(ours)), ("enable()", Side(torchs, microsdpa.enabled))):
        # Sizes that the door before has met are no longer new.
        met = NEW_SIZES * (_FirstCalls.turns + 2)
        decoding = replace(decoding, seqlen_k=decoding.seqlen_k + met)
        prefill = replace(prefill, batch=prefill.batch + met)
        for case, what in ((decoding, "length"), (prefill, "batch size")):
            text = f"a {what} that is new, in the mean"
            yield Door(name, side, Side(torchs), case, text, modes=("host",), runner=_FirstCalls)


class _Growing:
    """A call that is made with one key more each time that `grow` is called, or of a batch with one entry more."""

    def __init__(self, function: Callable[..., Any], tensors: Tensors) -> None:
        self.function = function
        self.tensors = tensors

    def grow(self) -> None:
        """Append a key and a value where a query decodes, as a cache does, and else a whole entry."""
        query, key, value = self.tensors
        if query.shape[2] == 1:
            longer = [torch.cat([t, t[:, :, :1]], dim=2) for t in (key, value)]
            self.tensors = query, longer[0], longer[1]
        else:
            self.tensors = tuple(torch.cat([t, t[:1]]) for t in self.tensors)  # type: ignore[assignment]
        # The allocator has the output's memory from here on: cudaMalloc takes longer than a plan, whoever asks for it.
        torch.empty_like(self.tensors[0])

    def __call__(self) -> Any:
        return self.function(*self.tensors)


class _FirstCalls(Runner):
    """Host time of the first call of each size, the device idle."""

    turns = 7

    def __init__(self, call: Any) -> None:
        self.call = call
        self.turn()

    def turn(self) -> list[float]:
        """The mean of some sizes is a sample: one length in 16 makes the plans of those after it."""
        total = 0.0
        for _ in range(NEW_SIZES):
            self.call.grow()
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.call()
            total += (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        return [total / NEW_SIZES]


def _absence(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed: pip install {package}"


def _language_models() -> Iterator[Door]:
    missing = _absence("transformers")
    for name, model in MODELS.items():
        for phase, queries in (("prefill", PROMPT), ("decoding step", 1)):
            keys = PROMPT if phase == "prefill" else CONTEXT + 1
            case = Case(seqlen_q=queries, seqlen_k=keys, causal="lower_right", **SHAPE)
            bind = _prefill if phase == "prefill" else _decoding_step
            yield Door(
                "transformers",
                _model_side(bind, model, NAME, missing),
                _model_side(bind, model, model.stock, missing),
                case,
                f"{name}, {phase}, beside {model.stock}",
                modes=("eager",),
                runner=_Passes,
            )
    case = Case(seqlen_q=1, seqlen_k=STEPS, causal="lower_right", **SHAPE)
    # torch makes plans for lengths, too, which a check with a loop would have made ahead of the first conversation.
    for bind, what, runner in ((_UnmetLoop, "a first time", _FirstLoop), (_Loop, "once more", _LaterLoop)):
        yield Door(
            "transformers",
            _model_side(_Loop, ONE_LAYER, NAME, missing, _last_of_prefill),
            _model_side(bind, ONE_LAYER, "sdpa", missing, _last_of_prefill),
            case,
            f"Llama of one layer, {STEPS:,} tokens with a growing cache, {what}, per token",
            modes=("eager",),
            runner=runner,
        )


def _model_side(
    bind: Callable[[Any], Call],
    model: Model,
    attention: str,
    missing: str,
    same: Callable[[Any], Call] | None = None,
) -> Side:
    """`same` gives the logits in a quicker way, for the comparison."""

    def check(_: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
        quick = same or bind
        exact, plain = (quick(_made(model, "eager", dtype))() for dtype in (torch.float32, torch.bfloat16))
        return _against_model(found, exact, plain)

    return Side(lambda _: bind(_made(model, attention, torch.bfloat16)), check=check, absent=missing)


def _against_model(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> tuple[dict[str, object], str]:
    """Logits against those of the model in FP32: twice the error of plain arithmetic in the same type."""
    errors = compare.measure(found, exact.double())
    allowed = compare.tolerance(plain, exact.double(), found.dtype)
    wrong = "" if errors.max_abs <= 2 * allowed.max_abs else f"logits are off by {errors.max_abs:.3g}"
    return compare.as_record(errors, allowed), wrong


@functools.lru_cache(maxsize=4)
def _made(model: Model, attention: str, dtype: torch.dtype) -> Any:
    """The model with the same random weights for every attention."""
    import transformers

    from microsdpa.integrations.transformers import register

    register()
    config = getattr(transformers, model.config)(**(SIZES | dict(model.sizes)))
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return made.to("cuda", dtype).eval()


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(1)).cuda()


def _prefill(model: Any) -> Call:
    tokens = _tokens(PROMPT)
    return lambda: model(input_ids=tokens, use_cache=False).logits


def _decoding_step(model: Any) -> Call:
    """A step on a cache of CONTEXT tokens, which is cut back after it."""
    from transformers import DynamicCache

    tokens = _tokens(CONTEXT + 1)
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :CONTEXT], past_key_values=cache)
    key_lengths = [(layer, layer.keys, layer.values) for layer in cache.layers]
    seen = [getattr(layer, "cumulative_length", None) for layer in cache.layers]

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=tokens[:, CONTEXT:], past_key_values=cache).logits
        for (layer, keys, values), length in zip(key_lengths, seen, strict=True):
            layer.keys, layer.values = keys, values
            if length is not None:
                layer.cumulative_length = length
        return logits

    return step


class _Loop:
    """STEPS steps from an empty cache, which grows."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokens = model, _tokens(STEPS)
        self.begin()

    def begin(self) -> None:
        """Empty the cache."""
        from transformers import DynamicCache

        self.cache, self.done = DynamicCache(config=self.model.config), 0

    def advance(self, steps: int) -> torch.Tensor:
        """The logits of the last of the next steps."""
        for i in range(self.done, self.done + steps):
            logits = self.model(input_ids=self.tokens[:, i : i + 1], past_key_values=self.cache).logits
        self.done += steps
        found: torch.Tensor = logits
        return found

    def __call__(self) -> torch.Tensor:
        """The logits of the last of all steps."""
        self.begin()
        return self.advance(STEPS)


class _UnmetLoop(_Loop):
    """A loop that gives the logits of the last step in one pass, and so has met no length before it advances."""

    def __call__(self) -> torch.Tensor:
        found: torch.Tensor = _last_of_prefill(self.model)()
        return found


def _last_of_prefill(model: Any) -> Call:
    """The logits that _Loop ends with, in one pass."""
    tokens = _tokens(STEPS)
    return lambda: model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits


class _Passes(Runner):
    """Passes of a model between two synchronisations: a few, for each takes milliseconds."""

    turns = 7

    def __init__(self, call: Call) -> None:
        self.call = call
        self.turn()

    def turn(self) -> list[float]:
        """One burst."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PASSES):
            self.call()
        torch.cuda.synchronize()
        return [(time.perf_counter() - start) / PASSES * 1e6]


class _LaterLoop(Runner):
    """Time of a loop of which all lengths have been met, by the loop whose logits were compared.

    Each turn is a part of the loop. So both sides take turns at caches of the same length.
    """

    turns = 16

    def __init__(self, call: Any) -> None:
        self.loop = call
        self.loop.begin()

    def turn(self) -> list[float]:
        """The next steps of the loop."""
        steps = STEPS // self.turns
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.loop.advance(steps)
        torch.cuda.synchronize()
        return [(time.perf_counter() - start) / steps * 1e6]


class _FirstLoop(_LaterLoop):
    """The same where kernels are loaded, but no length has a plan, as in a first conversation.

    The loop whose logits were compared has compiled the kernels of all lengths.
    """

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        launcher.forget_plans()


def _encoder() -> Iterator[Door]:
    """A BERT with sentences of several lengths."""
    missing = _absence("transformers")
    case = Case(8, 8, 128, 128, 64, dtype="bfloat16", masks=("padding",))
    sides = _encoder_side(NAME, missing), _encoder_side("sdpa", missing)
    yield Door("transformers", *sides, case, "BERT, padded batch, beside sdpa", modes=("eager",), runner=_Passes)


def _encoder_side(attention: str, missing: str) -> Side:
    def bind(attention: str, dtype: torch.dtype) -> Call:
        import transformers

        from microsdpa.integrations.transformers import register

        register()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
        config = transformers.BertConfig(**sizes, intermediate_size=1024, attn_implementation=attention)
        torch.manual_seed(0)
        model = transformers.BertModel(config).to("cuda", dtype).eval()
        tokens = torch.randint(VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(1)).cuda()
        seen = (torch.arange(128) < torch.arange(16, 144, 16)[:, None]).long().cuda()
        # What a padding token gives is read by nobody.
        return lambda: model(input_ids=tokens, attention_mask=seen).last_hidden_state * seen[..., None]

    def check(_: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
        exact, plain = (bind("eager", dtype)() for dtype in (torch.float32, torch.bfloat16))
        return _against_model(found, exact, plain)

    return Side(lambda _: bind(attention, torch.bfloat16), check=check, absent=missing)


def _diffusion() -> Iterator[Door]:
    """A Flux transformer of diffusers."""
    missing = _absence("diffusers")
    case = Case(1, 8, 1088, 1088, 64, dtype="bfloat16")
    sides = _diffusion_side("microsdpa", missing), _diffusion_side("native", missing)
    yield Door("diffusers", *sides, case, "Flux, beside native", modes=("eager",), runner=_Passes)


def _diffusion_side(backend: str, missing: str) -> Side:
    def bind(backend: str, dtype: torch.dtype) -> Call:
        import diffusers

        from microsdpa.integrations.diffusers import register

        register()
        torch.manual_seed(0)
        model = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=64,
            num_attention_heads=8,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            axes_dims_rope=(16, 24, 24),
        )
        model = model.to("cuda", dtype).eval()
        model.set_attention_backend(backend)
        generator = torch.Generator().manual_seed(1)
        inputs = {
            name: torch.randn(shape, generator=generator).to("cuda", dtype)
            for name, shape in (
                ("hidden_states", (1, 1024, 16)),
                ("encoder_hidden_states", (1, 64, 64)),
                ("pooled_projections", (1, 64)),
                ("timestep", (1,)),
            )
        }
        ids = {"img_ids": torch.zeros(1024, 3).cuda(), "txt_ids": torch.zeros(64, 3).cuda()}
        return lambda: model(**inputs, **ids, return_dict=False)[0]

    def check(_: Tensors, found: torch.Tensor) -> tuple[dict[str, object], str]:
        exact, plain = (bind("native", dtype)() for dtype in (torch.float32, torch.bfloat16))
        return _against_model(found, exact, plain)

    return Side(lambda _: bind(backend, torch.bfloat16), check=check, absent=missing)
