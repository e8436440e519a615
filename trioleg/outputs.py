"""What a reader of a stream gets: ``RequestOutput``, and ``Ending``, why a request ended.

Rules of this file: plain data, imported by every layer above, importing only ``errors``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .errors import (
    EngineDeadError,
    OutputError,
    ReaderTooSlow,
    RequestAborted,
    RequestEnded,
    ServerShutdown,
)

__all__ = ["CompletionOutput", "Ending", "EndingKind", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request: a delta or the whole, as the request's output kind says.

    ``finish_reason`` is None until the choice is finished, then "stop", "length", "abort" or
    "repetition". ``stop_reason`` is the matched stop string or the id of the stop token, None for the
    end-of-sequence token and for every other reason. ``token_ids`` counts every token that the
    engine sampled, those included whose text is hidden (stop tokens) or held back.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What has come for one request since the last read (or in all, by output kind)."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # Tokens of the prompt that came from the engine's prefix cache; None until known.
    num_cached_tokens: int | None = None


class EndingKind(enum.StrEnum):
    """The ways a request can end; the values are the metrics' ``reason`` labels."""

    STOP = "stop"  # a stop token or the end-of-sequence token
    STOP_STRING = "stop_string"
    LENGTH = "length"
    REPETITION = "repetition"
    LEFT = "left"  # the reader left: a disconnect, a cancel, or leaving the block early
    ABORTED = "aborted"  # by somebody else: the engine's own shutdown, or an operator
    ENGINE_DEAD = "engine_dead"
    OUTPUT_ERROR = "output_error"
    READER_TOO_SLOW = "reader_too_slow"
    SHUTDOWN = "shutdown"


_ERRORS: dict[EndingKind, type[RequestEnded]] = {
    EndingKind.ABORTED: RequestAborted,
    EndingKind.ENGINE_DEAD: EngineDeadError,
    EndingKind.OUTPUT_ERROR: OutputError,
    EndingKind.READER_TOO_SLOW: ReaderTooSlow,
    EndingKind.SHUTDOWN: ServerShutdown,
}

# After these the engine has nothing left of the request, so there is nothing to abort.
_ENGINE_IS_DONE = frozenset(
    {EndingKind.STOP, EndingKind.LENGTH, EndingKind.REPETITION, EndingKind.ENGINE_DEAD}
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended: decided once, by whoever came first (``RequestStream.end``).

    ``cause`` is a sentence for people; ``engine`` the rank that had the request, where known.
    ``engine_finished`` says that the engine itself reported the request's end, so that no ABORT is due.
    """

    kind: EndingKind
    cause: str = ""
    engine: int | None = None
    engine_finished: bool = field(default=False)

    @property
    def needs_abort(self) -> bool:
        """True if the engine may still have the request."""
        return not (self.engine_finished or self.kind in _ENGINE_IS_DONE)

    def error(self) -> RequestEnded | None:
        """A fresh exception for the reader; None after an ending that is not an error.

        ``LEFT`` makes none either: the reader is the one who left.
        """
        error = _ERRORS.get(self.kind)
        return None if error is None else error(self.cause or self.kind.value)
