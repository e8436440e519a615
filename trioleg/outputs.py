"""What a reader of a stream gets: ``RequestOutput``, and ``Ending``, why a request ended.

Rules of this file: plain data, imported by every layer above, importing only ``errors``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from .errors import (
    DeadlineExceeded,
    EngineDeadError,
    InvalidRequestError,
    OutputError,
    ReaderTooSlow,
    RequestAborted,
    RequestEnded,
    RequestRefused,
    ServerShutdown,
)

__all__ = [
    "CompletionOutput",
    "Ending",
    "EndingKind",
    "Logprob",
    "LogprobsOfToken",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable one token was at one place.

    ``logprob``: natural logarithm, -inf for a token that was ruled out, never NaN. ``rank``: from 1;
    None where the engine does not say. ``token_bytes``: what the token stands for, which may be a
    part of a character only; ``decoded_token``: the same as text, where bytes that are no character
    by themselves are spelled ``\\xf0``.
    """

    logprob: float
    rank: int | None
    decoded_token: str
    token_bytes: bytes


# By token id: the chosen token first, then the most probable others.
LogprobsOfToken: TypeAlias = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request: a delta or the whole, as the request's output kind says.

    ``finish_reason`` is None until the choice is finished, then "stop", "length", "abort" or
    "repetition". ``stop_reason`` is the matched stop string or the id of the stop token, None for the
    end-of-sequence token and for every other reason. ``token_ids`` counts every token that the
    engine sampled, those included whose text is hidden (stop tokens) or held back. ``logprobs``, if
    asked for, has one entry for each of them; ``cumulative_logprob`` is the sum over all tokens of the
    choice so far, whatever the output kind.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsOfToken] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time of a finished request went, in seconds; None where it cannot be known.

    ``queue`` and ``prefill`` are by the engine's clock (queued to scheduled, scheduled to the first
    token), ``time_to_first_token`` and ``end_to_end`` by ours, from the request's arrival;
    ``inter_token`` is the mean between the first and the last token, by the engine's clock.
    For n > 1, of the choice that finished last.
    """

    queue: float | None
    prefill: float | None
    time_to_first_token: float | None
    inter_token: float | None
    end_to_end: float | None


@dataclass(slots=True)
class RequestOutput:
    """What has come for one request since the last read (or in all, by output kind).

    ``prompt_logprobs``, if asked for, come once, with the first output (and with each one that is
    cumulative or final): an entry for each token of the prompt, None for the first, which nothing
    predicts. ``metrics`` come with the last output.

    ``error`` is only set in batch use (``trioleg.offline``), where a request that fails must not raise
    into its neighbours' results: then there are no ``outputs``. A stream raises it.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    # Tokens of the prompt that came from the engine's prefix cache; None until known.
    num_cached_tokens: int | None = None
    prompt_logprobs: list[LogprobsOfToken | None] | None = None
    metrics: RequestMetrics | None = None
    error: InvalidRequestError | RequestEnded | None = None


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What a pooling model made of a prompt: ``data`` in C order, in the form ``shape``."""

    data: list[float]
    shape: tuple[int, ...]


@dataclass(slots=True)
class PoolingRequestOutput:
    """The one output of a pooling request."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None


class EndingKind(enum.StrEnum):
    """The ways a request can end; the values are the metrics' ``reason`` labels."""

    STOP = "stop"  # a stop token or the end-of-sequence token
    STOP_STRING = "stop_string"
    LENGTH = "length"
    REPETITION = "repetition"
    LEFT = "left"  # the reader left: a disconnect, a cancel, or leaving the block early
    ABORTED = "aborted"  # by somebody else: an operator, by id, or the engine's own shutdown
    DEADLINE = "deadline"
    ENGINE_DEAD = "engine_dead"
    OUTPUT_ERROR = "output_error"
    REFUSED = "refused"  # by the engine, since it cannot be served as it was asked for
    READER_TOO_SLOW = "reader_too_slow"
    SHUTDOWN = "shutdown"


_ERRORS: dict[EndingKind, type[RequestEnded]] = {
    EndingKind.ABORTED: RequestAborted,
    EndingKind.DEADLINE: DeadlineExceeded,
    EndingKind.ENGINE_DEAD: EngineDeadError,
    EndingKind.OUTPUT_ERROR: OutputError,
    EndingKind.READER_TOO_SLOW: ReaderTooSlow,
    EndingKind.REFUSED: RequestRefused,
    EndingKind.SHUTDOWN: ServerShutdown,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended: decided once, by whoever came first (``RequestStream.end``).

    ``cause`` is a sentence for people; ``engine`` the rank that had the request, where known;
    ``parameter``, after ``REFUSED``, which parameter is to blame.
    """

    kind: EndingKind
    cause: str = ""
    engine: int | None = None
    parameter: str | None = None

    def error(self) -> RequestEnded | None:
        """A fresh exception for the reader; None after an ending that is not an error.

        ``LEFT`` makes none either: the reader is the one who left.
        """
        kind = _ERRORS.get(self.kind)
        if kind is None:
            return None
        error = kind(self.cause or self.kind.value)
        if isinstance(error, RequestRefused):
            error.parameter = self.parameter
        elif isinstance(error, RequestAborted):
            error.engine = self.engine
        return error
