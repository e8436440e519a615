"""``Entrance``: whether a request may come in at this moment, and to which engine it goes.

It may not while there is no engine, while there are too many (``admission.py``), and once the LLM is being taken
down. That has two steps: after ``drain`` new requests are refused, and those that had come in go on; after ``shut``
those that have not been sent are refused, too. Whoever is refused is counted here, and never began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from ..config import LLMConfig
from ..errors import EngineDeadError, EngineUnavailableError, ServerShutdown
from .admission import Admission
from .engine_link import EngineLink
from .health import Health, LLMState
from .supervisor import Supervisor

__all__ = ["Entrance"]


class Entrance:
    """``turned_away``: requests that never began, since no engine took them, by the LLM's state at that moment; only
    counted, since in an outage there are many. ``admission``: the places, and who holds them."""

    def __init__(self, supervisor: Supervisor, config: LLMConfig) -> None:
        self.turned_away: Counter[LLMState] = Counter()
        self._supervisor = supervisor
        self._is_fcfs = config.engine.scheduling_policy == "fcfs"
        self.admission = Admission(
            config.max_inflight_requests, config.max_queued_prompt_tokens, self._engine_load
        )
        # Why new requests are refused; and why all that have not been sent are.
        self._drained: str | None = None
        self.closed: str | None = None
        # What a drain cancels: see ``until_drain``.
        self._before_drain: set[trio.CancelScope] = set()

    @property
    def health(self) -> Health:
        """Whether requests are taken at this moment, and why not."""
        if self._drained is not None and self._supervisor.cause_of_death is None:
            return Health(LLMState.DRAINING, self._drained)
        return self._supervisor.health

    def link(self) -> EngineLink:
        """For a request that comes now. Raises ``ServerShutdown``, ``EngineDeadError``, ``EngineUnavailableError``."""
        with self.turning_away():
            self._refuse_if_draining()
            return self._supervisor.ready_link()

    def link_of_the_admitted(self) -> EngineLink:
        """As ``link``, for one that has come in already; not counted."""
        if self.closed is not None:
            raise ServerShutdown(self.closed)
        return self._supervisor.ready_link()

    def check_room(self) -> None:
        """See ``LLM.check_room``."""
        with self.turning_away():
            self._refuse_if_draining()
        self.admission.check_room()

    @contextmanager
    def until_drain(self) -> Iterator[None]:
        """See ``LLM.until_drain``."""
        with trio.CancelScope() as scope:
            self._before_drain.add(scope)
            try:
                yield
            finally:
                self._before_drain.remove(scope)
        if scope.cancelled_caught:
            with self.turning_away():
                self._refuse_if_draining()

    @contextmanager
    def turning_away(self) -> Iterator[None]:
        """Count a request that no engine takes at the moment."""
        try:
            yield
        except (EngineUnavailableError, EngineDeadError, ServerShutdown):
            self.turned_away[self.health.state] += 1
            raise

    def drain(self, cause: str) -> None:
        """Synchronous, idempotent; the first cause counts."""
        self._drained = self._drained or cause
        for scope in self._before_drain:
            scope.cancel(reason=cause)
        self._supervisor.note_change()

    def shut(self, cause: str) -> None:
        """Synchronous, idempotent; the first cause counts."""
        self.drain(cause)
        self.closed = self.closed or cause

    def _refuse_if_draining(self) -> None:
        if self._drained is not None:
            raise ServerShutdown(self._drained)

    def _engine_load(self) -> tuple[int, int]:
        """Of requests that run and wait, by the engine's last word; nothing is known of an order by priority."""
        link = self._supervisor.link
        return link.load if link is not None and self._is_fcfs else (0, 0)
