"""What a request body says about the form of its answer: ``response_format`` and ``structured_outputs``.

Pure. OpenAI's parameter and vLLM's become one ``StructuredOutputsParams``, which remembers which of them it
was. Unknown keys are refused by name, here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..structured_outputs import StructuredOutputsParams

__all__ = ["STRUCTURED_OUTPUTS", "read_structured_outputs"]

# The parameters that are read here.
STRUCTURED_OUTPUTS = ("response_format", "structured_outputs")

_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def read_structured_outputs(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The constraint that a body asks for, if any. Raises ``InvalidRequestError``."""
    constraint = _response_format(fields.get("response_format"))
    structured = fields.get("structured_outputs")
    if structured is None:
        return constraint
    if constraint is not None:
        allowed = "null, since response_format asks for a form already"
        raise _refusal("structured_outputs", structured, allowed)
    return StructuredOutputsParams.from_mapping(structured)


def _response_format(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    allowed = f"an object whose type is one of {', '.join(_TYPES)}"
    if not isinstance(value, dict) or value.get("type") not in _TYPES:
        raise _refusal("response_format", value, allowed)
    kind = value["type"]
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _refuse_others("response_format", value, known)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, where="response_format")
    return _json_schema(value.get("json_schema"))


def _json_schema(value: Any) -> StructuredOutputsParams:
    """``name`` and ``description`` are labels. ``strict`` false is honoured as true is: what keeps to a
    schema strictly also does so at will."""
    where = "response_format.json_schema"
    if not isinstance(value, dict):
        raise _refusal(where, value, "an object with name and schema")
    _refuse_others(where, value, _SCHEMA_KEYS)
    if not isinstance(value.get("name"), str):
        raise _refusal(f"{where}.name", value.get("name"), "a string")
    for name, kind in (("description", str), ("strict", bool)):
        if not isinstance(value.get(name), kind | None):
            allowed = f"{'a string' if kind is str else 'true, false'} or null"
            raise _refusal(f"{where}.{name}", value[name], allowed)
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise _refusal(f"{where}.schema", schema, "a JSON Schema: an object")
    return StructuredOutputsParams(json=schema, where=f"{where}.schema")


def _refuse_others(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, one in value.items():
        if name not in known and one is not None:
            raise _refusal(f"{where}.{name}", one, f"only {', '.join(known)}")


def _refusal(name: str, value: Any, allowed: str) -> InvalidRequestError:
    text = msgspec.json.encode(value).decode()
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)
