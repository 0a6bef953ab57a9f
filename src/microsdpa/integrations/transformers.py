"""Hugging Face transformers: attn_implementation="microattention", with its masks.

Two names are registered for the same functions. transformers asks of every name that contains "sdpa" whether the model
supports torch's function of this name. Models with a soft cap or with sinks do not, so "microsdpa" is refused there.
"microattention" works for those too.

Masks. transformers builds a mask once for each forward pass, through the function that is registered here. It hands it
to every layer. A mask of None would have to be guessed at in a layer. It means one alignment with a static cache and
another one with a dynamic cache, and a third after a model has cut queries off. So a causal mask is None for one query
alone.

What arguments of sdpa can say becomes a PatternMask: causal masks of any offset, sliding windows, padding as
[B, 1, 1, S_k], and packed sequences as document ids. A model that slices or combines it meets the bool tensor of
S_q x S_k. All else is transformers' own bool tensor: chunks, overlays, and everything that torch.compile traces. Packed
sequences with cu_seq_lens_q, without a gradient, take sdpa_varlen. Whether a batch has padding
is read once for each mask, where transformers' own function reads it too. A layer adds no synchronisation.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_dynamo_compiling

from microsdpa.attention import api
from microsdpa.attention.varlen import sdpa_varlen
from microsdpa.call.tensors import check_impl
from microsdpa.errors import InvalidArgument, UnsupportedProblem
from microsdpa.execution.nodes import PLAIN_TYPES
from microsdpa.integrations import dropin, versions
from microsdpa.integrations.dropin import DEVICES
from microsdpa.integrations.patterns import EVERYTHING, Pattern, PatternMask, describe

NAME = "microsdpa"
NAME_FOR_ALL = "microattention"
"""The name for models that refuse every name with "sdpa" in it, and for all others."""
EAGER = "attn_implementation='eager'"

HARMLESS = frozenset(
    {
        # What the mask already says, or what only the layers around attention read.
        *("position_ids", "cache_position", "position_embeddings", "past_key_values", "past_key_value", "seq_idx"),
        *("token_type_ids", "mm_token_type_ids", "input_ids", "inputs_embeds"),
        *("use_cache", "logits_to_keep", "num_items_in_batch", "labels", "return_dict", "return_loss"),
        *("output_hidden_states", "output_router_logits", "return_shared_kv_states"),
        # Of several sequences in a row: beside cu_seq_lens_q, which is looked at.
        *("max_length_q", "max_length_k", "cu_seq_lens_k"),
        # How FlashAttention's gradient is added up; gradients here do not depend on an order of threads.
        "deterministic",
    }
)
"""Keyword arguments that models pass on to their attention function and that change nothing in it."""

MASKS_AS_NUMBERS = frozenset({"bigbird_pegasus", "deepseek_v4"})
"""Model types that would misread bools, and get masks of numbers to be added, as with "eager".

