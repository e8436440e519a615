"""The program behind ``trioleg serve``: signals, engine, server, and the line that says it is ready.

Rules of this file: it owns the process, so it may import anything; all that is heavy is imported after
the signal receiver is there, since loading takes seconds in which a signal must already be heard.

The first SIGINT or SIGTERM ends the server, then its streams, then the engine, each in its order; while
the engine is still loading it ends that at once. A second one does not wait for any order.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial

import click
import trio

from .config import LLMConfig, ServerConfig

__all__ = ["READY_LINE", "curl_line", "ready_line", "run_server", "visible_url"]

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
    shutdown, serving = trio.Event(), trio.Event()
    program = trio.CancelScope()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        hear()
        from .runtime.unwrap import unwrapped

        with unwrapped():
            # Outside of what a signal cancels: a further one is heard until the very end.
            async with trio.open_nursery() as listening:
                listening.start_soon(_stop_at_signal, signals, serving, shutdown, program)
                with program:
                    await _run_program(model, llm_config, server_config, attach, serving, shutdown)
                listening.cancel_scope.cancel(reason="the server has ended")


async def _run_program(
    model: str,
    llm_config: LLMConfig,
    server_config: ServerConfig,
    attach: str | None,
    serving: trio.Event,
    shutdown: trio.Event,
) -> None:
    from .runtime.llm import open_llm
    from .runtime.stats_logger import LoggingStatsLogger
    from .server.serve import bind_sockets, serve

    # Before the engine: a taken port should not cost the time that a model takes to load.
    sockets = await bind_sockets(server_config)
    try:
        async with (
            open_llm(model, llm_config, attach=attach) as llm,
            trio.open_nursery() as server,
        ):
            # Only where somebody would read it: without a logger nothing is gathered.
            if logging.getLogger("trioleg.stats").isEnabledFor(logging.INFO):
                llm.stats_logger = LoggingStatsLogger()
            bound = await server.start(
                partial(serve, llm, server_config, sockets=sockets, shutdown=shutdown)
            )
            serving.set()
            name = server_config.served_model_name or llm.model
            url = visible_url(bound.host, bound.port)
            click.echo(f"{ready_line(url, name)}\n{curl_line(url, name)}")
    finally:
        for one in sockets:
            one.close()


async def _stop_at_signal(
    signals: AsyncIterator[int],
    serving: trio.Event,
    shutdown: trio.Event,
    program: trio.CancelScope,
) -> None:
    async for number in signals:
        if shutdown.is_set() or not serving.is_set():
            program.cancel(reason=signal.Signals(number).name)
        shutdown.set()


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
