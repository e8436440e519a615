"""Sleep, pause and caches over HTTP: vLLM's paths, parameters and answers, for operators alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from scripted_app import Answer, ScriptedApp, call, open_app
from sse_grammar import read_stream
from test_streaming_protocol import play
from trio.testing import MockClock

from trioleg.config import LLMConfig, ServerConfig
from trioleg.errors import InvalidRequestError
from trioleg.timeouts import Timeouts

ENDLESS = play(*("a", "b", "c") * 300)
ON = ServerConfig(enable_engine_controls=True)
PATHS = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
]


@asynccontextmanager
async def controlled(config: LLMConfig | None = None) -> AsyncIterator[ScriptedApp]:
    async with open_app(ENDLESS, ON, config) as app:
        yield app


async def ok(app: ScriptedApp, method: str, path: str) -> Any:
    answer = await call(app.app, method, path)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_off_unless_asked_for(autojump_clock: MockClock, method: str, path: str) -> None:
    async with open_app(ENDLESS) as app:
        before = list(app.transport.sent)
        answer = await call(app.app, method, path)
        assert (answer.status, answer.error["code"]) == (404, "engine_controls_off")
        assert answer.error["message"] == (
            f"{method} {path} is off; allowed: only on a server started with --enable-engine-controls"
        )
        assert app.transport.sent == before
        assert (await app.ask(max_tokens=3)).status == 200


async def test_asleep_requests_wait(autojump_clock: MockClock) -> None:
    """Probes still say that the server is well, as vLLM's do: who sleeps was sent to sleep."""
    asleep = Answer()
    async with controlled() as app:
        assert await ok(app, "GET", "/is_sleeping") == {"is_sleeping": False}
        assert await ok(app, "POST", "/sleep?level=2") == {"status": "sleeping", "level": 2}
        assert await ok(app, "GET", "/is_sleeping") == {"is_sleeping": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, asleep, stream=True, max_tokens=3))
            # Longer than an engine that has work may be silent: it is asked, and answers.
            await trio.sleep(200)
            assert asleep.parts == []
            assert await ok(app, "GET", "/health") == {"status": "ready"}
            partly = await ok(app, "POST", "/wake_up?tags=weights")
            assert partly == {"status": "sleeping", "tags": ["weights"]}
            assert await ok(app, "POST", "/wake_up") == {"status": "awake", "tags": None}
        assert read_stream(asleep.body, {}).choices[0].content == "abc"


async def test_asleep_a_request_has_its_deadline(autojump_clock: MockClock) -> None:
    async with controlled(LLMConfig(timeouts=Timeouts(first_token=5))) as app:
        await ok(app, "POST", "/sleep")
        answer = await app.ask(max_tokens=3)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        await ok(app, "POST", "/wake_up")
        assert (await app.ask(max_tokens=3)).status == 200


@pytest.mark.parametrize("what", ["/pause", "/sleep"])
async def test_what_runs_is_aborted(autojump_clock: MockClock, what: str) -> None:
    running = Answer()
    async with controlled() as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.ask, running, stream=True))
        await trio.sleep(0.45)
        await ok(app, "POST", what)
    choice = read_stream(running.body, {}).choices[0]
    assert choice.finish_reason == "abort"


async def test_pause_and_keep(autojump_clock: MockClock) -> None:
    running = Answer()
    async with controlled() as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, running, stream=True, max_tokens=6))
            await trio.sleep(0.45)
            answer = await ok(app, "POST", "/pause?mode=keep&clear_cache=false")
            assert answer == {"status": "paused"}
            assert await ok(app, "GET", "/is_paused") == {"is_paused": True}
            await trio.sleep(10)
            assert not running.is_whole
            assert await ok(app, "POST", "/resume") == {"status": "resumed"}
        assert await ok(app, "GET", "/is_paused") == {"is_paused": False}
    assert read_stream(running.body, {}).choices[0].content == "abcabc"


async def test_reset_of_the_prefix_cache(autojump_clock: MockClock) -> None:
    async with controlled() as app:
        assert await ok(app, "POST", "/reset_prefix_cache") == {"success": True}
        asked = "reset_running_requests=true&reset_external=1"
        assert await ok(app, "POST", f"/reset_prefix_cache?{asked}") == {"success": True}
        body = app.transport.sent[-1][1]
        assert body.endswith(b"reset_prefix_cache\x92\xc3\xc3")


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/sleep?level=3", "level is '3'; allowed: 0, 1, 2"),
        ("POST", "/sleep?level=one", "level is 'one'; allowed: 0, 1, 2"),
        ("POST", "/sleep?mode=soon", "mode is 'soon'; allowed: abort, wait, keep"),
        ("POST", "/pause?mode=soon", "mode is 'soon'; allowed: abort, wait, keep"),
        ("POST", "/pause?clear_cache=2", "clear_cache is '2'; allowed: true, 1, false, 0"),
        ("POST", "/resume?now=1", "unknown parameter: 'now'; allowed: no parameters"),
        ("POST", "/reset_prefix_cache?all=1", "unknown parameter: 'all'"),
        ("POST", "/wake_up?tag=weights", "unknown parameter: 'tag'; allowed: tags"),
        ("POST", "/wake_up?tags=weight", "tags is 'weight'; allowed: "),
        ("POST", "/wake_up?tags=", "tags is ''; allowed: "),
    ],
)
async def test_what_is_refused(
    autojump_clock: MockClock, method: str, path: str, words: str
) -> None:
    async with controlled() as app:
        before = list(app.transport.sent)
        answer = await call(app.app, method, path)
        assert answer.status == 400
        assert words in answer.error["message"]
        assert app.transport.sent == before


async def test_a_program_is_told_before_the_engine_is(autojump_clock: MockClock) -> None:
    async with controlled() as app:
        before = list(app.transport.sent)
        for call_, words in (
            (partial(app.llm.sleep, 3), "level is 3; allowed: 0, 1, 2"),
            (partial(app.llm.sleep, True), "level is True; allowed: 0, 1, 2"),
            (partial(app.llm.sleep, 1, "soon"), "mode is 'soon'; allowed: abort, wait, keep"),
            (partial(app.llm.pause, "soon"), "mode is 'soon'; allowed: abort, wait, keep"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await call_()
        assert app.transport.sent == before


async def test_the_engines_own_refusal(autojump_clock: MockClock) -> None:
    async with controlled() as app:
        await ok(app, "POST", "/sleep")
        answer = await call(app.app, "POST", "/resume")
        assert (answer.status, answer.error["code"]) == (500, "engine_refused")
        assert "wake it up first" in answer.error["message"]


async def test_without_an_engine(autojump_clock: MockClock) -> None:
    async with controlled() as app:
        app.transport.inject_dead()
        await trio.sleep(1)
        answer = await call(app.app, "POST", "/sleep")
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
