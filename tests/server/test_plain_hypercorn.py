"""``asgi_app``: under a real ``hypercorn -k trio`` with the scripted engine, and by hand, without any server.

What a plain Hypercorn does not do as ``trioleg serve`` does is in docs/plain-hypercorn.md; its rows are seen here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from process_helpers import wait_until
from programs import Program, running
from programs import wait_until as wait_until_now
from scripted_app import open_chat_llm
from served import Server, open_client, serving, wait_gone, write_script

from trioleg.errors import EngineStartError
from trioleg.runtime.llm import LLM
from trioleg.server import asgi
from trioleg.testing import Script

HYPERCORN = (sys.executable, "-m", "hypercorn", "--bind", "127.0.0.1:0", "--graceful-timeout", "1")


@contextmanager
def hypercorn(*options: str, model: str = "smollm2-135m", script: Path) -> Iterator[Program]:
    app = f"trioleg.server.asgi:asgi_app({model!r}, script={str(script)!r})"
    with running(*HYPERCORN, *options, app) as program:
        yield program


@contextmanager
def plain(folder: Path, *options: str, **script: Any) -> Iterator[Server]:
    """A ready server; its engine counts, as in ``served``."""
    with hypercorn("-k", "trio", *options, script=write_script(folder, **script)) as program:
        url = program.wait_for(r"Running on (http://\S+)")[1]
        yield Server(program, url=url)


def engine_of(server: Server) -> int:
    """The last of: Python's resource tracker, the worker, the guardian, the engine."""
    return server.family[-1]


async def test_answers_are_those_of_trioleg_serve(tmp_path: Path, smollm2: Path) -> None:
    seen = []
    with plain(tmp_path) as other, serving(tmp_path) as ours:
        for server in (other, ours):
            async with open_client(server) as client:
                assert (await client.get("/health")).json() == {"status": "ready"}
                for stream in (True, False):
                    answer = await client.answered(stream=stream)
                    assert answer.is_exact
                    seen.append((answer.status, sorted(answer.headers), answer.text))
    assert seen[:2] == seen[2:]


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path, smollm2: Path) -> None:
    with plain(tmp_path, step_interval_s=0.05) as server:
        async with open_client(server) as watcher:
            for stream in (True, False):
                async with open_client(server) as client:
                    client.ask(stream=stream)
                    await watcher.until_in_engine(running=1, waiting=0)
                await watcher.until_idle()


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_cuts_a_stream_and_leaves_no_process(
    tmp_path: Path, smollm2: Path, workers: int
) -> None:
    """It waits for as long as ``--graceful-timeout`` says, and the client is told nothing."""
    with plain(tmp_path, "--workers", str(workers), step_interval_s=0.05) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "stream": True}
        with httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                got = response.iter_text()
                text = next(got)
                # The other worker may still be on its way.
                wait_until_now(lambda: len(server.family) == 1 + 3 * workers)
                family = server.family
                server.program.process.send_signal(signal.SIGTERM)
                with pytest.raises(httpx2.RemoteProtocolError):
                    for piece in got:
                        text += piece
        assert '"content"' in text
        assert "error" not in text
        assert "[DONE]" not in text
        assert server.program.wait() == 0
        wait_gone(*family)


async def test_a_dead_engine_is_told_and_the_server_stays(tmp_path: Path, smollm2: Path) -> None:
    with plain(tmp_path, step_interval_s=0.05) as server:
        async with open_client(server) as client:
            answer = client.ask()
            await client.until(lambda: answer.text)
            os.kill(engine_of(server), signal.SIGKILL)
            await client.until(lambda: answer.is_told)
            assert answer.error["code"] == "engine_dead"
            await client.until_health(503, "killed by SIGKILL")
            assert (await client.get("/live")).status_code == 503
            assert (await client.answered()).status == 503
        server.program.process.send_signal(signal.SIGTERM)
        server.program.wait()
        assert "engine 0 is dead: it was killed by SIGKILL" in server.program.stderr