BigBirdPegasus hands them to an attention of its own, too. DeepSeek-V4 appends numbers: as bools they mean the reverse.
"""

_READ = frozenset({"indices", "block_indices", "cache", "output_attentions", "sliding_window", "cu_seq_lens_q"})
"""Further keyword arguments that the attention function here acts on."""

_CHANGING = _READ - {"sliding_window"}
"""Those of them that change what is computed where a mask is given."""


def register(*, strict: bool = False, impl: str = "auto", harmless: Iterable[str] = ()) -> None:
    """Make attn_implementation="microattention" and "microsdpa" work, for attention and masks both.

    What microsdpa does not compute goes to transformers' own "sdpa", with one logged line for each distinct reason.
    With `strict` it raises UnsupportedProblem instead, as it always does where there is a soft cap or sinks: "sdpa"
    would leave them out. `impl` is that of microsdpa.sdpa.

    A keyword argument that a model passes to its attention function and that is not known here raises
    UnsupportedProblem too, because it may change the meaning. `harmless` names those that do not, in your own models.

    Raises:
        ImportError: transformers is not installed, or is of a version that this was not tested with.
        InvalidArgument: there is no such `impl`, or `harmless` is one string.
    """
    versions.check("transformers")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    check_impl(impl)
    if isinstance(harmless, str):
        raise InvalidArgument(
            "harmless", expected="names of keyword arguments", got=repr(harmless), hint=f"pass ({harmless!r},)"
        )
    known = HARMLESS | _READ | frozenset(harmless)

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **further: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, S_q, H, D] from [B, H, S_q, D]; `s_aux` are the heads' sinks, [H]."""
        if further:
            _refuse_unknown(module, further, known)
        optioned = dropout or any(each is not None for each in (position_bias, softcap, s_aux))
        if not optioned and _CHANGING.isdisjoint(further) and _sees_everything(query, key, attention_mask, further):
            attended = _attend_plain(query, key, value, scaling, impl)
            if attended is not None:
                return attended, None
        if further:
            attention_mask = _with_selection(module, query, key, attention_mask, further)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        pattern = _pattern(module, query, key, attention_mask, causal, further)
        mask = attention_mask
        if pattern is None:
            mask = mask.tensor() if isinstance(mask, PatternMask) else mask
        else:
            mask = pattern.padding
            if pattern.start or pattern.stop != key.shape[2]:
                keys = slice(pattern.start, pattern.stop)
                key, value = key[:, :, keys], value[:, :, keys]
                position_bias = None if position_bias is None else position_bias[..., keys]
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1], "impl": impl}
        if pattern is not None:
            options |= {"causal": pattern.causal, "window": pattern.window, "document_ids": pattern.documents}
        if dropout:
            options["dropout_p"] = dropout
        options |= {"attn_mask": _combined(mask, position_bias), "softcap": softcap, "sinks": s_aux}
        only_here = softcap is not None or s_aux is not None
        size = value.shape[3]
        padded = F.pad(value, (0, query.shape[3] - size)) if only_here and size < query.shape[3] else value
        reason = _why_not(query, key, padded, position_bias, dropout, further, options)
        if not reason:
            try:
                result = _attend_packed(query, key, padded, options, further)
                if result is None:
                    out = _output(query, padded, (key, options["attn_mask"], s_aux))
                    attended = api.sdpa(query, key, padded, out=out, **options)
                    assert isinstance(attended, torch.Tensor)
                    result = attended
                result = result if size == query.shape[3] else result[..., :size]
                return result.transpose(1, 2).contiguous(), None
            except (InvalidArgument, UnsupportedProblem) as error:
                reason = str(error)
        if strict or only_here:
            raise UnsupportedProblem(reason, nearest=EAGER)
        dropin.note_fallback(reason)
        stock, aligned = _stock_mask(pattern, mask, attention_mask)
        theirs = {"dropout": dropout, "scaling": scaling, "is_causal": aligned, "position_bias": position_bias}
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, stock, **theirs, **further)
        return found

    for name in (NAME, NAME_FOR_ALL):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mask_function)


def _sees_everything(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, further: dict[str, Any]
) -> bool:
    """Whether every query sees every key, as in a decoding step and in an encoder without padding."""
    if mask is None:
        window = further.get("sliding_window")
        return query.shape[2] == 1 and (window is None or window >= key.shape[2])
    return type(mask) is PatternMask and mask.untouched and mask.hides_nothing


def _attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, impl: str
) -> torch.Tensor | None:
    """[B, S_q, H, D] of a call without options in which every query sees every key.

    It spares the layers of a decoding step most of what is looked at ahead of other calls. None for a call that has to
    be looked at, or that sdpa refuses.
    """
    if is_dynamo_compiling() or peek_interpreter_stack() is not None or query.device.type not in DEVICES:
        return None
    if not (type(query) in PLAIN_TYPES and type(key) in PLAIN_TYPES and type(value) in PLAIN_TYPES):
        return None
    out, shares = _output(query, value, (key,)), query.shape[1] != key.shape[1]
    try:
        result = api.sdpa(query, key, value, out=out, scale=scale, enable_gqa=shares, impl=impl)
    except (InvalidArgument, UnsupportedProblem):
        return None
    return result.transpose(1, 2).contiguous()


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **further: Any,
) -> torch.Tensor | None:
    """The mask of a forward pass, [B, 1, S_q, S_k], where False hides; the arguments are transformers'.

    It is a PatternMask where arguments of sdpa say the same, and a plain bool tensor otherwise. It is None only for one
    query that sees all keys, and if torch.compile traces a mask that hides nothing.

    Raises:
        UnsupportedProblem: the model would not hand the mask to an attention function, but read it as numbers to add.
    """
    theirs = _masking_utils()
    config = further.get("config")
    _refuse_own_attention(config)
    mask_function = theirs.causal_mask_function if mask_function is None else mask_function
    sizes: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    sizes |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
    if getattr(config, "model_type", None) in MASKS_AS_NUMBERS:
        numbers: torch.Tensor = theirs.eager_mask(**sizes, mask_function=mask_function, use_vmap=use_vmap, **further)
        return numbers
    traced = _is_traced(attention_mask)
    if allow_is_causal_skip and q_length == 1 and attention_mask is None and not (traced or use_vmap):
        # One query without a mask sees all keys, and a step of decoding makes no mask.
        ends_here = type(q_offset) is int and q_offset + 1 == kv_length + kv_offset
        if ends_here and mask_function is theirs.causal_mask_function:
            return None
    documents, of_each = _documents(mask_function) if attention_mask is None and not traced else (None, mask_function)
    # A model that forbids both will combine the mask with others, unless transformers did so for packed sequences.
    lazy = allow_is_causal_skip or allow_is_bidirectional_skip or documents is not None
    lazy = lazy and not use_vmap and not traced
    ends = _ends(of_each) if lazy else None
    if ends is not None and (attention_mask is None or _is_padding(attention_mask, batch_size)):
        # The offset of a static cache is a tensor: transformers' own function waits for it here, too.
        position = int(q_offset) - kv_offset if ends != (EVERYTHING, EVERYTHING) else 0
        pattern = describe(q_length, kv_length, position, *ends)
        if documents is not None:
            fits = pattern is not None and q_length == kv_length and documents.shape == (batch_size, q_length)
            pattern = replace(pattern, documents=documents) if fits and pattern is not None else None
        if pattern is not None:
            padding = _padding(attention_mask, kv_offset + pattern.start, kv_offset + pattern.stop, device)
            if padding is not None:
                pattern = replace(pattern, padding=padding)
            return PatternMask(batch_size, q_length, kv_length, pattern, torch.device(device))
    skip = traced and allow_is_bidirectional_skip and getattr(config, "is_causal", True)
    found: torch.Tensor | None = theirs.sdpa_mask(
        **sizes,
        mask_function=mask_function,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=skip,
        use_vmap=use_vmap,
        **further,
    )
    return found


