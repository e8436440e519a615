"""A Llama model in one GGUF file, rewritten as a Hugging Face directory.

Rules of this file: synchronous; needs the ``engine`` extra (gguf, numpy), so only
``model_store`` imports it, and only when there is something to convert. No torch.

The plan: three sections of the GGUF become three kinds of file. The tensors are dequantized, rounded to
bfloat16 and renamed (model.safetensors); the ``llama.*`` settings become config.json and
generation_config.json; the ``tokenizer.*`` settings become tokenizer.json and tokenizer_config.json. A
setting or tensor that is not translated here is refused by name: a model that loads but answers a
little wrong is worse than one that does not load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .errors import ModelStoreError

__all__ = ["convert", "put_back_rope_rows", "to_bfloat16"]

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

_ARCHITECTURE_SETTINGS = frozenset(
    f"llama.{name}"
    for name in (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    )
)

# With the embedding table of 49152 rows in one go the conversion took 780 MB of memory; so, 370.
_ROWS_AT_ONCE = 4096

# GGUF's token types; the others belong to vocabularies that are not byte-level.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def convert(source: Path, directory: Path, report: Callable[[int, int], None]) -> None:
    """Writes the model in ``source`` into the existing, empty ``directory``.

    ``report(done, total)`` counts bytes of tensors as the GGUF stores them. Raises ``ModelStoreError``
    for a file that is no GGUF or that holds what is not translated, ``OSError`` as it comes.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ModelStoreError(f"{source.name} is not a readable GGUF file: {error}") from error
    settings = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_unknown(source.name, settings)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(directory / "config.json", _config(settings, tied=tied))
    _write_json(directory / "generation_config.json", _token_ids(settings))
    _tokenizer(settings).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(settings))
    _write_tensors(directory / "model.safetensors", reader, settings, report)


def put_back_rope_rows(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Query or key rows in the order of Hugging Face's rotary embedding.

    GGUF files of Llama models are made for a rotation of neighbouring rows (0, 1), (2, 3), …;
    Hugging Face rotates row i with row i + half of the head. ``weight`` is [heads * head_dim, width].
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of ``values`` as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding a NaN could carry into the exponent; setting the quiet bit cannot.
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _refuse_unknown(file: str, settings: Mapping[str, Any]) -> None:
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for name, allowed in expected.items():
        if settings.get(name) != allowed:
            raise ModelStoreError(
                f"{file}: {name} is {settings.get(name)!r}; what can be converted: {allowed!r}"
            )
    architecture = {name for name in settings if name.startswith("llama.")}
    if architecture != _ARCHITECTURE_SETTINGS:
        raise ModelStoreError(
            f"{file}: cannot convert settings {sorted(architecture - _ARCHITECTURE_SETTINGS)}, "
            f"misses {sorted(_ARCHITECTURE_SETTINGS - architecture)}"
        )
    types = set(settings["tokenizer.ggml.token_type"])
    if not types <= {_NORMAL, _CONTROL, _USER_DEFINED}:
        raise ModelStoreError(f"{file}: token types are {sorted(types)}; allowed: 1, 3 and 4")


def _write_tensors(
    path: Path,
    reader: gguf.GGUFReader,
    settings: Mapping[str, Any],
    report: Callable[[int, int], None],
) -> None:
    """The safetensors format by hand, a few thousand rows in memory at a time.

    Eight bytes with the header's length, the header as JSON, the data
    (https://huggingface.co/docs/safetensors/index#format). The safetensors package would want all
    tensors at once, and its call for raw bytes differs between its versions.
    """
    heads = {
        "attn_q": settings["llama.attention.head_count"],
        "attn_k": settings["llama.attention.head_count_kv"],
    }
    header = _safetensors_header(reader.tensors)
    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in reader.tensors:
            _, part = _hugging_face_name(tensor.name)
            for rows in _row_blocks(tensor.data, whole=part in heads):
                values = gguf.dequantize(rows, tensor.tensor_type)
                if part in heads:
                    values = put_back_rope_rows(values, heads[part])
                file.write(to_bfloat16(values).tobytes())
            done += int(tensor.n_bytes)
            report(done, total)


def _row_blocks(data: npt.NDArray[Any], *, whole: bool) -> list[npt.NDArray[Any]]:
    step = len(data) if whole or data.ndim == 1 else _ROWS_AT_ONCE
    return [data[start : start + step] for start in range(0, len(data), step)]


def _safetensors_header(tensors: Sequence[gguf.ReaderTensor]) -> bytes:
    # "format" is what transformers looks for before it reads the tensors.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + 2 * int(tensor.n_elements)
        name, _ = _hugging_face_name(tensor.name)
        # GGUF names the fastest dimension first.
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def _hugging_face_name(name: str) -> tuple[str, str]:
    """The name in the Hugging Face layout, and which part of a layer it is ("" for none)."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name], ""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_TENSORS:
        raise ModelStoreError(f"the GGUF file holds a tensor {name!r} that a plain Llama has not")
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight", match[2]


def _config(settings: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    def llama(name: str) -> Any:
        return settings[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": llama("rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "max_position_embeddings": llama("context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": llama("attention.head_count"),
        "num_hidden_layers": llama("block_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "rms_norm_eps": _as_written(llama("attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _as_written(llama("rope.freq_base")),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": llama("vocab_size"),
        **_token_ids(settings),
    }


def _as_written(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where the file gives 9.99999974e-06."""
    return float(str(np.float32(value)))


def _token_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{ours}_token_id": settings[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in names.items()
        if f"tokenizer.ggml.{theirs}_token_id" in settings
    }


def _tokenizer(settings: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits digits one by one before anything else ("smollm")."""
    tokens = settings["tokenizer.ggml.tokens"]
    if len(tokens) != settings["llama.vocab_size"]:
        raise ModelStoreError(
            f"the GGUF file has {len(tokens)} tokens for a model of {settings['llama.vocab_size']}"
        )
    merges = [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, settings["tokenizer.ggml.token_type"]))
    return tokenizer


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Tokens that are matched in the text before BPE: the special ones and the user-defined ones."""
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind != _NORMAL
    ]


def _tokenizer_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    tokens = settings["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{ours}_token": tokens[settings[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in names.items()
        if f"tokenizer.ggml.{theirs}_token_id" in settings
    }
    template = settings.get("tokenizer.chat_template")
    return {
        **({"chat_template": template} if template is not None else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings["llama.context_length"],
        # The class that takes tokenizer.json as it is; a model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
