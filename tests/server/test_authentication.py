"""Keys as they come in a header: bytes, each of which is a character there."""

from __future__ import annotations

import pytest

from trioleg.server.authentication import is_authorized

KEYS = ("plain", "clé 鍵")


def header(key: str) -> str:
    return f"Bearer {key.encode().decode('latin-1')}"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key: str) -> None:
    assert is_authorized(header(key), KEYS)
    assert is_authorized(header(key).replace("Bearer", "bEARER"), KEYS)


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "plain", "Basic plain", "Bearer plai", "Bearer clé 鍵"]
)
def test_nothing_else_does(value: str | None) -> None:
    assert not is_authorized(value, KEYS)
    assert not is_authorized(header("plain"), ())