def _ends(mask_function: Callable[..., Any]) -> tuple[int, int] | None:
    """(left, right) ends of what a mask function of transformers lets a query see; None for any other function.

    transformers makes its windows as closures. They are known by their code, and their size by their cells.
    """
    theirs = _masking_utils()
    if mask_function is theirs.causal_mask_function:
        return EVERYTHING, 0
    if mask_function is theirs.bidirectional_mask_function:
        return EVERYTHING, EVERYTHING
    both = theirs.and_masks(theirs.causal_mask_function)
    if getattr(mask_function, "__code__", None) is not both.__code__:
        return None
    parts = _cells(mask_function)[0]
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, base = parts
    code, sizes = getattr(overlay, "__code__", None), _cells(overlay)
    if len(sizes) != 1 or type(sizes[0]) is not int or sizes[0] < 1:
        return None
    size: int = sizes[0]
    if base is theirs.causal_mask_function and code is theirs.sliding_window_overlay(1).__code__:
        return size - 1, 0
    if base is theirs.bidirectional_mask_function and code is theirs.sliding_window_bidirectional_overlay(1).__code__:
        return size, size
    return None


def _documents(mask_function: Callable[..., Any]) -> tuple[torch.Tensor | None, Callable[..., Any]]:
    """Numbers [B, S] of packed sequences that a mask function keeps apart, or None; and what it lets each of them see.

    transformers finds them by position_ids that start again, so that positions within one of them follow one another.
    """
    whole, wanted = _codes_of_packed()
    if getattr(mask_function, "__code__", None) is not whole or whole is None:
        return None, mask_function
    parts = _cells(mask_function)[0]
    codes = [getattr(part, "__code__", None) for part in parts] if isinstance(parts, tuple) else []
    if codes != wanted:
        return None, mask_function
    (documents,), (inner, _) = _cells(parts[0]), _cells(parts[1])
    return documents, inner


@functools.cache
def _masking_utils() -> Any:
    """transformers' module of masks: an import statement in a function takes a microsecond of each call."""
    return importlib.import_module("transformers.masking_utils")


@functools.cache
def _codes_of_packed() -> tuple[Any, list[Any]]:
    """Code of transformers' mask functions that keep packed sequences apart, and of what such a function consists of.

    None of versions that have none.
    """
    theirs = _masking_utils()
    make = getattr(theirs, "packed_sequence_compatibility_function", None)
    if make is None:
        return None, []
    none = torch.empty(0, device="cpu")
    packed = make(theirs.causal_mask_function, none, none)
    return packed.__code__, [part.__code__ for part in _cells(packed)[0]]


def _is_traced(attention_mask: torch.Tensor | None) -> bool:
    """Whether transformers takes a forward pass for a traced one. Of a mask there may be more to look at."""
    if attention_mask is None:
        return is_dynamo_compiling() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    from transformers.utils.import_utils import is_tracing

    return bool(is_tracing(attention_mask))


