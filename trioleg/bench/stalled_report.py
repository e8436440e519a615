"""What ``trioleg bench stalled`` is asked for, what came of it, what must not be, and how it is shown."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from ..config import ServerConfig
from .measurement import percentile
from .stalled_client import Reader

__all__ = [
    "DRAIN_S",
    "WRITE_BOUND_S",
    "BoundReport",
    "LetBeReport",
    "Readers",
    "Stalled",
    "show_stalled",
]

DRAIN_S = 2.0
WRITE_BOUND_S = 3.0
# What an exit may take behind its two bounds, drain and grace: processes end.
_MARGIN_S = 1.0
_ENDED_WELL = "it exited with status 0"


@dataclass(frozen=True, slots=True)
class Stalled:
    """What to do: ``stalled`` clients that never read beside ``readers``, for ``steps`` steps of the engine
    (``step_interval`` seconds apart) or ``time_limit`` seconds."""

    stalled: int = 200
    readers: int = 10
    steps: int = 100_000
    step_interval: float = 0.02
    time_limit: float = 120.0


@dataclass(slots=True)
class Readers:
    """``tokens``: the fewest that one of them has had; ``gaps_ms``: median, p99 and worst, between two pieces."""

    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    gaps_ms: tuple[float, float, float] | None = None

    def note(self, readers: Sequence[Reader]) -> None:
        self.tokens = min((one.num_tokens for one in readers), default=0)
        self.faults += [one.fault for one in readers if one.fault]
        gaps = [1000 * gap for one in readers for gap in one.gaps]
        if gaps:
            self.gaps_ms = (statistics.median(gaps), percentile(gaps, 0.99), max(gaps))


@dataclass(slots=True)
class LetBeReport:
    """The server that lets them be. ``before``: KB of the front end without a stream; ``opened``: with all of them,
    at their beginning; ``memory``: (seconds, tokens that a reader has had, KB, requests with unread output, bytes
    in that); ``exit``: how it ended after SIGTERM, ``exit_s``: when; ``ends``: of the stalled connections."""

    readers: Readers = field(default_factory=Readers)
    before: int = 0
    opened: int = 0
    memory: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    exit: str = "it did not end"
    exit_s: float = math.inf
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def allowed_s(self) -> float:
        return DRAIN_S + ServerConfig().graceful_timeout + _MARGIN_S

    def faults(self, asked: Stalled) -> list[str]:
        """What must not be, a sentence each."""
        faults = [f"a reader: {fault}" for fault in self.readers.faults]
        if self.exit != _ENDED_WELL:
            faults.append(f"after SIGTERM: {self.exit}")
        if self.exit_s > self.allowed_s:
            faults.append(f"SIGTERM took {self.exit_s:.1f} s; allowed: {self.allowed_s:g}")
        if self.ends != Counter(FIN=asked.stalled):
            faults.append(f"the ends of {asked.stalled} stalled connections: {dict(self.ends)}")
        return faults


@dataclass(slots=True)
class BoundReport:
    """The server with a write bound. ``cut_s``: from the first moment with all requests in the engine until only
    the readers' were left; infinite if that did not come."""

    readers: Readers = field(default_factory=Readers)
    cut_s: float = math.inf

    def faults(self) -> list[str]:
        """What must not be, a sentence each."""
        faults = [f"a reader beside clients that are cut: {fault}" for fault in self.readers.faults]
        if self.cut_s == math.inf:
            faults.append(
                f"who reads nothing was not cut, with a write bound of {WRITE_BOUND_S:g} s"
            )
        return faults


def show_stalled(asked: Stalled, let_be: LetBeReport, bound: BoundReport, console: Console) -> None:
    """Print it, for people."""
    columns = ("seconds", "tokens", "front end KB", "KB a stalled stream", "unread", "bytes each")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for seconds, tokens, kilobytes, requests, unread in let_be.memory:
        grown = (kilobytes - let_be.before) / max(asked.stalled, 1)
        each = unread / max(requests, 1)
        figures = (seconds, tokens, kilobytes, f"{grown:.1f}", requests, f"{each:.0f}")
        table.add_row(*map(str, figures))
    console.print(table)
    ends = ", ".join(f"{count} {end}" for end, count in let_be.ends.items())
    for line in (
        f"front end: {let_be.before} KB before the first stream, {let_be.opened} KB with all of them",
        f"readers beside {asked.stalled} stalled streams: {_shown(let_be.readers)}",
        f"SIGTERM: {let_be.exit} after {let_be.exit_s:.2f} s (allowed: {let_be.allowed_s:g})",
        f"ends of the stalled connections: {ends}",
        f"with a write bound of {WRITE_BOUND_S:g} s: all cut after {bound.cut_s:.1f} s",
        f"readers beside them: {_shown(bound.readers)}",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _shown(readers: Readers) -> str:
    exact = "; ".join(readers.faults) or "each of them exact"
    if readers.gaps_ms is None:
        return f"{readers.tokens} tokens at least, {exact}"
    median, p99, worst = readers.gaps_ms
    gaps = f"gaps of {median:.1f} ms, p99 {p99:.1f}, worst {worst:.1f}"
    return f"{readers.tokens} tokens at least, {exact}; {gaps}"
