"""Models of transformers and diffusers, made tiny by their own configurations, with random weights and inputs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

MAX_PARAMETERS = 40_000_000
"""A model with more is not tiny: its configuration has sizes that are not known here."""
VOCABULARY, LENGTH, BATCH = 128, 12, 2
PADDED = 5
"""Tokens of padding in the second row of a batch."""

SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size", "src_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "text_dim", "embedding_size"), 64),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "hidden_dim", "emb_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "text_hidden_size", "output_dim", "cross_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_attention_head", "attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("decoder_num_key_value_heads", "encoder_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "swa_head_dim", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "moe_ffn_hidden_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "dense_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_intermediate_size", "encoder_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "n_group", "num_expert_groups"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "latent_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "indexer_head_dim"), 16),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_topk", "sliding_window", "attention_chunk_size", "index_topk_tokens"), 4),
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), 2),
    **dict.fromkeys(("index_local_blocks",), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), 128),
    **dict.fromkeys(("max_source_positions", "max_sequence_length", "seq_length", "max_seq_len"), 128),
    **dict.fromkeys(("image_size", "img_size"), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("num_mel_bins",), 16),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("hidden_size_per_layer_input",), 16),
}
"""Fields of configurations that count, and what they become. Those that are None by default stay so."""

GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 16,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
SAM = {"output_channels": 64, "global_attn_indexes": [1], "window_size": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "sam_vision_model": SAM,
    "sam_hq_vision_model": SAM,
    "qwen2_vl_text": ROTARY,
    "qwen2_5_vl_text": ROTARY,
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "hidden_size": 64, "expand": 2},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "minimax_m3_sparse"], "num_hidden_layers": 2},
}
"""By model type: what the sizes alone do not make valid, or do not bring about."""


class NotTiny(Exception):
    """A model that its configuration does not make tiny, or that wants inputs that are not known here."""


def settings(kind: type, depth: int = 0) -> dict[str, Any]:
    """Arguments that make a configuration of a class tiny, those of its parts among them."""
    default = kind()
    given = {field.name: field.default for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    fields = (
        {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(vars(default))
    )
    found: dict[str, Any] = {}
    for name in fields & set(SIZES):
        value = given[name] if name in given else getattr(default, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(value, SIZES[name]) if name not in ("patch_size",) else SIZES[name]
    if "kv_lora_rank" in found:  # latent attention: its heads have sizes of their own, and are not shared
        found.pop("head_dim", None)
        if "num_key_value_heads" in found:
            found["num_key_value_heads"] = found.get("num_attention_heads", 4)
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if "layer_types" in fields and "num_hidden_layers" in found and kinds:
        found["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        found["num_hidden_layers"] = len(found["layer_types"])
    for name in fields:
        value = given[name] if name in given else getattr(default, name, None)
        if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "layerdrop"))):
            found[name] = 0.0
        if name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id"):
            found[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}.get(name, 1)
    found.pop("forced_eos_token_id", None)
    if "forced_eos_token_id" in fields:
        found["forced_eos_token_id"] = None
    for name in getattr(kind, "sub_configs", {}) if depth < 3 else ():
        part = getattr(default, name, None)
        if part is not None and not isinstance(part, dict):
            found[name] = settings(type(part), depth + 1) | {"model_type": part.model_type}
    return found | OVERRIDES.get(getattr(kind, "model_type", ""), {})


def configuration(kind: type) -> Any:
    """A tiny configuration of a class."""
    try:
        return kind(**settings(kind))
    except Exception as error:
        raise NotTiny(f"{kind.__name__}: {type(error).__name__}: {_line(error)}") from error


def make(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model with random weights on the CPU, in FP32.

    Raises:
        NotTiny: it is too large, or cannot be made from its configuration.
    """
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {_line(error)}") from error
    if size > MAX_PARAMETERS:
        raise NotTiny(f"{size / 1e6:.0f} million parameters are left when all known sizes are small")
    torch.manual_seed(seed)
    try:
        model = model_class(config).eval()
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {_line(error)}") from error
    return _livelier(model)


