"""Continuous batching of transformers on microsdpa's functions; test_generate_batch.py runs this in a process."""

from __future__ import annotations

from typing import Any

from microsdpa import flash_attn
from microsdpa.flash_attn import interface

flash_attn.install(distributions=True)  # transformers looks once, when it is imported

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import modeling_flash_attention_utils as theirs  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14, 15, 16, 17]]
TOKENS = 8


def main() -> None:
    called: list[str] = []
    varlen = interface.flash_attn_varlen_func

    def watched(*given: Any, **options: Any) -> Any:
        called.append("flash_attn_varlen_func")
        return varlen(*given, **options)

    watched.__wrapped__ = varlen  # type: ignore[attr-defined]
    __import__("flash_attn_interface").flash_attn_varlen_func = watched
    # transformers knows FlashAttention for CUDA alone; all that it asks of the package is answered as on a GPU.
    row: dict[str, Any] = theirs.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]
    assert row["pkg_availability_check"]()
    row |= {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cpu"),)}
    row.pop("cuda_min_major_version")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).half().eval()
    ends = {"eos_token_id": -1, "pad_token_id": 0, "do_sample": False, "max_new_tokens": TOKENS}
    config = transformers.GenerationConfig(**ends)
    # By default the cache and the tables take what memory there is.
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = []
    for implementation in ("sdpa", "flash_attention_3"):
        model.set_attn_implementation(implementation)
        requests = model.generate_batch(PROMPTS, config, continuous_batching_config=batching)
        found.append([request.generated_tokens for _, request in sorted(requests.items())])
    assert all(len(tokens) == TOKENS for tokens in found[0])
    assert found[0] == found[1]
    print(len(called), "calls")


main()
