"""A run of the bench of the leg: streams are opened, run, paused and ended, and nothing of them may be lost.

What a subject merges is no loss, but no frame either: of what came, frames and tokens are compared.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from ..errors import TriolegError
from ..ipc.launch import private_ipc_dir
from ..output.decoders import FastDecoder
from . import leg_client
from .leg_control import Remote, open_remote
from .leg_subjects import Leg, Subject
from .processes import resident_mb, running

__all__ = ["Burst", "Ended", "Run", "Window", "leg_token_ids", "open_clients"]

# A whole sentence with characters of one to four bytes, some of which are several tokens.
TEXT = "The quick brown fox 🦊 jumps over the lazy dog 🐶, then naps in Zürich — 東京 can wait. "
# Until all streams run as they will: caches, buffers, the allocator.
_WARM_UP_S = 1.0
# What may still come behind a pause of the engine.
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Window:
    """Of a stretch of time with all streams running. ``processor_s``: the server's, user and system; ``gap_p50``,
    ``gap_p99``: seconds beyond the step."""

    frames: int
    seconds: float
    processor_s: float
    gap_p50: float
    gap_p99: float

    @property
    def cost_us(self) -> float:
        """Microseconds of the processor for each frame; tokens that came merged are one."""
        return self.processor_s / self.frames * 1e6


@dataclass(frozen=True, slots=True)
class Ended:
    """``frames_of_tokens``: the share of the tokens that came in a frame of their own; ``late_steps``: the share of
    the engine's steps that were late, and ``worst_late_s`` by how much the worst was."""

    frames_of_tokens: float
    late_steps: float
    worst_late_s: float


@dataclass(frozen=True, slots=True)
class Burst:
    """So many tokens, in so many frames, within so many seconds from the first to the last."""

    tokens: int
    frames: int
    seconds: float


class Run:
    """Streams of one subject. One at a time, since all have the same clients."""

    def __init__(self, subject: Subject, clients: Remote, leg: Leg) -> None:
        self._subject = subject
        self._clients = clients
        self._leg = leg
        self._count = 0

    async def open(self, count: int) -> tuple[float, float]:
        """So many streams more, which have their first token and wait for more; median and p99 of the seconds until
        the first frame."""
        opened = await self._clients.tell("open", port=self._subject.port, count=count)
        self._count += count
        return opened["first_p50"], opened["first_p99"]

    async def window(self, rate: float, seconds: float, after: float = _WARM_UP_S) -> Window:
        """Set the streams going, ``rate`` steps a second; ``after`` so many seconds measure, then pause."""
        await self._subject.engine.tell("pace", rate=rate)
        figures = await self._clients.tell(
            "window",
            after=after,
            seconds=seconds,
            pid=self._subject.program.pid,
            step=1 / rate,
        )
        await self._pause()
        return Window(**figures)

    async def burst(self, rate: float, steps: int) -> Burst:
        """Exactly so many steps, and wait until the last of it is here."""
        await self._pause()
        started = time.monotonic()
        await self._subject.engine.tell("pace", rate=rate, limit=steps)
        within = steps / rate + _DRAIN_S
        drained = await self._clients.tell("drain", within=within)
        return Burst(steps * self._count, drained["frames"], drained["last"] - started)

    async def _pause(self) -> None:
        await self._subject.engine.tell("pace", rate=0)
        await self._clients.tell("drain", within=_DRAIN_S)

    async def length(self) -> int:
        """Tokens that each stream has had, if all were opened at once."""
        counted = await self._subject.engine.tell("count")
        return int(counted["tokens"] // self._count)

    def memory_mb(self) -> float:
        """The server's, resident, now."""
        return resident_mb(self._subject.program.pid)

    async def finish(self) -> Ended:
        """Have all streams end. ``TriolegError`` if a stream did not end in order, or its text is not what was
        sent."""
        counted = await self._subject.engine.tell("finish")
        closed = await self._clients.tell("close")
        each, rest = divmod(counted["tokens"], self._count)
        expected = set(map(leg_client.text_digest, _texts(self._leg, each)))
        if rest or not expected.issuperset(closed["texts"]):
            raise TriolegError(
                f"{self._subject.name}: the text of a stream of {each} tokens is not what was sent"
            )
        return Ended(
            frames_of_tokens=closed["frames"] / counted["tokens"],
            late_steps=counted["late"] / max(1, counted["steps"]),
            worst_late_s=counted["worst_late_s"],
        )


@functools.cache
def _tokenizer(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def leg_token_ids(directory: Path) -> tuple[int, ...]:
    """What every stream says, over and over."""
    return tuple(_tokenizer(directory).encode(TEXT, add_special_tokens=False).ids)


def _texts(leg: Leg, count: int) -> set[str]:
    """What ``count`` tokens may say: if the end cuts a character, what its tokens hold before that may be told."""
    tokenizer, ids = _tokenizer(leg.directory), leg.token_ids
    said = [ids[place % len(ids)] for place in range(count)]
    decoder = FastDecoder(tokenizer, skip_special_tokens=True)
    stepwise = "".join(decoder.step(one) or "" for one in said)
    return {stepwise, tokenizer.decode(said).rstrip("\ufffd")}


@asynccontextmanager
async def open_clients(leg: Leg) -> AsyncIterator[Remote]:
    """The clients' program, for one run at a time."""
    with private_ipc_dir() as folder:
        control = folder / "clients"
        async with running("-m", "trioleg.bench.leg_client", str(control)) as program:
            await program.wait_for(re.compile(leg_client.LISTENING))
            leg.pin_other(program.pid)
            async with open_remote(control) as clients:
                yield clients
