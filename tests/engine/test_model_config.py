"""Reading ``config.json``: what is not computed is refused by field, what is missing means its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_families import ARCHITECTURES, SIZES, change_config

from trioleg.engine.model_config import ModelConfig, Rope, read_model_config
from trioleg.errors import ModelStoreError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(path: Path, family: str = "Llama", **changes: Any) -> Path:
    config = getattr(transformers, f"{family}Config")(**SIZES)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(path)
    change_config(path, **changes)
    return path


def read(path: Path, family: str = "Llama", **changes: Any) -> ModelConfig:
    return read_model_config(write(path, family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "fragment"),
    [
        (
            "Llama",
            {"architectures": ["GemmaForCausalLM"]},
            "architectures is ['GemmaForCausalLM']; this engine allows: a list of one of "
            "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ("Llama", {"architectures": None}, "architectures is None"),
        ("Llama", {"architectures": [[]]}, "architectures is [[]]"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; this engine allows: 'silu', 'swish'"),
        ("Llama", {"attention_bias": "yes"}, "attention_bias is 'yes'; this engine allows: true or"),
        ("Mistral", {"attention_bias": True}, "attention_bias is True; this engine allows: False"),
        ("Qwen2", {"attention_bias": False}, "attention_bias is False; this engine allows: True"),
        ("Qwen3", {"mlp_bias": True}, "mlp_bias is True; this engine allows: False"),
        ("Llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; "),
        ("Llama", {"dtype": "float8"}, "dtype is 'float8'; this engine allows: 'float32'"),
        ("Llama", {"dtype": ..., "torch_dtype": 16}, "torch_dtype is 16"),
        ("Llama", {"hidden_size": 0}, "hidden_size is 0; this engine allows: an integer from 1 to 2147483647"),
        ("Llama", {"max_position_embeddings": 10**20}, "max_position_embeddings is 100000000000000000000; "),
        ("Llama", {"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648; this engine allows: an integer from 1 to 4096"),
        ("Llama", {"rms_norm_eps": 10**400}, f"rms_norm_eps is 1{'0' * 199}…; this engine allows: a number from 1e-14 to 1e+14"),
        ("Llama", {"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300; this engine allows: a number from"),
        ("Llama", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("Llama", {"num_hidden_layers": None}, "num_hidden_layers is None"),
        ("Llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; this engine allows: a divisor"),
        ("Llama", {"head_dim": 7}, "head_dim is 7; this engine allows: an even number"),
        ("Llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("Llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ],
)  # fmt: skip
def test_what_is_not_computed(
    tmp_path: Path, family: str, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ModelStoreError) as caught:
        read(tmp_path, family, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {fragment}")


@pytest.mark.parametrize(
    ("rope", "fragment"),
    [
        (
            {"rope_type": "yarn", "factor": 2},
            "rope_type is 'yarn'; this engine allows: 'default', 'linear', 'llama3'",
        ),
        ({"type": "dynamic", "factor": 2}, "rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this engine allows: 1"),
        ({"rope_type": "linear"}, "factor is None; this engine allows: a number from 1e-14 to 1e+14"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is None"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0; this engine allows: more"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300; this engine allows: a number from 1e-14 to 1e+14"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor is inf"),
        ({**LLAMA3, "original_max_position_embeddings": 10**30}, "original_max_position_embeddings is 1000"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_theta": -1}, "rope_theta is -1; this engine allows: a number from 1e-14 to 1e+14"),
        ({"full_attention": {"rope_theta": 1}}, "full_attention is {'rope_theta': 1}; this engine"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_rope_that_is_not_computed(
    tmp_path: Path, field: str, rope: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ModelStoreError) as caught:
        read(tmp_path, **{"rope_parameters": None, field: rope})
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {field}.{fragment}")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"rope_scaling": "linear", "rope_parameters": None}, "rope_scaling is 'linear'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling is {'type': 'linear', 'factor': 2.0}; this engine allows: the same as",
        ),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta is 0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    ],
)
def test_rope_fields_that_contradict(
    tmp_path: Path, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ModelStoreError) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {fragment}")


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_rope_of_older_files(tmp_path: Path, kind: str) -> None:
    old = {"rope_parameters": ..., "rope_theta": 5000.0}
    assert read(tmp_path, **old, rope_scaling=None).rope == Rope(rope_theta=5000.0)
    linear = {kind: "linear", "factor": 4}
    assert read(tmp_path, **old, rope_scaling=linear).rope == Rope(
        rope_type="linear", rope_theta=5000.0, factor=4.0
    )
    llama3 = {**LLAMA3, "rope_type": ..., kind: "llama3"}
    llama3 = {name: value for name, value in llama3.items() if value is not ...}
    new = {**LLAMA3, "rope_theta": 5000.0}
    older = read(tmp_path, **old, rope_scaling=llama3)
    assert older == read(tmp_path, rope_parameters=new)
    assert older.rope.original_max_position_embeddings == 64


def test_the_context_before_scaling(tmp_path: Path) -> None:
    section = {**LLAMA3, "original_max_position_embeddings": None}
    assert read(tmp_path, rope_parameters=section).rope.original_max_position_embeddings == 256
    outside = read(tmp_path, rope_parameters=LLAMA3, original_max_position_embeddings=48)
    assert outside.rope.original_max_position_embeddings == 48


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_missing_field_means_what_it_means_to_transformers(tmp_path: Path, family: str) -> None:
    names = ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    windows = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    missing = dict.fromkeys((*names, *windows, "rope_parameters", "hidden_act", "dtype"), ...)
    ours = read(tmp_path, family, num_attention_heads=32, hidden_size=128, **missing)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    for name in names:
        # Qwen2's class has no such field; its layers divide.
        assert getattr(ours, name) == getattr(theirs, name, 128 // 32), name
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert set(ours.sliding_windows) == {getattr(theirs, "sliding_window", None)}
    assert ours.dtype is None


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_explicit_null_of_heads_is_not_a_missing_one(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family, num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)


SLIDING, FULL = "sliding_attention", "full_attention"
ON = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ...}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Llama", {}, (None, None, None)),
        ("Llama", {"layer_types": [FULL] * 3}, (None, None, None)),
        ("Mistral", {"sliding_window": 5}, (5, 5, 5)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Qwen2", {"sliding_window": 5, "layer_types": ...}, (None, None, None)),
        ("Qwen2", ON, (None, None, None)),
        ("Qwen2", {**ON, "max_window_layers": 2}, (None, None, 9)),
        ("Qwen3", {**ON, "max_window_layers": 0}, (9, 9, 9)),
        ("Qwen3", {**ON, "layer_types": [SLIDING, FULL, SLIDING]}, (9, None, 9)),
        ("Qwen3", {**ON, "max_window_layers": 0, "sliding_window": None}, (None, None, None)),
    ],
)
def test_windows(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, family, **changes).sliding_windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "fragment"),
    [
        ("Llama", {"sliding_window": 8}, "sliding_window is 8; this engine allows: null"),
        ("Llama", {"layer_types": [FULL, FULL, SLIDING]}, "layer_types is "),
        ("Mistral", {"layer_types": [SLIDING, FULL, SLIDING]}, "layer_types is "),
        ("Mistral", {"use_sliding_window": False}, "use_sliding_window is False; this engine"),
        ("Mistral", {"sliding_window": 0}, "sliding_window is 0"),
        (
            "Mistral",
            {"sliding_window": 10**20},
            "sliding_window is 100000000000000000000; this engine",
        ),
        ("Qwen2", {**ON, "max_window_layers": 2**31}, "max_window_layers is 2147483648"),
        ("Qwen2", {**ON, "use_sliding_window": "on"}, "use_sliding_window is 'on'"),
        ("Qwen2", {**ON, "max_window_layers": -1}, "max_window_layers is -1"),
        ("Qwen2", {"layer_types": [SLIDING] * 3}, "layer_types is "),
        ("Qwen3", {**ON, "layer_types": [SLIDING, "chunked_attention", FULL]}, "layer_types is "),
        ("Qwen3", {**ON, "layer_types": [SLIDING]}, "layer_types is ['sliding_attention']; this"),
        ("Qwen3", {**ON, "layer_types": "sliding"}, "layer_types is 'sliding'"),
    ],
)
def test_windows_that_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ModelStoreError) as caught:
        read(tmp_path, family, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {fragment}")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON that can be read: it is nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        (f'{{"rope_scaling": {"[" * 200}{"]" * 200}}}', "nested too deep"),
        ("[]", "no JSON object"),
    ],
    ids=["missing", "cut", "deep", "deep objects", "deeper than a real one", "list"],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None, fragment: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelStoreError, match=fragment) as caught:
        read_model_config(tmp_path)
    assert str(path) in str(caught.value)
