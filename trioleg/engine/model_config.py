"""A model's ``config.json``, read and checked: which decoder this is, in numbers and switches.

Rules of this file: no torch, no trio. The architectures differ in little, and ``_ARCHITECTURES`` says in
what; everything behind this file knows sizes and switches, and no architecture by name. What the engine
does not compute (other architectures and rope types, quantized weights) is refused here, before any weight
is read. A field that is missing means what it means to transformers, whose class of the same name is
the reference for every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..model_files import MOST_LAYERS
from .config_file import ConfigFile, open_config_file

__all__ = ["ModelConfig", "Rope", "read_model_config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotary embedding; names are those of ``rope_parameters``.

    ``linear`` divides every frequency by ``factor``; ``llama3`` only those whose wave is long against
    the context the model was first trained with (``rope.py`` has the formula).
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes and switches of one model; names are the file's own where it has one.

    ``sliding_windows``: for each layer how many tokens a token sees, itself included; None: all before
    it. ``qk_norm``: query and key heads are normed before they are rotated. ``dtype``: what the file says
    of its weights ("bfloat16"), None if nothing.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """What an architecture has by itself; a bias that is None is a switch of ``config.json``.

    ``attention_bias`` is that of query, key and value, and of the output too if ``o_bias``. ``windows``:
    which layers slide. ``defaults``: of sizes that differ among architectures where the file has none.
    """

    attention_bias: bool | None = False
    o_bias: bool = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: Literal["none", "all layers", "by layer"] = "none"
    defaults: Mapping[str, int] = field(default_factory=dict)


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(attention_bias=None, o_bias=True, mlp_bias=None),
    "MistralForCausalLM": _Architecture(
        windows="all layers", defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": _Architecture(
        attention_bias=True,
        windows="by layer",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": _Architecture(
        attention_bias=None,
        o_bias=True,
        qk_norm=True,
        windows="by layer",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
}
_OTHER_MODELS = "vLLM's engine serves many others, behind the same front end: trioleg serve MODEL --attach ADDRESS"
# Two names of one function.
_ACTIVATIONS = ("silu", "swish")
_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_TYPES = ("default", "linear", "llama3")
_ROPE_FIELDS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)
# The Qwen classes' own default of ``max_window_layers``.
_FULL_LAYERS = 28


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``model_dir/config.json``. Raises ``ModelStoreError`` naming the file, the field, its value
    and what is allowed."""
    file = open_config_file(model_dir / "config.json")
    name, has = _architecture(file)
    file.require("hidden_act", *_ACTIVATIONS)
    file.require("quantization_config")
    layers = file.integer("num_hidden_layers", maximum=MOST_LAYERS)
    max_positions = file.integer("max_position_embeddings")
    attention_bias = _bias(file, "attention_bias", has.attention_bias)
    heads, kv_heads, head_dim = _heads(file, has)
    return ModelConfig(
        architecture=name,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        intermediate_size=file.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=file.number("rms_norm_eps", absent=1e-6),
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        rope=_rope(file, max_positions),
        qkv_bias=attention_bias,
        o_bias=attention_bias and has.o_bias,
        mlp_bias=_bias(file, "mlp_bias", has.mlp_bias),
        qk_norm=has.qk_norm,
        sliding_windows=_sliding_windows(file, has, layers),
        dtype=_dtype(file),
    )


def _architecture(file: ConfigFile) -> tuple[str, _Architecture]:
    named = file.fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(_ARCHITECTURES):
        allowed = "a list of one of " + ", ".join(_ARCHITECTURES)
        raise file.refusal("architectures", named, f"{allowed}. {_OTHER_MODELS}")
    return named[0], _ARCHITECTURES[named[0]]


