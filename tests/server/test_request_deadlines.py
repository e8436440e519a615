"""Deadlines as clients set them: in the body, in a header, by the server's default; from the headers on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from scripted_app import Answer, open_app
from sse_grammar import read_stream
from test_streaming_protocol import play
from trio.testing import MockClock

from trioleg.config import LLMConfig
from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineCoreRequestType
from trioleg.sampling_params import SamplingParams
from trioleg.server.protocol import parse_chat_completion
from trioleg.timeouts import Timeouts

ENDLESS = play(*("a", "b", "c") * 300)
# Its first token comes after 5 s.
LATE = play("a", "b", first_token_delay_s=5)
DEFAULT = LLMConfig(timeouts=Timeouts(first_token=1, total=3))


def as_header(seconds: str) -> dict[str, str]:
    return {"X-Request-Timeout": seconds}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "config", "after"),
    [
        ({"timeouts": {"first_token": 1}}, None, 1),
        ({"timeouts": {"total": 2.5}}, None, 2.5),
        ({"timeouts": {"first_token": 4, "total": 2}}, None, 2),
        ({"headers": as_header("1.5")}, None, 1.5),
        ({"headers": as_header("1.5"), "timeouts": {"total": 1}}, None, 1),
        ({"headers": as_header("1.5"), "timeouts": {"total": 4}}, None, 1.5),
        ({"headers": as_header("3"), "timeouts": {"first_token": 2}}, None, 2),
        ({}, DEFAULT, 1),
        ({"timeouts": {"first_token": 2, "total": None}}, DEFAULT, 2),
        ({"headers": as_header("0.5")}, DEFAULT, 0.5),
    ],
)
async def test_before_the_first_token(
    autojump_clock: MockClock,
    asked: dict[str, Any],
    config: LLMConfig | None,
    after: float,
    stream: bool,
    n: int,
) -> None:
    """A 504 in JSON, at that moment, that openai's clients do not repeat; one ABORT."""
    async with open_app(LATE, llm_config=config) as app:
        start = trio.current_time()
        answer = await app.ask(stream=stream, n=n, **asked)
        assert trio.current_time() - start == pytest.approx(after)
        kinds = [kind for kind, _ in app.transport.sent]
        assert kinds.count(EngineCoreRequestType.ABORT) == 1
        assert app.llm.statistics().endings == {"deadline": 1}
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers[b"x-should-retry"] == b"false"
    assert "deadline" in answer.error["message"]


@pytest.mark.parametrize("n", [1, 3])
async def test_in_the_middle_of_a_stream(autojump_clock: MockClock, n: int) -> None:
    async with open_app(ENDLESS) as app:
        answer = await app.ask(stream=True, n=n, timeouts={"first_token": 0.5, "total": 1.05})
    stream = read_stream(answer.body, {"n": n})
    assert (answer.status, answer.is_whole) == (200, True)
    assert stream.error is not None
    assert stream.error["code"] == "deadline_exceeded"
    assert all(one.content == "abcabcabcab" for one in stream.choices.values())


async def test_in_the_middle_of_a_plain_answer(autojump_clock: MockClock) -> None:
    async with open_app(ENDLESS) as app:
        answer = await app.ask(n=2, headers=as_header("0.55"))
    assert (answer.status, answer.headers[b"x-should-retry"]) == (504, b"false")
    partial = answer.error["partial"]["choices"]
    assert [one["message"]["content"] for one in partial] == ["abcabc", "abcabc"]


async def test_nothing_ends_what_is_in_time(autojump_clock: MockClock) -> None:
    """Nor does the deadline of a first token that has come."""
    timeouts = {"first_token": 0.5, "total": 100}
    async with open_app(ENDLESS) as app:
        answer = await app.ask(max_tokens=20, timeouts=timeouts, headers=as_header("60"))
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 20)


async def test_a_client_that_does_not_read(autojump_clock: MockClock) -> None:
    """The write is given up at the deadline, and the last frames two seconds later; it is let go then."""
    answer = Answer(reads=trio.Event())
    async with open_app(ENDLESS) as app:
        start = trio.current_time()
        await app.ask(answer, stream=True, timeouts={"total": 3})
        assert trio.current_time() - start == pytest.approx(5)
        assert app.llm.statistics().endings == {"deadline": 1}
        assert app.llm.statistics().open_streams == 0
    assert not answer.is_whole


