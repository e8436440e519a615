"""What a client saw, as a phrase; and what counts as a leak."""

from __future__ import annotations

import pytest

from trioleg.compare.observing import Holding, extra
from trioleg.compare.seen import phrase, phrases, read_answer

_CHUNK = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null,"token_ids":[7]}]}\n\n'
_ERROR = b'data: {"error":{"code":"engine_dead","type":"x"}}\n\n'
_DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "body", "end", "expected"),
    [
        (200, _CHUNK * 3, "cut", "200, 3 chunks, then cut"),
        (200, _CHUNK + b'data: {"cho', "reset", "200, 1 chunk, then reset"),
        (
            200,
            _CHUNK * 2 + _ERROR + _DONE,
            "whole",
            "200, 2 chunks, error event (engine_dead), [DONE]",
        ),
        (200, _CHUNK, "whole", "200, 1 chunk, no [DONE]"),
        (503, b'{"error":{"code":503}}', "whole", "503"),
        (None, b"", "nothing", "nothing within 10 s"),
        (200, _CHUNK, "nothing", "200, 1 chunk, nothing more within 10 s"),
        (None, b"", "cut", "cut"),
    ],
)
def test_phrases(status, body: bytes, end, expected: str) -> None:
    assert phrase(read_answer(status, body, end, within_s=10)) == expected


def test_clients_that_saw_the_same_are_one_phrase() -> None:
    one, other = read_answer(503, b"", "whole"), read_answer(200, _CHUNK, "cut")
    assert phrases([one, one]) == "503"
    assert phrases([one, other, one]) == "2 × 503; 1 × 200, 1 chunk, then cut"


def test_a_leak_is_what_is_more_than_before() -> None:
    before, after = Holding(5, 0, 20, 0, 0, {}), Holding(6, 0, 19, 2, 1, {})
    assert extra(before, after) == {"tasks": 1, "blocks": 2}
    assert extra(after, after) == {}
