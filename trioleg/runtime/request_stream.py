"""``RequestStream``: one request as its reader sees it, and the one place where it ends.

Whatever ends a request (the engine, a stop string, a fault, the reader's leaving, the engine's death,
a shutdown) calls ``end`` with an ``Ending``. ``end`` is synchronous and idempotent, and the first
cause wins. Nobody else ends a request, and no exception is stored anywhere: the reader gets a fresh
one, made from the ``Ending``, from its own call of ``receive``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trio

from ..output.submission import Submission
from ..outputs import Ending, EndingKind, RequestOutput
from .mailbox import Mailbox, MailboxStatistics

__all__ = ["RequestStream"]

_log = logging.getLogger("trioleg.requests")


class RequestStream:
    """The outputs of one request, for one reading task. Made by ``LLM.open_stream``.

    Iterating is receiving until ``trio.EndOfChannel``.
    """

    __slots__ = (
        "_closed",
        "_ending",
        "_on_end",
        "_serving",
        "external_req_id",
        "mailbox",
        "prompt_token_ids",
        "request_id",
        "submission",
        "submitted_at",
    )

    def __init__(
        self,
        submission: Submission,
        mailbox: Mailbox,
        *,
        on_end: Callable[[RequestStream, Ending], None],
        external_req_id: str | None = None,
    ) -> None:
        self.submission = submission
        self.request_id = submission.state.request_id
        self.prompt_token_ids: Sequence[int] = submission.state.prompt_token_ids
        # The caller's own name for the request, for people.
        self.external_req_id = external_req_id
        self.mailbox = mailbox
        # When it was handed to the engine's link, on Trio's clock.
        self.submitted_at = trio.current_time()
        self._on_end = on_end
        self._ending: Ending | None = None
        self._serving: trio.CancelScope | None = None
        self._closed = False

    @property
    def ending(self) -> Ending | None:
        """Why the request ended; None while it runs."""
        return self._ending

    @property
    def num_output_tokens(self) -> int:
        """The engine's tokens for all choices so far, whether read or not."""
        return self.submission.state.num_output_tokens

    def statistics(self) -> MailboxStatistics:
        """The mailbox's figures."""
        return self.mailbox.statistics()

    async def receive(self) -> RequestOutput:
        """The next output: everything that came since the last one, merged.

        What is unread is delivered first, at once and perhaps without a checkpoint. Then, by how the
        request ended: ``trio.EndOfChannel`` after a normal end, else a fresh ``RequestEnded`` of the
        matching type. Raises ``trio.BusyResourceError`` for a second reader and
        ``trio.ClosedResourceError`` once the stream's block, or the LLM's, has been left.
        A cancelled ``receive`` loses nothing.
        """
        while True:
            output: RequestOutput | None = self.mailbox.take()
            if output is not None:
                return output
            if self._closed or self._ending is not None:
                await trio.lowlevel.checkpoint()
                raise self._error()
            await self.mailbox.wait()

    def receive_nowait(self) -> RequestOutput | None:
        """What is unread, or None. Never raises, never waits."""
        # A pooling request's one output comes this way, too; only ``LLM.encode`` reads those streams.
        output: RequestOutput | None = self.mailbox.take()
        return output

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def _error(self) -> Exception:
        if self._closed:
            return trio.ClosedResourceError("this stream's block has been left")
        error = None if self._ending is None else self._ending.error()
        return trio.EndOfChannel() if error is None else error

    def end(self, ending: Ending) -> None:
        """End the request: synchronous, idempotent, the first cause wins.

        Stores the ending, tells the engine to stop if it may still be at it, wakes the reader, and,
        unless the request ended well, cancels the serving scope: a write in progress must not keep
        a failed request from saying so. Never raises: whoever ends a request has others to end.
        """
        if self._ending is not None:
            return
        self._ending = ending
        try:
            self._on_end(self, ending)
        except Exception:  # noqa: BLE001 - it is logged, and the others have to be ended too
            _log.exception(
                "request %s: not everything of its end (%s) could be done",
                self.request_id,
                ending.kind,
            )
        self.mailbox.wake()
        if self._serving is not None and ending.error() is not None:
            self._serving.cancel(reason=f"request {self.request_id} ended: {ending.kind}")

    def close(self) -> None:
        """The block is left: end the request if it runs, and refuse further use. Idempotent."""
        self._closed = True
        self.end(Ending(EndingKind.LEFT))
        self.mailbox.stop_counting()
        self.mailbox.wake()

    @contextmanager
    def serving(
        self, outlet: Callable[[RequestOutput], bool] | None = None
    ) -> Iterator[trio.CancelScope]:
        """One cancel scope for a whole loop of receiving and writing.

        It is cancelled when the request ends badly, also while the loop writes to a client that does
        not read. After the block, ``ending`` tells what happened, and ``receive_nowait`` what is
        still unread.

        ``outlet``: gets an output while the reader waits in ``receive``, which then goes on waiting. It is called
        by the link, within the step, so it must not block; it returns False, and has done nothing, if ``receive``
        is to return the output. What it raises ends the request. Bytes to write go to ``LLM.burst``.
        """
        with trio.CancelScope() as scope:
            self._serving = scope
            self.mailbox.outlet = outlet
            if self._ending is not None and self._ending.error() is not None:
                scope.cancel(reason=f"request {self.request_id} ended: {self._ending.kind}")
            try:
                yield scope
            finally:
                self.mailbox.outlet = None
                self._serving = None
