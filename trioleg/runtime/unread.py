"""``Unread``: what the readers of all requests together have left unread.

Each mailbox has a bound of its own, and a hundred readers that stay below it can still use up the memory. So they
have one together, beyond which the reader that is furthest behind is ended, until the rest fits.

Rules of this file: a token costs nothing here. A mailbox counts only from 64 KiB on, which no
reader that keeps up ever has; so none of these is ended for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..outputs import Ending, EndingKind
from .request_stream import RequestStream

__all__ = ["Unread"]


class Unread:
    """``num_bytes``: of the mailboxes that count, whether their requests have ended or not."""

    __slots__ = ("_max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def relieve(self, streams: Iterable[RequestStream]) -> None:
        """If there is too much, end the streams that are furthest behind. What is only left of finished requests
        cannot be ended here: it goes when it is read, or when its reader leaves or is cut. Never raises."""
        if self.num_bytes <= self._max_bytes:
            return
        behind = [one for one in streams if one.mailbox.num_counted]
        behind.sort(key=lambda one: one.mailbox.num_bytes)
        while behind and self.num_bytes > self._max_bytes:
            furthest = behind.pop()
            cause = (
                f"the readers of all requests have left {self.num_bytes} bytes unread, and this one the most; "
                f"allowed: {self._max_bytes} (unread_max_bytes)"
            )
            furthest.end(Ending(EndingKind.READER_TOO_SLOW, cause))
            # Its reader has been told, and takes what is left; until then nobody else ends for it.
            furthest.mailbox.stop_counting()
