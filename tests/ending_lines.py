"""The log's line about each ending, taken apart, so that a test can hold it against what the reader saw."""

from __future__ import annotations

import logging
import re

__all__ = ["EndingLines"]

_LINE = re.compile(r"request (\S+)(?: \('.*'\))? ended: (\w+)(?: \(.*\))?, (\d+) tokens, [\d.]+ s")


class EndingLines(logging.Handler):
    """``lines`` are those of ``trioleg.requests`` so far: (request id, kind, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        match = _LINE.fullmatch(record.getMessage())
        assert match, record.getMessage()
        self.lines.append((match[1], match[2], int(match[3])))