def _livelier(model: Any) -> Any:
    """Larger weights: as initialised, attention is so flat that a lost mask would hardly show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and parameter.is_floating_point() and "embed" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif parameter.dim() >= 1 and parameter.is_floating_point() and not parameter.isfinite().all():
                parameter.zero_()
    return model


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


MAPPINGS = {
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""Families of models, and transformers' list of the classes of each."""
OTHERS = {
    "encoder": ("mpnet", "t5gemma2_encoder", "dpr", "clip_text_model", "siglip_text_model", "bros", "lilt"),
    "speech": ("whisper", "speech_to_text", "moonshine", "audio-spectrogram-transformer", "clap"),
    "vision": (
        *("clip", "siglip", "siglip2", "align", "chinese_clip", "blip", "altclip", "owlvit", "groupvit", "flava"),
        *("clip_vision_model", "siglip_vision_model", "siglip2_vision_model", "aimv2_vision_model", "blip_2_qformer"),
        *("sam_vision_model", "sam_hq_vision_model", "sam", "sam2_vision_model", "sam3_vit_model", "dinov3_vit"),
        *("pixtral", "idefics2_vision", "idefics3_vision", "smolvlm_vision", "internvl_vision", "mlcd_vision_model"),
        *("vivit", "videomae", "timesformer", "vjepa2", "yolos", "vit_mae", "vit_msn", "dpt", "llama4_vision_model"),
    ),
}
"""Model types whose base model is tried beside the mappings."""
TOWERS = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel"),
    "qwen3_5": ("Qwen3_5VisionConfig", "Qwen3_5VisionModel"),
    "glm4v": ("Glm4vVisionConfig", "Glm4vVisionModel"),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VLMoeVisionTransformerPretrainedModel"),
}
"""Vision towers over packed images: the module of each, its configuration and its class."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model that the sweep tries.

    Attributes:
        family: "decoder", "encoder-decoder", "encoder", "speech", "vision", "tower" or "diffusion".
        kind: its model type, or the name of its class in diffusers.
    """

    family: str
    kind: str

    def __str__(self) -> str:
        """Family and type."""
        return f"{self.family}: {self.kind}"

    def classes(self) -> tuple[type, Any]:
        """Configuration and model class.

        Raises:
            NotTiny: the installed library has none.
        """
        import transformers
        from transformers.models.auto import configuration_auto, modeling_auto

        try:
            if self.family == "tower":
                module = importlib.import_module(f"transformers.models.{self.kind}.modeling_{self.kind}")
                config, model = TOWERS[self.kind]
                return getattr(module, config), getattr(module, model)
            names = getattr(modeling_auto, MAPPINGS[self.family])
            found = names.get(self.kind) or modeling_auto.MODEL_MAPPING_NAMES[self.kind]
            name = found if isinstance(found, str) else found[0]
            return configuration_auto.CONFIG_MAPPING[self.kind], getattr(transformers, name)
        except (AttributeError, ImportError, KeyError) as error:
            raise NotTiny(f"{type(error).__name__}: {_line(error)}") from error


def _image(channels: int = 4, size: int = 8) -> torch.Tensor:
    return normal(BATCH, channels, size, size)


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_STEP = {"timestep": torch.tensor([3.0, 9.0])}
_SEEN = torch.arange(7) < torch.tensor([[7], [3]])
DIFFUSION: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "FluxTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "num_single_layers": 1, "joint_attention_dim": 32}
        | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
        | _HEADS,
        lambda: {
            "hidden_states": normal(2, 16, 4),
            "encoder_hidden_states": normal(2, 7, 32),
            "pooled_projections": normal(2, 32),
            "img_ids": normal(16, 3),
            "txt_ids": normal(7, 3),
            **_STEP,
        },
    ),
    "WanTransformer3DModel": (
        {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32}
        | {"rope_max_seq_len": 32}
        | _HEADS
        | {"attention_head_dim": 12},
        lambda: {"hidden_states": normal(2, 4, 2, 8, 8), "encoder_hidden_states": normal(2, 7, 16), **_STEP},
    ),
    "QwenImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
        | _HEADS,
        lambda: {
            "hidden_states": normal(2, 16, 16),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_hidden_states_mask": _SEEN,
            "img_shapes": [[(1, 4, 4)]] * 2,
            **_STEP,
        },
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32}
        | {"pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 16}
        | _HEADS,
        lambda: {
            "hidden_states": _image(),
            "encoder_hidden_states": normal(2, 7, 32),
            "pooled_projections": normal(2, 32),
            **_STEP,
        },
    ),
    "PixArtTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "out_channels": 8, "caption_channels": 16, "cross_attention_dim": 32}
        | {"use_additional_conditions": False}
        | _HEADS,
        lambda: {
            "hidden_states": _image(),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_attention_mask": _SEEN,
            "timestep": torch.tensor([3, 9]),
        },
    ),
    "DiTTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "out_channels": 8, "num_embeds_ada_norm": 32} | _HEADS,
        lambda: {
            "hidden_states": _image(),
            "timestep": torch.tensor([3, 9]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "SanaTransformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16}
        | {"cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8, "patch_size": 1}
        | _HEADS,
        lambda: {
            "hidden_states": _image(),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_attention_mask": _SEEN,
            **_STEP,
        },
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16} | _HEADS,
        lambda: {
            "hidden_states": normal(2, 32, 8),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_attention_mask": _SEEN,
            "num_frames": 2,
            "height": 4,
            "width": 4,
            **_STEP,
        },
    ),
    "CogVideoXTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 16, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 9, "max_text_seq_length": 7}
        | _HEADS,
        lambda: {"hidden_states": normal(2, 3, 4, 8, 8), "encoder_hidden_states": normal(2, 7, 16), **_STEP},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
        | {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
        | {"caption_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 64},
        lambda: {"hidden_states": _image(), "encoder_hidden_states": normal(2, 7, 32), **_STEP},
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1}
        | {"guidance_embeds": True, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8)}
        | _HEADS,
        lambda: {
            "hidden_states": normal(2, 4, 2, 4, 4),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_attention_mask": _SEEN,
            "pooled_projections": normal(2, 8),
            "guidance": torch.tensor([6.0, 6.0]),
            **_STEP,
        },
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1}
        | {"num_attention_heads": 2, "num_kv_heads": 1, "axes_dim_rope": (4, 4, 8), "cap_feat_dim": 16}
        | {"multiple_of": 16},
        lambda: {
            "hidden_states": _image(),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_attention_mask": _SEEN,
            "timestep": torch.tensor([0.3, 0.9]),
        },
    ),
}
"""Transformers of diffusers: arguments that make each tiny, and what it is called with."""


