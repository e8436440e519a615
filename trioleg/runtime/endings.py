"""``Endings``: every request's end, counted by its kind and told in one line of the log."""

from __future__ import annotations

import logging
from collections import Counter

import trio

from ..outputs import Ending, EndingKind
from .arrival import Arrival

__all__ = ["Endings", "one_line"]

_log = logging.getLogger("trioleg.requests")


class Endings:
    """``counts``: requests that have ended, by kind."""

    def __init__(self) -> None:
        self.counts: Counter[EndingKind] = Counter()

    def note(
        self, request_id: str, ending: Ending, arrival: Arrival, num_output_tokens: int = 0
    ) -> None:
        """Once for each request. Synchronous."""
        self.counts[ending.kind] += 1
        _log.info(
            "request %s%s ended: %s%s, %d tokens, %.3f s",
            request_id,
            "" if arrival.external_req_id is None else f" ({arrival.external_req_id!r})",
            ending.kind,
            f" ({one_line(ending.cause)})" if ending.cause else "",
            num_output_tokens,
            trio.current_time() - arrival.at,
        )


def one_line(cause: str) -> str:
    """A cause may be a client's stop string, or an engine's traceback: neither may write lines of its own."""
    return cause if cause.isprintable() else repr(cause)
