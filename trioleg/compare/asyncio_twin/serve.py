"""``serve``: the app under Hypercorn's asyncio worker, until a signal comes or the engine is dead.

The tasks beside the server are kept by names of this function alone, and ended in its ``finally``. A dead engine is
looked for now and then, since an error in mid-stream is the client's, and reaches nobody here.
"""

from __future__ import annotations

import asyncio
import signal

from hypercorn.asyncio import serve as serve_app
from hypercorn.config import Config

from .app import create_app
from .llm import LLM

__all__ = ["serve"]

# vLLM's.
_WATCHDOG_S = 5.0


async def serve(llm: LLM, model: str, port: int, *, graceful_timeout: float | None = None) -> None:
    """Serve ``llm`` at ``port`` of this machine. SIGINT or SIGTERM ends the engine, whose requests end with it, then
    the server; an engine that died ends the server within five seconds. ``graceful_timeout``: seconds for answers that
    are still being written; None: Hypercorn's own."""
    loop = asyncio.get_running_loop()
    signalled, should_exit = asyncio.Event(), asyncio.Event()

    def terminate_if_errored() -> None:
        if llm.errored and not llm.is_running:
            should_exit.set()

    async def watch_engine() -> None:
        while True:
            await asyncio.sleep(_WATCHDOG_S)
            terminate_if_errored()

    async def watch_signals() -> None:
        await signalled.wait()
        await loop.run_in_executor(None, llm.shutdown)
        should_exit.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    beside = [
        asyncio.create_task(watch_engine(), name="watch_engine"),
        asyncio.create_task(watch_signals(), name="watch_signals"),
    ]
    try:
        app = create_app(llm, model, terminate_if_errored)
        await serve_app(app, _config(port, graceful_timeout), shutdown_trigger=should_exit.wait)
    finally:
        for task in beside:
            task.cancel()


def _config(port: int, graceful_timeout: float | None) -> Config:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.loglevel = "WARNING"
    if graceful_timeout is not None:
        config.graceful_timeout = graceful_timeout
    return config
