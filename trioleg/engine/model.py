"""Llama's forward pass over a paged key/value cache: embed, layers, logits.

Rules of this file: torch, no trio, no state but the weights. Everything works on one flat list of rows,
a row being one token of one request; only attention (``attention.py``) knows which rows belong together.
The numbers are those of Hugging Face's ``LlamaForCausalLM``; the tests hold them to 1e-4 in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from .attention import AttentionGroup, attend
from .model_config import ModelConfig
from .weights import LayerWeights, Weights

__all__ = ["Batch", "LlamaModel"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, group after group. ``slots``: where each row's key and value go in the cache;
    ``sample_rows``: the rows whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    groups: list[AttentionGroup]


class LlamaModel:
    """The weights of one model and its forward pass."""

    def __init__(self, config: ModelConfig, weights: Weights, *, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embed_tokens.dtype
        self.device = weights.embed_tokens.device
        self.max_model_len = max_model_len
        self._rotations = _rotations(config, max_model_len).to(self.device)

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Computes every row, writes its keys and values, and returns the rows, [rows, hidden_size].

        ``cache`` is [layers, blocks, block_size, 2, kv_heads, head_dim].
        """
        hidden = embedding(batch.token_ids, self.weights.embed_tokens)
        rotation = self._rotations[batch.positions].unsqueeze(1)
        for layer, layer_cache in zip(self.weights.layers, cache.unbind(), strict=True):
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attention(normed, layer, layer_cache, rotation, batch)
            normed = self._norm(hidden, layer.post_attention_norm)
            gate, up = _linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _linear(silu(gate).mul_(up), layer.down)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The logits of some of ``forward``'s rows, [rows, vocab_size] in float32."""
        return _linear(self._norm(hidden, self.weights.norm), self.weights.lm_head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _attention(
        self, normed: Tensor, layer: LayerWeights, cache: Tensor, rotation: Tensor, batch: Batch
    ) -> Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = _linear(normed, layer.qkv).view(len(normed), -1, self.config.head_dim)
        rotated = qkv[:, : heads + kv_heads]
        rotated.copy_(_rotate(rotated, rotation))
        # Keys and values stand side by side in qkv as they do in the cache: one write for both.
        cache.view(-1, 2, kv_heads, self.config.head_dim).index_copy_(
            0, batch.slots, qkv[:, heads:].view(len(qkv), 2, kv_heads, -1)
        )
        outputs, start = [], 0
        for group in batch.groups:
            rows = group.batch * group.length
            outputs.append(attend(qkv[start : start + rows, :heads], cache, group))
            start += rows
        return _linear(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layer.o)


def _linear(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows`` [n, in] times ``matrix`` [out, in], transposed."""
    # For a single row in half precision the general product first rearranges the whole matrix, which costs
    # more than reading it: 20 ms a token against 14 (all layers of SmolLM2-135M, bfloat16, two cores).
    if len(rows) == 1 and rows.device.type == "cpu" and rows.dtype != torch.float32:
        return torch.mv(matrix, rows[0]).unsqueeze(0)
    return linear(rows, matrix)


def _rotations(config: ModelConfig, length: int) -> Tensor:
    """Rotary embedding's unit numbers, complex [length, head_dim/2]: position · theta^(−2i/head_dim)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turns neighbours of [rows, heads, head_dim] as complex numbers; the result is float32."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)
