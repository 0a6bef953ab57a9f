"""A model of transformers on microsdpa: one line more, the same logits.

The model is a small random Llama, so that nothing is fetched; a name in from_pretrained() works the same way.

    python examples/transformers_model.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from microsdpa.integrations.transformers import register

LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 2, 128, 4, 2, 256


def main() -> float:
    """Logits of both attentions; gives the largest difference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    tokens = torch.randint(VOCABULARY, (2, 48), device=device)

    register()  # the one line: now the model may ask for "microattention"
    logits = {}
    with torch.no_grad():
        for attention in ("eager", "microattention"):
            model.set_attn_implementation(attention)
            logits[attention] = model(tokens).logits.float()
        generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    difference = float((logits["eager"] - logits["microattention"]).abs().max())
    print(f"{device}: largest difference of the logits {difference:.1e}, generated {generated.shape[1] - 48} tokens")
    return difference


if __name__ == "__main__":
    main()
