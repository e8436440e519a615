"""The program behind ``trioleg serve``: signals, engine, server, and the line that says it is ready.

Rules of this file: it owns the process, so it may import anything; all that is heavy is imported after
the signal receiver is there, since loading takes seconds in which a signal must already be heard.

The server listens while the engine loads, so that probes get an answer. The first SIGINT or SIGTERM lets running
requests have their time, then ends what is left of them, the server, the engine, each in its order; while the
engine is still loading it ends that at once. A second one ends all now: streams are told, if they take it at once,
and the engine is killed. An engine's death is an error, whatever signals come behind it.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click
import trio

from .config import LLMConfig, ServerConfig
from .errors import EngineDeadError, ServerShutdown

if TYPE_CHECKING:
    from .runtime.adoption import EngineLegs
    from .runtime.llm import LLM
    from .server.binding import Binding
    from .server.hypercorn_config import HypercornSettings
    from .server.serve import Address

_log = logging.getLogger("trioleg.server")

__all__ = ["READY_LINE", "STOP_SIGNALS", "curl_line", "ready_line", "run_server", "visible_url"]

# What ends the program in good order.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Behind the time in which a lost engine may come back: its last words.
_VERDICT_MARGIN_S = 0.5
# For those who are told, once there was a second signal, and for their connections' end.
_LAST_WORDS_S = 0.5
# For those whose request is on its way, when the server ends while its engine loads.
_LAST_ANSWERS_S = 0.1
# What a program that started ours looks for. Of a server on a Unix socket alone, the url is unix: and its path.
READY_LINE = re.compile(r"ready: (?P<model>.*) at (?P<url>https?://\S+|unix:.+)$")


async def run_server(
    model: str,
    llm_config: LLMConfig,
    server_config: ServerConfig,
    attach: str | None,
    hear: Callable[[], None] = lambda: None,
    hypercorn: HypercornSettings | None = None,
    *,
    adopt: EngineLegs | None = None,
    stop_signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> None:
    """Serves until a signal comes; for ``trio.run``, in the main thread.

    ``hear`` is called once signals are received here. ``hypercorn``: as in ``serve``, ``attach`` and ``adopt``: as
    in ``open_llm``. ``stop_signals`` are heard; somebody else sees to the others. Raises ``TriolegError``: the
    model or the address cannot be had, the engine does not start, or, once everything is taken down, it died.
    """
    program = _Program(hypercorn)
    try:
        with trio.open_signal_receiver(*stop_signals) as signals:
            hear()
            await _run_hearing(
                program,
                signals,
                partial(program.run, model, llm_config, server_config, attach, adopt),
            )
    finally:
        # Trio closes what wakes it at signals before it tells Python so, and one that comes in between would
        # be an error on stderr. The program is over: they can change nothing.
        for number in stop_signals:
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
    def __init__(self, hypercorn: HypercornSettings | None) -> None:
        self._hypercorn = hypercorn
        self.scope = trio.CancelScope()
        self.cause_of_death: str | None = None
        self._shutdown = trio.Event()
        self._is_ready = False
        self._llm: LLM | None = None

    async def run(
        self,
        model: str,
        llm_config: LLMConfig,
        server_config: ServerConfig,
        attach: str | None,
        adopt: EngineLegs | None,
    ) -> None:
        from .runtime.opening import open_llm
        from .server.accepting import raise_descriptor_limit
        from .server.binding import bind_all
        from .server.hypercorn_config import HypercornSettings

        raise_descriptor_limit()
        # Before the engine: a taken port should not cost the time that a model takes to load.
        bindings = await bind_all(server_config, self._hypercorn or HypercornSettings())
        llm: LLM | None = None
        try:
            async with open_llm(
                model, llm_config, attach=attach, adopt=adopt, wait_until_ready=False
            ) as llm:
                self._llm = llm
                await self._serve(llm, server_config, bindings)
                await _settle(llm, llm_config)
        finally:
            # Known only when the engine's process is gone: it may have died right before a signal came.
            self.cause_of_death = None if llm is None else llm.cause_of_death
            for one in bindings:
                one.close()

    async def _serve(self, llm: LLM, config: ServerConfig, bindings: Sequence[Binding]) -> None:
        from .heap import settle_heap
        from .runtime.stats_logger import LoggingStatsLogger
        from .server.serve import serve

        # Only where somebody would read it: without a logger nothing is gathered.
        if logging.getLogger("trioleg.stats").isEnabledFor(logging.INFO):
            llm.stats_logger = LoggingStatsLogger()
        async with trio.open_nursery() as server:
            bound = await server.start(
                partial(
                    serve,
                    llm,
                    config,
                    hypercorn_config=self._hypercorn,
                    sockets=bindings,
                    shutdown=self._shutdown,
                )
            )
            await self._wait_ready(llm)
            settle_heap()
            self._is_ready = True
            name = config.served_model_name or llm.model
            certfile = None if self._hypercorn is None else self._hypercorn.certfile
            embeds = "generate" not in llm.supported_tasks
            click.echo(_ready_lines(bound.addresses, name, certfile, embeds=embeds))

    async def _wait_ready(self, llm: LLM) -> None:
        is_ready = False
        with suppress(ServerShutdown):
            await llm.wait_ready()
            is_ready = True
        if not is_ready:
            # A signal came first, and has said until when last answers may be written.
            await trio.sleep_forever()

    async def stop_at_signal(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if not self._is_ready:
                self._leave_the_start(name)
            elif self._shutdown.is_set():
                self._hurry()
            else:
                _log.info("%s: the server ends; a second signal does not wait", name)
            self._shutdown.set()

    def _leave_the_start(self, name: str) -> None:
        """Nothing has been served yet, but somebody may have asked."""
        _log.info("%s: the server ends, before it was ready", name)
        if self._llm is None or self._shutdown.is_set():
            self.scope.cancel(reason=name)
        else:
            self._llm.drain("the server is shutting down")
            self.scope.deadline = trio.current_time() + _LAST_ANSWERS_S

    def _hurry(self) -> None:
        assert self._llm is not None, "it is there before the server is ready"
        self._llm.shut_down("the server is shutting down, at once")
        self._llm.hurry()
        self.scope.deadline = min(self.scope.deadline, trio.current_time() + _LAST_WORDS_S)


async def _settle(llm: LLM, config: LLMConfig) -> None:
    """Wait for the verdict on an engine that has just been lost: if it is dead, this end is no success."""
    with trio.move_on_after(config.unreachable_timeout + _VERDICT_MARGIN_S):
        engines = llm.statistics().engines
        if any(one.lost is not None and one.dead is None for one in engines):
            await llm.wait_dead()


def _ready_lines(
    addresses: Sequence[Address], model: str, certfile: str | None, *, embeds: bool = False
) -> str:
    """The line that says so, one for each further address, and a command to try."""
    urls = [visible_url(one) if one.path is None else f"unix:{one.path}" for one in addresses]
    first = addresses[0]
    options = [] if first.path is None else ["--unix-socket", first.path]
    if first.is_tls and certfile is not None:
        options += ["--cacert", certfile]
    url = visible_url(first)
    return "\n".join(
        [
            ready_line(urls[0], model),
            *(f"also at {one}" for one in urls[1:]),
            curl_line(url, model, *options, embeds=embeds),
        ]
    )


def visible_url(address: Address) -> str:
    """The URL under which this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(address.host, address.host)
    return replace(address, host=host).url


def ready_line(url: str, model: str) -> str:
    """``READY_LINE`` matches it."""
    return f"ready: {model} at {url}"


def curl_line(url: str, model: str, *options: str, embeds: bool = False) -> str:
    """A command for a shell that streams an answer from the server at ``url``, or, of a model that ``embeds``,
    shows a vector. ``options``: more of curl's."""
    question = "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    path, asked = "chat/completions", {"messages": messages, "temperature": 0, "stream": True}
    if embeds:
        path, asked = "embeddings", {"input": question}
    data = json.dumps({"model": model, **asked}, ensure_ascii=False)
    header = "Content-Type: application/json"
    return shlex.join(["curl", "-sSN", *options, f"{url}/v1/{path}", "-H", header, "-d", data])
