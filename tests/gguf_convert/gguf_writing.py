"""Models and tokenizers of transformers, written as GGUF files by the gguf package.

Names of tensors come from that package's own table, so that the tests do not repeat what they test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tiny_gguf import TOKENS, interleave
from tokenizers import Tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
F32 = gguf.GGMLQuantizationType.F32


@dataclass
class Vocabulary:
    """What a GGUF says of a tokenizer. ``merges`` for "gpt2", ``scores`` for "llama"."""

    tokens: list[str]
    types: list[int]
    model: str = "gpt2"
    pre: str | None = "smollm"
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    templates: list[Mapping[str, str]] = field(default_factory=list)

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        for name, token_id in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        if self.templates:
            writer.add_chat_template(self.templates)


SMALL = Vocabulary(TOKENS, [1] * len(TOKENS), merges=["h e", "l l", "he ll", "hell o"])


def vocabulary_of(file: Path, size: int | None = None, **changes: Any) -> Vocabulary:
    """Of a real tokenizer.json, as llama.cpp's converter writes it: padded to ``size`` with unused
    tokens, and for a SentencePiece vocabulary with a score for each piece."""
    fields = json.loads(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(file))
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = [tokenizer.id_to_token(i) for i in range(count)]
    types = [1] * count
    for token in fields["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    padding = (size or count) - count
    tokens += [f"[PAD{count + i}]" for i in range(padding)]
    types += [5] * padding
    if changes.get("model") == "llama":
        types = [6 if tokens[i].startswith("<0x") else kind for i, kind in enumerate(types)]
        changes["scores"] = _scores(tokens, fields["model"]["merges"])
    else:
        merges = fields["model"]["merges"]
        changes["merges"] = [one if isinstance(one, str) else " ".join(one) for one in merges]
    return Vocabulary(tokens, types, **changes)


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """The file has merges in their place: a piece is the better the earlier it is made. Runs of spaces
    were added to the vocabulary afterwards, with one score for all; they are the last to be made."""
    made = {merge.replace(" ", ""): -float(i) for i, merge in reversed([*enumerate(merges)])}
    return [-1e9 if set(token) == {"▁"} else made.get(token, -1e9) for token in tokens]


def write_model(
    path: Path,
    model: Any,
    vocabulary: Vocabulary = SMALL,
    *,
    kind_of: Callable[[str, npt.NDArray[Any]], gguf.GGMLQuantizationType] = lambda *_: F32,
    more: Mapping[str, float | int | str] = {},
    tensors: Mapping[str, npt.NDArray[Any]] = {},
    split_max_tensors: int = 0,
) -> Path:
    """``model``'s weights and settings. ``kind_of(name, values)`` is how a tensor is stored; ``more`` are
    settings of the architecture, ``tensors`` stand in place of the model's. With ``split_max_tensors``, in several files; returns the first."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(
        path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors
    )
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    for name, value in {**settings, **more}.items():
        key = name if "split." in name else f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name}"
        writer.add_key_value(key, value, _type_of(value))
    vocabulary.write(writer)
    for name, values in {**gguf_tensors(model), **tensors}.items():
        kind = kind_of(name, values)
        if kind == F32 or kind == gguf.GGMLQuantizationType.I32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))[0]


def _type_of(value: float | int | str) -> gguf.GGUFValueType:
    """The usual type where it holds the value, else the widest."""
    types = gguf.GGUFValueType
    if isinstance(value, str):
        return types.STRING
    if isinstance(value, float):
        return types.FLOAT32 if value == 0 or 1e-37 < abs(value) < 1e38 else types.FLOAT64
    if value < 0:
        return types.INT32
    return types.UINT32 if value < 2**32 else types.UINT64


def gguf_tensors(model: Any) -> dict[str, npt.NDArray[np.float32]]:
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture == gguf.MODEL_ARCH.LLAMA and part in heads:
            flat = values if values.ndim == 2 else values[:, None]
            values = interleave(flat, heads[part]).reshape(values.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    if config.rope_parameters["rope_type"] == "llama3":
        found["rope_freqs.weight"] = _frequency_table(model)
    return found


def _frequency_table(model: Any) -> npt.NDArray[np.float32]:
    """What transformers divides each frequency by."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, head_dim, 2).float() / head_dim
    plain = 1 / config.rope_parameters["rope_theta"] ** powers
    return (plain / model.model.rotary_emb.inv_freq).numpy()
