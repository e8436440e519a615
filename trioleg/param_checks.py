"""Checks of single values: each returns what is kept of one, or refuses it in the house's words.

Rules of this file: pure; imports only ``errors``. ``name`` is the parameter, ``allowed`` what it may be; a
bool is no number anywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import InvalidRequestError

__all__ = [
    "check_int",
    "check_number",
    "check_token_ids",
    "logit_bias_of",
    "member_of",
    "refusal",
    "strings_of",
    "token_ids_of",
]

_Member = TypeVar("_Member", bound=enum.Enum)

# Integers travel as MessagePack's 64 bits; what an engine takes is smaller (it counts in int32).
_INT_MAX = 2**31 - 1

# The largest vocabularies that are in use have as many tokens (Gemma's); nothing longer can mean anything,
# and every element of a list is looked at between the tokens of other requests.
_TOKEN_IDS_MAX = 2**18


def refusal(name: str, value: Any, allowed: str) -> InvalidRequestError:
    """The error to raise; a long value is cut."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)


def check_number(name: str, value: Any, allowed: str, low: float, high: float) -> None:
    """Raises ``InvalidRequestError`` unless ``value`` is a number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(name, value, allowed)
    # Also false for NaN; and an int that no float can hold is compared all the same.
    if not low <= value <= high:
        raise refusal(name, value, allowed)


def check_int(name: str, value: Any, allowed: str, low: int, high: int = _INT_MAX) -> None:
    """Raises ``InvalidRequestError`` unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refusal(name, value, allowed)


def strings_of(name: str, value: Any, *, count: int, characters: int) -> tuple[str, ...]:
    """At most ``count`` non-empty strings of ``characters`` in all; one may stand without a list."""
    allowed = "a non-empty string or a list of them"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise refusal(name, value, allowed)
    if not all(isinstance(one, str) and one for one in strings):
        raise refusal(name, value, allowed)
    total = sum(map(len, strings))
    if len(strings) > count or total > characters:
        raise InvalidRequestError(
            f"{name} has {len(strings)} strings of {total} characters in all; allowed: at most "
            f"{count} strings and {characters} characters",
            parameter=name,
        )
    return tuple(strings)


def token_ids_of(name: str, value: Any, *, count: int = _TOKEN_IDS_MAX) -> tuple[int, ...]:
    """A list of at most ``count`` token ids."""
    if not isinstance(value, list | tuple):
        raise refusal(name, value, "a list of token ids of at least 0")
    if len(value) > count:
        raise _too_long(name, value, count)
    for token_id in value:
        check_int(name, token_id, "a list of token ids of at least 0", 0)
    return tuple(value)


def _too_long(name: str, value: Any, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is {len(value)} ids long; allowed: at most {count}", parameter=name
    )


def logit_bias_of(name: str, value: Any) -> dict[int, float]:
    """A bias from -100 to 100 for each token id; ids may be spelled as strings, as JSON's keys are."""
    allowed = "an object of token ids, each with a number from -100 to 100"
    if not isinstance(value, Mapping):
        raise refusal(name, value, allowed)
    if len(value) > _TOKEN_IDS_MAX:
        raise _too_long(name, value, _TOKEN_IDS_MAX)
    biases = {}
    for key, bias in value.items():
        token_id = _spelled(key)
        check_int(name, token_id, allowed, 0)
        if token_id in biases:
            raise refusal(name, f"{token_id} twice", allowed)
        check_number(name, bias, allowed, -100.0, 100.0)
        biases[token_id] = float(bias)
    return biases


def _spelled(key: Any) -> Any:
    # No longer than an id can be, since Python refuses to read numbers of thousands of digits.
    is_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if is_id else key


def check_token_ids(name: str, token_ids: Any, vocab_size: int) -> None:
    """Raises ``InvalidRequestError`` unless all ids, which are integers, are the vocabulary's."""
    if token_ids:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise InvalidRequestError(
                f"{name} holds {low if low < 0 else high}; allowed: 0 to {vocab_size - 1}",
                parameter=name,
            )


def member_of(name: str, value: Any, kind: type[_Member]) -> _Member:
    """The member of an enumeration that ``value`` is or names."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(one.value) for one in kind)
        raise refusal(name, value, allowed) from None
