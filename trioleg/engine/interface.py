"""``Core``: what the process shell needs of an engine, torch or scripted.

Rules of this file: types only. A core is synchronous and knows no Trio, no sockets and no threads:
the shell calls every method of it from one thread, never two at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..messages import EngineCoreOutputs, EngineCoreRequest, EngineReadyResponse

__all__ = ["Core"]


class Core(Protocol):
    """An engine that goes in steps. Whatever it raises ends it, but for the two cases named below."""

    ready: EngineReadyResponse

    def add_request(self, request: EngineCoreRequest) -> None:
        """Takes a request. One that it cannot serve is answered with ERROR by the next ``step``, or
        raises ``InvalidRequestError``, whose message the shell then answers with."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Drops requests; nothing more is said of them. Unknown ids are no error."""
        ...

    def abort_client(self, client_index: int) -> None:
        """Drops all requests of one client, which has stopped taking its outputs."""
        ...

    def finish_all(self, stop_reason: str | None = None) -> None:
        """Ends every request with ABORT and no tokens; the next ``step`` reports it."""
        ...

    def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        """One named call, answered with a plain value, or with a ``concurrent.futures.Future`` that a later
        step completes. What it (or the future) raises is the call's failure."""
        ...

    def wait_s(self) -> float | None:
        """Seconds until ``step`` has something to do: 0 now, None not before the next call."""
        ...

    def step(self) -> dict[int, EngineCoreOutputs]:
        """One step: what it made, by client_index. The shell stamps engine_index."""
        ...

    def close(self) -> None:
        """Frees what the core holds. The last call."""
        ...
