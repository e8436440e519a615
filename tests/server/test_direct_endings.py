"""Streams whose outputs go past the server's loop: whole and in order by the strict parser, however they end, and
whenever the short way is free."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import trio
from scripted_app import Answer, DirectWay, open_app
from sse_grammar import Stream, read_stream
from test_failures import break_frames, errors, raised
from test_stream_endings import (
    ASKED,
    BAD_ENDINGS,
    ENDLESS,
    End,
    abort,
    be_cut_off,
    die,
    report_an_error,
    send_a_bad_id,
    shut_down,
)
from trio.testing import MockClock

from trioleg.config import LLMConfig
from trioleg.messages import EngineCoreOutputs
from trioleg.outputs import RequestOutput
from trioleg.runtime.tracer import FindChoice

OFTEN = [1.0, 0.5, 0.0]


def answer_by(often: float, seed: int = 1) -> tuple[Answer, DirectWay]:
    """``often``: the share of outputs at which the short way is free."""
    answer, chance = Answer(), random.Random(seed)
    answer.direct = way = DirectWay(answer, lambda: chance.random() < often)
    return answer, way


def is_prefix(content: str, *, of: str = "abc") -> bool:
    return (of * 100).startswith(content)


# ---------------------------------------------------------------------------- endings


@ASKED
@BAD_ENDINGS
@pytest.mark.parametrize("often", OFTEN[:2])
async def test_a_bad_ending_finds_all_that_was_generated(
    autojump_clock: MockClock,
    end: End,
    status: int,
    code: str | None,
    asked: dict[str, Any],
    often: float,
) -> None:
    asked = {**asked, "return_token_ids": True, "stop": "cabX"}
    answer, way = answer_by(often)
    async with open_app(ENDLESS) as app:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(app.ask, answer, stream=True, **asked))
                await trio.sleep(0.75)
                end(app)
    stream = read_stream(answer.body, asked)
    assert stream.error is not None
    assert stream.error["code"] == code
    assert way.num_parts > 0
    for one in stream.choices.values():
        assert one.content.startswith("abcabca")
        assert is_prefix(one.content)
        assert len(one.content) == len(one.token_ids or [])


@pytest.mark.parametrize("end", [abort, die, be_cut_off, shut_down, send_a_bad_id, report_an_error])
async def test_what_was_held_back_comes_once_and_before_the_ending(
    autojump_clock: MockClock, end: End
) -> None:
    answer, way = answer_by(1.0)
    asked = {"stop": "bcaX", "n": 2}
    async with open_app(ENDLESS) as app:
        app.vary_choices()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, answer, stream=True, **asked))
            await trio.sleep(0.65)
            end(app)
    stream = read_stream(answer.body, asked)
    assert way.num_parts > 0
    for index, choice in stream.choices.items():
        assert is_prefix(choice.content, of=("abc", "bca")[index])
        assert len(choice.content) >= 6


@pytest.mark.parametrize("often", OFTEN)
@pytest.mark.parametrize(
    ("more", "finish", "content"),
    [
        ({"max_tokens": 20}, "length", ("abc" * 7)[:20]),
        ({"stop": "cabc", "min_tokens": 5}, "stop", "abcab"),
        (
            {"stop": "bca", "include_stop_str_in_output": True, "min_tokens": 8},
            "stop",
            "abcabcabca",
        ),
        ({"stop_token_ids": [265], "min_tokens": 6}, "stop", "abcabcab"),
    ],
)
async def test_good_endings(
    autojump_clock: MockClock, more: dict[str, Any], finish: str, content: str, often: float
) -> None:
    """The same stream, whichever way it went."""
    plain = Answer()
    answer, way = answer_by(often)
    asked = {**more, "n": 2, "stream_options": {"include_usage": True}, "return_token_ids": True}
    async with open_app(ENDLESS) as app:
        await app.ask(plain, stream=True, **asked)
        await app.ask(answer, stream=True, **asked)
    expected, stream = (read_stream(one.body, asked) for one in (plain, answer))
    assert (stream.choices, stream.usage) == (expected.choices, expected.usage)
    assert {one.finish_reason for one in stream.choices.values()} == {finish}
    assert (way.num_parts > 0) is (often > 0)


@pytest.mark.parametrize("often", OFTEN)
async def test_a_deadline(autojump_clock: MockClock, often: float) -> None:
    answer, _ = answer_by(often)
    async with open_app(ENDLESS) as app:
        await app.ask(answer, stream=True, timeouts={"total": 1.05}, stop="abX")
    stream = read_stream(answer.body)
    assert stream.error is not None
    assert stream.error["code"] == "deadline_exceeded"
    assert is_prefix(stream.choices[0].content)
    assert len(stream.choices[0].content) >= 10


async def test_a_client_that_reads_well_and_then_nothing_more(autojump_clock: MockClock) -> None:
    """Its first parts went the short way; then that is not free, and the loop's write hangs."""
    answer = Answer()
    answer.direct = DirectWay(answer, lambda: len(answer.parts) < 10)
    config = LLMConfig(mailbox_max_bytes=2000)
    async with open_app(ENDLESS, llm_config=config) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, answer, stream=True))
        await trio.sleep(0.85)
        answer.reads = trio.Event()
        await trio.sleep(5)
        assert app.llm.statistics().endings == {"reader_too_slow": 1}
        answer.reads.set()
    stream: Stream = read_stream(answer.body)
    assert stream.error is not None
    assert stream.error["code"] == "reader_too_slow"
    assert is_prefix(stream.choices[0].content)
    assert len(stream.choices[0].content) > 20


async def test_a_client_that_leaves_is_sent_nothing_more(autojump_clock: MockClock) -> None:
    answer, way = answer_by(1.0)
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, answer, stream=True, n=2))
        await trio.sleep(0.55)
        assert way.num_parts > 0
        num_parts = len(answer.parts)
        answer.leave.set()
        await trio.sleep(10)
        assert app.llm.statistics().endings == {"left": 1}
    assert (len(answer.parts), answer.is_whole) == (num_parts, False)


# ---------------------------------------------------------------------------- faults, and who looks on


async def test_a_bug_in_the_framing_is_told_alike_by_both_ways(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for often in (0.0, 1.0):
        caplog.clear()
        answer, way = answer_by(often)
        with monkeypatch.context() as patch:
            break_frames(patch, 4, RuntimeError("on purpose"))
            async with open_app(ENDLESS) as app:
                await app.ask(answer, stream=True)
                assert app.llm.statistics().endings == {"output_error": 1}
                assert not app.llm.live_requests()
        (entry,) = errors(caplog)
        told.append((answer.status, answer.is_whole, len(answer.parts), str(raised(entry))))
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (way.num_parts > 0) is (often > 0)
    assert told[0] == told[1]


class Onlooker:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.frames: list[bytes] = []
        self.num_written = 0

    def on_message(self, message: EngineCoreOutputs, received: float, find: FindChoice) -> None:
        self.tokens += [token for output in message.outputs for token in output.new_token_ids]

    def on_frames(self, output: RequestOutput | None, frames: bytes) -> None:
        self.frames.append(frames)

    def on_written(self) -> None:
        self.num_written += 1


async def test_a_tracer_sees_every_hop(autojump_clock: MockClock) -> None:
    answer, way = answer_by(1.0)
    onlooker = Onlooker()
    async with open_app(ENDLESS) as app:
        app.llm.tracer = onlooker
        await app.ask(answer, stream=True, max_tokens=20)
    assert way.num_parts == 0
    assert len(onlooker.tokens) == 20
    assert b"".join(onlooker.frames) == answer.body
    assert onlooker.num_written == len(onlooker.frames) == 21
