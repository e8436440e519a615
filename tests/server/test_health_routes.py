"""What probes are told in every state, what a request is told then, and that both agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from quart_trio import QuartTrio
from scripted_app import MESSAGES, Answer, ScriptedApp, call, chat_tokenizer, open_app
from test_streaming_protocol import play
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import LLMConfig
from trioleg.runtime.engines import Engine
from trioleg.runtime.health import LLMState
from trioleg.runtime.llm import LLM
from trioleg.runtime.opening import running
from trioleg.server.app import create_app

ENDLESS = play(*("a", "b", "c") * 300)


@asynccontextmanager
async def open_loading_app() -> AsyncIterator[QuartTrio]:
    """Its engine does not become ready."""

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[Engine]:
        await trio.sleep_forever()
        raise AssertionError("nobody wakes this task but with a cancel")
        yield

    llm = LLM("scripted", chat_tokenizer(), open_engine, LLMConfig())
    async with running(llm, wait_until_ready=False):
        yield create_app(llm)


async def metric(app: QuartTrio, name: str, **labels: str) -> float:
    text = (await call(app, "GET", "/metrics")).body.decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise AssertionError(f"no metric {name} {labels} in {text}")


async def check_probes(
    app: QuartTrio, state: LLMState, *, code: str | None, alive: bool, retry: bool
) -> None:
    """Every probe, with GET and HEAD, says ``state``; the metrics do, too."""
    for path, is_well in (("/health", code is None), ("/ready", code is None), ("/live", alive)):
        answer = await call(app, "GET", path)
        assert (answer.status, answer.json["status"]) == (200 if is_well else 503, state)
        assert (b"retry-after" in answer.headers) == (retry and not is_well)
        if is_well:
            assert "error" not in answer.json
        else:
            error = answer.error
            assert (error["code"], error["type"]) == (code, "service_unavailable_error")
            assert error["message"]
        assert (await call(app, "HEAD", path)).status == answer.status
    for one in LLMState:
        assert await metric(app, "trioleg_state", state=one.value) == (one is state)


async def check_a_request(app: QuartTrio, *, code: str, retry: bool) -> None:
    """Streamed or not, it is refused with the same."""
    for stream in ("true", "false"):
        body = b'{"stream":%s,"messages":[{"role":"user","content":"a"}]}' % stream.encode()
        answer = await call(app, "POST", "/v1/chat/completions", body)
        assert (answer.status, answer.error["code"]) == (503, code)
        assert (b"retry-after" in answer.headers) == retry
        assert b"x-should-retry" not in answer.headers


async def test_loading(autojump_clock: MockClock) -> None:
    async with open_loading_app() as app:
        await check_probes(app, LLMState.LOADING, code="engine_unavailable", alive=True, retry=True)
        await check_a_request(app, code="engine_unavailable", retry=True)
        models = await call(app, "GET", "/v1/models")
        assert (models.status, models.error["code"]) == (503, "engine_unavailable")
        assert b"retry-after" in models.headers
        assert (await call(app, "GET", "/v1/requests")).json == {"object": "list", "data": []}
        assert await metric(app, "trioleg_engine_up") == 0


async def test_ready(autojump_clock: MockClock) -> None:
    async with open_app(play("a")) as app:
        await check_probes(app.app, LLMState.READY, code=None, alive=True, retry=False)
        assert await metric(app.app, "trioleg_engine_up") == 1
        assert await metric(app.app, "trioleg_engine_restarts_total") == 0


async def test_frozen_and_back(autojump_clock: MockClock) -> None:
    async with open_app(ENDLESS) as app:
        app.transport.freeze()
        await trio.sleep(2)
        await check_probes(
            app.app, LLMState.FROZEN, code="engine_unavailable", alive=True, retry=True
        )
        assert await metric(app.app, "trioleg_engine_up") == 0
        app.transport.thaw()
        await trio.sleep(1)
        await check_probes(app.app, LLMState.READY, code=None, alive=True, retry=False)


async def test_dead_for_good(autojump_clock: MockClock) -> None:
    async with open_app(ENDLESS) as app:
        app.transport.inject_dead()
        await app.llm.wait_dead()
        await check_probes(app.app, LLMState.DEAD, code="engine_dead", alive=False, retry=False)
        await check_a_request(app.app, code="engine_dead", retry=False)
        assert await metric(app.app, "trioleg_engine_up") == 0


async def test_restarting_and_back(autojump_clock: MockClock) -> None:
    async with open_app(ENDLESS, llm_config=LLMConfig(restart_engine=True)) as app:
        app.transport.inject_dead()
        await trio.sleep(0.5)
        await check_probes(
            app.app, LLMState.RESTARTING, code="engine_unavailable", alive=True, retry=True
        )
        await check_a_request(app.app, code="engine_unavailable", retry=True)
        await trio.sleep(5)
        await check_probes(app.app, LLMState.READY, code=None, alive=True, retry=False)
        assert await metric(app.app, "trioleg_engine_restarts_total") == 1
        assert (await app.ask(max_tokens=2)).status == 200


async def test_draining(autojump_clock: MockClock) -> None:
    async with open_app(ENDLESS) as app:
        app.llm.shut_down("the server is shutting down")
        await check_probes(
            app.app, LLMState.DRAINING, code="server_shutdown", alive=True, retry=False
        )
        await check_a_request(app.app, code="server_shutdown", retry=False)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_victim_of_the_engines_death_may_come_again(
    autojump_clock: MockClock, restart: bool, stream: bool
) -> None:
    """Retry-After only if there is going to be an engine to come back to."""
    answer = Answer()
    late = play("a", first_token_delay_s=5)
    async with open_app(late, llm_config=LLMConfig(restart_engine=restart)) as app:
        await struck(app, answer, app.transport.inject_dead, stream=stream)
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert (b"retry-after" in answer.headers) == restart


async def struck(
    app: ScriptedApp, answer: Answer, strike: Callable[[], None], *, stream: bool
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: app.ask(answer, stream=stream, messages=MESSAGES))
        await wait_all_tasks_blocked()
        strike()


async def test_retry_after_is_whole_seconds(autojump_clock: MockClock) -> None:
    """The engine is guessed to be there in 10 s; 1 s is the least that is said."""
    async with open_loading_app() as app:
        assert (await call(app, "GET", "/health")).headers[b"retry-after"] == b"10"
    async with open_app(ENDLESS, llm_config=LLMConfig(restart_engine=True)) as scripted:
        scripted.transport.inject_dead()
        await trio.sleep(0.6)
        answer = await call(scripted.app, "GET", "/health")
        assert answer.headers[b"retry-after"] == b"1"
