"""A LoRA adapter of random numbers, in PEFT's format, for a model of Llama's kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# Large enough for other answers than the model's own, small enough for whole words.
_SIZE = 0.05


def write_adapter(folder: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """Write one for ``model`` into ``folder``, which is made, and return that: the same for the same ``seed``."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    per_head = hidden // config["num_attention_heads"]
    rows = {"q_proj": hidden, "v_proj": per_head * config["num_key_value_heads"]}
    noise = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in {"lora_A": (rank, hidden), "lora_B": (out, rank)}.items():
                values = noise.normal(0, _SIZE, shape).astype(np.float32)
                tensors[f"{prefix}.{half}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(rows),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder
