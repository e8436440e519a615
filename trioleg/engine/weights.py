"""A checkpoint's tensors: checked against ``config.json``, then fused for speed, one after another.

Rules of this file: torch, no trio; ``checkpoint.py`` reads the files. ``_layer_parts`` is the table that
says which tensors of the checkpoint make which of ours; the check, the loading and the progress follow from
it. Query, key and value are one matrix here, and so are gate and up: fewer and larger products are faster.
The rows of every query and key head are reordered (``_interleave``), since the model rotates neighbours
(``rope.py``); so are the biases and norms that stand beside those rows.

Every tensor is copied to where it stays, so that no more than one is in memory twice, and a file may change
or vanish once ``load_weights`` has returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ModelStoreError
from .checkpoint import Checkpoint
from .model_config import ModelConfig

__all__ = ["LayerWeights", "Weights", "load_weights"]

# Older exports carry the rope table, which follows from config.json.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_EMBED, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; ``qkv`` stacks query, key and value rows.

    None: the model has none. ``qk_norm`` is [heads + kv_heads, head_dim] as one list: the query's weights
    once for each of its heads, then the key's.
    """

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model. ``lm_head`` is ``embed_tokens`` itself where the checkpoint ties them."""

    embed_tokens: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the checkpoint. ``rotated``: its rows are heads' and get reordered; ``copies``: how
    often it stands in ours."""

    name: str
    shape: tuple[int, ...]
    rotated: bool = False
    copies: int = 1


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    report: Callable[[int, int], None] = lambda *_: None,
) -> Weights:
    """Reads ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    ``dtype`` None: the checkpoint's own; where its tensors differ, the one that ``config.json`` names, or
    without that the smallest which holds them all. ``report`` is told after each tensor how many bytes of
    the checkpoint are read, and of how many. Raises ``ModelStoreError`` naming the file for what is missing,
    corrupt, of another size than ``config.json`` says, or unknown; before the first tensor is read, unless
    the file changes meanwhile.
    """
    checkpoint = Checkpoint(model_dir)
    layers = [_layer_parts(config, index) for index in range(config.num_hidden_layers)]
    whole = _whole_parts(config)
    wanted = [
        *whole.values(),
        *itertools.chain.from_iterable(p for one in layers for p in one.values()),
    ]
    _check(checkpoint, wanted, config)
    loader = _Loader(
        checkpoint,
        wanted,
        dtype=dtype or _own_dtype(checkpoint, wanted, config),
        device=device,
        head_dim=config.head_dim,
        report=report,
    )
    embed = loader.load([whole[_EMBED]])
    return Weights(
        embed_tokens=embed,
        layers=[
            LayerWeights(**{field: loader.load(parts) for field, parts in one.items()})
            for one in layers
        ],
        norm=loader.load([whole[_NORM]]),
        lm_head=embed if config.tie_word_embeddings else loader.load([whole[_LM_HEAD]]),
    )


def _whole_parts(config: ModelConfig) -> dict[str, _Part]:
    hidden = config.hidden_size
    parts = [_Part(_EMBED, (config.vocab_size, hidden)), _Part(_NORM, (hidden,))]
    if not config.tie_word_embeddings:
        parts.append(_Part(_LM_HEAD, (config.vocab_size, hidden)))
    return {part.name: part for part in parts}


def _layer_parts(config: ModelConfig, index: int) -> dict[str, list[_Part]]:
    """For each field of ``LayerWeights`` that this model has, what it is stacked of."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def part(name: str, *shape: int, rotated: bool = False, copies: int = 1) -> _Part:
        return _Part(f"model.layers.{index}.{name}", shape, rotated, copies)

    def qkv(kind: str, *columns: int) -> list[_Part]:
        return [
            part(f"self_attn.q_proj.{kind}", heads * head_dim, *columns, rotated=True),
            part(f"self_attn.k_proj.{kind}", kv_heads * head_dim, *columns, rotated=True),
            part(f"self_attn.v_proj.{kind}", kv_heads * head_dim, *columns),
        ]

    def gate_up(kind: str, *columns: int) -> list[_Part]:
        return [part(f"mlp.{one}_proj.{kind}", inner, *columns) for one in ("gate", "up")]

    parts = {
        "input_norm": [part("input_layernorm.weight", hidden)],
        "qkv": qkv("weight", hidden),
        "o": [part("self_attn.o_proj.weight", hidden, heads * head_dim)],
        "post_attention_norm": [part("post_attention_layernorm.weight", hidden)],
        "gate_up": gate_up("weight", hidden),
        "down": [part("mlp.down_proj.weight", hidden, inner)],
    }
    if config.qkv_bias:
        parts["qkv_bias"] = qkv("bias")
    if config.o_bias:
        parts["o_bias"] = [part("self_attn.o_proj.bias", hidden)]
    if config.mlp_bias:
        parts["gate_up_bias"] = gate_up("bias")
        parts["down_bias"] = [part("mlp.down_proj.bias", hidden)]
    if config.qk_norm:
        parts["qk_norm"] = [
            part("self_attn.q_norm.weight", head_dim, rotated=True, copies=heads),
            part("self_attn.k_norm.weight", head_dim, rotated=True, copies=kv_heads),
        ]
    return parts


def _check(checkpoint: Checkpoint, wanted: list[_Part], config: ModelConfig) -> None:
    for part in wanted:
        if part.name not in checkpoint:
            raise ModelStoreError(
                f"{checkpoint.folder}: no tensor {part.name}, which config.json asks for"
            )
        path, shape, dtype = checkpoint[part.name]
        if shape != part.shape:
            raise ModelStoreError(
                f"{path}: {part.name} has shape {list(shape)}; "
                f"by config.json it is {list(part.shape)}"
            )
        if dtype not in _FLOATS:
            raise ModelStoreError(
                f"{path}: {part.name} is {dtype}; this engine reads {', '.join(_FLOATS)}"
            )
    known = {part.name for part in wanted} | {_LM_HEAD}
    rest = sorted(n for n in checkpoint if n not in known and not n.endswith(_DERIVED_SUFFIX))
    if rest:
        shown = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
        raise ModelStoreError(
            f"{checkpoint[rest[0]].path}: holds tensors that a {config.architecture} with this "
            f"config.json has not: {shown}"
        )


def _own_dtype(checkpoint: Checkpoint, wanted: list[_Part], config: ModelConfig) -> torch.dtype:
    dtypes = {_FLOATS[checkpoint[part.name].dtype] for part in wanted}
    if len(dtypes) > 1 and config.dtype is not None:
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    return reduce(torch.promote_types, dtypes)


class _Loader:
    """Stacks parts into tensors of ours, and counts what it has read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: list[_Part],
        *,
        dtype: torch.dtype,
        device: torch.device,
        head_dim: int,
        report: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype, self._device = dtype, device
        self._head_dim = head_dim
        self._report = report
        self._done, self._total = 0, sum(self._bytes(part) for part in wanted)

    def load(self, parts: list[_Part]) -> Tensor:
        rows = [part.copies * part.shape[0] for part in parts]
        stack = torch.empty(sum(rows), *parts[0].shape[1:], dtype=self._dtype, device=self._device)
        for part, target in zip(parts, torch.split(stack, rows), strict=True):
            tensor = self._checkpoint.read(part.name)
            if part.rotated:
                tensor = _interleave(tensor, self._head_dim)
            target.view(part.copies, *part.shape).copy_(tensor)
            self._done += self._bytes(part)
            self._report(self._done, self._total)
        return stack

    def _bytes(self, part: _Part) -> int:
        return math.prod(part.shape) * _FLOATS[self._checkpoint[part.name].dtype].itemsize


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Puts row i and row i + head_dim/2 of every head side by side.

    The checkpoint rotates the two halves of a head against each other; side by side, a pair is one
    complex number. Query and key are reordered alike, so their products do not change.
    """
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
