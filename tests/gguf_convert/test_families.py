"""Whole models of each family: through a GGUF file and back, they compute what they did before.

transformers loads the converted directory, which is also the check that config.json says all there is; our
engine loads it, which is the check that it says nothing else.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_writing import SMALL, gguf_tensors, write_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trioleg import model_store
from trioleg.config import EngineConfig, LLMConfig
from trioleg.errors import ModelStoreError
from trioleg.gguf_convert import convert
from trioleg.model_store.gguf_file import find_gguf
from trioleg.offline import open_engine
from trioleg.sampling_params import SamplingParams

Kind = gguf.GGMLQuantizationType

_SIZES = {
    "vocab_size": len(SMALL.tokens),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Which model, what is particular about it, and what its GGUF says beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"rope.dimension_count": 8, "vocab_size": len(SMALL.tokens)}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama, heads of their own size": (
        "llama",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16},
    ),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}, {"attention.key_length": 16}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "mistral": ("mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": (
        "qwen3",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16},
    ),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True}, {}),
}


def make(model_type: str, **settings: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**_SIZES, "tie_word_embeddings": False, **settings}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    for values in model.parameters():
        # Norms are ones and biases zeros in a new model: nobody would miss them.
        if values.dim() == 1:
            torch.nn.init.uniform_(values, 0.5, 1.5)
    return model


def converted(source: Path) -> Path:
    found = find_gguf(source, source.parent / "made")
    assert found is not None
    found.directory.mkdir(parents=True)
    convert(found.parts, found.directory, lambda done, total: None)
    return found.directory


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40)[None] * 7 % len(SMALL.tokens)
    with torch.inference_mode():
        return model(ids).logits


def loaded(directory: Path) -> Any:
    """transformers takes a tensor that it has no use for in silence; here it is an error."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_model_is_the_same_model(tmp_path: Path, family: str) -> None:
    model_type, settings, more = FAMILIES[family]
    model = make(model_type, **settings)
    directory = converted(write_model(tmp_path / "a.gguf", model, more=more))
    again = loaded(directory)
    assert again.config.architectures == [type(model).__name__]
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "float32"


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_engine_answers_as_the_model_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("TRIOLEG_CACHE", str(tmp_path / "cache"))
    model_type, settings, more = FAMILIES[family]
    model = make(model_type, **settings)
    source = str(write_model(tmp_path / "a.gguf", model, more=more))
    model_store.pull(source)
    prompt = [7 * i % len(SMALL.tokens) for i in range(20)]
    engine_config = EngineConfig(dtype="float32", device="cpu", max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_engine(source, LLMConfig(engine=engine_config)) as engine:
        (output,) = engine.generate([prompt], params)
    assert output.error is None
    assert list(output.outputs[0].token_ids) == greedy(model, prompt, 12)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)]
)
def test_a_file_of_half_precision_keeps_its_format(tmp_path: Path, kind: Any, dtype: Any) -> None:
    model = make("qwen2")
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(values.to(dtype).float())
    source = write_model(
        tmp_path / "a.gguf", model, kind_of=lambda _, x: kind if x.ndim == 2 else Kind.F32
    )
    directory = converted(source)
    name = str(dtype).removeprefix("torch.")
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == name
    torch.testing.assert_close(logits(loaded(directory)), logits(model), rtol=0, atol=1e-5)


def test_a_vector_beyond_float16_is_refused(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "a.gguf",
        make("llama"),
        kind_of=lambda _, x: Kind.F16 if x.ndim == 2 else Kind.F32,
        tensors={"output_norm.weight": np.full(32, 1e5, np.float32)},
    )
    with pytest.raises(
        ModelStoreError, match=r"a\.gguf: output_norm\.weight .* too large for float16"
    ):
        converted(source)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_quantized_model_is_what_transformers_makes_of_it(
    tmp_path: Path, model_type: str
) -> None:
    """Its own reader of GGUF files is another implementation of all this."""
    model = make(model_type, head_dim=8)
    source = write_model(
        tmp_path / "a.gguf",
        model,
        kind_of=lambda _, x: Kind.Q8_0 if x.ndim == 2 else Kind.F32,
        more={"vocab_size": len(SMALL.tokens), "attention.key_length": 8},
    )
    theirs = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(converted(source) / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values.to(torch.bfloat16)), name


def test_a_model_in_parts_is_the_same_model(tmp_path: Path) -> None:
    model = make("llama")
    first = write_model(tmp_path / "a.gguf", model, split_max_tensors=5)
    assert first.name == "a-00001-of-00005.gguf"
    torch.testing.assert_close(logits(loaded(converted(first))), logits(model), rtol=0, atol=1e-5)
    second = tmp_path / "a-00002-of-00005.gguf"
    with pytest.raises(ModelStoreError, match=r"later part .*first, a-00001-of-00005\.gguf"):
        find_gguf(second, tmp_path)
    second.unlink()
    with pytest.raises(ModelStoreError, match=r"a-00002-of-00005\.gguf is missing"):
        find_gguf(first, tmp_path)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelStoreError, match="one of 5 parts"):
        convert([tmp_path / "renamed.gguf"], tmp_path, lambda done, total: None)


