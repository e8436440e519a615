"""Keep-alive comments (B22): after each silence, never beside a client's events, and off by default."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from scripted_app import Answer, DirectWay, open_app
from sse_grammar import read_stream
from test_streaming_protocol import play
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import ServerConfig
from trioleg.errors import InvalidRequestError
from trioleg.output.submission import make_pooling_submission
from trioleg.outputs import CompletionOutput, Ending, EndingKind, RequestOutput
from trioleg.runtime.burst import Burst
from trioleg.runtime.mailbox import Mailbox
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import PoolingParams, SamplingParams
from trioleg.server.protocol import parse_chat_completion
from trioleg.server.sse import KEEP_ALIVE
from trioleg.server.stream import serve_stream


def comments(answer: Answer, since: float) -> list[float]:
    return [round(at - since, 3) for at, part in answer.parts if part == KEEP_ALIVE]


async def test_one_after_each_silence(autojump_clock: MockClock) -> None:
    """Interval 1 s, engine silent for 3.5 s before its first token: three comments."""
    config = ServerConfig(sse_keep_alive_interval=1)
    async with open_app(play("a", "b", first_token_delay_s=3.5), config) as app:
        start = trio.current_time()
        answer = await app.ask(stream=True)
    assert comments(answer, start) == [1, 2, 3]
    stream = read_stream(answer.body)
    assert (stream.num_comments, stream.choices[0].content) == (3, "ab")


async def test_silence_is_counted_from_the_last_frame(autojump_clock: MockClock) -> None:
    """A token every 2.5 s: two comments between any two."""
    config = ServerConfig(sse_keep_alive_interval=1)
    async with open_app(play(*"abc", step_interval_s=2.5), config) as app:
        start = trio.current_time()
        answer = await app.ask(stream=True)
    assert comments(answer, start) == [1, 2, 3.5, 4.5]
    assert read_stream(answer.body).choices[0].deltas == ["a", "b", "c"]


@pytest.mark.parametrize("interval", [None, 1.0])
async def test_none_while_tokens_come(autojump_clock: MockClock, interval: float | None) -> None:
    config = ServerConfig(sse_keep_alive_interval=interval)
    async with open_app(play(*"abc" * 20, step_interval_s=0.9), config) as app:
        answer = await app.ask(stream=True)
    assert read_stream(answer.body).num_comments == 0


def direct_answer() -> tuple[Answer, DirectWay]:
    answer = Answer()
    answer.direct = way = DirectWay(answer)
    return answer, way


async def test_none_while_tokens_go_past_the_loop(autojump_clock: MockClock) -> None:
    config = ServerConfig(sse_keep_alive_interval=1)
    answer, way = direct_answer()
    async with open_app(play(*"abc" * 20, step_interval_s=0.3), config) as app:
        await app.ask(answer, stream=True)
    stream = read_stream(answer.body)
    assert (stream.num_comments, stream.choices[0].content) == (0, "abc" * 20)
    assert way.num_parts > 50


async def test_silence_is_counted_from_what_went_past_the_loop(autojump_clock: MockClock) -> None:
    """However the tokens lie to the loop's own timer: a proxy that closes after 1 s does not know of it."""
    config = ServerConfig(sse_keep_alive_interval=1)
    answer, way = direct_answer()
    script = play(*"abca", step_interval_s=0.3, faults=[{"after_steps": 3, "how": "hang"}])
    async with open_app(script, config) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, answer, stream=True))
            await trio.sleep(3)
            app.llm.shut_down("enough")
    assert way.num_parts == 2
    last_token = max(at for at, part in answer.parts if b'"content":"c"' in part)
    assert comments(answer, last_token) == [1, 2]


async def test_outputs_past_the_loop_without_a_frame_are_silence(autojump_clock: MockClock) -> None:
    config = ServerConfig(sse_keep_alive_interval=1)
    answer, _ = direct_answer()
    async with open_app(play(*"abcabcabc", step_interval_s=0.4), config) as app:
        await app.ask(answer, stream=True, stream_interval=8)
    stream = read_stream(answer.body)
    assert (stream.num_comments, stream.choices[0].content) == (3, "abcabcabc")


async def test_outputs_without_a_frame_are_silence(autojump_clock: MockClock) -> None:
    """What waits for the stream interval makes no frame, so a proxy sees nothing of it."""
    config = ServerConfig(sse_keep_alive_interval=1)
    script = play(*"abcabcabc", step_interval_s=0.4)
    async with open_app(script, config) as app:
        answer = await app.ask(stream=True, stream_interval=8)
    stream = read_stream(answer.body)
    assert stream.choices[0].deltas == ["a", "bcabcabc"]
    assert stream.num_comments == 3


class OneStream:
    """As much of an ``LLM`` as ``serve_stream`` needs."""

    tracer, burst = None, Burst()

    def __init__(self) -> None:
        submission = make_pooling_submission("r", [1], PoolingParams())
        mailbox = Mailbox(aggregate=True, max_bytes=10_000)
        self.stream = RequestStream(submission, mailbox, on_end=lambda *_: None)

    @asynccontextmanager
    async def open_stream(self, *_: object, **__: object) -> AsyncIterator[RequestStream]:
        yield self.stream


async def test_an_output_in_the_very_moment_is_not_cut(mock_clock: MockClock) -> None:
    """The reader is woken by an output, and before it runs its time is over. The output's write must
    not be under the scope that this has cancelled: half a chunk ends a connection."""
    llm, parts = OneStream(), []

    async def start() -> None:
        await trio.lowlevel.checkpoint()

    async def send(message: dict[str, Any]) -> None:
        parts.append(message["body"])
        await trio.lowlevel.checkpoint()

    def put(text: str, finish: str | None = None) -> None:
        output = CompletionOutput(0, text, [5], finish)
        llm.stream.mailbox.put(RequestOutput("r", [1], [output], finish is not None))

    request = parse_chat_completion(b'{"messages":[{"role":"user","content":"x"}]}', SamplingParams)
    serving = partial(serve_stream, llm, request, "m", start, send, keep_alive_interval=1)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving)
            for text in "abc":
                await wait_all_tasks_blocked()
                put(text)
                mock_clock.jump(2)
            await wait_all_tasks_blocked()
            put("d", "stop")
            llm.stream.end(Ending(EndingKind.STOP))
    assert read_stream(b"".join(parts)).choices[0].deltas == ["a", "b", "c", "d"]


async def test_off_unless_asked_for(autojump_clock: MockClock) -> None:
    async with open_app(play("a", first_token_delay_s=1000)) as app:
        answer = await app.ask(stream=True)
    assert read_stream(answer.body).num_comments == 0


async def test_a_plain_answer_has_none(autojump_clock: MockClock) -> None:
    config = ServerConfig(sse_keep_alive_interval=1)
    async with open_app(play("a", first_token_delay_s=10), config) as app:
        answer = await app.ask()
    assert answer.headers[b"content-type"] == b"application/json"
    assert KEEP_ALIVE not in answer.body


async def test_a_bad_request_is_a_400_all_the_same(autojump_clock: MockClock) -> None:
    config = ServerConfig(sse_keep_alive_interval=1)
    async with open_app(play("a", first_token_delay_s=10), config) as app:
        answer = await app.ask(stream=True, max_tokens=5000)
    assert answer.status == 400


@pytest.mark.parametrize("interval", [0, -1, math.inf, math.nan])
def test_intervals_that_are_none(interval: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"sse_keep_alive_interval is .*; allowed:"):
        ServerConfig(sse_keep_alive_interval=interval)