def _cells(function: object) -> list[Any]:
    """What a function has closed over."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _is_padding(attention_mask: torch.Tensor, batch: int) -> bool:
    """Whether a mask is [B, S_k] of bools."""
    return attention_mask.dim() == 2 and attention_mask.dtype == torch.bool and attention_mask.shape[0] == batch


def _padding(
    attention_mask: torch.Tensor | None, start: int, stop: int, device: torch.device | str
) -> torch.Tensor | None:
    """The mask [B, 1, 1, stop - start] of keys start to stop; None if it hides none of them. Waits for the device."""
    if attention_mask is None:
        return None
    missing = max(0, stop - attention_mask.shape[1])
    seen = F.pad(attention_mask, (0, missing))[:, start:stop]
    return None if seen.all() else seen[:, None, None].to(device)


_own_attention: dict[type, str] = {}


def _refuse_own_attention(config: object) -> None:
    """Refuse models whose attention is code of their own: they add the mask to the scores, and a bool adds 0 or 1.

    Raises:
        UnsupportedProblem: one of the model's modules has attention classes and does not look for attention functions.
    """
    kind = type(config)
    if kind not in _own_attention:
        package = kind.__module__.rpartition(".")[0]
        _own_attention[kind] = "" if config is None else _module_with_own_attention(package)
    if _own_attention[kind]:
        raise UnsupportedProblem(
            f"{_own_attention[kind]} has an attention of its own, which reads masks in another form",
            nearest=f"{EAGER}, or microsdpa.enable() for what calls torch's scaled_dot_product_attention",
        )


def _module_with_own_attention(package: str) -> str:
    """Name of a loaded modeling module of a package that defines attention classes without attention functions."""
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[0] != package or "modeling_" not in name or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            continue
        for attribute, each in vars(module).items():
            own = isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == name
            if own and "Attention" in attribute:
                return name.rpartition(".")[2]
    return ""


def _refuse_unknown(module: torch.nn.Module, further: dict[str, Any], known: frozenset[str]) -> None:
    unknown = [name for name, value in further.items() if value is not None and name not in known]
    if unknown:
        raise UnsupportedProblem(
            f"{type(module).__name__} passes {' and '.join(unknown)} to its attention function, which microsdpa does "
            "not know and may not ignore",
            nearest=f"{EAGER}, or register(harmless=[...]) for what changes nothing",
        )


def _with_selection(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    further: dict[str, Any],
) -> torch.Tensor | None:
    """The mask, and of the keys those only that a sparse model chose for each query.

    `indices` are keys, [B, S_q, N]; `block_indices` are blocks of keys, which the module's indexer takes apart.
    """
    indices, blocks = further.get("indices"), further.get("block_indices")
    if indices is None and blocks is None:
        return attention_mask
    mask = attention_mask.tensor() if isinstance(attention_mask, PatternMask) else attention_mask
    if blocks is not None:
        build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
        if build is None or indices is not None:
            raise UnsupportedProblem(
                f"{type(module).__name__} passes block_indices, and has no indexer.build_block_mask to read them with",
                nearest=EAGER,
            )
        position_ids = further.get("position_ids")
        if mask is None and position_ids is None:
            raise UnsupportedProblem("block_indices came without a mask and without position_ids", nearest=EAGER)
        # Its numbers are kept: a query of padding sees all keys alike then, and the next layer chooses blocks by it.
        built: torch.Tensor = build(blocks, mask, key.shape[2], query.dtype, query.device, position_ids)
        return built
    assert indices is not None
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if mask is None or indices.dim() != 3 or indices.shape[:2] != shape[:2]:
        raise UnsupportedProblem(
            f"indices: expected [B, S_q, N] = {[*shape[:2], 'N']} beside a mask, got {list(indices.shape)} beside "
            f"{'no mask' if mask is None else 'a mask'}",
            nearest=EAGER,
        )
    chosen = torch.zeros(shape, dtype=torch.bool, device=query.device).scatter_(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)


def _pattern(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    further: dict[str, Any],
) -> Pattern | None:
    """What a mask, or none, means as arguments; None for a mask that has to be read.

    Raises:
        UnsupportedProblem: there is no mask, and what that means cannot be told.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if mask is not None:
        if not isinstance(mask, PatternMask):
            return None
        if mask.pattern.documents is None:
            _refuse_packing(query, further)
        if mask.untouched and mask.hides_nothing:  # of whatever length: models keep a mask that they do not cut
            return Pattern(0, seqlen_k)
        fits = mask.untouched and (mask.shape[2], mask.shape[3]) == (seqlen_q, seqlen_k)
        return mask.pattern if fits else None
    _refuse_packing(query, further)
    window = further.get("sliding_window")
    if window is not None and window < seqlen_k:
        raise UnsupportedProblem(
            f"{type(module).__name__} passes a sliding_window of {window} for {seqlen_k} keys, and no mask",
            nearest=EAGER,
        )
    if not causal or seqlen_q == 1:
        return Pattern(0, seqlen_k)
    if seqlen_q != seqlen_k:
        raise UnsupportedProblem(
            f"{type(module).__name__} is causal and passes no mask for {seqlen_q} queries and {seqlen_k} keys: "
            "the positions of the queries cannot be told",
            nearest="a mask, or is_causal=False",
        )
    return describe(seqlen_q, seqlen_k, 0, EVERYTHING, 0)


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    further: dict[str, Any],
) -> torch.Tensor | None:
    """[1, H, S, D] of sequences that both document ids and cu_seq_lens keep apart, by sdpa_varlen.

    None where that has no gradient, or not the call's options: document ids say the same.
    """
    offsets = further.get("cu_seq_lens_q"), further.get("cu_seq_lens_k")
    if options.get("document_ids") is None or query.shape[0] != 1 or options["impl"] not in ("auto", "emulate"):
        return None
    if options["attn_mask"] is not None or "dropout_p" in options or is_dynamo_compiling():
        return None
    if any(given is None or given.dtype != torch.int32 for given in offsets):
        return None
    sinks = options["sinks"]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sinks)):
        return None
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    shared = {name: options[name] for name in ("scale", "impl", "window", "softcap", "sinks")}
    most = further.get("max_length_q")
    found = sdpa_varlen(
        *packed,
        query_offsets=offsets[0],
        key_offsets=offsets[1],
        max_queries=most if isinstance(most, int) and most > 0 else None,
        causal=options["causal"] is not None,
        **shared,
    )
    assert isinstance(found, torch.Tensor)
    return found.transpose(0, 1)[None]