def diffusion(kind: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A model of diffusers with random weights on the CPU, in FP32, and its inputs.

    Raises:
        NotTiny: diffusers is not installed, or its model takes other arguments.
    """
    try:
        import diffusers

        torch.manual_seed(seed)
        settings, inputs = DIFFUSION[kind]
        return _livelier(getattr(diffusers, kind)(**settings).eval()), inputs()
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {_line(error)}") from error


def candidates() -> list[Candidate]:
    """Every model of the installed transformers and diffusers that is tried, in an order that does not change."""
    from transformers.models.auto import modeling_auto

    found: dict[Any, Candidate] = {}
    for family, mapping in MAPPINGS.items():
        for kind in (*getattr(modeling_auto, mapping), *OTHERS.get(family, ())):
            names = getattr(modeling_auto, mapping).get(kind, kind)  # one class may be in several mappings
            found.setdefault((kind, str(names)), Candidate(family, kind))
    for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items():  # decoders of models that see or hear
        if kind.endswith("_text") and not any(kind == other for other, _ in found):
            found[kind, str(name)] = Candidate("decoder", kind)
    towers = [Candidate("tower", kind) for kind in TOWERS]
    diffusers = [Candidate("diffusion", kind) for kind in DIFFUSION]
    return [*sorted(found.values(), key=lambda c: (list(MAPPINGS).index(c.family), c.kind)), *towers, *diffusers]


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(length: int = LENGTH, batch: int = BATCH, seed: int = 1) -> torch.Tensor:
    """Random tokens [B, S] that are none of the special ones."""
    return torch.randint(5, VOCABULARY - 8, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = LENGTH) -> torch.Tensor:
    """An attention mask [B, S] whose second row has padding on the left or the right."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, slice(None, PADDED) if side == "left" else slice(length - PADDED, None)] = 0
    return mask


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What one forward pass of a model is called with, without masks."""
    wanted = inspect.signature(model.forward).parameters
    config = model.config
    found: dict[str, torch.Tensor] = {}
    if "grid_thw" in wanted:
        patches = config.in_channels * config.patch_size**2 * getattr(config, "temporal_patch_size", 1)
        grid = torch.tensor([[1, 4, 6], [1, 4, 4]])
        return {"hidden_states": normal(int(grid.prod(dim=1).sum()), patches), "grid_thw": grid}
    main = model.main_input_name
    if main == "input_ids" or ("input_ids" in wanted and "pixel_values" in wanted and not model.can_generate()):
        found["input_ids"] = tokens()
    if main == "pixel_values" or ("pixel_values" in wanted and not model.can_generate()):
        found["pixel_values"] = _pixels(model)
    if main == "input_features":
        found["input_features"] = _features(config)
    if main == "input_values":
        found["input_values"] = _values(config)
    if main not in found:
        raise NotTiny(f"its main input is {main}, which is not known here")
    if config.is_encoder_decoder and "decoder_input_ids" in wanted:
        found["decoder_input_ids"] = tokens(7, seed=2)
    if "bbox" in wanted:
        found["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
    return found


def _pixels(model: Any) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if hasattr(config, "num_frames"):
        return normal(BATCH, config.num_frames, channels, height, width)
    return normal(BATCH, channels, height, width)


def _features(config: Any) -> torch.Tensor:
    if getattr(config, "model_type", "") == "whisper":
        return normal(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return normal(BATCH, 64, getattr(config, "input_feat_per_channel", getattr(config, "num_mel_bins", 80)))


def _values(config: Any) -> torch.Tensor:
    if hasattr(config, "max_length"):
        return normal(BATCH, config.max_length, config.num_mel_bins)
    return normal(BATCH, 4000)
