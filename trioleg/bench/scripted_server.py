"""A program: the whole server over the scripted engine, its own engine process included.

    python -m trioleg.bench.scripted_server MODEL SCRIPT [--restart-engine]

It prints where it listens, then, once the engine is there, the line that ``trioleg serve`` prints. SIGTERM and
SIGINT end it, the engine with it. MODEL needs only its tokenizer.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import click
import trio

from ..config import LLMConfig, ServerConfig
from ..errors import TriolegError
from ..heap import settle_heap
from ..runtime.opening import open_llm
from ..server.serve import serve
from ..serving import ready_line

__all__ = ["main"]


def main() -> None:
    """Leaves by ``SystemExit``: an error of ours is one line on stderr, and 1."""
    parser = argparse.ArgumentParser(description="Serves what a scripted engine says.")
    parser.add_argument("model")
    parser.add_argument("script", type=Path)
    parser.add_argument("--restart-engine", action="store_true")
    options = parser.parse_args()
    config = LLMConfig(restart_engine=options.restart_engine)
    try:
        trio.run(_run, options.model, options.script, config)
    except TriolegError as error:
        sys.exit(f"trioleg: {error}")


async def _run(model: str, script: Path, config: LLMConfig) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as program:
            program.start_soon(_leave_at_signal, signals, program.cancel_scope)
            await _serve(model, script, config)
            program.cancel_scope.cancel(reason="the server has ended")


async def _leave_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await signals.__anext__()
    scope.cancel(reason="a signal")


async def _serve(model: str, script: Path, config: LLMConfig) -> None:
    async with open_llm(model, config, script=script, wait_until_ready=False) as llm:
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(partial(serve, llm, ServerConfig(port=0)))
            click.echo(f"listening at {bound.url}")
            await llm.wait_ready()
            settle_heap()
            click.echo(ready_line(bound.url, model))


if __name__ == "__main__":
    main()
