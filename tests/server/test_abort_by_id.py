"""Abort by id (C15): exact, the same for queued and running, and told to the victim as an end, not a fault."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from scripted_app import Answer, ScriptedApp, call, open_app
from sse_grammar import read_stream
from test_streaming_protocol import play
from trio.testing import MockClock

from trioleg.config import ServerConfig
from trioleg.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
)

ENDLESS = play(*("a", "b", "c") * 300)
# One at a time: the second request waits in the engine's queue.
ONE_SLOT = play(*("a", "b", "c") * 300, max_num_seqs=1)


async def listed(app: ScriptedApp) -> list[dict[str, Any]]:
    answer = await call(app.app, "GET", "/v1/requests")
    assert (answer.status, answer.json["object"]) == (200, "list")
    data: list[dict[str, Any]] = answer.json["data"]
    return data


async def abort(app: ScriptedApp, shown_id: str) -> Answer:
    return await call(app.app, "DELETE", f"/v1/requests/{shown_id}")


def num_aborts(app: ScriptedApp) -> int:
    return [kind for kind, _ in app.transport.sent].count(EngineCoreRequestType.ABORT)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("delay", [5, 0], ids=["before its first token", "in the middle"])
async def test_a_stream(autojump_clock: MockClock, n: int, delay: int) -> None:
    """It ends with "abort" for each choice and [DONE], with or without anything before."""
    victim = Answer()
    asked = {"n": n, "stream_options": {"include_usage": True}}
    script = play(*("a", "b", "c") * 300, first_token_delay_s=delay)
    async with open_app(script) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, victim, stream=True, **asked))
        await trio.sleep(0.45)
        (one,) = await listed(app)
        answer = await abort(app, one["id"])
        assert answer.json == {"id": one["id"], "object": "request", "aborted": True}
        assert (answer.status, num_aborts(app)) == (200, 1)
        assert await listed(app) == []
    assert (victim.status, victim.is_whole) == (200, True)
    stream = read_stream(victim.body, asked)
    assert stream.error is None
    assert sorted(stream.choices) == list(range(n))
    for choice in stream.choices.values():
        assert (choice.finish_reason, choice.content) == ("abort", "" if delay else "abcab")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_queued_one_and_nobody_else(autojump_clock: MockClock, stream: bool) -> None:
    """Its id is in no answer yet: it is found by its client's name for it."""
    running, queued = Answer(), Answer()
    async with open_app(ONE_SLOT) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, running, stream=True, max_tokens=20))
        await trio.sleep(0.3)
        named = {"X-Request-Id": "the second"}
        nursery.start_soon(partial(app.ask, queued, headers=named, stream=stream))
        await trio.sleep(0.3)
        first, second = await listed(app)
        assert (first["client_request_id"], second["client_request_id"]) == (None, "the second")
        assert first["num_output_tokens"] >= 5
        assert second["num_output_tokens"] == 0
        assert (await abort(app, second["id"])).status == 200
        assert [one["id"] for one in await listed(app)] == [first["id"]]
    assert len(read_stream(running.body).choices[0].content) == 20
    if stream:
        assert read_stream(queued.body).choices[0].finish_reason == "abort"
    else:
        assert (queued.status, queued.error["code"]) == (500, "request_aborted")


async def test_a_plain_one_gets_what_was_generated(autojump_clock: MockClock) -> None:
    victim = Answer()
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, victim, n=2))
        await trio.sleep(0.55)
        (one,) = await listed(app)
        await abort(app, one["id"])
    assert (victim.status, victim.error["code"]) == (500, "request_aborted")
    assert victim.headers[b"x-should-retry"] == b"false"
    partial_ = victim.error["partial"]
    assert partial_["id"] == one["id"]
    assert [choice["message"]["content"] for choice in partial_["choices"]] == ["abcabc"] * 2


async def test_behind_a_keep_alive_comment(autojump_clock: MockClock) -> None:
    victim = Answer()
    config = ServerConfig(sse_keep_alive_interval=1)
    late = play("a", first_token_delay_s=9)
    async with open_app(late, config) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, victim, stream=True))
        await trio.sleep(1.5)
        await abort(app, (await listed(app))[0]["id"])
    stream = read_stream(victim.body)
    assert (stream.num_comments, stream.choices[0].finish_reason) == (1, "abort")


