"""``RequestStream`` and ``Mailbox`` of today's asyncio: ends, cancels, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.compare.taskgroup_twin.mailbox import Mailbox
from trioleg.compare.taskgroup_twin.request_stream import RequestStream
from trioleg.compare.taskgroup_twin.unwrap import reraise
from trioleg.errors import DeadlineExceeded, EngineDeadError
from trioleg.output.submission import make_submission
from trioleg.outputs import CompletionOutput, Ending, EndingKind, RequestOutput
from trioleg.sampling_params import RequestOutputKind, SamplingParams
from trioleg.timeouts import Timeouts

_BOUND_S = 30.0
_DEAD = Ending(EndingKind.ENGINE_DEAD, "it is gone")


class _Made:
    def __init__(self) -> None:
        self.mailbox = Mailbox(aggregate=True, max_bytes=2**20)
        self.ended: list[RequestStream] = []
        submission = make_submission(
            "one",
            ids("caf"),
            SamplingParams(max_tokens=10, output_kind=RequestOutputKind.DELTA),
            byte_fallback_tokenizer(),
            max_model_len=100,
            max_logprobs=0,
            sink=self.mailbox,
        )
        self.stream = RequestStream(submission, self.mailbox, self.ended.append)

    def put(self, text: str) -> None:
        self.mailbox.put(RequestOutput("one", [1], [CompletionOutput(0, text, [5])], False))


def _play(body: Callable[[_Made], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(_BOUND_S):
            await body(_Made())

    asyncio.run(bounded())


async def _parked(stream: RequestStream) -> asyncio.Task[RequestOutput | None]:
    task = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    return task


def test_a_cancelled_reader_loses_nothing_even_if_an_output_comes_first() -> None:
    async def body(made: _Made) -> None:
        reader = await _parked(made.stream)
        made.put("a")
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        output = await made.stream.receive()
        assert output is not None
        assert output.outputs[0].text == "a"

    _play(body)


def test_a_second_reader_is_refused() -> None:
    async def body(made: _Made) -> None:
        reader = await _parked(made.stream)
        with pytest.raises(RuntimeError, match="another task"):
            await made.stream.receive()
        made.stream.close()
        with pytest.raises(RuntimeError, match="has been left"):
            await reader

    _play(body)


def test_the_first_cause_wins_and_what_is_unread_comes_before_it() -> None:
    async def body(made: _Made) -> None:
        made.put("a")
        made.stream.end(_DEAD)
        made.stream.end(Ending(EndingKind.SHUTDOWN))
        assert made.ended == [made.stream]
        assert await made.stream.receive() is not None
        errors = []
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="it is gone") as caught:
                await made.stream.receive()
            errors.append(caught.value)
        assert errors[0] is not errors[1]

    _play(body)


def test_a_good_end_is_none() -> None:
    async def body(made: _Made) -> None:
        reader = await _parked(made.stream)
        made.stream.end(Ending(EndingKind.LENGTH))
        assert await reader is None
        assert [one async for one in made.stream] == []

    _play(body)


@pytest.mark.parametrize("timeouts", [Timeouts(first_token=0.01), Timeouts(total=0.01)])
def test_a_deadline_ends_it_wherever_its_reader_is(timeouts: Timeouts) -> None:
    async def body(made: _Made) -> None:
        made.stream.set_deadlines(timeouts, asyncio.get_running_loop().time())
        never = asyncio.Event()
        async with made.stream.serving():
            await never.wait()
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s, its deadline"):
            await made.stream.receive()

    _play(body)


def test_serving_stops_for_a_bad_end_alone_and_lets_other_timeouts_pass() -> None:
    async def body(made: _Made) -> None:
        with pytest.raises(TimeoutError):
            async with made.stream.serving():
                raise TimeoutError
        async with made.stream.serving():
            made.stream.end(Ending(EndingKind.STOP))
            await asyncio.sleep(0)
            made.put("a")
        assert await made.stream.receive() is not None

    _play(body)


def test_an_end_that_cannot_be_told_is_an_end(caplog) -> None:
    def fail(_stream: RequestStream) -> None:
        raise RuntimeError("no way out")

    async def body(made: _Made) -> None:
        stream = RequestStream(made.stream.submission, made.mailbox, fail)
        reader = await _parked(stream)
        stream.end(_DEAD)
        with pytest.raises(EngineDeadError):
            await reader
        assert "no way out" in caplog.text

    _play(body)


def test_an_error_keeps_its_own_context() -> None:
    own = ValueError("its own")
    error = KeyError("one")
    error.__context__ = own
    with pytest.raises(KeyError) as caught:
        try:
            raise ExceptionGroup("a group", [error])
        except ExceptionGroup as group:
            reraise(group.exceptions[0])
    assert caught.value.__context__ is own
