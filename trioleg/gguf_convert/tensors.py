"""The tensors: dequantized, renamed, and written as model.safetensors.

Rules of this file: imports gguf, numpy, ``errors``, ``header`` and ``reader``. A few million values in memory at a
time, whatever the model's size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ..errors import ModelStoreError
from .header import Tensor
from .reader import Model

__all__ = [
    "Dtype",
    "dtype_of",
    "hugging_face_name",
    "put_back_rope_rows",
    "to_bfloat16",
    "write_tensors",
]

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# With its embedding, 49152 rows of 576, in one go SmolLM2 took 580 MB of memory; so, 175.
_VALUES_AT_ONCE = 4096 * 576

_Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format: its name in config.json and in safetensors, bytes of a value, how it is made."""

    name: str
    code: str
    size: int
    cast: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of ``values`` as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding a NaN could carry into the exponent; setting the quiet bit cannot.
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


_FLOAT32 = Dtype("float32", "F32", 4, lambda values: values.astype(np.float32, copy=False))
_FLOAT16 = Dtype("float16", "F16", 2, lambda values: values.astype(np.float16))
_BFLOAT16 = Dtype("bfloat16", "BF16", 2, to_bfloat16)


def dtype_of(tensors: Sequence[Tensor]) -> Dtype:
    """The format that all tensors are written in: an engine computes in one.

    The matrices decide, for vectors are float32 in nearly every GGUF. Where they are float16 or float32
    nothing is rounded (vectors beside float16 matrices came from float16 or bfloat16, so that they
    fit). Quantized ones become bfloat16: it rounds by 1/512 at most, less than the finest of them did, and has
    the range of any model, which float16 has not.
    """
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if not kinds <= {_Kind.F32, _Kind.F16, _Kind.BF16} or kinds == {_Kind.BF16}:
        return _BFLOAT16
    return _FLOAT16 if kinds == {_Kind.F16} else _FLOAT32


def hugging_face_name(name: str) -> tuple[str, str]:
    """The name in the Hugging Face layout, and which part of a layer it is ("" for none).

    The name is "" for what is no weight there: the table of frequencies, which config.json stands for.
    """
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _GLOBAL_TENSORS.get(name, ""), ""
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}", part


def put_back_rope_rows(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Query or key rows in the order of Hugging Face's rotary embedding.

    GGUF files of Llama models are made for a rotation of neighbouring rows (0, 1), (2, 3), …;
    Hugging Face rotates row i with row i + half of the head. ``rows`` is [heads * head_dim, width], or
    the bias, [heads * head_dim].
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_tensors(
    path: Path, model: Model, permuted: Mapping[str, int], report: Callable[[int, int], None]
) -> None:
    """The safetensors format by hand, a few thousand rows in memory at a time.

    Eight bytes with the header's length, the header as JSON, the data
    (https://huggingface.co/docs/safetensors/index#format). The safetensors package would want all
    tensors at once, and its call for raw bytes differs between its versions. ``permuted``: see
    ``config.make_config``.
    """
    dtype = dtype_of(model.tensors)
    header = _header(model.tensors, dtype)
    total, done = sum(tensor.num_bytes for tensor in model.tensors), 0
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in model.tensors:
            name, part = hugging_face_name(tensor.name)
            if name:
                for rows in _dequantized(tensor, permuted.get(part)):
                    _check_range(model, tensor, rows, dtype)
                    file.write(dtype.cast(rows).tobytes())
            done += tensor.num_bytes
            report(done, total)


def _check_range(model: Model, tensor: Tensor, rows: npt.NDArray[np.float32], dtype: Dtype) -> None:
    if dtype is not _FLOAT16 or tensor.kind == _Kind.F16:
        return
    if np.any(np.isfinite(rows) & (np.abs(rows) > np.finfo(np.float16).max)):
        raise ModelStoreError(
            f"{model.name}: {tensor.name} holds numbers that are too large for float16, in which the "
            "file has its matrices"
        )


def _header(tensors: Sequence[Tensor], dtype: Dtype) -> bytes:
    # "format" is what transformers looks for before it reads the tensors.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        name, _ = hugging_face_name(tensor.name)
        if not name:
            continue
        end = start + dtype.size * tensor.num_values
        shape = list(tensor.shape)
        header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def _dequantized(tensor: Tensor, heads: int | None) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor as float32, in blocks of rows; with ``heads``, of whole heads, put back in order."""
    head = tensor.shape[0] // heads if heads else 1
    step = max(_VALUES_AT_ONCE // tensor.shape[-1] // head, 1) * head
    for start in range(0, tensor.num_rows, step):
        values = tensor.values(start, min(step, tensor.num_rows - start))
        # A vector is one row, and its entries are what belongs to heads.
        values = values.reshape(-1, *tensor.shape[1:])
        yield put_back_rope_rows(values, len(values) // head) if heads else values
