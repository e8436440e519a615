"""A server on a real socket for the connection's tests, and a client that sends what it is told.

Nothing here is clever about HTTP: tests of a server should not share its parser.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config

from trioleg.server.connection import ConnectionLimits, TlsListener, serve_connections

# No test waits this long; a test that would hang fails after it.
BOUND = 20.0


@dataclass
class Server:
    port: int
    shutdown: trio.Event
    done: trio.Event = field(default_factory=trio.Event)
    connections: Any = None

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[Client]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        for name, value in options.items():
            stream.setsockopt(trio.socket.SOL_SOCKET, getattr(trio.socket, name), value)
        async with stream:
            yield Client(stream)

    @asynccontextmanager
    async def connect_tls(self, context: ssl.SSLContext) -> AsyncIterator[Client]:
        """Trio's strict kind of TLS, to which an end without a close_notify is an error."""
        async with self.connect() as plain:
            stream = trio.SSLStream(plain.stream, context, server_hostname="localhost")
            await stream.do_handshake()
            yield Client(stream)

    async def exchange(self, request: bytes) -> bytes:
        """Send and read to the end of file."""
        async with self.connect() as client:
            await client.send(request)
            return await client.rest()


@asynccontextmanager
async def serving(
    app: Any,
    *,
    config: Config | None = None,
    tls: ssl.SSLContext | None = None,
    bound: float = BOUND,
    **limits: Any,
) -> AsyncIterator[Server]:
    """``app`` behind ``serve_connections`` on a free port; leaving the block, within ``bound``, shuts it down."""
    config = config or Config()
    config.errorlog = None
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    server = Server(listener.socket.getsockname()[1], trio.Event())
    serve = partial(
        serve_connections,
        app,
        config,
        [listener if tls is None else TlsListener(listener, tls)],
        shutdown=server.shutdown,
        limits=ConnectionLimits(**limits),
    )

    async def run(task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            server.connections = await nursery.start(serve)
            task_status.started()
        server.done.set()

    with trio.fail_after(bound):
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            yield server
            server.shutdown.set()


class Client:
    """One connection, byte by byte."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.buffer = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _more(self) -> bool:
        data = await self.stream.receive_some()
        self.buffer += data
        return bool(data)

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with ``mark``; fails at the end of file."""
        while mark not in self.buffer:
            assert await self._more(), f"end of file before {mark!r}: {self.buffer!r}"
        head, _, self.buffer = self.buffer.partition(mark)
        return head + mark

    async def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            assert await self._more(), f"end of file before {count} bytes: {self.buffer!r}"
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    async def rest(self) -> bytes:
        """Everything to the end of file; a reset is an error."""
        while await self._more():
            pass
        taken, self.buffer = self.buffer, b""
        return taken

    async def response(self) -> tuple[int, bytes, bytes]:
        """One whole response: status, head, body (of a Content-Length, or of chunks)."""
        head = await self.until(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length:
            return status, head, await self.exactly(int(length[1]))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return status, head, body

    async def chunk(self) -> bytes:
        size = int(await self.until(b"\r\n"), 16)
        return (await self.exactly(size + 2))[:-2]

    async def at_eof(self) -> bool:
        """True when the server has closed, and sent nothing before."""
        return not self.buffer and not await self._more()


async def lifespan(scope: Any, receive: Any, send: Any) -> None:
    """The least that an app's lifespan can do."""
    for part in ("startup", "shutdown"):
        assert (await receive())["type"] == f"lifespan.{part}"
        await send({"type": f"lifespan.{part}.complete"})


def http_app(handler: Callable[[Any, Any, Any], Any]) -> Any:
    """An ASGI app: ``handler(scope, receive, send)`` for each request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(scope, receive, send)
        else:
            await handler(scope, receive, send)

    return app


async def start(send: Any, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def body(send: Any, data: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def reply(send: Any, data: bytes, status: int = 200) -> None:
    await start(send, status, (b"content-length", b"%d" % len(data)))
    await body(send, data)


async def read_body(receive: Any) -> bytes | None:
    """The request's body, None if the client left before its end."""
    data: bytes = b""
    while (message := await receive())["type"] == "http.request":
        data += message["body"]
        if not message["more_body"]:
            return data
    return None


async def disconnected(receive: Any) -> None:
    """Return when ``receive`` says so."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers method, path and body."""
    data = await read_body(receive)
    if data is not None:
        await reply(send, b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], data))


def get(path: str = "/", *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: test", *headers, "", ""]).encode()


def post(data: bytes, *headers: str, path: str = "/") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data
