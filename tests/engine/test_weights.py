"""Reading a checkpoint: what is wrong is named, by file and by tensor; what is right is read once."""

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
from tiny_families import change_config, save_tiny

from trioleg.config import EngineConfig
from trioleg.engine.checkpoint import Checkpoint
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


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


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
    with pytest.raises(ModelStoreError, match=r"norm.weight is I8; this engine reads F32"):
        load(model_dir)


def test_tensors_that_no_llama_has(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(model_dir, lambda t: t.update({name: torch.ones(32)}))
    with pytest.raises(ModelStoreError, match=r"a LlamaForCausalLM .* has not: .*q_proj\.bias"):
        load(model_dir)


@pytest.mark.parametrize(
    ("family", "switches", "name"),
    [
        ("Qwen2", {}, "self_attn.k_proj.bias"),
        ("Qwen3", {}, "self_attn.q_norm.weight"),
        ("Llama", {"mlp_bias": True}, "mlp.down_proj.bias"),
        ("Llama", {"attention_bias": True}, "self_attn.o_proj.bias"),
    ],
)
def test_what_a_family_has_more_must_be_there(
    tmp_path: Path, family: str, switches: dict[str, bool], name: str
) -> None:
    save_tiny(tmp_path, family, **switches)
    name = f"model.layers.1.{name}"
    assert load(tmp_path).layers[1].down.shape == (32, 48)
    change_tensors(tmp_path, lambda t: t.update({name: t[name][:3].clone()}))
    with pytest.raises(ModelStoreError, match=rf"{name} has shape \[3\]; by config.json"):
        load(tmp_path)
    change_tensors(tmp_path, lambda t: t.pop(name))
    with pytest.raises(ModelStoreError, match=rf"no tensor {name}, which config.json asks for"):
        load(tmp_path)


def test_what_follows_from_the_rest_may_be_there(model_dir: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(96, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_tensors(model_dir, lambda t: t.update(extra))
    weights = load(model_dir)
    assert weights.lm_head is weights.embed_tokens


@pytest.fixture
def shards_dir(tmp_path: Path) -> Path:
    """The tiny model in several files, with their index."""
    save_tiny_llama(tmp_path).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    return tmp_path / "many"


def change_index(path: Path, name: str, shard: object) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][name] = shard
    file.write_text(json.dumps(index))


def test_shards(tiny_dir: Path, shards_dir: Path) -> None:
    assert len(list(shards_dir.glob("*.safetensors"))) > 1
    one, many = load(tiny_dir), load(shards_dir)
    assert torch.equal(one.layers[2].gate_up, many.layers[2].gate_up)
    assert torch.equal(one.embed_tokens, many.embed_tokens)


def test_a_shard_that_is_missing_or_cut(shards_dir: Path) -> None:
    shard = sorted(shards_dir.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelStoreError, match=f"{shard.name}: cannot be read as safetensors"):
        load(shards_dir)
    shard.unlink()
    with pytest.raises(ModelStoreError, match=f"{shard.name}: there is no such file"):
        load(shards_dir)


def test_a_tensor_that_is_not_where_the_index_says(shards_dir: Path) -> None:
    first, *_, last = sorted(shards_dir.glob("*.safetensors"))
    change_index(shards_dir, "model.norm.weight", first.name)
    with pytest.raises(
        ModelStoreError, match=rf"{first.name}: holds no tensor model\.norm\.weight"
    ):
        load(shards_dir)
    change_index(shards_dir, "model.norm.weight", last.name)
    change_index(shards_dir, "model.other.weight", last.name)
    with pytest.raises(
        ModelStoreError, match=rf"{last.name}: holds no tensor model\.other\.weight"
    ):
        load(shards_dir)


def test_a_tensor_in_two_shards(shards_dir: Path) -> None:
    shards = sorted(shards_dir.glob("*.safetensors"))
    name = next(iter(load_file(shards[0])))
    save_file({**load_file(shards[1]), name: torch.ones(1)}, shards[1])
    with pytest.raises(ModelStoreError, match=f"{shards[1].name}: holds {name}, and so does"):
        load(shards_dir)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{}", "holds no weight_map"),
        ("[", r"index\.json: is not JSON"),
        ('{"weight_map": ' + "[" * 100_000, r"index\.json: is not JSON that .* nested too deep"),
        ('{"weight_map": 7}', "holds no weight_map"),
        ('{"weight_map": {}}', "holds no weight_map"),
        ('{"weight_map": {"a": "../elsewhere"}}', "is not the name of a file beside it"),
        ('{"weight_map": {"a": ""}}', r"index\.json: '' is not the name of a file beside it"),
        ('{"weight_map": {"a": ".."}}', r"index\.json: '\.\.' is not the name of a file"),
        (f'{{"weight_map": {{"a": "{"x" * 300}"}}}}', r"index\.json: 'xxx.* is not the name of a"),
        (f'{{"weight_map": {{"a": "{"é" * 200}"}}}}', r"index\.json: 'ééé.* is not the name of a"),
        (r'{"weight_map": {"a": "a\u0000b"}}', r"index\.json: .* is not the name of a file"),
        (r'{"weight_map": {"a": "a\ud800b"}}', r"index\.json: .* is not the name of a file"),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a file beside it"),
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


@pytest.mark.parametrize(
    ("named", "expected"),
    [("float16", torch.float16), ("bfloat16", torch.bfloat16), (..., torch.float32)],
)
def test_where_tensors_differ_the_config_decides(
    model_dir: Path, named: Any, expected: torch.dtype
) -> None:
    halves = {"model.embed_tokens.weight": torch.float16, "model.norm.weight": torch.bfloat16}
    change_tensors(
        model_dir, lambda t: t.update({name: t[name].to(one) for name, one in halves.items()})
    )
    change_config(model_dir, dtype=..., torch_dtype=named)
    weights = load(model_dir)
    assert {weights.embed_tokens.dtype, weights.norm.dtype, weights.layers[0].o.dtype} == {expected}


def test_nothing_is_read_of_what_does_not_fit(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(Checkpoint, "read", lambda _, name: read.append(name))
    change_tensors(model_dir, lambda t: t.pop("model.layers.2.mlp.down_proj.weight"))
    with pytest.raises(ModelStoreError, match="no tensor"):
        load(model_dir)
    assert read == []


def test_progress_counts_every_byte(model_dir: Path) -> None:
    reports: list[tuple[int, int]] = []
    load_weights(
        model_dir,
        read_model_config(model_dir),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        report=lambda done, total: reports.append((done, total)),
    )
    tensors = load_file(model_dir / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert len(reports) == len(tensors)
    assert sorted(reports) == reports
    assert {total for _, total in reports} == {whole}
    assert reports[-1] == (whole, whole)


def test_a_file_that_is_cut_while_it_is_read(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"

    def cut(done: int, total: int) -> None:
        path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(ModelStoreError, match=r"model\.safetensors: cannot be read"):
        load_weights(
            model_dir,
            read_model_config(model_dir),
            dtype=None,
            device=torch.device("cpu"),
            report=cut,
        )


def test_the_file_may_vanish_after_loading(model_dir: Path) -> None:
    weights = load(model_dir)
    before = weights.layers[0].o.clone()
    (model_dir / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights.layers[0].o, before)


def test_load_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"config\.json is missing"):
        EngineCore.load(tmp_path, EngineConfig())