@pytest.mark.parametrize(
    ("family", "more", "named"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'.*none, linear"),
        ("llama", {"rope.scaling.factor": 0.0}, "rope.scaling.factor is 0.0"),
        ("llama3", {"rope.scaling.factor": 2.0}, "rope.scaling.factor is 2.0.*rope_freqs"),
        ("llama", {"rope.dimension_count": 4}, "rope.dimension_count is 4.*size of a head"),
        ("llama", {"attention.value_length": 4}, "value_length is 4"),
        (
            "llama",
            {"attention.key_length": 4, "rope.dimension_count": 4},
            r"blk\.0\.attn_q\.weight has shape \[32, 32\]; by the settings it is \[16, 32\]",
        ),
        ("llama", {"expert_count": 8}, "cannot convert the settings llama.expert_count"),
        ("llama", {"vocab_size": 7}, "263 tokens for a model of 7"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale"),
        ("qwen2", {"attention.sliding_window": 8}, "sliding_window is 8"),
        ("llama", {"attention.sliding_window": -1}, "sliding_window is -1.*from 0"),
        ("llama with biases", {"attention.sliding_window": 8}, "sliding_window is 8.*biases"),
        ("llama", {"block_count": 2**25}, "block_count is 33554432.*from 1 to 21,.* 21 tensors"),
        ("llama", {"attention.head_count_kv": 3}, "head_count_kv is 3.*divisor.*which is 4"),
        ("llama", {"attention.key_length": 7, "rope.dimension_count": 7}, "head is 7.*even"),
        ("llama", {"context_length": 2**31}, "context_length is 2147483648.*to 2147483647"),
        ("llama", {"rope.freq_base": 1e300}, r"freq_base is 1e\+300.*1e-14 to 1e\+14"),
        ("llama", {"rope.freq_base": 1e-300}, "freq_base is 1e-300"),
        ("llama", {"rope.freq_base": math.nan}, "freq_base is nan"),
        ("llama", {"rope.freq_base": 2**64 - 1}, "freq_base is 18446744073709551615"),
        ("qwen2", {"attention.layer_norm_rms_epsilon": 1e-60}, "rms_epsilon is 1e-60"),
        ("llama", {"rope.scaling.factor": 1e30}, r"scaling\.factor is 1.0.*e\+30"),
    ],
)
def test_settings_of_other_models_are_refused(
    tmp_path: Path, family: str, more: dict[str, Any], named: str
) -> None:
    model_type, settings, usual = FAMILIES[family]
    source = write_model(tmp_path / "a.gguf", make(model_type, **settings), more={**usual, **more})
    with pytest.raises(ModelStoreError, match=rf"a\.gguf.*{named}"):
        converted(source)


@pytest.mark.parametrize(
    "changes", [{"high_freq_factor": 8.0}, {"original_max_position_embeddings": 4096}]
)
def test_another_table_of_frequencies_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make("llama", head_dim=16, rope_parameters={**_LLAMA3, **changes})
    source = write_model(tmp_path / "a.gguf", model, more={"attention.key_length": 16})
    with pytest.raises(ModelStoreError, match=r"rope_freqs\.weight is not the table"):
        converted(source)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, family: str) -> None:
    model_type, settings, more = FAMILIES[family]
    model = make(model_type, **settings)
    for name, values in gguf_tensors(model).items():
        if name == "token_embd.weight":
            continue  # its rows are compared with the tokens
        for wrong in (np.concatenate([values, values]), values[..., None].copy(), values[:-2]):
            source = write_model(tmp_path / "a.gguf", model, more=more, tensors={name: wrong})
            with pytest.raises(ModelStoreError) as caught:
                converted(source)
            said = f"a.gguf: {name} has shape {list(wrong.shape)}; by the settings it is {list(values.shape)}"
            assert str(caught.value) == said
            shutil.rmtree(tmp_path / "made")


def test_a_table_of_frequencies_in_integers_is_refused(tmp_path: Path) -> None:
    model = make("llama", head_dim=16, rope_parameters=_LLAMA3)
    source = write_model(
        tmp_path / "a.gguf",
        model,
        more={"attention.key_length": 16},
        tensors={"rope_freqs.weight": np.ones(8, np.int32)},
        kind_of=lambda name, _: Kind.I32 if name == "rope_freqs.weight" else Kind.F32,
    )
    with pytest.raises(ModelStoreError, match=r"a\.gguf: rope_freqs\.weight is stored as I32"):
        converted(source)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38, 0.5, -1.0])
def test_a_table_of_no_frequencies_is_refused(tmp_path: Path, value: float) -> None:
    table = np.full(8, value, np.float32)
    model = make("llama", head_dim=16, rope_parameters=_LLAMA3)
    source = write_model(
        tmp_path / "a.gguf",
        model,
        more={"attention.key_length": 16},
        tensors={"rope_freqs.weight": table},
    )
    with pytest.raises(ModelStoreError, match=r"a\.gguf.* rope_freqs\.weight is not the table"):
        converted(source)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"split.count": -1}, "split.count is -1; .*an integer of at least 0"),
        ({"split.count": "1"}, "split.count is '1'; .*an integer"),
        ({"split.tensors.count": "21"}, "split.tensors.count is '21'; .*an integer"),
        ({"split.tensors.count": -1}, "hold 21 of -1 tensors"),
    ],
)
def test_parts_that_cannot_be_counted(tmp_path: Path, settings: Any, named: str) -> None:
    source = write_model(tmp_path / "a.gguf", make("llama"), more=settings)
    with pytest.raises(ModelStoreError, match=rf"a\.gguf: {named}|a\.gguf: its parts {named}"):
        converted(source)
