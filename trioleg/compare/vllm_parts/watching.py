"""What the probe can tell of vLLM: its loop's tasks, and the requests that its output processor holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..inside.asyncio_watch import AsyncioWatch
from ..inside.lanes import Lanes
from ..inside.probe import Probe
from ..programs.arguments import Arguments

__all__ = ["Watching"]


class Watching:
    """Listens at the probe's socket from now on. Raises ``OSError``."""

    def __init__(self, arguments: Arguments) -> None:
        self._probe = Probe(arguments.probe)
        self._lanes = None if arguments.lanes is None else Lanes(arguments.lanes)
        self._front_end: Any = None
        self._watch: AsyncioWatch | None = None

    def take_front_end(self, async_llm: Any) -> None:
        """It is there: its requests count from now on."""
        self._front_end = async_llm

    @contextmanager
    def loop(self) -> Iterator[None]:
        """For the length of the running loop: before vLLM has made a task, so that every one has its lane."""
        self._watch = watch = AsyncioWatch(self._count_requests, self._lanes)
        self._probe.attach(
            asyncio.get_running_loop().call_soon_threadsafe,
            watch.census,
            None if self._lanes is None else watch.write_lanes,
            watch.steps,
        )
        try:
            yield
        finally:
            if self._lanes is not None:
                watch.write_lanes()

    def census(self) -> dict[str, Any]:
        """As the probe has it; for the loop's own thread."""
        assert self._watch is not None, "the loop is watched"
        return self._watch.census()

    def _count_requests(self) -> int:
        llm = self._front_end
        return 0 if llm is None else len(llm.output_processor.request_states)
