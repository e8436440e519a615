"""A model's ``config.json``, read and checked: which Llama this is, in numbers.

Rules of this file: no torch, no trio; imports only ``errors``. What the engine does not compute (other
architectures, biases, scaled rope, quantized weights) is refused here, before any weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelStoreError

__all__ = ["ModelConfig", "read_model_config"]

_ARCHITECTURE = "LlamaForCausalLM"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes of a ``LlamaForCausalLM``; names are the file's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``model_dir/config.json``. Raises ``ModelStoreError`` naming the file and the field."""
    return _Reader(model_dir / "config.json").model_config()


class _Reader:
    """The fields of one file, each with a refusal that names file, field, value and what is allowed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            fields = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelStoreError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelStoreError(f"{path}: is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ModelStoreError(f"{path}: holds no JSON object")
        self._fields: dict[str, Any] = fields

    def model_config(self) -> ModelConfig:
        self._refuse_what_is_not_computed()
        hidden_size, heads = self._size("hidden_size"), self._size("num_attention_heads")
        config = ModelConfig(
            vocab_size=self._size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._size("intermediate_size"),
            num_hidden_layers=self._size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=self._size("num_key_value_heads", default=heads),
            head_dim=self._size("head_dim", default=hidden_size // heads),
            max_position_embeddings=self._size("max_position_embeddings"),
            rms_norm_eps=self._positive("rms_norm_eps", self._fields.get("rms_norm_eps", 1e-6)),
            rope_theta=self._rope_theta(),
            tie_word_embeddings=bool(self._fields.get("tie_word_embeddings", False)),
        )
        if heads % config.num_key_value_heads:
            raise self._refusal(
                "num_key_value_heads",
                config.num_key_value_heads,
                f"a divisor of num_attention_heads, which is {heads}",
            )
        if config.head_dim % 2:
            raise self._refusal("head_dim", config.head_dim, "an even number")
        return config

    def _refuse_what_is_not_computed(self) -> None:
        architectures = self._fields.get("architectures")
        if architectures != [_ARCHITECTURE]:
            raise self._refusal("architectures", architectures, f"[{_ARCHITECTURE!r}]")
        for name, allowed in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("quantization_config", None),
        ):
            if self._fields.get(name, allowed) != allowed:
                raise self._refusal(name, self._fields[name], repr(allowed))

    def _rope_theta(self) -> float:
        """From ``rope_parameters``, or in older files ``rope_theta`` beside ``rope_scaling``."""
        name = "rope_parameters" if self._fields.get("rope_parameters") else "rope_scaling"
        rope = self._fields.get(name) or {}
        if not isinstance(rope, dict):
            raise self._refusal(name, rope, "an object, or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise self._refusal(f"{name}.rope_type", kind, "'default'")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise self._refusal(f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
        return self._positive(
            "rope_theta", rope.get("rope_theta", self._fields.get("rope_theta", 10000.0))
        )

    def _size(self, name: str, *, default: int | None = None) -> int:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refusal(name, value, "an integer of at least 1")
        return value

    def _positive(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self._refusal(name, value, "a number above 0")
        return float(value)

    def _refusal(self, name: str, value: Any, allowed: str) -> ModelStoreError:
        return ModelStoreError(f"{self._path}: {name} is {value!r}; this engine allows: {allowed}")
