"""E6: files run out. Those who are served are served whole, the others are told so, and nothing spins."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from hypercorn.config import Config
from served import Client, Server, open_client, serving

from trioleg.server.connection import ConnectionLimits, serve_connections

NUM_CLIENTS = 400
BOUND_S = 90.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
# What is not for clients: the engine's sockets, those kept for an engine that is started again, and so on.
LEAST_SERVED = 128
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def ask_health(stream: trio.SocketStream) -> tuple[int, bytes]:
    """Status and the rest of what came. A reset is an error, for it can take an answer with it."""
    await stream.send_all(HEALTH)
    answer = b""
    while b"}" not in answer and (part := await stream.receive_some()):
        answer += part
    return int(answer.split(b" ", 2)[1]), answer


def assert_told(answer: bytes) -> None:
    """A 503 that a program can read, whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nretry-after: 1\r\n" in head
    assert b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"


class Crowd:
    """Many connections; ``served`` and ``refused`` are those that have asked for /health once."""

    def __init__(self) -> None:
        self.served: list[trio.SocketStream] = []
        self.refused: list[trio.SocketStream] = []

    async def ask(self, stream: trio.SocketStream) -> None:
        status, answer = await ask_health(stream)
        if status == 200:
            self.served.append(stream)
            return
        assert status == 503
        while part := await stream.receive_some():
            answer += part
        assert_told(answer)
        await stream.aclose()
        self.refused.append(stream)


@asynccontextmanager
async def crowd(server: Server, count: int) -> AsyncIterator[Crowd]:
    """So many connections, each of which has had an answer; they close at the block's end."""
    port = urlsplit(server.url).port
    assert port is not None
    people = Crowd()
    async with AsyncExitStack() as stack:
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                nursery.start_soon(people.ask, await stack.enter_async_context(stream))
        yield people


@contextmanager
def limited(tmp_path: Path, soft: int, hard: int, *options: str, **more: Any) -> Iterator[Server]:
    with serving(tmp_path, *options, files=(soft, hard), **more) as server:
        yield server


async def exact_answers(client: Client, count: int) -> None:
    answers = [client.ask() for _ in range(count)]
    await client.until(lambda: all(one.is_done for one in answers))
    assert all(one.is_exact for one in answers)


async def test_e6_256_files_and_400_clients(smollm2, tmp_path) -> None:
    with limited(tmp_path, 256, 256) as server:
        pid = server.program.process.pid
        async with open_client(server, BOUND_S) as client:
            await client.until_health(200)
            streams = [client.ask(max_tokens=1000) for _ in range(8)]
            await client.until(lambda: all(one.text for one in streams))
            async with crowd(server, NUM_CLIENTS) as people:
                assert len(people.served) >= LEAST_SERVED
                assert len(people.served) + len(people.refused) == NUM_CLIENTS
                await client.until(lambda: all(one.is_done for one in streams))
                # The client's own connections are older, and served all the same.
                assert (await client.get("/health")).status_code == 200
                assert all(one.is_exact for one in streams)
                assert (await ask_health(people.served[-1]))[0] == 200
                await client.until_idle()
                # Full, and nothing to do: a server that spins takes a whole second for each.
                before = cpu_seconds(pid)
                await trio.sleep(2)
                assert cpu_seconds(pid) - before < 1.0
            await exact_answers(client, 20)
        lines = [one for one in server.program.stderr.splitlines() if "are refused" in one]
        assert len(lines) == 1, lines
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0
    assert "Traceback" not in server.program.stderr


async def test_an_engine_is_started_again_while_there_is_room_for_no_client(
    smollm2, tmp_path
) -> None:
    with limited(tmp_path, 256, 256, "--restart-engine") as server:
        async with open_client(server, BOUND_S) as client:
            # On the one connection that this client has, and keeps.
            await client.get("/health")
            async with crowd(server, NUM_CLIENTS) as people:
                assert people.refused
                engine = server.engine
                os.kill(engine, signal.SIGKILL)
                while (await client.get("/health")).status_code == 200:
                    pass
                while (await client.get("/health")).status_code == 503:
                    pass
                assert server.engine != engine
                assert (await client.answered()).is_exact


async def test_the_soft_limit_is_raised(smollm2, tmp_path) -> None:
    with limited(tmp_path, 256, 4096) as server:
        async with open_client(server, BOUND_S) as client, crowd(server, NUM_CLIENTS) as people:
            assert len(people.served) == NUM_CLIENTS
            assert (await client.answered()).is_exact
    assert "are refused" not in server.program.stderr


# ---------------------------------------------------------------------------- something else has them


@contextmanager
def all_files_taken() -> Iterator[None]:
    """No file can be opened in this process while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A short way to the end, above what is open.
    few = max(map(int, os.listdir("/dev/fd"))) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    taken: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


async def test_emfile_itself_is_told_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    """The clients' sockets are made before, since they are this process's files, too."""
    caplog.set_level(logging.WARNING, "trioleg.server")
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    address = listener.socket.getsockname()
    shutdown = trio.Event()
    limits = ConnectionLimits(max_connections=1000)
    run = partial(serve_connections, hello, Config(), [listener], shutdown=shutdown, limits=limits)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            await nursery.start(run)
            socks = [stack.enter_context(trio.socket.socket()) for _ in range(21)]
            old, *new = map(trio.SocketStream, socks)
            await old.socket.connect(address)
            assert (await ask_health(old))[0] == 200
            with all_files_taken():
                for one in new:
                    await one.socket.connect(address)
                    await one.send_all(HEALTH)
                answers = [b"".join([part async for part in one]) for one in new]
                assert (await ask_health(old))[0] == 200
            for answer in answers:
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert_told(answer)
            (line,) = caplog.messages
            assert line.startswith(
                "connections are refused: the system has no room for it (Too many"
            )
            async with await trio.open_tcp_stream(*address) as later:
                assert (await ask_health(later))[0] == 200
            assert (await ask_health(old))[0] == 200
            shutdown.set()
