"""The architecture's settings, as config.json has them, and which tensors such a model consists of.

Rules of this file: imports ``reader``, ``errors``, ``model_files`` and numpy (for the rope table). Names
and defaults are those of llama.cpp's converter and loader (convert_hf_to_gguf.py, src/llama-model.cpp).
What our engine would not take of a config.json (``engine/model_config.py``) is refused here, where the
user's own file can be named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelStoreError
from ..model_files import LARGEST_INTEGER, LARGEST_NUMBER, MOST_LAYERS, SMALLEST_NUMBER
from .header import Tensor
from .reader import Model
from .tensors import dtype_of

__all__ = ["make_config"]

# general.architecture, and whose config.json that becomes.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

# Llama 3's own, which its GGUF files do not carry: only the table that follows from them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE_TABLE = "rope_freqs.weight"


_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Sizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """What there is beside the weights that every model has."""

    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    rope_table: bool


def make_config(model: Model) -> tuple[dict[str, Any], Mapping[str, int]]:
    """The content of config.json, but for the ids of special tokens; and how many heads the tensors have whose rows must change places.

    Those are a Llama's query and key: {"attn_q": heads, "attn_k": key/value heads}. Raises
    ``ModelStoreError`` for a setting or tensor of another kind of model.
    """
    if model.architecture not in _ARCHITECTURES:
        model.refuse("general.architecture", ", ".join(_ARCHITECTURES))
    sizes = _sizes(model)
    parts = _parts(model)
    _check_tensors(model, sizes, parts)
    base = _number(model, "rope.freq_base", 10_000.0)
    config = {
        "architectures": [_ARCHITECTURES[model.architecture][0]],
        "attention_dropout": 0.0,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "max_position_embeddings": _size(model, "context_length"),
        "model_type": _ARCHITECTURES[model.architecture][1],
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": _number(model, "attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(model, sizes.head_dim, base),
        "rope_theta": base,
        "tie_word_embeddings": parts.tied,
        "torch_dtype": dtype_of(model.tensors).name,
        "vocab_size": sizes.vocabulary,
    }
    return config | _own_settings(model, parts), _permuted(model, sizes)


def _sizes(model: Model) -> _Sizes:
    heads = _size(model, "attention.head_count")
    kv_heads = _size(model, "attention.head_count_kv", heads)
    if heads % kv_heads:
        name = f"{model.architecture}.attention.head_count_kv"
        model.refuse(name, f"a divisor of attention.head_count, which is {heads}")
    hidden = _size(model, "embedding_length")
    return _Sizes(
        hidden=hidden,
        inner=_size(model, "feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(model, hidden, heads),
        layers=_layers(model),
        vocabulary=_vocab_size(model),
    )


def _layers(model: Model) -> int:
    """Compared with what the file holds before a name is made for each."""
    layers = _size(model, "block_count")
    most = min(MOST_LAYERS, len(model.tensors))
    if layers > most:
        name = f"{model.architecture}.block_count"
        model.refuse(
            name, f"an integer from 1 to {most}, since the file has {len(model.tensors)} tensors"
        )
    return layers


def _size(model: Model, name: str, default: int | None = None) -> int:
    full = f"{model.architecture}.{name}"
    value = model.take(full, int) if default is None else model.take(full, int, default)
    if value is None or not 1 <= value <= LARGEST_INTEGER:
        model.refuse(full, f"an integer from 1 to {LARGEST_INTEGER}")
    return value


def _number(model: Model, name: str, default: float | None = None) -> float:
    """The shortest decimal that is this float32: 1e-05, where the file gives 9.99999974e-06."""
    full = f"{model.architecture}.{name}"
    value = model.take(full, float) if default is None else model.take(full, float, default)
    if value is None or not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
        model.refuse(full, f"a number from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}")
    return _shortest(value)


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _head_dim(model: Model, hidden: int, heads: int) -> int:
    head_dim = _size(model, "attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if _size(model, name, head_dim) != head_dim:
            model.refuse(f"{model.architecture}.{name}", f"the size of a head, which is {head_dim}")
    if head_dim % 2:
        raise ModelStoreError(
            f"{model.name}: the size of a head is {head_dim} (attention.key_length, or without it "
            "embedding_length / attention.head_count); what can be converted: an even number"
        )
    return head_dim


def _vocab_size(model: Model) -> int:
    """As many as the embedding has rows; there must be a token for each."""
    rows = next((t.shape[0] for t in model.tensors if t.name == "token_embd.weight"), 0)
    named = len(model.take("tokenizer.ggml.tokens", list))
    said = _size(model, "vocab_size", named)
    if not named == said == (rows or named):
        raise ModelStoreError(
            f"{model.name} has {named} tokens for a model of {said} and an embedding of {rows} rows"
        )
    return named


def _rope_scaling(model: Model, head_dim: int, base: float) -> dict[str, Any] | None:
    """Linear if nothing is said but a factor; a table of frequencies is Llama 3's way."""
    name = f"{model.architecture}.rope.scaling"
    kind = model.take(f"{name}.type", str, "linear")
    if kind not in {"none", "linear"}:
        model.refuse(f"{name}.type", "none, linear")
    factor = _number(model, "rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    table = next((tensor for tensor in model.tensors if tensor.name == _ROPE_TABLE), None)
    if table is None:
        return None if factor == 1 else {"factor": factor, "rope_type": "linear"}
    if factor != 1:
        model.refuse(f"{name}.factor", f"1, or none, beside the tensor {_ROPE_TABLE}")
    return _llama3_scaling(model, table, head_dim, base)


def _llama3_scaling(
    model: Model, tensor: Tensor, head_dim: int, base: float
) -> dict[str, Any] | None:
    """The settings that bring the table in the file: its largest value, and Llama 3's own."""
    table = tensor.values(0, 1)[0].astype(np.float64)
    factor = float(table.max())
    # A table of float32 from slightly other arithmetic; other settings differ by far more.
    if not 1 <= factor <= LARGEST_NUMBER or not np.allclose(
        table, _llama3_table(head_dim, base, factor), rtol=1e-4
    ):
        raise ModelStoreError(
            f"{model.name}: the tensor {_ROPE_TABLE} is not the table that Llama 3's settings "
            f"({', '.join(f'{key} {value}' for key, value in _LLAMA3.items())}) bring; no other can "
            "be converted"
        )
    if factor == 1:
        return None
    return {"factor": _shortest(factor), **_LLAMA3, "rope_type": "llama3"}


def _llama3_table(head_dim: int, base: float, factor: float) -> Any:
    """What each frequency is divided by: 1 for the fast ones, ``factor`` for the slow ones, and a line
    in 1/x between them. The rule is that of Llama 3.1's release (``apply_scaling`` in its model.py)."""
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / waves
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def _own_settings(model: Model, parts: _Parts) -> dict[str, Any]:
    """What not every architecture's config.json has. A Qwen2 has its biases without being asked."""
    biases = {"attention_bias": parts.qkv_bias, "mlp_bias": parts.mlp_bias}
    name = f"{model.architecture}.attention.sliding_window"
    window = model.take(name, int, 0) or 0
    if not 0 <= window <= LARGEST_INTEGER:
        model.refuse(name, f"an integer from 0 (none) to {LARGEST_INTEGER}")
    if model.architecture == "llama":
        if window and any(biases.values()):
            model.refuse(name, "none, in a model with biases")
        # Mistral is the Llama with a window, in GGUF files too.
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return {**mistral, "sliding_window": window} if window else biases
    if window:
        # Which layers have it is not said, and not all do by default.
        model.refuse(name, "none")
    own = {"attention_bias": parts.qkv_bias} if model.architecture == "qwen3" else {}
    return {**own, "sliding_window": None, "use_sliding_window": False}


def _permuted(model: Model, sizes: _Sizes) -> Mapping[str, int]:
    if model.architecture != "llama":
        return {}
    return {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}


def _parts(model: Model) -> _Parts:
    there = {tensor.name for tensor in model.tensors}
    architecture = model.architecture
    output_bias = architecture != "qwen2" and "blk.0.attn_output.bias" in there
    return _Parts(
        tied="output.weight" not in there,
        qkv_bias=output_bias or architecture == "qwen2",
        output_bias=output_bias,
        mlp_bias=architecture == "llama" and "blk.0.ffn_down.bias" in there,
        head_norms=architecture == "qwen3",
        rope_table=architecture == "llama" and _ROPE_TABLE in there,
    )


def _check_tensors(model: Model, sizes: _Sizes, parts: _Parts) -> None:
    """Every tensor that the model needs is there, of the size that the settings say, and no other."""
    found = {tensor.name: tensor.shape for tensor in model.tensors}
    inner = _layer_shapes(sizes, parts)
    expected = _global_shapes(sizes, parts) | {
        f"blk.{layer}.{name}": shape
        for layer in range(sizes.layers)
        for name, shape in inner.items()
    }
    if unknown := sorted(found.keys() - expected.keys()):
        raise ModelStoreError(
            f"{model.name} holds tensors that a model of architecture {model.architecture} has not, "
            f"as far as it can be converted: {_some(unknown)}"
        )
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelStoreError(f"{model.name} lacks tensors: {_some(missing)}")
    for name, shape in found.items():
        if shape != expected[name]:
            raise ModelStoreError(
                f"{model.name}: {name} has shape {list(shape)}; by the settings it is "
                f"{list(expected[name])}"
            )


def _global_shapes(sizes: _Sizes, parts: _Parts) -> _Shapes:
    words = (sizes.vocabulary, sizes.hidden)
    shapes: _Shapes = {"token_embd.weight": words, "output_norm.weight": (sizes.hidden,)}
    if not parts.tied:
        shapes["output.weight"] = words
    if parts.rope_table:
        shapes[_ROPE_TABLE] = (sizes.head_dim // 2,)
    return shapes


def _layer_shapes(sizes: _Sizes, parts: _Parts) -> _Shapes:
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    hidden, inner = sizes.hidden, sizes.inner
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    if parts.head_norms:
        vectors |= {"attn_q_norm": sizes.head_dim, "attn_k_norm": sizes.head_dim}
    biased = {
        "attn_q": parts.qkv_bias,
        "attn_k": parts.qkv_bias,
        "attn_v": parts.qkv_bias,
        "attn_output": parts.output_bias,
        **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), parts.mlp_bias),
    }
    return {
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.weight": (size,) for name, size in vectors.items()},
        **{f"{name}.bias": (matrices[name][0],) for name, is_there in biased.items() if is_there},
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
