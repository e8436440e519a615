"""``trioleg bench stalled``: many clients that read nothing of their streams, beside a few that read everything.

Two servers, one after the other. The first lets such clients be (its write bound is out of reach): how much memory
do they take, do the others get every token and in time, and does SIGTERM end all of it when it should? The second
has a short write bound: who reads nothing is cut, the engine hears of it, and the others notice nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import h11
import trio

from ..errors import TriolegError
from ..model_store import resolve
from ..runtime.unwrap import unwrapped
from ..tokenizer import Tokenizer
from .metrics import read_metrics
from .processes import resident_kb, until
from .servers import Server, attached_server
from .stalled_client import Reader, StalledClient, open_stalled
from .stalled_report import DRAIN_S, WRITE_BOUND_S, BoundReport, LetBeReport, Stalled

__all__ = ["run_stalled"]

_TOKEN_IDS = [504, 3575, 282, 4649]
# A write bound that is out of reach.
_NO_BOUND_S = 86_400.0
# Until everybody is in the engine; and until a program under test that hangs is given up.
_PATIENCE_S = 60.0
_LOOK_AGAIN_S = 0.25
# Tokens of the bench's prompt, with the model's chat template round it, are fewer.
_PROMPT_ROOM = 256
_SAMPLE_S = 2.0
_UNREAD = ("trioleg_unread_requests", "trioleg_unread_bytes")
_RUNNING = "trioleg_engine_running_requests"


async def run_stalled(
    model: str, asked: Stalled, progress: Callable[[str], None]
) -> tuple[LetBeReport, BoundReport]:
    """Both servers. ``progress`` is told now and then. Raises ``TriolegError`` if one does not start or answer."""
    tokenizer = Tokenizer.from_directory(resolve(model, weights=False))
    # The text of the tokens in the middle of others.
    text = tokenizer.decode(_TOKEN_IDS * 2).removeprefix(tokenizer.decode(_TOKEN_IDS))
    run = _Run(asked, text, progress)
    script = {
        "token_ids": _TOKEN_IDS,
        "step_interval_s": asked.step_interval,
        "max_num_seqs": asked.stalled + asked.readers,
        "max_model_len": asked.steps + _PROMPT_ROOM,
    }
    options = ("--drain-timeout", str(DRAIN_S), "--write-timeout")
    with unwrapped():
        async with attached_server(model, script, *options, str(_NO_BOUND_S)) as server:
            unbound = await run.let_be(server)
        async with attached_server(model, script, *options, str(WRITE_BOUND_S)) as server:
            bound = await run.cut(server)
    return unbound, bound


class _Run:
    def __init__(self, asked: Stalled, text: str, progress: Callable[[str], None]) -> None:
        self._asked = asked
        self._text = text
        self._progress = progress

    async def let_be(self, server: Server) -> LetBeReport:
        report = LetBeReport()
        await read_metrics(server.port, ())
        report.before = resident_kb(server.program.pid)
        async with self._clients(server) as (readers, stalled):
            report.opened = resident_kb(server.program.pid)
            await self._watch(server, readers, report)
            await self._terminate(server, report)
            await _see_ends(stalled, report.ends)
        report.readers.note(readers)
        return report

    async def cut(self, server: Server) -> BoundReport:
        report = BoundReport()
        async with self._clients(server) as (readers, _):
            started = time.monotonic()

            async def only_readers_run() -> bool:
                figures = await read_metrics(server.port, [_RUNNING])
                return figures[_RUNNING] <= len(readers)

            cut = await until(only_readers_run, _PATIENCE_S, every=_LOOK_AGAIN_S)
            # All have the same number of steps: what is whole was not cut.
            if cut and not any(one.finish for one in readers):
                report.cut_s = time.monotonic() - started
            self._progress(f"who reads nothing was cut within {report.cut_s:.1f} s")
        report.readers.note(readers)
        return report

    @asynccontextmanager
    async def _clients(
        self, server: Server
    ) -> AsyncIterator[tuple[list[Reader], list[StalledClient]]]:
        """All of them, from the moment at which the engine has all their requests. Readers end with the block."""
        asked, port = self._asked, server.port
        readers = [Reader(_TOKEN_IDS, self._text) for _ in range(asked.readers)]
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(_read, reader, port, asked.steps)
            opening = [open_stalled(port, asked.steps) for _ in range(asked.stalled)]
            stalled = [await stack.enter_async_context(one) for one in opening]

            async def all_run() -> bool:
                figures = await read_metrics(port, [_RUNNING])
                return figures[_RUNNING] == asked.readers + asked.stalled

            if not await until(all_run, _PATIENCE_S, every=_LOOK_AGAIN_S):
                raise TriolegError("not all requests reached the engine of the server under test")
            yield readers, stalled
            nursery.cancel_scope.cancel(reason="the readers have seen what there is")

    async def _watch(self, server: Server, readers: list[Reader], report: LetBeReport) -> None:
        """Look at the memory until all has been sent, or the time is up."""
        started = time.monotonic()
        while True:
            figures = await read_metrics(server.port, _UNREAD)
            seconds = time.monotonic() - started
            tokens = min((one.num_tokens for one in readers), default=0)
            kilobytes = resident_kb(server.program.pid)
            requests, unread = (int(figures[name]) for name in _UNREAD)
            report.memory.append((round(seconds, 1), tokens, kilobytes, requests, unread))
            self._progress(f"{tokens} tokens, {kilobytes} KB, {unread} bytes unread")
            if seconds >= self._asked.time_limit or all(one.finish for one in readers):
                return
            await trio.sleep(_SAMPLE_S)

    async def _terminate(self, server: Server, report: LetBeReport) -> None:
        os.kill(server.program.pid, signal.SIGTERM)
        at = time.monotonic()
        with trio.move_on_after(_PATIENCE_S):
            report.exit = await server.program.wait()
            report.exit_s = time.monotonic() - at


async def _read(reader: Reader, port: int, max_tokens: int) -> None:
    try:
        await reader.run(port, max_tokens)
    except (OSError, h11.RemoteProtocolError) as error:
        reader.fault = f"its connection broke: {error}"


async def _see_ends(stalled: list[StalledClient], ends: Counter[str]) -> None:
    async def see(one: StalledClient) -> None:
        ends[await one.see_end()] += 1

    with trio.move_on_after(_PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for one in stalled:
                nursery.start_soon(see, one)
