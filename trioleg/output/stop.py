"""Stop strings: where the text ends, and how much of it must wait.

Pure. A ``StopChecker`` sees the text of one request grow token by token and answers two questions:
has a stop string been completed, and how many characters at the end could still become one.

The stop string that is completed first wins; of two completed by the same character, the one that
stands first in the request's list. Only the end of what is already known has to be searched again:
a match that ends in the new text starts at most ``len(stop) - 1`` characters before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling_params import StopHoldBack

__all__ = ["StopChecker", "StopMatch"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``start`` and ``end`` are offsets into the text that was searched."""

    stop: str
    start: int
    end: int


class StopChecker:
    """The stop strings of one request; keeps no text of its own."""

    def __init__(self, stop: Sequence[str], hold_back: StopHoldBack) -> None:
        self._stop = tuple(stop)
        self._fixed = hold_back is StopHoldBack.FIXED
        # The longest text that is not yet a stop string but may become one.
        self.reach = max((len(one) for one in self._stop), default=1) - 1

    def find(self, text: str, new: int) -> StopMatch | None:
        """The first stop string that ends within the last ``new`` characters of ``text``."""
        known = len(text) - new
        found: StopMatch | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (found is None or start + len(stop) < found.end):
                found = StopMatch(stop, start, start + len(stop))
        return found

    def held_back(self, text: str) -> int:
        """How many characters at the end of ``text`` have to wait for what comes next."""
        if self._fixed:
            return min(self.reach, len(text))
        for length in range(min(self.reach, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
