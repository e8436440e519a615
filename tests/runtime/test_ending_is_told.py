"""C14: every way in which a request can end is one log line with its reason, and counted under it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import trio
from scripted_llm import PROMPT, open_scripted, script
from trio.testing import MockClock

from trioleg.config import LLMConfig
from trioleg.ipc.codec import encode
from trioleg.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, refusal_reason
from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import SamplingParams
from trioleg.testing import ScriptedTransport
from trioleg.timeouts import Timeouts

Act: TypeAlias = Callable[[LLM, ScriptedTransport, RequestStream], None]


def nothing(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
    """It ends by itself."""


def leave(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
    stream.close()


def abort(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
    llm.abort(stream.request_id)


def die(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
    transport.inject_dead()


def shut_down(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
    llm.shut_down("the server is shutting down")


def engine_says(token_ids: list[int], reason: FinishReason | None, why: str | None = None) -> Act:
    """The next output is this one."""

    def act(llm: LLM, transport: ScriptedTransport, stream: RequestStream) -> None:
        output = EngineCoreOutput(
            stream.request_id, token_ids, finish_reason=reason, stop_reason=why
        )
        transport.inject([encode(EngineCoreOutputs(outputs=[output]))])

    return act


@dataclass(frozen=True)
class Way:
    kind: EndingKind
    tokens: int
    act: Act = nothing
    asked: dict[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)
    cause: str = ""
    config: LLMConfig = field(default_factory=LLMConfig)


WAYS = [
    Way(EndingKind.STOP, 4),
    Way(EndingKind.STOP_STRING, 3, asked={"stop": ["é"]}, cause="é"),
    Way(EndingKind.LENGTH, 2, asked={"max_tokens": 2}),
    Way(EndingKind.REPETITION, 2, engine_says([265], FinishReason.REPETITION)),
    Way(EndingKind.LEFT, 1, leave),
    Way(EndingKind.ABORTED, 1, abort, cause="the request was aborted by its id"),
    Way(
        EndingKind.DEADLINE,
        2,
        timeouts=Timeouts(total=0.15),
        cause=r"was not complete after 0\.15 s",
    ),
    Way(EndingKind.ENGINE_DEAD, 1, die, cause="engine 0 is dead: it reported its own death"),
    Way(EndingKind.OUTPUT_ERROR, 2, engine_says([-1], None), cause="token id -1"),
    Way(
        EndingKind.REFUSED,
        1,
        engine_says([], FinishReason.ERROR, refusal_reason("priority", "priority is 1")),
        cause="priority is 1",
    ),
    Way(
        EndingKind.READER_TOO_SLOW,
        1,
        config=LLMConfig(mailbox_max_bytes=100),
        cause="fallen too far behind",
    ),
    Way(EndingKind.SHUTDOWN, 1, shut_down, cause="the server is shutting down"),
]


def test_no_way_is_left_out() -> None:
    assert [way.kind for way in WAYS] == list(EndingKind)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.kind)
async def test_an_ending_is_told_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    caplog.set_level(logging.INFO, "trioleg.requests")
    async with open_scripted(script("caf", "C3", "A9", "</s>"), way.config) as (llm, transport):
        params = SamplingParams(**way.asked)
        async with llm.open_stream(
            PROMPT, params, timeouts=way.timeouts, external_req_id="mine\n"
        ) as stream:
            await trio.sleep(0.05)
            way.act(llm, transport, stream)
            await trio.sleep(5.0)
        assert llm.statistics().endings == {way.kind: 1}
    (line,) = [one.getMessage() for one in caplog.records if one.name == "trioleg.requests"]
    told = re.fullmatch(
        rf"request {stream.request_id} \('mine\\n'\) ended: {way.kind}( \(.*\))?, (\d+) tokens, "
        r"\d+\.\d{3} s",
        line,
    )
    assert told, line
    assert re.search(way.cause, told[1] or "") if way.cause else told[1] is None
    assert int(told[2]) == way.tokens


async def test_a_request_that_was_never_sent_is_told_too(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Left, or overdue, while its prompt was read."""
    caplog.set_level(logging.INFO, "trioleg.requests")
    async with open_scripted(script("a")) as (llm, _):
        with trio.CancelScope() as scope:
            scope.cancel("the client has left")
            await llm.generate("a")
        assert scope.cancelled_caught
        assert llm.statistics().endings == {EndingKind.LEFT: 1}
    (line,) = caplog.messages
    assert re.fullmatch(r"request \S+ ended: left, 0 tokens, 0\.000 s", line)


async def test_a_stop_string_writes_no_line_of_its_own(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trioleg.requests")
    async with open_scripted(script("a", "0A", "b")) as (llm, _):
        await llm.generate(PROMPT, SamplingParams(stop=["\n"]))
    (line,) = caplog.messages
    assert r"ended: stop_string ('\n'), 2 tokens" in line
