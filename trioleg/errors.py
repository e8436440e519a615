"""Every error that trioleg raises on purpose, and nothing else.

Rules of this file: it imports nothing of trioleg. An error is a type that a caller may want to
catch, with a message that a person can act on. HTTP statuses are the server's business
(``server/protocol.py`` maps these types once), exit codes the command line's.

Trio's own errors keep their meaning: ``trio.EndOfChannel`` after a stream's last output,
``trio.ClosedResourceError`` for use after closing, ``trio.BusyResourceError`` for a second reader.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "OVERLOAD_CODES",
    "DeadlineExceeded",
    "EngineDeadError",
    "EngineStartError",
    "EngineUnavailableError",
    "InvalidRequestError",
    "LoRAAdapterNotFoundError",
    "ModelStoreError",
    "OutputError",
    "OverloadedError",
    "ReaderTooSlow",
    "RequestAborted",
    "RequestEnded",
    "RequestRefused",
    "ServerShutdown",
    "TriolegError",
    "WireError",
]


class TriolegError(Exception):
    """The base of all errors of trioleg."""


class InvalidRequestError(TriolegError, ValueError):
    """A request that cannot be served as it was asked for. Unless it is a ``RequestRefused``, nothing was
    sent to an engine.

    ``parameter`` is the name that the caller used (dotted for a nested one), or None when no single
    one is to blame. The message names parameter, value and what is allowed.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class LoRAAdapterNotFoundError(InvalidRequestError):
    """There is no adapter under the path, or none of the name, that was given."""


class ModelStoreError(TriolegError):
    """A model that cannot be found, fetched, verified or read. The message names the file."""


class EngineStartError(TriolegError):
    """An engine did not become ready. The message ends with the engine's own last words."""


class EngineUnavailableError(TriolegError):
    """No engine takes requests at the moment, but one may soon: it is loading, is being restarted, or does
    not answer. Nothing was sent. ``retry_after``: when to ask again, in seconds; a guess."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


# Why there may be no room, for programs.
OVERLOAD_CODES = ("too_many_requests", "too_many_queued_tokens", "deadline_too_short")


class OverloadedError(TriolegError):
    """There is no room for the request at the moment. Nothing was sent. ``code``: ``too_many_requests`` or
    ``too_many_queued_tokens`` (a bound of ``LLMConfig``), or ``deadline_too_short`` (the queue is longer than the
    request's own deadline). ``retry_after``: when to ask again, in seconds; a guess."""

    def __init__(self, message: str, *, code: str, retry_after: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class WireError(TriolegError):
    """A frame from the other side of the engine-core wire that means nothing to us."""


class RequestEnded(TriolegError):
    """A request ended before its last token. Raised by ``RequestStream.receive``.

    Each raise makes a fresh instance from the stream's ``Ending``, so that tracebacks never mix.
    ``partial`` is the ``RequestOutput`` with what had been generated, where ``LLM.generate`` raises.
    """

    partial: Any = None


class EngineDeadError(RequestEnded):
    """The engine that had the request (or that the whole ``open_llm`` rests on) is gone, or so far out of
    reach that nobody can tell the difference."""


class DeadlineExceeded(RequestEnded):
    """The request's time is over: for its first token, or in all (``Timeouts``)."""


class RequestAborted(RequestEnded):
    """Somebody other than the reader aborted the request. ``engine``: the one that did it, by itself (it was
    paused, say); None: somebody did, by the request's id."""

    engine: int | None = None


class RequestRefused(RequestEnded, InvalidRequestError):
    """The engine found, before the first token or behind it, that the request cannot be served as it was
    asked for. ``parameter`` as in ``InvalidRequestError``."""


class OutputError(RequestEnded):
    """The engine reported an error for this request, or sent an output that cannot be used."""


class ReaderTooSlow(RequestEnded):
    """Unread output outgrew the mailbox's bound in bytes."""


class ServerShutdown(RequestEnded):
    """The front end is shutting down."""
