"""``SeldomLog``: warnings about what comes from outside, a few at once and then seldom, however much comes.

Rules of this file: knows Trio's clock. It repeats what it is given: who quotes a stranger makes that fit for a line
(``versions.shown``).
"""

from __future__ import annotations

import logging
import math

import trio

__all__ = ["SeldomLog"]

# A peer that is refused tries again ten times a second, and there may be many; but a few that are refused for
# different reasons are each of interest.
_LOG_INTERVAL_S = 10.0
_LINES_AT_ONCE = 5


class SeldomLog:
    """``logger``: where to. ``what``: what the lines that are left out are counted as."""

    def __init__(self, logger: logging.Logger, what: str = "more") -> None:
        self._logger = logger
        self._what = what
        self._began = dict[str, float]()
        self._said = dict[str, int]()
        self._unsaid = dict[str, int]()

    def warn(self, leg: str, line: str) -> None:
        """Log it, or count it if there were five lines of this leg in the last ten seconds."""
        now = trio.current_time()
        if now >= self._began.get(leg, -math.inf) + _LOG_INTERVAL_S:
            self._began[leg], self._said[leg] = now, 0
        if self._said[leg] == _LINES_AT_ONCE:
            self._unsaid[leg] = self._unsaid.get(leg, 0) + 1
            return
        self._said[leg] += 1
        more = self._unsaid.pop(leg, 0)
        before = f" ({more} {self._what} since the last such line)" if more else ""
        self._logger.warning("%s leg: %s%s", leg, line, before)
