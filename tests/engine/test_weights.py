"""Reading a model directory: what is wrong is named, by file and by field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import save_tiny_llama
from safetensors.torch import load_file, save_file

from trioleg.config import EngineConfig
from trioleg.engine.core import EngineCore
from trioleg.engine.model_config import read_model_config
from trioleg.engine.weights import Weights, load_weights
from trioleg.errors import ModelStoreError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def load(path: Path, dtype: torch.dtype | None = None) -> Weights:
    return load_weights(path, read_model_config(path), dtype=dtype, device=torch.device("cpu"))


def change_config(path: Path, **changes: Any) -> None:
    fields = json.loads((path / "config.json").read_text())
    fields.update(changes)
    (path / "config.json").write_text(json.dumps(fields))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures is ['MistralForCausalLM']"),
        (
            {"architectures": None},
            "architectures is None; this engine allows: ['LlamaForCausalLM']",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this engine allows: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; this engine allows: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
            "rope_parameters.rope_type is 'llama3'; this engine allows: 'default'",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling.rope_type is 'linear'",
        ),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta is -1"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor is 0.5",
        ),
        ({"hidden_size": 0}, "hidden_size is 0; this engine allows: an integer of at least 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; this engine allows: a divisor of"),
        ({"head_dim": 7}, "head_dim is 7; this engine allows: an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_computed(
    model_dir: Path, changes: dict[str, Any], fragment: str
) -> None:
    change_config(model_dir, **changes)
    with pytest.raises(ModelStoreError) as caught:
        read_model_config(model_dir)
    assert str(caught.value).startswith(f"{model_dir / 'config.json'}: {fragment}")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "no JSON object")],
)
def test_a_config_that_cannot_be_read(model_dir: Path, content: str | None, fragment: str) -> None:
    path = model_dir / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelStoreError, match=fragment) as caught:
        read_model_config(model_dir)
    assert str(path) in str(caught.value)


def test_rope_theta_of_older_files(model_dir: Path) -> None:
    change_config(model_dir, rope_parameters=None, rope_scaling=None, rope_theta=5000.0)
    assert read_model_config(model_dir).rope_theta == 5000.0


def test_weights_that_are_missing(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelStoreError, match=r"model\.safetensors: there is no such file"):
        load(model_dir)


@pytest.mark.parametrize("content", [b"", b"not at all", b"\xff" * 64])
def test_weights_that_are_corrupt(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelStoreError, match=r"model\.safetensors: cannot be read as safetensors"):
        load(model_dir)


def test_weights_that_are_cut_short(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelStoreError, match=r"model\.safetensors: cannot be read"):
        load(model_dir)


def test_a_tensor_that_is_missing(model_dir: Path) -> None:
    change_tensors(model_dir, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelStoreError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(model_dir)


def test_a_tensor_of_another_size(model_dir: Path) -> None:
    change_tensors(model_dir, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelStoreError, match=r"norm.weight has shape \[31\]; .* it is \[32\]"):
        load(model_dir)


def test_a_tensor_of_integers(model_dir: Path) -> None:
    change_tensors(
        model_dir, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    )
    with pytest.raises(ModelStoreError, match=r"norm.weight is torch.int8; this engine reads"):
        load(model_dir)


def test_tensors_that_no_llama_has(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(model_dir, lambda t: t.update({name: torch.ones(32)}))
    with pytest.raises(ModelStoreError, match=r"without biases has not: .*q_proj\.bias"):
        load(model_dir)


def test_what_follows_from_the_rest_may_be_there(model_dir: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(96, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_tensors(model_dir, lambda t: t.update(extra))
    weights = load(model_dir)
    assert weights.lm_head is weights.embed_tokens


def test_shards(tmp_path: Path) -> None:
    reference = save_tiny_llama(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert torch.equal(one.layers[2].gate_up, many.layers[2].gate_up)
    assert torch.equal(one.embed_tokens, many.embed_tokens)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{}", "holds no weight_map"),
        ("[", "holds no weight_map"),
        ('{"weight_map": {"a": "../elsewhere"}}', "is not the name of a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: there is no such file"),
    ],
)
def test_an_index_that_leads_nowhere(model_dir: Path, content: str, fragment: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelStoreError, match=fragment):
        load(model_dir)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_auto_is_the_checkpoints(model_dir: Path, dtype: torch.dtype) -> None:
    change_tensors(model_dir, lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    assert load(model_dir).layers[0].down.dtype == dtype
    assert load(model_dir, torch.float32).layers[0].down.dtype == torch.float32


def test_the_file_may_vanish_after_loading(model_dir: Path) -> None:
    weights = load(model_dir)
    before = weights.layers[0].o.clone()
    (model_dir / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights.layers[0].o, before)


def test_load_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"config\.json: cannot be read"):
        EngineCore.load(tmp_path, EngineConfig())
