"""One call of an app, as its connection sees it: ASGI's ``receive`` and ``send``, and what the client sends.

A stream of tokens is such a call for minutes, in which nothing comes from its client. So this is small where a
memory channel is not, and an app that has its whole body need not keep a task here for the one message that may still
come: it leaves a cancel scope instead (``cancel_at_disconnect``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent

from .http1 import Http1

__all__ = ["AppCall"]


class AppCall:
    """``put`` is the connection's, ``close`` anybody's, all else the app's."""

    __slots__ = (
        "_app_send",
        "_is_closed",
        "_messages",
        "_most_messages",
        "_news",
        "_protocol",
        "_scope",
        "stream",
    )

    def __init__(
        self,
        protocol: Http1,
        app_send: Callable[[ASGISendEvent], Awaitable[None]],
        most_messages: int,
    ) -> None:
        # Hypercorn's, of this request.
        self.stream: Any = protocol.stream
        self._protocol = protocol
        self._app_send = app_send
        self._most_messages = most_messages
        self._messages: list[ASGIReceiveEvent] = []
        self._is_closed = False
        # Of whoever waits for a message, or for room for one.
        self._news: trio.Event | None = None
        self._scope: trio.CancelScope | None = None

    async def put(self, message: ASGIReceiveEvent) -> None:
        """A message for the app; ``http.disconnect`` closes. Waits while the app has too many before it: that is the
        client's back-pressure. Cancel-safe."""
        if message["type"] == "http.disconnect":
            self.close()
        if self._is_closed:
            return  # the app has returned, or the answer is out: nobody wants the rest of the body
        self._messages.append(message)
        self._notify()
        while len(self._messages) > self._most_messages and not self._is_closed:
            await self._wait()

    def close(self) -> None:
        """Nothing follows; ``receive`` says ``http.disconnect`` from now on. Synchronous, idempotent."""
        self._is_closed = True
        self._notify()
        if self._scope is not None:
            self._scope.cancel(reason="the client has left, or the answer is out")

    def cancel_at_disconnect(self, scope: trio.CancelScope) -> None:
        """Cancel ``scope`` as soon as ``receive`` says ``http.disconnect``, at once if it does already: for an app
        that has nothing else to receive."""
        self._scope = scope
        if self._is_closed:
            self.close()

    async def receive(self) -> ASGIReceiveEvent:
        """ASGI's. Cancel-safe, and a checkpoint: an app that asks in a loop must not keep the others from running."""
        if self.stream is self._protocol.stream:
            await self._protocol.ask_for_body()
        await trio.lowlevel.checkpoint()
        while not (self._messages or self._is_closed):
            await self._wait()
        if not self._messages:
            return {"type": "http.disconnect"}
        message = self._messages.pop(0)
        self._notify()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """ASGI's."""
        if self._protocol.owner.gone:
            await trio.lowlevel.checkpoint()
        else:
            await self._app_send(message)

    def _notify(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def _wait(self) -> None:
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()
