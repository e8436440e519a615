"""The decoder's forward pass over a paged key/value cache: embed, layers, logits.

Rules of this file: torch, no trio, no state but the weights. Everything works on one flat list of rows,
a row being one token of one request; only attention (``attention.py``) knows which rows belong together.
Llama, Mistral and Qwen are one model here: where one has a bias, a norm or a window that another has not, it
is None there, and costs nothing. The numbers are those of Hugging Face's classes; the tests hold them to
1e-4 in float32.

In half precision what the layers add up to (the residual) stays float32. Rounding it after every layer doubled
the error of SmolLM2's logits in bfloat16, and the same question in chunks of another size got another answer; it
costs nothing, since float32 is the faster of the two for sums and norms on a CPU (measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from .attention import AttentionGroup, attend
from .model_config import ModelConfig
from .rope import rotate, rotations
from .weights import LayerWeights, Weights

__all__ = ["Batch", "CausalLM"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, group after group. ``slots``: where each row's key and value go in the cache;
    ``sample_rows``: the rows whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    groups: list[AttentionGroup]


class CausalLM:
    """The weights of one model and its forward pass. ``windows``: what its layers' attention differs in."""

    def __init__(self, config: ModelConfig, weights: Weights, *, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embed_tokens.dtype
        self.device = weights.embed_tokens.device
        self.max_model_len = max_model_len
        self.windows = frozenset(config.sliding_windows)
        self._rotations = rotations(config.rope, config.head_dim, max_model_len).to(self.device)

    def forward(self, batch: Batch, cache: Tensor) -> Tensor:
        """Computes every row, writes its keys and values, and returns the rows, [rows, hidden_size] in float32.

        ``cache`` is [layers, blocks, block_size, 2, kv_heads, head_dim].
        """
        hidden = embedding(batch.token_ids, self.weights.embed_tokens).float()
        rotation = self._rotations[batch.positions].unsqueeze(1)
        layers = zip(self.weights.layers, self.config.sliding_windows, cache.unbind(), strict=True)
        for layer, window, layer_cache in layers:
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attention(normed, layer, window, layer_cache, rotation, batch)
            normed = self._norm(hidden, layer.post_attention_norm)
            gate, up = _linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + _linear(silu(gate).mul_(up), layer.down, layer.down_bias)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The logits of some of ``forward``'s rows, [rows, vocab_size] in float32."""
        return _linear(self._norm(hidden, self.weights.norm), self.weights.lm_head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(hidden, weight.shape, weight.float(), self.config.rms_norm_eps)
        return normed.to(self.dtype)

    def _head_norm(self, heads: Tensor, weights: Tensor) -> Tensor:
        """Each head normed by itself, [rows, heads, head_dim]; a head's weights are its own."""
        size = self.config.head_dim
        return rms_norm(heads, (size,), eps=self.config.rms_norm_eps) * weights.view(-1, size)

    def _attention(
        self,
        normed: Tensor,
        layer: LayerWeights,
        window: int | None,
        cache: Tensor,
        rotation: Tensor,
        batch: Batch,
    ) -> Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = _linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(normed), -1, self.config.head_dim)
        rotated = qkv[:, : heads + kv_heads]
        normed = rotated if layer.qk_norm is None else self._head_norm(rotated, layer.qk_norm)
        rotated.copy_(rotate(normed, rotation))
        # Keys and values stand side by side in qkv as they do in the cache: one write for both.
        cache.view(-1, 2, kv_heads, self.config.head_dim).index_copy_(
            0, batch.slots, qkv[:, heads:].view(len(qkv), 2, kv_heads, -1)
        )
        outputs, start = [], 0
        for group in batch.groups:
            end = start + group.batch * group.length
            outputs.append(attend(qkv[start:end, :heads], cache, group, window))
            start = end
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _linear(rows, layer.o, layer.o_bias)


def _linear(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows`` [n, in] times ``matrix`` [out, in], transposed, and ``bias`` [out] added to each row."""
    # For a single row in half precision the general product first rearranges the whole matrix, which costs
    # more than reading it: 20 ms a token against 14 (all layers of SmolLM2-135M, bfloat16, two cores).
    if len(rows) == 1 and rows.device.type == "cpu" and rows.dtype != torch.float32:
        row = rows[0]
        product = torch.mv(matrix, row) if bias is None else torch.addmv(bias, matrix, row)
        return product.unsqueeze(0)
    return linear(rows, matrix, bias)
