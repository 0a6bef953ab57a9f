"""The mask function and the attention function that transformers is given: what they read, keep and refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.call import tensors as call_tensors

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[integrations]'"
)
from transformers import masking_utils as theirs  # noqa: E402

from microsdpa.integrations import transformers as integration  # noqa: E402
from microsdpa.integrations import versions  # noqa: E402
from microsdpa.integrations.patterns import PatternMask  # noqa: E402
from microsdpa.integrations.transformers import NAME, NAME_FOR_ALL, mask_function, register  # noqa: E402

CAUSAL, BOTH_WAYS = theirs.causal_mask_function, theirs.bidirectional_mask_function
KINDS: dict[str, Callable[..., Any]] = {
    "causal": CAUSAL,
    "window of 1": theirs.sliding_window_causal_mask_function(1),
    "window of 3": theirs.sliding_window_causal_mask_function(3),
    "window of 99": theirs.sliding_window_causal_mask_function(99),
    "bidirectional": BOTH_WAYS,
    "bidirectional window": theirs.sliding_window_bidirectional_mask_function(2),
}
LENGTHS = [
    (7, 7, 0, 0),
    (1, 7, 6, 0),
    (3, 7, 4, 0),
    (5, 9, 0, 0),
    (3, 9, 2, 0),
    (3, 6, 8, 5),
    (1, 4, 9, 6),
    (2, 9, 9, 0),
]
"""Queries, keys, offsets of both: square, a step, a chunk, static caches, sliding caches, keys that are missing."""


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def attend(module: Any = None, *args: Any, **options: Any) -> torch.Tensor:
    """What the registered function gives, [B, S_q, H, D]."""
    function = transformers.AttentionInterface()[NAME_FOR_ALL]
    found: torch.Tensor = function(module or SimpleNamespace(is_causal=True), *args, **options)[0]
    return found


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = query.double() @ key.double().mT * query.shape[3] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    return (weights @ value.double()).transpose(1, 2)


@pytest.mark.parametrize("padded", ["none", "all ones", "left", "right", "short", "everything"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_transformers_own_and_attention_follows_it(
    kind: str, lengths: tuple[int, int, int, int], padded: str
) -> None:
    register(strict=True)
    seqlen_q, seqlen_k, offset_q, offset_k = lengths
    attention_mask = None
    if padded != "none":
        attention_mask = torch.ones(2, seqlen_k + offset_k, dtype=torch.bool)
        if padded == "left":
            attention_mask[1, : offset_k + 2] = False
        elif padded == "right":
            attention_mask[1, -2:] = False
        elif padded == "short":  # a static cache has more keys than there are tokens
            attention_mask = attention_mask[:, :-2]
        elif padded == "everything":
            attention_mask[1] = False
    given = {"batch_size": 2, "q_length": seqlen_q, "kv_length": seqlen_k, "q_offset": offset_q, "kv_offset": offset_k}
    given |= {"mask_function": KINDS[kind], "attention_mask": attention_mask}
    both = BOTH_WAYS in (KINDS[kind],) or kind.startswith("bidirectional")
    skips = {"allow_is_causal_skip": not both, "allow_is_bidirectional_skip": both}
    mask = mask_function(**given, **skips, config=transformers.LlamaConfig())
    expected = theirs.sdpa_mask(**given, allow_is_causal_skip=False).expand(2, 1, seqlen_q, seqlen_k)
    step = kind == "causal" and seqlen_q == 1 and padded == "none" and bool(expected.all())
    assert (mask is None) == step
    query, key, value = half(2, 4, seqlen_q, 16), half(2, 2, seqlen_k, 16, seed=1), half(2, 2, seqlen_k, 16, seed=2)
    out = attend(None, query, key, value, mask)
    repeated = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    torch.testing.assert_close(out.double(), exact(query, *repeated, expected), rtol=2e-3, atol=2e-3)
    assert mask is None or torch.equal(mask & torch.ones((), dtype=torch.bool), expected)


def test_one_query_has_no_mask_only_where_it_sees_all_keys_of_the_cache() -> None:
    def made(seqlen_k: int = 7, position: Any = 6, **rest: Any) -> torch.Tensor | None:
        return mask_function(2, 1, seqlen_k, position, 0, **({"mask_function": CAUSAL} | rest))

    assert made() is None
    assert made(position=torch.tensor(6)) is not None  # of a static cache
    assert made(seqlen_k=9) is not None
    assert made(attention_mask=torch.ones(2, 7, dtype=torch.bool)) is not None
    assert made(mask_function=KINDS["window of 3"]) is not None
    assert made(allow_is_causal_skip=False) is not None


def test_a_call_without_options_is_looked_at_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    register(strict=True)
    step, keys = half(2, 4, 1, 16), half(2, 2, 7, 16, seed=1)
    expected = attend(None, step, keys, keys, torch.ones(2, 1, 1, 7, dtype=torch.bool))

    def looked_at(*args: Any) -> None:
        raise AssertionError("the call was looked at")

    monkeypatch.setattr(integration, "_pattern", looked_at)
    whole = mask_function(2, 5, 7, mask_function=BOTH_WAYS)
    for mask in (None, whole):
        torch.testing.assert_close(attend(None, step, keys, keys, mask), expected, rtol=2e-3, atol=2e-3)
    window, packed = {"sliding_window": 6}, {"cu_seq_lens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}
    for further in (window, packed, {"softcap": 2.0}, {"s_aux": half(4)}, {"position_bias": half(1, 4, 1, 7)}):
        with pytest.raises(AssertionError, match="looked at"):
            attend(None, step, keys, keys, None, **further)
    with pytest.raises(AssertionError, match="looked at"):
        attend(None, step.float(), keys.float(), keys.float(), None)


@pytest.mark.parametrize(
    ("kind", "lengths", "causal", "window", "keys"),
    [
        ("causal", (7, 7, 0, 0), "upper_left", None, 7),
        ("causal", (3, 7, 4, 0), "lower_right", None, 7),
        ("causal", (5, 9, 0, 0), "upper_left", None, 5),
        ("causal", (3, 9, 2, 0), "lower_right", None, 5),
        ("causal", (1, 7, 6, 0), None, None, 7),
        ("window of 3", (7, 7, 0, 0), "upper_left", (2, -1), 7),
        ("window of 3", (3, 9, 5, 0), "lower_right", (2, -1), 5),
        ("window of 3", (1, 7, 6, 0), None, None, 3),
        ("window of 99", (7, 7, 0, 0), "upper_left", None, 7),
        ("bidirectional", (3, 7, 0, 0), None, None, 7),
        ("bidirectional window", (7, 7, 0, 0), None, (2, 2), 7),
    ],
)
@pytest.mark.parametrize("offset", [int, torch.tensor])
def test_no_mask_of_queries_by_keys_is_made_where_arguments_say_the_same(
    kind: str,
    lengths: tuple[int, int, int, int],
    causal: str | None,
    window: tuple[int, int] | None,
    keys: int,
    offset: Callable[[int], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    sdpa = integration.api.sdpa
    monkeypatch.setattr(
        integration.api, "sdpa", lambda q, k, v, **o: calls.append(o | {"keys": k.shape[2]}) or sdpa(q, k, v, **o)
    )
    register(strict=True)
    seqlen_q, seqlen_k, offset_q, offset_k = lengths
    padding = torch.ones(2, seqlen_k, dtype=torch.bool)
    for hidden in (False, True):
        padding[1, -seqlen_q - 1 if seqlen_q < seqlen_k else 0] = not hidden
        if hidden:
            padding[1] = torch.arange(seqlen_k) % 2 == 0
        mask = mask_function(
            2,
            *(seqlen_q, seqlen_k, offset(offset_q), offset_k, KINDS[kind], padding),
            allow_is_bidirectional_skip=True,
        )
        attend(None, half(2, 2, seqlen_q, 16), half(2, 2, seqlen_k, 16), half(2, 2, seqlen_k, 16), mask)
        assert isinstance(mask, PatternMask)
        assert mask.untouched
        assert mask._elements is None
    unpadded, padded = calls
    for call in calls:
        assert (call.get("causal"), call.get("window"), call["keys"]) == (causal, window, keys)
    assert unpadded.get("attn_mask") is None
    assert padded["attn_mask"].shape == (2, 1, 1, keys)


def test_what_touches_a_mask_makes_it_a_tensor_that_counts() -> None:
    def make() -> Any:
        return mask_function(2, 5, 5, mask_function=CAUSAL)

    lower = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    mask = make()
    assert (mask.dtype, mask.shape, mask.dim(), mask.is_contiguous()) == (torch.bool, (2, 1, 5, 5), 4, True)
    assert mask.untouched
    for change in (lambda m: m[:, :, -2:], lambda m: ~m, lambda m: m.float(), lambda m: m.expand(2, 4, 5, 5)):
        assert torch.equal(change(make()), change(lower))
        assert type(change(make())) is torch.Tensor
    assert torch.equal(copy.deepcopy(mask), lower)
    assert "True" in repr(make())
    query = half(2, 2, 5, 16)
    row = make()
    row[..., 0] = False  # a written mask is not a causal mask any more
    seen = lower.clone()
    seen[..., 0] = False
    torch.testing.assert_close(
        attend(None, query, query, query, row).double(), exact(query, query, query, seen), rtol=2e-3, atol=2e-3
    )
    with torch.inference_mode():
        assert torch.equal(make()[0], lower[0])


def test_a_mask_that_is_no_pattern_is_transformers_own_tensor() -> None:
    packed = theirs.and_masks(CAUSAL, theirs.packed_sequence_mask_function(torch.arange(6)[None] // 3))
    chunked = theirs.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int))
    either = theirs.or_masks(CAUSAL, theirs.sliding_window_bidirectional_overlay(1))
    for function in (packed, chunked, either):
        mask = mask_function(1, 6, 6, mask_function=function)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, theirs.sdpa_mask(1, 6, 6, mask_function=function, allow_is_causal_skip=False))


def test_without_a_mask_the_positions_must_be_clear() -> None:
    register(strict=True)
    query, key = half(1, 2, 3, 16), half(1, 2, 7, 16)
    everything = torch.ones(3, 7, dtype=torch.bool)
    out = attend(None, query, key, key, None, is_causal=False)
    torch.testing.assert_close(out.double(), exact(query, key, key, everything), rtol=2e-3, atol=2e-3)
    with pytest.raises(microsdpa.UnsupportedProblem, match="no mask for 3 queries and 7 keys"):
        attend(None, query, key, key, None)
    with pytest.raises(microsdpa.UnsupportedProblem, match="sliding_window of 4 for 7 keys, and no mask"):
        attend(None, query, key, key, None, is_causal=False, sliding_window=4)


def test_keywords_that_are_not_known_are_refused_by_name() -> None:
    query = half(1, 2, 3, 16)
    for strict in (False, True):
        register(strict=strict)
        with pytest.raises(microsdpa.UnsupportedProblem, match="passes tree_mask and gate to its attention function"):
            attend(None, query, query, query, None, tree_mask=1, gate=query, position_ids=None)
        attend(None, query, query, query, None, tree_mask=None)
    register(harmless=["gate"])
    attend(None, query, query, query, None, gate=query, use_cache=True)
    with pytest.raises(microsdpa.InvalidArgument, match="harmless"):
        register(harmless="gate")
    with pytest.raises(microsdpa.InvalidArgument, match="impl"):
        register(impl="fastest")


def test_packed_sequences_are_parted_or_refused() -> None:
    register(strict=True)
    query = half(1, 2, 6, 16)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    for mask in (None, mask_function(1, 6, 6, mask_function=CAUSAL)):
        with pytest.raises(microsdpa.UnsupportedProblem, match="names 2 sequences in 1 rows"):
            attend(None, query, query, query, mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=4)
    attend(None, query, query, query, None, cu_seq_lens_q=bounds[[0, 2]])
    config = transformers.LlamaConfig(attn_implementation=NAME)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]])
    mask = theirs.create_causal_mask(config, torch.zeros(1, 6, 8), None, None, positions)
    assert not mask[0, 0, 2:, :2].any()
    attend(None, query, query, query, mask, cu_seq_lens_q=bounds)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lengths", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_packed_sequences_have_no_mask_of_all_pairs(
    lengths: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(theirs, "packed_sequence_compatibility_function"):
        pytest.skip(f"transformers {transformers.__version__} has another form of packed masks")
    register(strict=True)
    config = transformers.MistralConfig(attn_implementation=NAME, sliding_window=window)
    create = theirs.create_causal_mask if window is None else theirs.create_sliding_window_causal_mask
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 0]])
    mask = create(config, torch.zeros(1, 7, 8), None, None, positions)
    assert isinstance(mask, PatternMask)
    seen = torch.tensor([0, 0, 1, 1, 1, 1, 2])
    row, column = torch.arange(7)[:, None], torch.arange(7)
    wanted = (seen[:, None] == seen) & (column <= row) & (column > row - (window or 7))
    query, key = half(1, 4, 7, 16), half(1, 2, 7, 16)
    bounds = torch.tensor([0, 2, 6, 7], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4} if lengths else {}
    calls = []
    monkeypatch.setattr(integration, "sdpa_varlen", lambda *a, **k: calls.append(1) or microsdpa.sdpa_varlen(*a, **k))
    out = attend(None, query, key, key, mask, **given)
    expected = exact(query, key.repeat_interleave(2, 1), key.repeat_interleave(2, 1), wanted)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    assert len(calls) == lengths
    leaf = query.clone().requires_grad_()  # a gradient takes the numbers of the sequences
    attend(None, leaf, key, key, mask, **given).sum().backward()
    assert leaf.grad is not None
    assert len(calls) == lengths
    assert torch.equal(mask[0, 0], wanted)


def test_weights_and_paged_caches_are_left_to_transformers() -> None:
    query = half(1, 2, 3, 16)
    register(strict=True)
    for asked in ({"output_attentions": True}, {"cache": object()}):
        with pytest.raises(microsdpa.UnsupportedProblem, match=r"output_attentions|paged cache"):
            attend(None, query, query, query, None, **asked)
    register()
    attend(None, query, query, query, None, output_attentions=True)
    with pytest.raises(microsdpa.UnsupportedProblem, match="output_attentions"):
        attend(None, query, query, query, None, output_attentions=True, s_aux=torch.zeros(2))


def test_a_selection_without_a_way_to_read_it_is_refused() -> None:
    register()
    query = half(1, 2, 3, 16)
    with pytest.raises(microsdpa.UnsupportedProblem, match=r"no indexer\.build_block_mask"):
        attend(None, query, query, query, None, block_indices=torch.zeros(1, 2, 3, 1, dtype=torch.long))
    with pytest.raises(microsdpa.UnsupportedProblem, match="beside no mask"):
        attend(None, query, query, query, None, indices=torch.zeros(1, 3, 1, dtype=torch.long))


@pytest.mark.parametrize("number", [False, True])
def test_selected_keys_are_the_only_ones(number: bool) -> None:
    register(strict=True)
    query = half(1, 2, 4, 16)
    chosen = torch.tensor([[[0, 1], [1, 0], [0, 2], [3, 1]]])
    mask: Any = mask_function(1, 4, 4, mask_function=CAUSAL)
    if number:
        mask = torch.zeros(1, 1, 4, 4).masked_fill(~mask.tensor(), torch.finfo(torch.float16).min).half()
    seen = torch.zeros(1, 4, 4, dtype=torch.bool).scatter(-1, chosen, True) & torch.ones(4, 4).tril().bool()
    out = attend(None, query, query, query, mask, indices=chosen.int())
    torch.testing.assert_close(out.double(), exact(query, query, query, seen[:, None]), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_a_position_bias_is_added(padded: bool) -> None:
    register(strict=True)
    query, bias = half(2, 2, 5, 16), half(1, 2, 5, 5, seed=3)
    padding = torch.tensor([[True] * 5, [False] * 2 + [True] * 3]) if padded else None
    mask = mask_function(2, 5, 5, mask_function=CAUSAL, attention_mask=padding)
    assert mask is not None
    scores = query.double() @ query.double().mT * 0.25 + bias.double()
    expected = scores.masked_fill(~mask.tensor(), -torch.inf).softmax(dim=-1).nan_to_num(0.0) @ query.double()
    again = mask_function(2, 5, 5, mask_function=CAUSAL, attention_mask=padding)
    out = attend(None, query, query, query, again, position_bias=bias)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=2e-3, atol=2e-3)


LEFT_TO_TORCH = {
    "broadcast batch": (half(1, 4, 5, 16), half(2, 4, 5, 16), half(2, 4, 5, 16)),
    "other value heads": (half(2, 4, 5, 16), half(2, 4, 5, 16), half(2, 1, 5, 16)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_calls_that_are_left_to_torch_do_not_raise(name: str, compiled: bool) -> None:
    register()
    tensors = LEFT_TO_TORCH[name]
    module = torch.nn.Module()

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(module, query, key, value, None, is_causal=True)

    torch._dynamo.reset()
    function = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(function(*tensors), expected)
    register(strict=True)
    with pytest.raises(microsdpa.UnsupportedProblem):
        attend(module, *tensors, None, is_causal=True)


def test_a_compiled_layer_takes_a_mask_that_was_made_outside() -> None:
    """The mask of a whole forward pass, where only layers are compiled."""
    register(strict=True)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().half()
    model.set_attn_implementation(NAME)
    ids, padding = torch.arange(2, 14).view(2, 6), torch.tensor([[1] * 6, [0, 0] + [1] * 4])
    with torch.no_grad():
        for mask in (None, padding):
            expected = model(ids, attention_mask=mask).logits
            compiled = copy.deepcopy(model)
            torch._dynamo.reset()
            for layer in compiled.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            found = compiled(ids, attention_mask=mask).logits
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_a_soft_cap_and_sinks_need_the_name_without_sdpa() -> None:
    register()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.Gemma2ForCausalLM(config)
    if not model._supports_sdpa:  # as transformers says from some version on
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            model.set_attn_implementation(NAME)
    model.set_attn_implementation(NAME_FOR_ALL)
    with torch.no_grad(), pytest.raises(microsdpa.UnsupportedProblem, match=r"torch\.float32"):
        model(torch.arange(6)[None])


def test_float32_is_transformers_own_and_as_fast_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask stays an argument in what is left to transformers."""
    register()
    calls: list[Any] = []
    stock = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **o: calls.append((o["attn_mask"], o["is_causal"])) or stock(*a, **o),
    )
    query = half(1, 2, 5, 16).float()
    assert torch.float32 not in call_tensors.DTYPES
    attend(torch.nn.Module(), query, query, query, mask_function(1, 5, 5, mask_function=CAUSAL))
    attend(torch.nn.Module(), query, query, query, mask_function(1, 5, 5, mask_function=BOTH_WAYS))
    assert calls == [(None, True), (None, False)]


@pytest.mark.parametrize(("library", "version"), [("transformers", "5.3.1"), ("diffusers", "1.0.0")])
def test_a_version_that_was_not_tested_is_refused(library: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=rf"expected {library} \d+\.\d+ to \d+\.\d+, found {library} {version}"):
        versions.check(library)
    if library == "transformers":
        with pytest.raises(ImportError, match=version):
            register()


def test_the_installed_versions_are_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in versions.SUPPORTED:
        versions.check(library)

    def missing(name: str) -> str:
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    with pytest.raises(ImportError, match="found no transformers"):
        register()