@pytest.mark.parametrize(
    ("options", "model", "sentence"),
    [
        (["-k", "trio"], "no-such", "no model 'no-such': not a directory, "),
        ([], "smollm2-135m", "start it as: hypercorn -k trio"),
    ],
    ids=["no model", "asyncio"],
)
def test_a_start_that_fails_is_one_sentence(
    tmp_path: Path, options: list[str], model: str, sentence: str
) -> None:
    """In this process (``--workers 0``) the exit code says it, too; Hypercorn's parent process would say 0."""
    script = write_script(tmp_path)
    with hypercorn(*options, "--workers", "0", model=model, script=script) as program:
        assert program.wait() == 1
        (line,) = [one for one in program.stderr.splitlines() if "Lifespan failure" in one]
        assert sentence in line


# ---------------------------------------------------------------------------- by hand


class Lifespan:
    """The server's side of the lifespan. ``said``: what the app has sent."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.said: list[dict[str, Any]] = []
        self.leave = trio.Event()
        self._asked = 0

    async def receive(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked == 1:
            return {"type": "lifespan.startup"}
        await self.leave.wait()
        return {"type": "lifespan.shutdown"}

    async def send(self, message: dict[str, Any]) -> None:  # noqa: ASYNC124 - ASGI's
        self.said.append(message)

    async def run(self) -> None:
        await self.app({"type": "lifespan"}, self.receive, self.send)

    def types(self) -> list[str]:
        return [one["type"] for one in self.said]


async def refused(app: Any, kind: str = "http") -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:  # noqa: ASYNC124 - ASGI's
        said.append(message)

    async def receive() -> dict[str, Any]:  # noqa: ASYNC124 - ASGI's
        raise AssertionError("a request that is refused is not read")

    await app({"type": kind, "method": "GET", "path": "/health"}, receive, send)
    return said


def error_in(said: list[dict[str, Any]]) -> dict[str, Any]:
    start, body = said
    assert (start["status"], body["more_body"]) == (503, False)
    error: dict[str, Any] = json.loads(body["body"])["error"]
    return error


def opening(monkeypatch: pytest.MonkeyPatch, opened: AbstractAsyncContextManager[LLM]) -> Lifespan:
    monkeypatch.setattr(asgi, "open_llm", lambda *_, **__: opened)
    return Lifespan(asgi.asgi_app())


async def test_outside_of_the_lifespan_requests_get_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = trio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[LLM]:
        await loaded.wait()
        async with open_chat_llm(Script(token_ids=[1])) as (llm, _):
            yield llm

    life = opening(monkeypatch, slow())
    assert "lifespan" in error_in(await refused(life.app))["message"]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.run)
            await wait_until(lambda: life._asked)
            await trio.testing.wait_all_tasks_blocked()
            assert "loading" in error_in(await refused(life.app))["message"]
            assert await refused(life.app, "websocket") == [{"type": "websocket.close"}]
            loaded.set()
            await wait_until(lambda: life.said)
            life.leave.set()
    assert life.types() == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert error_in(await refused(life.app))["code"] == "server_shutdown"


@pytest.mark.parametrize("error", [EngineStartError("it coughed"), OSError("it coughed")])
async def test_any_failed_start_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A server takes an exception here for an app without a lifespan, and would serve it."""

    @asynccontextmanager
    async def failing() -> AsyncIterator[LLM]:
        await trio.lowlevel.checkpoint()
        raise error
        yield

    life = opening(monkeypatch, failing())
    await life.run()
    (told,) = life.said
    assert told["type"] == "lifespan.startup.failed"
    assert told["message"].endswith("it coughed")


async def test_a_cancelled_start_leaves_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypercorn cancels the lifespan at its ``startup_timeout``."""
    left = False

    @asynccontextmanager
    async def endless() -> AsyncIterator[LLM]:
        nonlocal left
        try:
            await trio.sleep_forever()
            yield
        finally:
            left = True

    life = opening(monkeypatch, endless())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert left
    assert not life.said


def test_under_asyncio_there_is_one_clear_sentence() -> None:
    life = Lifespan(asgi.asgi_app())
    asyncio.run(life.run())
    (told,) = life.said
    assert told["type"] == "lifespan.startup.failed"
    assert "hypercorn -k trio" in told["message"]
    # A server that was told to leave the lifespan out: uvicorn has a switch for it.
    assert "hypercorn -k trio" in error_in(asyncio.run(refused(life.app)))["message"]
