"""``serve``: the app under Hypercorn's asyncio worker, until a signal comes or the engine is dead.

The group owns what runs beside the server. Hypercorn's own shutdown cancels what is left after its grace, once: an answer
that swallowed that would be waited for by nobody.
"""

from __future__ import annotations

import asyncio
import signal

from hypercorn.asyncio import serve as serve_app
from hypercorn.config import Config

from ...config import ServerConfig
from ...outputs import Ending, EndingKind
from .app import create_app
from .llm import LLM

__all__ = ["serve"]

_DEFAULTS = ServerConfig()
# For the last frames of what did not end by itself; then connections are cut.
_GRACE_S = 3.0


async def serve(
    llm: LLM,
    model: str,
    port: int,
    *,
    drain_timeout: float = _DEFAULTS.drain_timeout,
    write_timeout: float | None = None,
) -> None:
    """Serve ``llm`` at ``port`` of this machine. SIGINT or SIGTERM refuses new requests, waits ``drain_timeout`` seconds
    for those that there are, ends the others, and returns. A dead engine is told of for some seconds; then it returns,
    too. ``write_timeout``: see ``serve_stream``."""
    loop = asyncio.get_running_loop()
    is_signalled, should_exit = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        await is_signalled.wait()
        llm.is_draining = True
        try:
            async with asyncio.timeout(drain_timeout):
                await llm.wait_idle()
        except TimeoutError:
            llm.end_all(Ending(EndingKind.SHUTDOWN, "the server is shutting down"))
        should_exit.set()

    async def watch_engine() -> None:
        await llm.wait_dead()
        await asyncio.sleep(_DEFAULTS.engine_death_linger)
        should_exit.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_signalled.set)
    async with asyncio.TaskGroup() as group:
        beside = [
            group.create_task(drain(), name="drain"),
            group.create_task(watch_engine(), name="watch_engine"),
        ]
        app = create_app(llm, model, write_timeout=write_timeout)
        await serve_app(app, _config(port), shutdown_trigger=should_exit.wait)
        for task in beside:
            task.cancel("the server has ended")


def _config(port: int) -> Config:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.loglevel = "WARNING"
    config.graceful_timeout = _GRACE_S
    return config
