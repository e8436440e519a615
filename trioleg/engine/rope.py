"""Rotary embedding: a head's pairs of numbers, turned by angles that grow with the position.

Rules of this file: torch, no trio, no state. A pair is two neighbours, seen as one complex number, so that
turning is one product; checkpoints pair a head's halves instead, and ``weights.py`` reorders them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .model_config import Rope

__all__ = ["rotate", "rotations"]


def rotations(rope: Rope, head_dim: int, length: int) -> Tensor:
    """The unit numbers of positions 0 … length − 1, complex64 [length, head_dim/2]."""
    angles = torch.outer(torch.arange(length).float(), _frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turns [rows, heads, head_dim] by [rows, 1, head_dim/2]; the result is float32."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position, float32 [head_dim/2]: theta^(−2i/head_dim), scaled as ``rope_type`` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling, by how many turns a pair makes in the original context.

    ``high_freq_factor`` turns or more: as it was; ``low_freq_factor`` or fewer: divided by ``factor``;
    between them a straight line from the one to the other.
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, kept.clamp(0, 1))
