"""Tiny random models of every architecture, with the reference that computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_helpers import VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def save_tiny(path: Path, family: str, **changes: Any) -> Any:
    """Saves a random model as Hugging Face does; returns the reference implementation in float32."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases begin as zeros and norms as ones, and then a missing one would not be missed.
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return model


def change_config(path: Path, **changes: Any) -> None:
    """Sets fields of ``path/config.json``; one that is changed to ``...`` goes."""
    fields = json.loads((path / "config.json").read_text())
    fields.update(changes)
    kept = {name: value for name, value in fields.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))