def _heads(file: ConfigFile, has: _Architecture) -> tuple[int, int, int]:
    """Query heads, key/value heads, and the size of each."""
    heads = file.integer("num_attention_heads")
    kv_heads = file.integer(
        "num_key_value_heads", absent=has.defaults.get("num_key_value_heads"), null=heads
    )
    if heads % kv_heads:
        allowed = f"a divisor of num_attention_heads, which is {heads}"
        raise file.refusal("num_key_value_heads", kv_heads, allowed)
    shared = file.integer("hidden_size") // heads
    head_dim = file.integer("head_dim", absent=has.defaults.get("head_dim"), null=shared)
    if head_dim % 2:
        raise file.refusal("head_dim", head_dim, "an even number")
    return heads, kv_heads, head_dim


def _bias(file: ConfigFile, name: str, has: bool | None) -> bool:
    if has is None:
        return file.flag(name)
    file.require(name, has)
    return has


def _dtype(file: ConfigFile) -> str | None:
    """``dtype``, in older files ``torch_dtype``."""
    name = "dtype" if file.fields.get("dtype") is not None else "torch_dtype"
    file.require(name, *_DTYPES)
    return file.fields.get(name)


def _sliding_windows(
    file: ConfigFile, has: _Architecture, num_layers: int
) -> tuple[int | None, ...]:
    window, first = _window(file, has), 0
    if has.windows == "by layer":
        first = file.integer("max_window_layers", minimum=0, absent=_FULL_LAYERS)
    kinds = [_kind(window is not None and layer >= first) for layer in range(num_layers)]
    named = file.fields.get("layer_types")
    if named is not None and named != kinds:
        if has.windows != "by layer" or window is None:
            raise file.refusal(
                "layer_types", named, f"{kinds[0]!r} for each of {num_layers} layers"
            )
        if not isinstance(named, list) or [_kind(one == _kind(True)) for one in named] != named:
            allowed = f"a list of {_kind(True)!r} and {_kind(False)!r}"
            raise file.refusal("layer_types", named, allowed)
        if len(named) != num_layers:
            raise file.refusal("layer_types", named, f"one entry for each of {num_layers} layers")
        kinds = named
    return tuple(window if kind == _kind(True) else None for kind in kinds)


def _kind(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"


def _window(file: ConfigFile, has: _Architecture) -> int | None:
    """The window of the layers that slide, in tokens; None if none does."""
    if has.windows == "none":
        file.require("sliding_window")
        return None
    if has.windows == "by layer":
        if not file.flag("use_sliding_window"):
            return None
    else:
        file.require("use_sliding_window", True)
    if file.fields.get("sliding_window", 0) is None:
        return None
    return file.integer("sliding_window", absent=has.defaults["sliding_window"])


def _rope(file: ConfigFile, max_positions: int) -> Rope:
    """From ``rope_parameters``, or in older files ``rope_theta`` beside ``rope_scaling``."""
    rope = _rope_section(file)
    for name, value in rope.fields.items():
        if value is not None and name not in _ROPE_FIELDS:
            raise rope.refusal(name, value, f"no such field, but {', '.join(sorted(_ROPE_FIELDS))}")
    for one in (file, rope):
        one.require("partial_rotary_factor", 1)
    rope_type = rope.fields.get("rope_type") or rope.fields.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise rope.refusal("rope_type", rope_type, ", ".join(map(repr, _ROPE_TYPES)))
    theta = rope.number("rope_theta", absent=file.number("rope_theta", absent=10000.0))
    if rope_type == "default":
        return Rope(rope_theta=theta)
    factor = rope.number("factor")
    if rope_type == "linear":
        return Rope(rope_type=rope_type, rope_theta=theta, factor=factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", high, f"more than low_freq_factor, which is {low}")
    # A field of the whole file goes before that of the section, as in transformers.
    original = rope.integer("original_max_position_embeddings", absent=max_positions)
    return Rope(
        rope_type=rope_type,
        rope_theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=file.integer(
            "original_max_position_embeddings", absent=original
        ),
    )


def _rope_section(file: ConfigFile) -> ConfigFile:
    new, old = file.section("rope_parameters"), file.section("rope_scaling")
    if new.fields and old.fields and new.fields != old.fields:
        raise file.refusal("rope_scaling", old.fields, "the same as rope_parameters, or null")
    return new if new.fields else old
