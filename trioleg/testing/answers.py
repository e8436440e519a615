"""``Answer``: what one request gets, in words that a test's author would use.

Rules of this file: plain data and no runtime. An answer is checked when it is made, so that a mistake shows in
the test's own line, and becomes a ``Script`` when a request comes.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ..engine.script import Fault, Script
from .tokenizer import END_ID

__all__ = ["Answer", "AnswerOptions", "Content"]

Content = str | bytes | Iterable[str | bytes]


class AnswerOptions(TypedDict, total=False):
    """How an answer is said: see ``Answer``."""

    finish_reason: Literal["stop", "length"]
    first_token_delay: float
    interval: float
    stall_after: int | None
    stall: float
    die_after: int | None
    error_after: int | None


_OPTIONS = tuple(AnswerOptions.__annotations__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """``pieces`` are said one a step; bytes may be a part of a character. Durations are seconds.

    ``finish_reason``: "stop", or "length". ``first_token_delay``: before the first piece; ``interval``: between
    two. ``stall_after``: behind so many pieces the engine is silent for ``stall``. ``die_after``: behind so many
    the engine dies, and all other requests with it; ``error_after``: this request alone fails; one of the
    two. 0 is before the first. Raises ``ValueError`` with the name, the value and what is allowed.
    """

    pieces: tuple[bytes, ...]
    finish_reason: Literal["stop", "length"] = "stop"
    first_token_delay: float = 0.0
    interval: float = 0.0
    stall_after: int | None = None
    stall: float = math.inf
    die_after: int | None = None
    error_after: int | None = None

    def __post_init__(self) -> None:
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(
                f'finish_reason is {self.finish_reason!r}; allowed: "stop" and "length"'
            )
        if not self.pieces and self.finish_reason == "length":
            raise ValueError('pieces are []; allowed with finish_reason "length": at least one')
        for name in ("first_token_delay", "interval", "stall"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} is {seconds!r}; allowed: 0 seconds or more")
        most = len(self.pieces)
        for name in ("stall_after", "die_after", "error_after"):
            after = getattr(self, name)
            if after is not None and not (isinstance(after, int) and 0 <= after <= most):
                raise ValueError(f"{name} is {after!r}; allowed: 0 to {most}, the number of pieces")
        self._check_together()

    def _check_together(self) -> None:
        if self.stall_after is None and self.stall != math.inf:
            raise ValueError(
                f"stall is {self.stall} without stall_after; allowed: stall_after=k, stall={self.stall}"
            )
        if self.die_after is not None and self.error_after is not None:
            raise ValueError(
                f"die_after is {self.die_after} and error_after {self.error_after}; allowed: one of them"
            )

    @classmethod
    def of(cls, content: Content, options: AnswerOptions) -> Answer:
        """A text is said word by word; a list as it is."""
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ValueError(f"{name}={value!r} is no option; allowed: {', '.join(_OPTIONS)}")
        encoded = (one.encode() if isinstance(one, str) else one for one in _pieces(content))
        return cls(pieces=tuple(encoded), **options)

    def __str__(self) -> str:
        return reprlib.repr(b"".join(self.pieces).decode(errors="replace"))

    def script(self, max_model_len: int) -> Script:
        """The same for the engine: a byte is a token."""
        steps = [list(piece) for piece in self.pieces]
        if len(steps) in (self.stall_after, self.die_after, self.error_after):
            steps.append([])  # the end is a step of its own
        if self.finish_reason == "stop":
            steps[-1:] = [[*(steps[-1] if steps else []), END_ID]]
        return Script(
            steps=steps,
            finish=self.finish_reason,
            first_token_delay_s=self.first_token_delay + self._stall_behind(0),
            delays_s={
                place: self.interval + self._stall_behind(place) for place in range(1, len(steps))
            },
            faults=self._faults(),
            max_model_len=max_model_len,
            takes_constraints=True,
        )

    def _stall_behind(self, place: int) -> float:
        return self.stall if place == self.stall_after else 0.0

    def _faults(self) -> list[Fault]:
        faults = []
        if self.die_after is not None:
            faults.append(Fault(after_steps=self.die_after, how="raise"))
        if self.error_after is not None:
            faults.append(Fault(after_steps=self.error_after, how="error"))
        return faults


def _pieces(content: Content) -> list[str | bytes]:
    if isinstance(content, str):
        return re.findall(r"\s*\S+(?:\s+\Z)?|\s+", content)
    # A dict's keys, say, are not meant: it is one piece, and a wrong one.
    is_list = isinstance(content, Iterable) and not isinstance(content, bytes | Mapping)
    pieces: list[Any] = list(content) if is_list else [content]
    for piece in pieces:
        if not (isinstance(piece, str | bytes) and piece):
            raise ValueError(
                f"content has {piece!r} in it; allowed: a text, bytes, or a list of these, none empty"
            )
    return pieces
