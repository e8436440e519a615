"""What has gone wrong in other servers' streams, each as a case: the parser of ``sse_grammar`` checks
every stream here against all of its rules, and a test adds what is its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from scripted_app import ScriptedApp, open_app
from sse_grammar import Stream, read_answer, read_stream
from tiny_tokenizers import ids
from trio.testing import MockClock

from trioleg.engine.scripted import Script
from trioleg.messages import EngineCoreRequestType

PEPPER = ("F0", "9F", "8C", "B6")


def play(*pieces: str, size: int = 1, **more: object) -> Script:
    """A script of pieces, ``size`` tokens a step, a tenth of a second apart."""
    tokens = ids(*pieces)
    steps = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    fields = {"steps": steps, "step_interval_s": 0.1, "finish": "length", **more}
    return msgspec.convert(fields, Script)


async def stream_of(app: ScriptedApp, **asked: Any) -> Stream:
    answer = await app.ask(stream=True, **asked)
    assert (answer.status, answer.is_whole) == (200, True)
    return read_stream(answer.body, asked)


def joined_bytes(entries: Sequence[dict[str, Any]] | None) -> bytes:
    assert entries is not None
    return b"".join(bytes(one["bytes"]) for one in entries)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_in_the_first_output_has_a_status(
    autojump_clock: MockClock, stream: bool
) -> None:
    """B2: nothing is out yet, so it is a 500 in JSON, streamed or not."""
    fault = {"after_steps": 0, "how": "bad_token_id", "token_id": -1}
    async with open_app(play("a", "b", faults=[fault])) as app:
        answer = await app.ask(stream=stream)
    assert answer.status == 500
    assert answer.headers[b"content-type"] == b"application/json"
    assert (answer.error["code"], answer.error["type"]) == ("output_error", "server_error")
    assert "token id -1" in answer.error["message"]


async def test_finish_reason_is_in_every_chunk(autojump_clock: MockClock) -> None:
    """B4: null until it is known, and then once."""
    async with open_app(play("a", "b", "c")) as app:
        answer = await app.ask(stream=True)
    chunks = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n")[:-2]]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None, None, None, "length"]
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)


async def test_usage_comes_in_one_last_chunk(autojump_clock: MockClock) -> None:
    """B6: that the others say null, and that its choices are empty, are rules of the parser."""
    asked = {"n": 2, "stream_options": {"include_usage": True}}
    async with open_app(play("a", "b", "c")) as app:
        stream = await stream_of(app, **asked)
    assert stream.usage is not None
    assert (stream.usage["prompt_tokens"], stream.usage["completion_tokens"]) == (4, 6)


async def test_logprobs_of_a_character_in_four_tokens(autojump_clock: MockClock) -> None:
    """B9: four tokens here, which are one character of text; each has its logprob, and its bytes."""
    async with open_app(play(*PEPPER, "a")) as app:
        (choice,) = (await stream_of(app, logprobs=True)).choices.values()
    assert choice.deltas == ["", "", "", "🌶", "a"]
    assert choice.logprobs is not None
    assert joined_bytes(choice.logprobs[:4]) == bytes.fromhex("f09f8cb6")
    assert [one["token"] for one in choice.logprobs] == ["\\xf0", "\\x9f", "\\x8c", "\\xb6", "a"]


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("hold_back", ["overlap", "fixed"])
async def test_logprobs_never_come_after_their_text(
    autojump_clock: MockClock, size: int, hold_back: str
) -> None:
    """Also where text was held back for a stop string that is completed in the end (B9)."""
    pieces = ("a", "b", *PEPPER, "c", "a", "b", "b", "c", "a")
    asked = {"logprobs": True, "stop": "bbc", "stop_hold_back": hold_back, "return_token_ids": True}
    async with open_app(play(*pieces, size=size)) as app:
        answer = await app.ask(stream=True, **asked)
    choice = read_stream(answer.body, asked).choices[0]
    assert (choice.content, choice.stop_reason) == ("ab🌶ca", "bbc")
    assert joined_bytes(choice.logprobs) == "ab🌶cabbc".encode()
    # At no point has more text come than the tokens so far spell.
    text, spelled = b"", b""
    for event in answer.body.split(b"\n\n")[1:-2]:
        one = json.loads(event[6:])["choices"][0]
        text += one["delta"]["content"].encode()
        spelled += joined_bytes((one["logprobs"] or {"content": []})["content"])
        assert spelled.startswith(text)


@pytest.mark.parametrize(
    ("spelling", "character"),
    [(("E2", "80", "A8"), "\u2028"), (("E2", "80", "A9"), "\u2029"), (("C2", "85"), "\u0085")],
)
async def test_line_ends_of_unicode_split_no_data_line(
    autojump_clock: MockClock, spelling: Sequence[str], character: str
) -> None:
    """B14: in the text, in tokens of logprobs, in a stop string; the parser compares the two ways to
    split."""
    asked = {"logprobs": True, "top_logprobs": 2, "stop": f"{character}c"}
    async with open_app(play("a", *spelling, "b", *spelling, "c", "a")) as app:
        (choice,) = (await stream_of(app, **asked)).choices.values()
    assert (choice.content, choice.stop_reason) == (f"a{character}b", f"{character}c")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("bad", "parameter"),
    [
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 2500}]}, "messages"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
async def test_a_bad_request_is_found_before_the_first_byte(
    autojump_clock: MockClock, stream: bool, bad: dict[str, Any], parameter: str
) -> None:
    """B21: 400 in JSON, although a stream was asked for, and the engine never hears of it."""
    async with open_app(play("a")) as app:
        answer = await app.ask(stream=stream, **bad)
        assert answer.status == 400
        assert answer.headers[b"content-type"] == b"application/json"
        assert answer.error["param"] == parameter
        assert EngineCoreRequestType.ADD not in [kind for kind, _ in app.transport.sent]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_interval_loses_nothing(autojump_clock: MockClock, n: int) -> None:
    """B23: 7 tokens by 5: the first at once, five more, and the tail with its finish."""
    asked = {"n": n, "stream_interval": 5, "logprobs": True, "return_token_ids": True}
    async with open_app(play(*"abcabca")) as app:
        answer = await app.ask(stream=True, **asked)
        plain = await app.ask(**asked)
    stream = read_stream(answer.body, asked)
    for choice in stream.choices.values():
        assert choice.deltas == ["a", "bcabc", "a"]
        assert joined_bytes(choice.logprobs) == b"abcabca"
    assert {i: one.logprobs for i, one in stream.choices.items()} == {
        i: one.logprobs for i, one in read_answer(plain.body, asked).choices.items()
    }
    sent_at = [at for at, part in answer.parts if b'"content":"a"' in part]
    assert sent_at[-1] - sent_at[0] == pytest.approx(0.6)


async def test_what_names_a_stream_does_not_change(autojump_clock: MockClock) -> None:
    """B25: the parser compares every chunk's id, created, model and object, and refuses a second role;
    two streams at once have two ids."""
    async with open_app(play(*"abc")) as app, trio.open_nursery() as nursery:
        bodies: list[bytes] = []

        async def one() -> None:
            answer = await app.ask(stream=True, n=2)
            read_stream(answer.body, {"n": 2})
            bodies.append(answer.body)

        nursery.start_soon(one)
        nursery.start_soon(one)
    ids_ = [{json.loads(e[6:])["id"] for e in body.split(b"\n\n")[:-2]} for body in bodies]
    assert [len(one) for one in ids_] == [1, 1]
    assert ids_[0] != ids_[1]


async def test_prompt_logprobs(autojump_clock: MockClock) -> None:
    """One entry a prompt token, the first without; by token id."""
    async with open_app(play("a")) as app:
        answer = await app.ask(prompt_logprobs=1)
    first, *others = json.loads(answer.body)["prompt_logprobs"]
    assert first is None
    assert len(others) == 3
    for entry in others:
        assert len(entry) in (1, 2)
        for one in entry.values():
            assert set(one) == {"logprob", "rank", "decoded_token"}