@pytest.mark.parametrize(
    "other",
    [
        lambda shown: shown[:-1],
        lambda shown: shown + "0",
        lambda shown: shown.removeprefix("chatcmpl-"),
        lambda shown: "chatcmpl-" + shown,
        lambda shown: shown.upper(),
        lambda shown: shown + "%20",
        lambda shown: "0_" + shown,
        lambda shown: "chatcmpl-0_" + shown.removeprefix("chatcmpl-"),
        lambda shown: "chatcmpl-",
        lambda shown: "the clients own",
    ],
)
async def test_only_the_exact_id(autojump_clock: MockClock, other: Callable[[str], str]) -> None:
    """404 in OpenAI's form, and the request goes on. A choice's id in the engine is no request's."""
    victim = Answer()
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        named = {"X-Request-Id": "the clients own"}
        asked = partial(app.ask, victim, stream=True, n=2, max_tokens=10, headers=named)
        nursery.start_soon(asked)
        await trio.sleep(0.3)
        (one,) = await listed(app)
        answer = await abort(app, other(one["id"]))
        assert (answer.status, answer.error["code"]) == (404, "request_not_found")
        assert answer.error["param"] == "id"
        assert num_aborts(app) == 0
    assert read_stream(victim.body, {"n": 2}).choices[0].finish_reason == "length"


async def test_one_that_has_ended(autojump_clock: MockClock) -> None:
    async with open_app(play("a")) as app:
        shown_id = (await app.ask()).json["id"]
        for _ in range(2):
            assert (await abort(app, shown_id)).status == 404
        assert num_aborts(app) == 0


async def test_a_second_abort_finds_nothing(autojump_clock: MockClock) -> None:
    """Even while the victim's client has not taken its last frames."""
    victim = Answer(reads=trio.Event())
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, victim, stream=True))
        await trio.sleep(0.55)
        (one,) = await listed(app)
        assert (await abort(app, one["id"])).status == 200
        assert (await abort(app, one["id"])).status == 404
        assert num_aborts(app) == 1


async def test_what_is_listed(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """The id is the one in the answer; the client's own id is in the line about the ending, too."""
    caplog.set_level(logging.INFO, "trioleg.requests")
    before = int(time.time())
    answer = Answer()
    async with open_app(ENDLESS) as app, trio.open_nursery() as nursery:
        named = {"X-Request-Id": "abc 1"}
        nursery.start_soon(partial(app.ask, answer, stream=True, n=2, max_tokens=9, headers=named))
        await trio.sleep(0.35)
        (one,) = await listed(app)
    assert before - 1 <= one.pop("created") <= time.time()
    assert one == {
        "id": json.loads(answer.body.split(b"\n")[0].removeprefix(b"data: "))["id"],
        "object": "request",
        "client_request_id": "abc 1",
        "num_prompt_tokens": 4,
        "num_output_tokens": 8,
    }
    assert "('abc 1') ended: length" in caplog.text
    assert answer.headers[b"x-request-id"] == b"abc 1"


@pytest.mark.parametrize("name", ["x" * 257, "a\tb", "a\x85b", ""])
async def test_a_name_that_cannot_be_shown(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It is neither echoed nor logged."""
    caplog.set_level(logging.INFO, "trioleg.requests")
    async with open_app(play("a")) as app:
        answer = await app.ask(headers={"X-Request-Id": name})
    assert answer.status == 200
    assert b"x-request-id" not in answer.headers
    (line,) = [one.message for one in caplog.records]
    assert "(" not in line


@pytest.mark.parametrize(("by_engine", "may_repeat"), [(True, True), (False, False)])
async def test_only_an_abort_by_id_asks_not_to_be_repeated(
    autojump_clock: MockClock, by_engine: bool, may_repeat: bool
) -> None:
    """Through the whole leg: an engine that aborts by itself (a stock one that is told to leave) is not somebody
    who wants the request to end."""
    async with open_app(play("a", first_token_delay_s=60.0)) as app, trio.open_nursery() as nursery:
        answer = Answer()
        nursery.start_soon(app.ask, answer)
        await trio.sleep(1)
        (stream,) = app.llm.live_requests()
        if by_engine:
            output = EngineCoreOutput(stream.request_id, [], finish_reason=FinishReason.ABORT)
            message = EngineCoreOutputs(outputs=[output], timestamp=1.0)
            app.transport.inject([msgspec.msgpack.encode(message)])
        else:
            assert app.llm.abort(stream.request_id)
    assert (answer.status, answer.error["code"]) == (500, "request_aborted")
    assert (answer.headers.get(b"x-should-retry") != b"false") is may_repeat