def _refuse_packing(query: torch.Tensor, further: dict[str, Any]) -> None:
    """Refuse several sequences in one row that no mask keeps apart."""
    bounds = further.get("cu_seq_lens_q")
    if bounds is not None and bounds.shape[0] - 1 > query.shape[0]:
        raise UnsupportedProblem(
            f"cu_seq_lens_q names {bounds.shape[0] - 1} sequences in {query.shape[0]} rows, and the mask parts none",
            nearest="position_ids that start at 0 for each sequence, without a cache and an attention_mask",
        )


def _output(query: torch.Tensor, value: torch.Tensor, others: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Memory for [B, H, S_q, D_v] in the order [B, S_q, H, D_v], which models want; None where autograd makes its own.

    The output that sdpa allocates has the memory order of query, which in most models is that already.
    """
    if query.shape[2] == 1 or not query.is_contiguous() or is_dynamo_compiling():
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, value, *others)):
        return None
    batch, heads, seqlen_q, _ = query.shape
    return query.new_empty(batch, seqlen_q, heads, value.shape[3]).transpose(1, 2)


def _combined(mask: torch.Tensor | None, position_bias: torch.Tensor | None) -> torch.Tensor | None:
    """A mask, and a position bias to be added, as one."""
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    return position_bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else position_bias + mask


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor | None,
    dropout: float,
    further: dict[str, Any],
    options: dict[str, Any],
) -> str:
    """What of a call microsdpa does not compute; empty for nothing that can be told at a glance."""
    if further.get("output_attentions"):
        return "output_attentions=True asks for the weights of the keys"
    if further.get("cache") is not None:
        return "there is a paged cache, which transformers' own functions fill"
    if position_bias is not None and position_bias.requires_grad and torch.is_grad_enabled():
        return "a position bias takes gradients"
    mask: torch.Tensor | None = options["attn_mask"]
    reason = dropin.why_not(query, key, value, mask, dropout)
    if not reason and is_dynamo_compiling():
        reason = dropin.why_not_traced(query, key, value, mask, options)
    return reason


def _stock_mask(
    pattern: Pattern | None, mask: torch.Tensor | None, given: torch.Tensor | None
) -> tuple[torch.Tensor | None, bool]:
    """(mask, is_causal) for transformers' own "sdpa", of the keys that are left."""
    if pattern is None:
        return mask, False
    plain = pattern.padding is None and pattern.window is None and pattern.documents is None
    if plain and pattern.causal != "lower_right":
        return None, pattern.causal is not None
    assert isinstance(given, PatternMask)
    return given.tensor()[..., pattern.start : pattern.stop], False
