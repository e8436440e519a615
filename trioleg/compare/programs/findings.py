"""What a consumer of the library tells of itself: one line of JSON. Standard library alone: vLLM's interpreter reads it
too."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Findings"]


class Findings:
    """``cause_at``: when the consumer did what it is about, by the monotonic clock. ``remark``: for whoever reads what
    came of it."""

    def __init__(self) -> None:
        self.cause_at: float | None = None
        self.remark = ""
        self._error: BaseException | None = None

    def note_cause(self) -> None:
        """It happens now. Of several the first counts."""
        if self.cause_at is None:
            self.cause_at = time.monotonic()

    def note_error(self, error: BaseException) -> None:
        """What has left the consumer."""
        self._error = error

    def tell(self, census: Mapping[str, Any]) -> None:
        """Print them. ``others``: errors that came out within the error, or as its context."""
        error = self._error
        line = {
            "cause_at": self.cause_at,
            "error": _shown(error),
            "cause": _shown(None if error is None else error.__cause__),
            "others": [] if error is None else [_shown(one) for one in _within(error)],
            "census": census,
            "remark": self.remark,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _shown(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _within(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield member
            yield from _within(member)
    if error.__context__ is not None and error.__context__ is not error.__cause__:
        yield error.__context__
        yield from _within(error.__context__)
