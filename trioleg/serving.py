"""The program behind ``trioleg serve``: signals, engine, server, and the line that says it is ready.

Rules of this file: it owns the process, so it may import anything; all that is heavy is imported after
the signal receiver is there, since loading takes seconds in which a signal must already be heard.

The server listens while the engine loads, so that probes get an answer. The first SIGINT or SIGTERM ends the
server, then its streams, then the engine, each in its order; while the engine is still loading it ends that at
once. A second one does not wait for any order. An engine's death is an error, whatever signals come behind it.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
import trio

from .config import LLMConfig, ServerConfig
from .errors import EngineDeadError

if TYPE_CHECKING:
    from trio.socket import SocketType

    from .runtime.llm import LLM

__all__ = ["READY_LINE", "curl_line", "ready_line", "run_server", "visible_url"]

# Behind the time in which a lost engine may come back: its last words.
_VERDICT_MARGIN_S = 0.5
# What a program that started ours looks for.
READY_LINE = re.compile(r"ready: (?P<model>.*) at (?P<url>http://\S+)$")


async def run_server(
    model: str,
    llm_config: LLMConfig,
    server_config: ServerConfig,
    attach: str | None,
    hear: Callable[[], None] = lambda: None,
) -> None:
    """Serves until a signal comes; for ``trio.run``, in the main thread.

    ``hear`` is called once signals are received here. Raises ``TriolegError``: the model or the
    address cannot be had, the engine does not start, or, once everything is taken down, it died.
    """
    program = _Program()
    try:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            hear()
            await _run_hearing(
                program, signals, partial(program.run, model, llm_config, server_config, attach)
            )
    finally:
        # Trio closes what wakes it at signals before it tells Python so, and one that comes in between would
        # be an error on stderr. The program is over: they can change nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if program.cause_of_death is not None:
        raise EngineDeadError(program.cause_of_death)


async def _run_hearing(
    program: _Program, signals: AsyncIterator[int], run: Callable[[], Awaitable[None]]
) -> None:
    from .runtime.unwrap import unwrapped

    with unwrapped():
        # Outside of what a signal cancels: a further one is heard until the very end.
        async with trio.open_nursery() as listening:
            listening.start_soon(program.stop_at_signal, signals)
            with program.scope:
                await run()
            listening.cancel_scope.cancel(reason="the server has ended")


class _Program:
    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.cause_of_death: str | None = None
        self._shutdown = trio.Event()
        self._is_ready = False
        self._llm: LLM | None = None

    async def run(
        self, model: str, llm_config: LLMConfig, server_config: ServerConfig, attach: str | None
    ) -> None:
        from .runtime.opening import open_llm
        from .server.serve import bind_sockets

        # Before the engine: a taken port should not cost the time that a model takes to load.
        sockets = await bind_sockets(server_config)
        llm: LLM | None = None
        try:
            async with open_llm(model, llm_config, attach=attach, wait_until_ready=False) as llm:
                self._llm = llm
                await self._serve(llm, server_config, sockets)
                await _settle(llm, llm_config)
        finally:
            # Known only when the engine's process is gone: it may have died right before a signal came.
            self.cause_of_death = None if llm is None else llm.cause_of_death
            for one in sockets:
                one.close()

    async def _serve(self, llm: LLM, config: ServerConfig, sockets: Sequence[SocketType]) -> None:
        from .runtime.stats_logger import LoggingStatsLogger
        from .server.serve import serve

        # Only where somebody would read it: without a logger nothing is gathered.
        if logging.getLogger("trioleg.stats").isEnabledFor(logging.INFO):
            llm.stats_logger = LoggingStatsLogger()
        async with trio.open_nursery() as server:
            bound = await server.start(
                partial(serve, llm, config, sockets=sockets, shutdown=self._shutdown)
            )
            await llm.wait_ready()
            self._is_ready = True
            name = config.served_model_name or llm.model
            url = visible_url(bound.host, bound.port)
            click.echo(f"{ready_line(url, name)}\n{curl_line(url, name)}")

    async def stop_at_signal(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if self._shutdown.is_set() or not self._is_ready:
                self.scope.cancel(reason=signal.Signals(number).name)
            if self._shutdown.is_set() and self._llm is not None:
                self._llm.hurry()
            self._shutdown.set()


async def _settle(llm: LLM, config: LLMConfig) -> None:
    """Wait for the verdict on an engine that has just been lost: if it is dead, this end is no success."""
    with trio.move_on_after(config.unreachable_timeout + _VERDICT_MARGIN_S):
        engines = llm.statistics().engines
        if any(one.lost is not None and one.dead is None for one in engines):
            await llm.wait_dead()


def visible_url(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ready_line(url: str, model: str) -> str:
    """``READY_LINE`` matches it."""
    return f"ready: {model} at {url}"


def curl_line(url: str, model: str) -> str:
    """A command for a shell that streams an answer from the server at ``url``."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    data = json.dumps(body, ensure_ascii=False)
    header = "Content-Type: application/json"
    return shlex.join(["curl", "-sN", f"{url}/v1/chat/completions", "-H", header, "-d", data])
