"""A checkpoint's tensors: found, checked against the sizes of ``config.json``, and fused for speed.

Rules of this file: torch and safetensors, no trio. Query, key and value are one matrix here, and so are
gate and up: fewer and larger products are faster. The rows of every query and key head are reordered
(``_interleave``), since the model rotates neighbours (``model.py``). Every tensor is copied, so a file may
change or vanish once ``load_weights`` has returned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelStoreError
from .model_config import ModelConfig

__all__ = ["LayerWeights", "Weights", "load_weights"]

# Older exports carry the rope table, which follows from config.json.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; ``qkv`` stacks query, key and value rows."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model. ``lm_head`` is ``embed_tokens`` itself where the checkpoint ties them."""

    embed_tokens: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor


def load_weights(
    model_dir: Path, config: ModelConfig, *, dtype: torch.dtype | None, device: torch.device
) -> Weights:
    """Reads ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    ``dtype`` None: the checkpoint's own. Raises ``ModelStoreError`` naming the file for what is missing,
    corrupt, of another size than ``config.json`` says, or unknown.
    """
    checkpoint = _Checkpoint(model_dir, dtype=dtype, device=device)
    hidden = config.hidden_size
    embed = checkpoint.take("model.embed_tokens.weight", config.vocab_size, hidden)
    norm = checkpoint.take("model.norm.weight", hidden)
    layers = [_layer(checkpoint, config, i) for i in range(config.num_hidden_layers)]
    if config.tie_word_embeddings:
        checkpoint.ignore("lm_head.weight")
        lm_head = embed
    else:
        lm_head = checkpoint.take("lm_head.weight", config.vocab_size, hidden)
    checkpoint.refuse_the_rest()
    return Weights(embed, layers, norm, lm_head)


def _layer(checkpoint: _Checkpoint, config: ModelConfig, index: int) -> LayerWeights:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_rows = config.num_attention_heads * head_dim
    key_rows = config.num_key_value_heads * head_dim

    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.take(f"model.layers.{index}.{name}.weight", *shape)

    query = _interleave(take("self_attn.q_proj", query_rows, hidden), head_dim)
    key = _interleave(take("self_attn.k_proj", key_rows, hidden), head_dim)
    value = take("self_attn.v_proj", key_rows, hidden)
    gate, up = take("mlp.gate_proj", inner, hidden), take("mlp.up_proj", inner, hidden)
    return LayerWeights(
        input_norm=take("input_layernorm", hidden),
        qkv=torch.cat([query, key, value]),
        o=take("self_attn.o_proj", hidden, query_rows),
        post_attention_norm=take("post_attention_layernorm", hidden),
        gate_up=torch.cat([gate, up]),
        down=take("mlp.down_proj", hidden, inner),
    )


def _interleave(matrix: Tensor, head_dim: int) -> Tensor:
    """Puts row i and row i + head_dim/2 of every head side by side.

    The checkpoint rotates the two halves of a head against each other; side by side, a pair is one
    complex number. Query and key are reordered alike, so their products do not change.
    """
    halves = matrix.view(-1, 2, head_dim // 2, matrix.shape[1])
    return halves.transpose(1, 2).reshape(matrix.shape)


class _Checkpoint:
    """The tensors of one model directory; each is taken once."""

    def __init__(self, model_dir: Path, *, dtype: torch.dtype | None, device: torch.device) -> None:
        self._model_dir, self._dtype, self._device = model_dir, dtype, device
        self._tensors: dict[str, Tensor] = {}
        self._home: dict[str, Path] = {}
        for path in _files(model_dir):
            self._read(path)

    def _read(self, path: Path) -> None:
        if not path.is_file():
            raise ModelStoreError(f"{path}: there is no such file")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    self._tensors[name] = file.get_tensor(name)
                    self._home[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelStoreError(f"{path}: cannot be read as safetensors: {error}") from error

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelStoreError(
                f"{self._model_dir}: no tensor {name}, which config.json asks for"
            )
        path = self._home[name]
        if tuple(tensor.shape) != shape:
            raise ModelStoreError(
                f"{path}: {name} has shape {list(tensor.shape)}; by config.json it is {list(shape)}"
            )
        if tensor.dtype not in _FLOATS:
            allowed = ", ".join(str(one) for one in _FLOATS)
            raise ModelStoreError(f"{path}: {name} is {tensor.dtype}; this engine reads {allowed}")
        if self._dtype is None:
            self._dtype = tensor.dtype
        return tensor.to(self._device, self._dtype, copy=True)

    def ignore(self, name: str) -> None:
        self._tensors.pop(name, None)

    def refuse_the_rest(self) -> None:
        rest = sorted(name for name in self._tensors if not name.endswith(_DERIVED_SUFFIX))
        if rest:
            shown = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
            raise ModelStoreError(
                f"{self._home[rest[0]]}: holds tensors that a Llama without biases has not: {shown}"
            )


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return [model_dir / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelStoreError(f"{index}: holds no weight_map of file names: {error!r}") from error
    for name in names:
        # A shard is a file beside its index; a path could lead anywhere.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelStoreError(f"{index}: {name!r} is not the name of a file beside it")
    return [model_dir / name for name in names]
