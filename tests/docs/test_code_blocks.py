"""Every Python block of README and docs runs, page by page, on the CPU."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import microsdpa
from microsdpa.call.tensors import DTYPES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ALL = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = [path for path in ALL if BLOCK.search(path.read_text())]


def tensors(*shape: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape).half() for _ in range(count)]


def nothing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"torch": torch, "microsdpa": microsdpa}


def small_inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), tensors(1, 2, 16, 32), strict=True)) | {"microsdpa": microsdpa}


def flash_backend(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CPU has no flash backend to activate: what the page calls is there, and is told of it."""
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append, raising=False)
    return {"torch": torch, "microsdpa": microsdpa}


def a_cache(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two sequences of 3 and 1 new tokens, on a cache of four pages of 16, in the emulator."""
    query, new_key, new_value = torch.randn(4, 2, 32).half(), *tensors(4, 1, 32, count=2)
    key_cache, value_cache = tensors(4, 16, 1, 32, count=2)
    real = microsdpa.sdpa_varlen
    monkeypatch.setattr(microsdpa, "sdpa_varlen", lambda *a, **o: real(*a, **o, impl="emulate"))
    return {
        **{"query": query, "k": new_key, "v": new_value, "key_cache": key_cache, "value_cache": value_cache},
        "offsets": torch.tensor([0, 3, 4], dtype=torch.int32),
        "table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "lengths": torch.tensor([5, 17], dtype=torch.int32),
        "key_cache_8bit": key_cache.to(torch.float8_e4m3fn),
        "value_cache_8bit": value_cache.to(torch.float8_e4m3fn),
        "v_scale": torch.tensor([0.5]),
        "cos": torch.ones(64, 16).half(),
        **dict.fromkeys(("q_weight", "k_weight"), torch.ones(32).half()),
        "sin": torch.zeros(64, 16).half(),
        "microsdpa": microsdpa,
    }


def a_projection(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Four heads of queries and two of keys behind one projection, and tables of rotary embedding."""
    query, key, value = tensors(1, 2, 8, 32)
    x, q_weight, k_weight, cos, sin = (torch.randn(1, 8, 64), *torch.ones(2, 32), *torch.ones(2, 8, 16))
    return {
        **{"query": query, "key": key, "value": value, "q_weight": q_weight.half(), "k_weight": k_weight.half()},
        **{
            "cos": cos.half(),
            "sin": sin.half(),
            "x": x.half(),
            "projection": torch.nn.Linear(64, 8 * 32).half().requires_grad_(False),
        },
        **{"B": 1, "S": 8, "H": 4, "H_kv": 2, "D": 32, "torch": torch, "microsdpa": microsdpa},
    }


def one_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    query, key, value = tensors(1, 2, 16, 32)
    return {"mesh": mesh, "query": query, "key": key, "value": value, "seqlen": 16}


def a_model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Llama of two layers, in the place of one that is fetched."""
    transformers = pytest.importorskip("transformers", reason="transformers is of the extra integrations")
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.LlamaConfig(**config, vocab_size=64)

    def from_pretrained(name: str, attn_implementation: str, dtype: torch.dtype) -> Any:
        assert dtype in DTYPES
        made._attn_implementation = attn_implementation
        return transformers.AutoModel.from_config(made)

    return {"AutoModel": SimpleNamespace(from_pretrained=from_pretrained), "name": "tiny", "torch": torch}


def a_pipeline(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a pipeline of diffusers has: a transformer whose backend can be set."""
    pytest.importorskip("diffusers", reason="diffusers is of the extra integrations")
    from diffusers.models.attention_dispatch import AttentionBackendName

    transformer = SimpleNamespace(set_attention_backend=AttentionBackendName)
    return {"pipeline": SimpleNamespace(transformer=transformer)}


SETUPS: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "docs/block.md": a_projection,
    "docs/diffusers.md": a_pipeline,
    "docs/emulator.md": small_inputs,
    "docs/serving.md": a_cache,
    "docs/several-gpus.md": one_rank,
    "docs/torch.md": flash_backend,
    "docs/transformers.md": a_model,
}
"""What a page's blocks have before the first; other pages have torch and microsdpa."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in ("README.md", "diffusers.md") and page.parent in (ROOT, ROOT / "docs"):
        pytest.importorskip("diffusers", reason="diffusers is of the extra integrations")
        pytest.importorskip("transformers", reason="transformers is of the extra integrations")
    logging.disable(logging.WARNING)
    namespace = SETUPS.get(page.relative_to(ROOT).as_posix(), nothing)(monkeypatch)
    modules = set(sys.modules)
    try:
        for number, block in enumerate(BLOCK.findall(page.read_text()), start=1):
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    finally:
        logging.disable(logging.NOTSET)
        for name in ("flash_attn", "flash_attn_interface"):
            if name not in modules:
                sys.modules.pop(name, None)
        with contextlib.suppress(RuntimeError):  # the page has not called enable()
            microsdpa.disable()


def test_pages_with_blocks_are_found() -> None:
    assert {"README.md", "docs/getting-started.md"} <= {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert set(SETUPS) <= {path.relative_to(ROOT).as_posix() for path in PAGES}
