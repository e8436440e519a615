"""POST /v1/embeddings: what is accepted, what is refused, and how the answer looks.

Pure. OpenAI's parameters, and vLLM's beside them; as for chat requests, each is honoured, or refused by name.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..outputs import PoolingRequestOutput
from ..prompts import TokenizeParams
from ..sampling_params import PoolingParams
from ..timeouts import Timeouts
from .fields import boolean, model, object_of, refusal, refuse_others, timeouts

__all__ = ["EmbeddingRequest", "embedding_json", "embeddings_json", "parse_embeddings"]

# OpenAI's own bound on the inputs of one request.
_INPUTS_MAX = 2048

_FORMATS = ("float", "base64")

# "user" says whose request it is, which changes nothing about the answer; it is not kept.
_HONOURED = frozenset(
    {
        "input",
        "model",
        "encoding_format",
        "dimensions",
        "user",
        "truncate_prompt_tokens",
        "truncation_side",
        "add_special_tokens",
        "use_activation",
        "priority",
        "cache_salt",
        "timeouts",
    }
)

# Parameters of vLLM's that are not honoured, with the values that ask for nothing. What is sent is float32, its
# lowest byte first, whatever this machine's order is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", *(["native"] if sys.byteorder == "little" else [])),
    "padding": ("do_not_pad",),
    "request_id": (),
    "mm_processor_kwargs": ({},),
    # use_activation's older name, which vLLM has given up.
    "normalize": (),
}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings, checked but for what only the model knows. ``input``: a prompt or a list of them,
    as ``LLM.embed`` takes it. ``priority`` and ``cache_salt`` are as they came: ``LLM.embed`` checks them."""

    model: str | None
    input: str | list[Any]
    params: PoolingParams
    tokenize: TokenizeParams
    encoding_format: str
    priority: int = 0
    cache_salt: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)


def parse_embeddings(body: bytes) -> EmbeddingRequest:
    """Parse and check a request body. Raises ``InvalidRequestError`` naming the parameter."""
    try:
        return _parse(object_of(body))
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply to be looked at") from None


def _parse(fields: dict[str, Any]) -> EmbeddingRequest:
    refuse_others(fields, _HONOURED, _NEUTRAL)
    add_special_tokens = fields.get("add_special_tokens") is None or boolean(
        fields, "add_special_tokens"
    )
    return EmbeddingRequest(
        model=model(fields),
        input=_input(fields),
        params=PoolingParams(
            dimensions=fields.get("dimensions"), use_activation=fields.get("use_activation")
        ),
        tokenize=TokenizeParams(
            truncate_prompt_tokens=fields.get("truncate_prompt_tokens"),
            truncation_side=fields.get("truncation_side"),
            add_special_tokens=add_special_tokens,
            parameter="input",
        ),
        encoding_format=_encoding_format(fields),
        priority=0 if fields.get("priority") is None else fields["priority"],
        cache_salt=fields.get("cache_salt"),
        timeouts=timeouts(fields),
    )


def _input(fields: Mapping[str, Any]) -> str | list[Any]:
    allowed = "a string, a list of token ids, or a list of such strings or lists"
    if "input" not in fields:
        raise InvalidRequestError(f"input is missing; allowed: {allowed}", parameter="input")
    value = fields["input"]
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("input", value, allowed)
    if _is_id(value[0]):
        return value
    if len(value) > _INPUTS_MAX:
        raise InvalidRequestError(
            f"input has {len(value)} inputs; allowed: at most {_INPUTS_MAX}", parameter="input"
        )
    for place, one in enumerate(value):
        # Of a list of ids the first tells it from a list of messages; the model's vocabulary tells the others.
        if not isinstance(one, str) and not (isinstance(one, list) and one and _is_id(one[0])):
            raise refusal(f"input[{place}]", one, "a string, or a list of token ids")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int


def _encoding_format(fields: Mapping[str, Any]) -> str:
    value = fields.get("encoding_format")
    if value is not None and value not in _FORMATS:
        raise refusal("encoding_format", value, f"{', '.join(_FORMATS)} or null")
    return value or "float"


def embedding_json(index: int, output: PoolingRequestOutput, encoding_format: str) -> msgspec.Raw:
    """One vector, as OpenAI has it: a list of numbers, or base64 of float32."""
    data: Any = output.outputs.data
    if encoding_format == "base64":
        data = base64.b64encode(_little_endian(data)).decode("ascii")
    return msgspec.Raw(
        msgspec.json.encode({"object": "embedding", "index": index, "embedding": data})
    )


def _little_endian(data: Sequence[float]) -> bytes:
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def embeddings_json(vectors: Sequence[msgspec.Raw], *, model: str, num_tokens: int) -> bytes:
    """The whole answer. ``num_tokens``: of all prompts."""
    return msgspec.json.encode(
        {
            "object": "list",
            "data": vectors,
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )
