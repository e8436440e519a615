"""Errors of our own: of what an ending does, of the way out of ``open_llm``, and of two tasks at once."""

from __future__ import annotations

import logging

import pytest
import trio
from scripted_llm import PROMPT, aborted, open_scripted, script
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import LLM
from trioleg.outputs import EndingKind
from trioleg.runtime.deadlines import Deadlines
from trioleg.runtime.engine_link import EngineLink
from trioleg.runtime.request_stream import RequestStream
from trioleg.runtime.supervisor import Supervisor
from trioleg.sampling_params import SamplingParams
from trioleg.testing import ScriptedTransport

CAFE = ("caf", "C3", "A9", "</s>")


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What each entry about an error says, the error itself included."""
    return [
        f"{record.getMessage()}: {record.exc_info[1]!r}"
        for record in caplog.records
        if record.exc_info and record.exc_info[1]
    ]


async def test_an_ending_that_fails_in_a_cancelled_reader(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """M12, below the server: one log entry with the cause, and the cancel goes its way."""
    stream_ended = EngineLink.stream_ended

    def fail_for_the_first(link: EngineLink, stream: RequestStream) -> None:
        if stream is streams[0]:
            raise KeyError("a bug of ours")
        stream_ended(link, stream)

    monkeypatch.setattr(EngineLink, "stream_ended", fail_for_the_first)
    streams: list[RequestStream] = []
    went_on = False
    async with (
        open_scripted(script(*CAFE, first_token_delay_s=1.0)) as (llm, transport),
        trio.open_nursery() as nursery,
    ):
        scope = trio.CancelScope()

        async def read() -> None:
            nonlocal went_on
            with scope:
                async with llm.open_stream(PROMPT, SamplingParams()) as stream:
                    streams.append(stream)
                    await stream.receive()
                went_on = True

        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        async with llm.open_stream(PROMPT, SamplingParams()) as other:
            scope.cancel("the client has left")
            await wait_all_tasks_blocked()
            assert scope.cancelled_caught
            assert not went_on
            (entry,) = errors_in(caplog)
            assert streams[0].request_id in entry
            assert "left" in entry
            assert "a bug of ours" in entry
            assert "".join([one.outputs[0].text async for one in other]) == "café"
        assert llm.statistics().open_streams == 0
        assert llm.statistics().endings == {EndingKind.LEFT: 1, EndingKind.STOP: 1}
        assert aborted(transport) == []


async def test_an_ending_that_fails_does_not_keep_the_others_from_theirs(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(link: EngineLink, stream: RequestStream) -> None:
        raise KeyError("a bug of ours")

    async with (
        open_scripted(script(*CAFE, first_token_delay_s=60.0)) as (llm, transport),
        llm.open_stream(PROMPT, SamplingParams()) as one,
        llm.open_stream(PROMPT, SamplingParams()) as other,
    ):
        monkeypatch.setattr(EngineLink, "stream_ended", fail)
        transport.inject_dead()
        await llm.wait_dead()
        for stream in (one, other):
            assert stream.ending is not None
            assert stream.ending.kind is EndingKind.ENGINE_DEAD
    assert len(errors_in(caplog)) == 2


# ---------------------------------------------------------------------------- the way out of the block


async def fail_to_close(transport: ScriptedTransport) -> None:
    await trio.lowlevel.cancel_shielded_checkpoint()
    raise OSError("the transport would not close")


async def test_the_bodys_error_wins_over_that_of_the_exit(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ScriptedTransport, "aclose", fail_to_close)
    error = LookupError("the body's own")
    with pytest.raises(LookupError) as caught:
        async with open_scripted(script(*CAFE)):
            raise error
    assert caught.value is error
    (entry,) = errors_in(caplog)
    assert "would not close" in entry


async def test_an_error_of_the_exit_alone_leaves_as_itself(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ScriptedTransport, "aclose", fail_to_close)
    with pytest.raises(OSError, match="would not close"):
        async with open_scripted(script(*CAFE)):
            await trio.lowlevel.checkpoint()
    assert errors_in(caplog) == []


async def test_an_error_of_the_exit_is_not_lost_beside_a_cancel(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that is being cancelled hears of it, and no ``Cancelled`` stands in the way."""
    monkeypatch.setattr(ScriptedTransport, "aclose", fail_to_close)
    with pytest.raises(OSError, match="would not close"), trio.CancelScope() as scope:
        async with open_scripted(script(*CAFE)):
            scope.cancel()
            await trio.sleep_forever()


async def test_two_tasks_that_fail_at_once_are_one_error_and_one_log_entry(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F15: the timer of one LLM fails, and so does its supervisor, which that cancels."""

    async def fail_in_the_timer(self: Deadlines) -> None:
        await trio.sleep(1.0)
        raise KeyError("the timer's")

    run = Supervisor.run

    async def fail_in_the_supervisor(self: Supervisor) -> None:
        try:
            await run(self)
        finally:
            raise ValueError("the supervisor's")

    monkeypatch.setattr(Deadlines, "run", fail_in_the_timer)
    monkeypatch.setattr(Supervisor, "run", fail_in_the_supervisor)
    opened: list[LLM] = []
    with caplog.at_level(logging.ERROR), pytest.raises((KeyError, ValueError)) as caught:
        async with open_scripted(script(*CAFE)) as (llm, _):
            opened.append(llm)
            await llm.generate(PROMPT, SamplingParams(max_tokens=2))
            await trio.sleep_forever()
    both = [*errors_in(caplog), repr(caught.value)]
    assert len(both) == 2
    assert all(any(word in one for one in both) for word in ("the timer's", "the supervisor's"))
    assert opened[0].statistics().open_streams == 0
