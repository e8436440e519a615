"""A request body's fields: read one by one, and refused by name.

Pure. What is said here is the same for every path: what counts as asking for nothing, and how a refusal is worded.
Everything raises ``InvalidRequestError``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..timeouts import Timeouts

__all__ = ["boolean", "json_of", "model", "object_of", "refusal", "refuse_others", "timeouts"]


def object_of(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return fields


def refuse_others(
    fields: Mapping[str, Any], honoured: Container[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises unless every field is ``honoured``, or ``neutral`` at a value that asks for nothing, as null does."""
    for name, value in fields.items():
        if name in honoured:
            continue
        if name not in neutral:
            raise InvalidRequestError(f"unknown parameter: {name!r}", parameter=name)
        if value is not None and not any(_same(value, one) for one in neutral[name]):
            allowed = " or ".join(["null", *(json_of(one) for one in neutral[name])])
            raise InvalidRequestError(
                f"{name} is {json_of(value)}, which is not supported; allowed: {allowed}",
                parameter=name,
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equal, but true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def json_of(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def refusal(name: str, value: Any, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {json_of(value)}; allowed: {allowed}", parameter=name)


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise refusal(name, value, "true, false or null")
    return bool(value)


def model(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("model")
    if name is not None and not isinstance(name, str):
        raise refusal("model", name, "a model's name (GET /v1/models lists them) or null")
    return name


_TIMEOUTS = ("first_token", "total")


def timeouts(fields: Mapping[str, Any]) -> Timeouts:
    asked = fields.get("timeouts")
    if asked is None:
        return Timeouts()
    if not isinstance(asked, dict):
        raise refusal("timeouts", asked, f"an object with {' and '.join(_TIMEOUTS)}, or null")
    for name, value in asked.items():
        if name not in _TIMEOUTS:
            raise refusal(f"timeouts.{name}", value, f"only {' and '.join(_TIMEOUTS)}")
    return Timeouts(**asked)
