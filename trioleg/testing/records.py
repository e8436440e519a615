"""What came in at a scripted server, and how each request went: written in its thread, read by the test's.

``Records`` holds the answers that wait for requests, and the requests. Of a request there are three views: the
HTTP request (``RecordingApp``), the stream that answers it (``RecordingLLM``), and what the engine is told
(``AnswerCore``). A context variable leads from the first to the second, the engine's ids to the third.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import InvalidRequestError
from ..outputs import Ending, EndingKind
from ..runtime.llm import LLM
from ..runtime.request_stream import RequestStream
from .answers import Answer

__all__ = ["ReceivedRequest", "RecordingApp", "RecordingLLM", "Records"]

# Ends whose ABORT is good manners: the answer was complete.
_COMPLETE = (EndingKind.STOP, EndingKind.STOP_STRING, EndingKind.LENGTH)


class ReceivedRequest:
    """A POST request as it came in. ``path``; ``headers``, their names in small letters; ``content``, the body's bytes;
    ``status``, the one that was sent, None before.

    The methods that wait block the thread that calls them, and raise ``TimeoutError`` with the state of things.
    """

    def __init__(self, path: str, headers: Mapping[str, str], changed: threading.Condition) -> None:
        self.path = path
        self.headers = headers
        self.content = b""
        self.status: int | None = None
        self._changed = changed
        self._answer: Answer | None = None
        self._stream: RequestStream | None = None
        self._was_told = False
        self._is_over = False

    def __repr__(self) -> str:
        ending = "no ending" if self.ending is None else self.ending.kind
        return f"<ReceivedRequest {self.path}: status {self.status}, {ending}>"

    @property
    def body(self) -> Any:
        """The body as JSON. Raises ``ValueError`` if it is not."""
        return json.loads(self.content)

    @property
    def ending(self) -> Ending | None:
        """How it ended: ``ending.kind`` is an ``EndingKind``, and equal to its text: "stop", "left", "deadline",
        "engine_dead" …; ``ending.cause`` says more. None while it runs, and for one that was refused before
        the engine saw it."""
        return None if self._stream is None else self._stream.ending

    @property
    def aborted(self) -> bool:
        """Whether the engine was told to stop before the answer was complete, since the client left, say; or
        the client left so early that the engine had not heard of it."""
        ending = self.ending
        if ending is None:
            return self._is_over and self.status is None
        return self._was_told and ending.kind not in _COMPLETE

    def wait_aborted(self, timeout: float = 10.0) -> None:
        """Return once ``aborted`` is true."""
        self._wait(lambda: self.aborted, timeout, "been aborted")

    def wait_ended(self, timeout: float = 10.0) -> Ending:
        """Return the ``ending`` once there is one."""
        self._wait(lambda: self.ending is not None, timeout, "ended")
        assert self.ending is not None
        return self.ending

    def _wait(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                state = "it is still being answered" if self.ending is None else f"{self.ending}"
                raise TimeoutError(f"{self.path} has not {what} within {timeout:g} s: {state}")


class Records:
    """``answers`` wait for the next requests; ``standing`` is for all that find none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.answers: deque[Answer] = deque()
        self.standing: Answer | None = None
        self.requests: list[ReceivedRequest] = []
        self._by_engine_id: dict[str, ReceivedRequest] = {}

    def arrived(self, request: ReceivedRequest) -> None:
        """Its body is whole."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def opened(self, request: ReceivedRequest, stream: RequestStream) -> None:
        """It has been sent to the engine, which has not looked yet."""
        with self.changed:
            request._answer = self.answers.popleft() if self.answers else self.standing
            request._stream = stream
            for one in stream.submission.engine_request_ids:
                self._by_engine_id[one] = request

    def ended(self) -> None:
        """Some stream has an ending."""
        with self.changed:
            self.changed.notify_all()

    def over(self, request: ReceivedRequest) -> None:
        """The server has done with it."""
        with self.changed:
            request._is_over = True
            self.changed.notify_all()

    def told_to_stop(self, engine_request_id: str) -> None:
        """The engine has got an ABORT."""
        with self.changed:
            self._by_engine_id[engine_request_id]._was_told = True
            self.changed.notify_all()

    def answer_for(self, engine_request_id: str) -> Answer:
        """Raises ``InvalidRequestError`` where a test has not said what the answer is."""
        request = self._by_engine_id[engine_request_id]
        answer = request._answer
        if answer is None:
            raise InvalidRequestError(
                f"this is request number {self.requests.index(request) + 1} of the test, and no answer is left for it; call "
                "the scripted server's answer(…) once for each request, or always(…)"
            )
        return answer

    def complaints(self) -> list[str]:
        """What a test that is over has left: requests without an answer, answers without a request."""
        with self.changed:
            found = [
                f"no answer was left for request number {number} ({request.path})"
                for number, request in enumerate(self.requests, start=1)
                if request._stream is not None and request._answer is None
            ]
            return found + [f"nobody asked for the answer {answer}" for answer in self.answers]

    def reader_waits(self, engine_request_id: str) -> bool:
        """Whether all that was said so far has been taken by the stream's reader."""
        stream = self._by_engine_id[engine_request_id]._stream
        return stream is None or stream.statistics().reader_waits


_current: ContextVar[ReceivedRequest] = ContextVar("trioleg.testing.request")


class RecordingApp:
    """An ASGI app round another one: puts down every POST, whatever becomes of it."""

    def __init__(self, app: Callable[..., Awaitable[None]], records: Records) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        request = ReceivedRequest(scope["path"], headers, self._records.changed)
        _current.set(request)

        async def noted_receive() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                request.content += message.get("body", b"")
                if not message.get("more_body", False):
                    self._records.arrived(request)
            return message

        async def noted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
            await send(message)

        try:
            await self._app(scope, noted_receive, noted_send)
        finally:
            self._records.over(request)


class RecordingLLM(LLM):
    """An LLM all of whose streams belong to requests of a ``RecordingApp``."""

    def __init__(self, records: Records, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._records = records

    @asynccontextmanager
    async def open_stream(self, *args: Any, **more: Any) -> AsyncIterator[RequestStream]:
        """As ``LLM.open_stream``."""
        try:
            async with super().open_stream(*args, **more) as stream:
                self._records.opened(_current.get(), stream)
                yield stream
        finally:
            self._records.ended()
