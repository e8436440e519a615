"""Phrases: what differs from run to run is not in them, and what was said is."""

from __future__ import annotations

import json

import pytest

from trioleg.compare.phrases import error_phrase, exception_lines, exit_phrase, plain


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("engine 0 is dead: it exited with status 3", "engine 0 is dead: it exited with status 3"),
        ("\n  the first line\nthe second", "the first line"),
        ("request chatcmpl-9f7db7945fec-0 failed", "request ID failed"),
        ("no answer within 12.5 s from ipc:///tmp/a/in", "no answer within N s from ADDRESS"),
        ("<Task pending at 0x7f00aa>", "<Task pending at ADDRESS>"),
        ("(APIServer pid=71) it ended", "(APIServer pid N) it ended"),
        ("", ""),
    ],
)
def test_plain(text: str, phrase: str) -> None:
    assert plain(text) == phrase


def test_plain_is_not_long() -> None:
    assert len(plain("long " * 100)) == 160


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        ({"error": {"code": "engine_dead", "type": "t", "message": "gone"}}, "engine_dead: gone"),
        ({"error": {"code": 500, "type": "Internal", "message": "gone"}}, "Internal: gone"),
        ({"error": {"message": "gone"}}, "gone"),
        ({"choices": []}, ""),
    ],
)
def test_error_phrase(body: dict[str, object], phrase: str) -> None:
    assert error_phrase(body) == error_phrase(json.dumps(body)) == phrase


def test_error_phrase_of_what_is_no_json() -> None:
    assert error_phrase(b"Internal Server Error") == "Internal Server Error"
    assert error_phrase(b"") == ""


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("it was killed by SIGKILL", "killed by SIGKILL"),
        ("Engine core proc EngineCore died unexpectedly (exitcode: -9)", "killed by SIGKILL"),
        ("it exited with status 3", "status 3"),
        ("exit code 3", "status 3"),
        ("the engine did not become ready: it ended with 3", "status 3"),
        ("it ended with -9", "killed by SIGKILL"),
        ("Failed core proc(s): {'EngineCore': 3}", "status 3"),
        ("returncode=-9", "killed by SIGKILL"),
        ("HTTP status 503 was sent", ""),
        ("nothing of the kind", ""),
    ],
)
def test_exit_phrase(text: str, phrase: str) -> None:
    assert exit_phrase(["before", text]) == phrase


def test_exception_lines() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    raise ValueError('the body')",
        "ValueError: the body",
        "(APIServer pid=7) ERROR 12-01 00:00:00 [a.py:1] KeyError: 'the clean-up'",
        "  | RuntimeError: the scenario's fault: reader",
        "trioleg.errors.EngineDeadError",
        "ValueError: the body",
        "an Error in the text",
    ]
    assert exception_lines(lines) == [
        "ValueError: the body",
        "KeyError: 'the clean-up'",
        "RuntimeError: the scenario's fault: reader",
        "trioleg.errors.EngineDeadError",
    ]
