"""The conversion, on a tiny Llama written here as llama.cpp would write it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, TOKENS, interleave, tiny_weights, write_gguf

from trioleg.errors import ModelStoreError
from trioleg.gguf_convert import convert, put_back_rope_rows, to_bfloat16


def _convert(tmp_path: Path, **changes: object) -> Path:
    source, directory = tmp_path / "tiny.gguf", tmp_path / "made"
    write_gguf(source, **changes)
    directory.mkdir()
    convert(source, directory, lambda done, total: None)
    return directory


def test_bfloat16_rounds_as_torch_does() -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    # Ties in both directions, and the largest values, which round up to infinity.
    chosen = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0], np.uint32)
    values = np.concatenate([random, chosen]).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(to_bfloat16(values)[numbers], expected[numbers])


def test_a_nan_stays_a_nan_in_bfloat16() -> None:
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    rounded = torch.from_numpy(to_bfloat16(bits.view(np.float32))).view(torch.bfloat16)
    assert rounded.isnan().all()


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_rows_are_put_back(heads: int) -> None:
    weight = np.arange(heads * 8 * 5, dtype=np.float32).reshape(heads * 8, 5)
    np.testing.assert_array_equal(put_back_rope_rows(interleave(weight, heads), heads), weight)


def test_weights_come_back_under_their_names(tmp_path: Path) -> None:
    made = load_file(_convert(tmp_path) / "model.safetensors")
    weights = tiny_weights()
    assert set(made) == set(weights)
    for name, weight in weights.items():
        assert made[name].dtype == torch.bfloat16
        # Coarser than the error of four bits over this range, far finer than a swapped row.
        np.testing.assert_allclose(made[name].float().numpy(), weight, atol=0.15, err_msg=name)


def test_float32_tensors_are_only_rounded(tmp_path: Path) -> None:
    made = load_file(_convert(tmp_path, quantization={}) / "model.safetensors")
    for name, weight in tiny_weights().items():
        expected = torch.from_numpy(weight).to(torch.bfloat16)
        assert torch.equal(made[name], expected), name


@pytest.mark.parametrize("tied", [True, False])
def test_config_says_what_the_model_is(tmp_path: Path, tied: bool) -> None:
    directory = _convert(tmp_path, tied=tied)
    config = json.loads((directory / "config.json").read_text())
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD_DIM
    # Written as a person would write them, not as a float32 widened to a float64.
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100_000.0)
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(directory / "model.safetensors")) is not tied
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "made", lambda *report: reports.append(report))
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"add_bos": True}, "add_bos_token is True"),
        ({"extra_setting": "rope.scaling.factor"}, r"\['llama.rope.scaling.factor'\]"),
        ({"extra_tensor": "rope_freqs.weight"}, "'rope_freqs.weight'"),
        ({"tokens": TOKENS[:-1]}, f"{len(TOKENS) - 1} tokens for a model of {len(TOKENS)}"),
        ({"token_types": [6] * len(TOKENS)}, r"token types are \[6\]"),
    ],
)
def test_what_is_not_translated_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelStoreError, match=named):
        _convert(tmp_path, **changes)


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all", b"GGUF"])
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelStoreError, match=r"broken\.gguf"):
        convert(file, tmp_path, lambda done, total: None)


def test_a_cut_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelStoreError, match=r"cut\.gguf"):
        convert(file, tmp_path, lambda done, total: None)


def test_the_quantizations_of_the_default_model_are_in_play(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert kinds == {"F32", "Q4_1", "Q8_0"}
