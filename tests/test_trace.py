"""``trioleg trace``: every token once, in its frame, with times that go forward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAFE = Path(__file__).parents[1] / "docs" / "examples" / "cafe"
IDS = "260,198,172"


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trioleg", "trace", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=check)


def trace(*arguments: str, returncode: int = 0) -> dict[str, Any]:
    done = run(*arguments, "--json", check=False)
    assert done.returncode == returncode, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def times(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("engine", "read", "processed", "framed", "written")]


def test_cafe_is_three_frames_and_the_middle_one_is_empty() -> None:
    made = trace("--model", str(CAFE), "--ids", IDS)
    rows = made["tokens"]
    assert [(row["token_id"], row["piece"], row["step"]) for row in rows] == [
        (260, "caf", 1),
        (198, r"\xc3", 2),
        (172, r"\xa9", 3),
    ]
    assert [(row["frame"], row["content"]) for row in rows] == [(1, "caf"), (2, ""), (3, "é")]
    assert [row["held_back"] for row in rows] == ["", "bytes c3: no character yet", ""]
    for row in rows:
        assert times(row) == sorted(times(row))
    kinds = [(frame["kind"], frame["content"]) for frame in made["frames"][:-2]]
    assert kinds == [("role", ""), ("tokens", "caf"), ("tokens", ""), ("tokens", "é")]
    assert [frame["kind"] for frame in made["frames"][-2:]] == ["usage", "done"]
    assert made["prompt_token_ids"] == [2]


def test_the_table_is_for_people() -> None:
    lines = run("--model", str(CAFE), "--ids", IDS).stdout.splitlines()
    assert lines[0].endswith("cafe · scripted engine · 3 tokens · 6 frames")
    held_back = next(line for line in lines if line.startswith("1  198"))
    assert r'"\xc3"' in held_back
    assert held_back.rstrip().endswith("bytes c3: no character yet")
    assert "frame   3  tokens  1 token   \"é\"  finish_reason 'length'" in lines
    assert lines[-1].startswith("median of each frame's last token: to the socket's reader ")


@pytest.mark.parametrize("detokenizer", ["fast", "readable"])
def test_the_interval_and_a_stop_string_say_that_they_hold_back(detokenizer: str) -> None:
    """The stop string completes in the last but one token; what is behind it is in no frame."""
    a, b, c = 263, 264, 265
    ids = ",".join(map(str, (a, a, b, c, a)))
    arguments = ("--model", str(CAFE), "--ids", ids, "--detokenizer", detokenizer)
    rows = trace(*arguments, "--stop", "bc", "--stream-interval", "2")["tokens"]
    assert [row["held_back"] for row in rows] == [
        "",
        "interval: 1 of 2",
        "'b' may begin a stop string",
        "completes the stop string 'bc'",
    ]
    assert [row["content"] for row in rows] == ["a", None, "a", ""]


def test_a_bad_id_ends_in_the_frame_that_says_so() -> None:
    made = trace("--model", str(CAFE), "--ids", "260,9999", returncode=1)
    assert [row["token_id"] for row in made["tokens"]] == [260]
    (error,) = [frame for frame in made["frames"] if frame["kind"] == "error"]
    assert error["content"] == "the engine sent token id 9999; this model's ids are 0 to 268"


def test_a_real_prompt(smollm2: Path) -> None:
    made = trace("What is the capital of France?", "--max-tokens", "8")
    assert "".join(row["piece"] for row in made["tokens"]).startswith("The capital of France")
    assert len(made["prompt_token_ids"]) == 37
    assert made["tokens"][-1]["held_back"] == "stop token: not part of the text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either PROMPT or --ids"),
        (("hi", "--ids", "1"), "give either PROMPT or --ids"),
        (("--ids", "1;2"), "--ids is '1;2'; allowed: token ids with commas"),
        (("--ids", "9" * 20), "allowed: token ids with commas"),
        (("--model", str(CAFE), "hi"), "has no weights"),
        (("--ids", "1", "--stop", ""), "stop is ('',); allowed: a non-empty string"),
        (("--ids", "1", "--stream-interval", "0"), "stream_interval is 0; allowed"),
    ],
)
def test_what_cannot_be_traced_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
