"""The conversion, on a tiny Llama written here as llama.cpp would write it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, TOKENS, interleave, tiny_weights, write_gguf

from trioleg.errors import ModelStoreError
from trioleg.gguf_convert import convert, tensors
from trioleg.gguf_convert.reader import open_gguf
from trioleg.gguf_convert.tensors import put_back_rope_rows, to_bfloat16, write_tensors


def _convert(tmp_path: Path, **changes: object) -> Path:
    source, directory = tmp_path / "tiny.gguf", tmp_path / "made"
    write_gguf(source, **changes)
    directory.mkdir()
    convert([source], directory, lambda done, total: None)
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


def test_float32_tensors_beside_quantized_ones_are_only_rounded(tmp_path: Path) -> None:
    made = load_file(_convert(tmp_path) / "model.safetensors")
    weights = tiny_weights()
    for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        assert torch.equal(made[name], torch.from_numpy(weights[name]).to(torch.bfloat16)), name


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
    convert([tmp_path / "tiny.gguf"], tmp_path / "made", lambda *report: reports.append(report))
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma'; .*llama, qwen2, qwen3"),
        ({"pre": "llama-9"}, "tokenizer.ggml.pre is 'llama-9'; .*llama-bpe, qwen2"),
        ({"extra_setting": "rope.scaling.beta"}, r"settings llama\.rope\.scaling\.beta"),
        ({"extra_tensor": "blk.0.ffn_gate_exps.weight"}, "ffn_gate_exps.weight"),
        ({"tokens": TOKENS[:-1]}, f"{len(TOKENS) - 1} tokens for a model of {len(TOKENS)}"),
        ({"tokens": [*TOKENS[:-1], "!"]}, "names a token twice"),
        ({"token_types": [6] * len(TOKENS)}, r"token types are \[6\]"),
    ],
)
def test_what_is_not_translated_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelStoreError, match=named):
        _convert(tmp_path, **changes)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    # The name of one tensor becomes that of another layer's.
    source.write_bytes(source.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_uq.weight"))
    with pytest.raises(ModelStoreError, match=r"tensors that .* has not.*: blk\.0\.ffn_uq\.weight"):
        convert([source], tmp_path, lambda done, total: None)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(source, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelStoreError, match=r"big\.gguf is big-endian"):
        convert([source], tmp_path, lambda done, total: None)


def test_damage_anywhere_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    source, made = tmp_path / "tiny.gguf", tmp_path / "made"
    write_gguf(source)
    whole = source.read_bytes()
    made.mkdir()
    random = np.random.default_rng(0)
    for place in random.integers(0, len(whole) - 20_000, 150):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        source.write_bytes(damaged)
        try:
            convert([source], made, lambda done, total: None)
        except ModelStoreError as error:
            assert "tiny.gguf" in str(error)  # noqa: PT017 - most of the damage is harmless


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all", b"GGUF"])
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelStoreError, match=r"broken\.gguf"):
        convert([file], tmp_path, lambda done, total: None)


def test_a_cut_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelStoreError, match=r"cut\.gguf"):
        convert([file], tmp_path, lambda done, total: None)


@pytest.mark.parametrize("kept", [0, 100, 20_000])
def test_a_file_that_shrinks_while_it_is_converted_is_named(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "shrinking.gguf"
    write_gguf(file)

    def cut(done: int, total: int) -> None:
        os.truncate(file, kept)

    with pytest.raises(ModelStoreError, match=r"^shrinking\.gguf is cut off or damaged: .*, now$"):
        convert([file], tmp_path, cut)


def test_no_file_stays_open(tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError):
        _convert(tmp_path, extra_setting="rope.scaling.beta")
    assert not [one for one in Path("/proc/self/fd").iterdir() if ".gguf" in str(one.resolve())]


def _quantizations() -> list[gguf.GGMLQuantizationType]:
    """All that the package dequantizes."""
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", _quantizations(), ids=lambda kind: kind.name)
def test_every_quantization_in_blocks_of_rows_is_the_same_as_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: gguf.GGMLQuantizationType
) -> None:
    monkeypatch.setattr(tensors, "_VALUES_AT_ONCE", 3 * 256)
    source = tmp_path / "one.gguf"
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (16, 256 // block * size), np.uint8)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf([source]) as model:
        write_tensors(tmp_path / "one.safetensors", model, {"attn_q": 2}, lambda done, total: None)
    (made,) = load_file(tmp_path / "one.safetensors").values()
    whole = put_back_rope_rows(gguf.dequantize(data, kind), 2)
    assert np.isfinite(whole).all()
    assert whole.any()
    assert torch.equal(made, torch.from_numpy(whole).to(made.dtype))


def test_a_format_that_is_not_dequantized_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "ints.gguf", "llama")
    writer.add_tensor("output_norm.weight", np.ones(4, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        open_gguf([tmp_path / "ints.gguf"]) as model,
        pytest.raises(ModelStoreError, match=r"ints\.gguf: output_norm\.weight is stored as I32"),
    ):
        write_tensors(tmp_path / "x", model, {}, lambda done, total: None)


def test_the_quantizations_of_the_default_model_are_in_play(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert kinds == {"F32", "Q4_1", "Q8_0"}
