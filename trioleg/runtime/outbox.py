"""``Outbox``: what goes to one engine, at once, or, while it is out of contact, when it is back.

Everything here is synchronous and raises nothing for a message that cannot leave: an ABORT must be able to
leave from any task, a dying one too. A request that has not left is kept, and so is an ABORT. ABORTs that
may have been lost with a connection are said again; the engine does not mind to be told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import trio

from ..ipc.codec import encode_abort, encode_request, encode_utility
from ..ipc.transport import Transport
from ..messages import EngineCoreRequestType
from .request_stream import RequestStream

__all__ = ["DOUBT_S", "Outbox"]

# What was sent so shortly before the connection was lost may not have arrived: heartbeats take 0.75 s to
# miss somebody.
DOUBT_S = 2.0


class Outbox:
    """``is_open``: the engine is in contact as far as is known; if not, nothing is tried."""

    def __init__(self, transport: Transport, is_open: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_open = is_open
        self._requests: dict[str, RequestStream] = {}
        self._aborts: list[str] = []
        # Those that may have to be said again: of the last ``DOUBT_S``, and all since contact was lost.
        self._recent_aborts: deque[tuple[float, list[str]]] = deque()
        self._calls = 0
        # Messages that could not leave at once.
        self.failed_sends = 0

    def add(self, stream: RequestStream) -> bool:
        """Send the request, or keep it. False: some of its choices have left, and the others cannot. Those that
        have are taken back, and it must end: the engine may not get an id twice."""
        sent: list[str] = []
        for request in stream.submission.engine_requests if self._is_open() else ():
            if not self._send(EngineCoreRequestType.ADD, encode_request(request)):
                break
            sent.append(request.request_id)
        else:
            if sent:
                # They are the engine's now, and a stream may be long.
                stream.submission.engine_requests.clear()
                return True
        if sent:
            self.abort(sent)
            return False
        self._requests[stream.request_id] = stream
        return True

    def holds(self, stream: RequestStream) -> bool:
        """The request is still here: the engine has never heard of it."""
        return stream.request_id in self._requests

    def withdraw(self, stream: RequestStream) -> bool:
        """Forget the request. False: it has left, and an ABORT is due."""
        return self._requests.pop(stream.request_id, None) is not None

    def abort(self, engine_request_ids: list[str]) -> None:
        """One ABORT for all of them, now or later; none is needed for no ids."""
        if not engine_request_ids:
            return
        now = trio.current_time()
        while self._is_open() and self._recent_aborts and self._recent_aborts[0][0] < now - DOUBT_S:
            self._recent_aborts.popleft()
        self._recent_aborts.append((now, engine_request_ids))
        if not self._send(EngineCoreRequestType.ABORT, encode_abort(engine_request_ids)):
            self._aborts += engine_request_ids

    def call(self, method: str, args: Sequence[Any]) -> int | None:
        """The id under which the engine will answer; None: it could not be asked, and will not be."""
        self._calls += 1
        body = encode_utility(0, self._calls, method, args)
        return self._calls if self._send(EngineCoreRequestType.UTILITY, body) else None

    def catch_up(self, doubtful_since: float) -> list[RequestStream]:
        """The engine is back: send what was kept, and again the ABORTs from ``doubtful_since`` on. Returns those
        that must end: see ``add``."""
        aborts = dict.fromkeys(self._aborts)
        for at, engine_request_ids in self._recent_aborts:
            if at > doubtful_since:
                aborts.update(dict.fromkeys(engine_request_ids))
        self._aborts = []
        self._recent_aborts.clear()
        self.abort(list(aborts))
        requests, self._requests = self._requests, {}
        return [stream for stream in requests.values() if not self.add(stream)]

    def _send(self, kind: EngineCoreRequestType, body: bytes) -> bool:
        sent = self._transport.send(kind, body)
        self.failed_sends += not sent
        return sent