# ---------------------------------------------------------------------------- the body's time


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_bodys_way_counts(autojump_clock: MockClock, stream: bool, n: int) -> None:
    """Headers at 0, body at 2: a total of 3 is over at 3."""
    async with open_app(LATE) as app:
        start = trio.current_time()
        answer = Answer(body_after=2)
        await app.ask(answer, stream=stream, n=n, timeouts={"total": 3})
        assert trio.current_time() - start == pytest.approx(3)
    assert answer.status == 504


async def test_a_body_that_was_too_long_on_its_way(autojump_clock: MockClock) -> None:
    """Its own timeouts are known when it is there, and were over by then: nothing was sent."""
    answer = Answer(body_after=2)
    async with open_app(LATE) as app:
        await app.ask(answer, timeouts={"first_token": 1})
        assert EngineCoreRequestType.ADD not in [kind for kind, _ in app.transport.sent]
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("headers", "config", "after"),
    [
        (as_header("2"), None, 2),
        (None, DEFAULT, 1),
        (None, LLMConfig(timeouts=Timeouts(total=3)), 3),
        (as_header("2"), LLMConfig(timeouts=Timeouts(total=3)), 2),
    ],
)
async def test_a_body_that_does_not_come(
    autojump_clock: MockClock,
    headers: dict[str, str] | None,
    config: LLMConfig | None,
    after: float,
) -> None:
    answer = Answer(body_after=math.inf)
    async with open_app(LATE, llm_config=config) as app:
        start = trio.current_time()
        await app.ask(answer, headers=headers)
        assert trio.current_time() - start == pytest.approx(after)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers[b"x-should-retry"] == b"false"


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("timeouts", "parameter"),
    [
        ('{"total": 0}', "timeouts.total"),
        ('{"total": -1}', "timeouts.total"),
        ('{"first_token": -0.0}', "timeouts.first_token"),
        ('{"first_token": true}', "timeouts.first_token"),
        ('{"first_token": "3"}', "timeouts.first_token"),
        ('{"first_token": []}', "timeouts.first_token"),
        ('{"total": 1' + "0" * 400 + "}", "timeouts.total"),
        ('{"totals": 1}', "timeouts.totals"),
        ('{"self": 1}', "timeouts.self"),
        ("3", "timeouts"),
        ("[]", "timeouts"),
        ("false", "timeouts"),
    ],
)
def test_timeouts_that_are_none(timeouts: str, parameter: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"a"}}],"timeouts":{timeouts}}}'
    with pytest.raises(InvalidRequestError, match=parameter) as caught:
        parse_chat_completion(body.encode(), SamplingParams)
    assert caught.value.parameter == parameter
    assert "allowed: " in str(caught.value)


@pytest.mark.parametrize("number", ["1e400", "Infinity", "NaN"])
def test_infinities_are_no_json(number: str) -> None:
    body = f'{{"messages":[{{"role":"user","content":"a"}}],"timeouts":{{"total":{number}}}}}'
    with pytest.raises(InvalidRequestError, match="JSON"):
        parse_chat_completion(body.encode(), SamplingParams)


@pytest.mark.parametrize(
    "value",
    ["0", "0.0", "-1", "+1", "inf", "nan", "1e3", "", "1 s", "1,5", "1, 2", "1_0", ".5", "1" * 50],
)
async def test_a_header_that_is_no_duration(autojump_clock: MockClock, value: str) -> None:
    async with open_app(LATE) as app:
        answer = await app.ask(headers=as_header(value))
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")
    assert "X-Request-Timeout" in answer.error["message"]
    assert "allowed: " in answer.error["message"]


@pytest.mark.parametrize("timeouts", [None, {}, {"total": None}, {"total": 1e9}])
async def test_timeouts_that_bound_nothing(autojump_clock: MockClock, timeouts: Any) -> None:
    async with open_app(LATE) as app:
        assert (await app.ask(timeouts=timeouts)).status == 200
