"""``RequestStream``: one request as its reader sees it, and the one place where it ends.

As ``runtime/request_stream.py``: ``end`` is synchronous and idempotent, the first cause wins, and errors are made afresh
from the ``Ending``. Deadlines are timers of the loop that call ``end``, wherever the reader is: ``asyncio.timeout`` would
have to be round the reader's own code, and would reach it only while it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ...output.submission import Submission
from ...outputs import Ending, EndingKind, RequestOutput
from ...timeouts import Timeouts
from .mailbox import Mailbox

__all__ = ["RequestStream"]

_log = logging.getLogger("trioleg.compare.taskgroup_twin")


class RequestStream:
    """The outputs of one request, for one reading task. Made by ``LLM.open_stream``, which closes it."""

    def __init__(
        self,
        submission: Submission,
        mailbox: Mailbox,
        on_end: Callable[[RequestStream], None],
    ) -> None:
        self.submission = submission
        self.request_id = submission.state.request_id
        self.prompt_token_ids = submission.state.prompt_token_ids
        self.ending: Ending | None = None
        self._mailbox = mailbox
        self._on_end = on_end
        self._serving: asyncio.Timeout | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._is_closed = False

    async def receive(self) -> RequestOutput | None:
        """The next output: everything that came since the last one, merged; None after the last. Then, by how the
        request ended, a fresh ``RequestEnded``. Raises ``RuntimeError`` for a second reader, and once the stream's
        block has been left. What is unread is not lost by a cancel."""
        while True:
            output = self.receive_nowait()
            if output is not None:
                return output
            if self._is_closed:
                raise RuntimeError("this stream's block has been left")
            if self.ending is not None:
                error = self.ending.error()
                if error is not None:
                    raise error
                return None
            await self._mailbox.wait()

    def receive_nowait(self) -> RequestOutput | None:
        """What is unread, or None."""
        output: RequestOutput | None = self._mailbox.take()
        return output

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self.receive()
        if output is None:
            raise StopAsyncIteration
        return output

    def set_deadlines(self, timeouts: Timeouts, since: float) -> None:
        """End the request when its time, from ``since`` on (the loop's clock), is over."""
        loop = asyncio.get_running_loop()
        if timeouts.first_token is not None:
            cause = f"the request had no first token after {timeouts.first_token:g} s, its deadline"
            timer = loop.call_at(since + timeouts.first_token, self._end_without_token, cause)
            self._timers.append(timer)
        if timeouts.total is not None:
            ending = Ending(
                EndingKind.DEADLINE,
                f"the request was not complete after {timeouts.total:g} s, its deadline",
            )
            self._timers.append(loop.call_at(since + timeouts.total, self.end, ending))

    def _end_without_token(self, cause: str) -> None:
        if not self.submission.state.num_output_tokens:
            self.end(Ending(EndingKind.DEADLINE, cause))

    def end(self, ending: Ending) -> None:
        """End the request: synchronous, idempotent, the first cause wins. Tells the engine if it may still be at it,
        wakes the reader, and, unless the request ended well, stops the block of ``serving``."""
        if self.ending is not None:
            return
        self.ending = ending
        for timer in self._timers:
            timer.cancel()
        try:
            self._on_end(self)
        except Exception:  # noqa: BLE001 - whoever ends a request has others to end
            _log.exception("request %s: its end could not be done", self.request_id)
        self._mailbox.wake()
        if ending.error() is not None:
            self._stop_serving()

    def close(self) -> None:
        """The block is left. Idempotent."""
        self._is_closed = True
        self.end(Ending(EndingKind.LEFT))
        self._mailbox.wake()

    def _stop_serving(self) -> None:
        if self._serving is not None:
            self._serving.reschedule(0.0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Round a whole loop of receiving and writing, which stops when the request ends badly.

        A timeout whose time is set to the past is the nearest that asyncio has to a scope that somebody else can
        cancel. It uses the task's one channel for cancels, once: a body that swallows it is not stopped.
        """
        try:
            async with asyncio.timeout(None) as self._serving:  # noqa: ASYNC100 - its body is the caller's
                if self.ending is not None and self.ending.error() is not None:
                    self._stop_serving()
                yield
        except TimeoutError:
            if self._serving is None or not self._serving.expired():
                raise
        finally:
            self._serving = None
