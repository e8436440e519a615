"""Clients that leave, clients that stop reading, and what their apps get to know."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from connection_harness import (
    BOUND,
    body,
    disconnected,
    echo,
    get,
    http_app,
    post,
    read_body,
    reply,
    serving,
    start,
)
from process_helpers import wait_until
from trio.testing import wait_all_tasks_blocked

from trioleg.server.client_stream import PlainStream


class Watcher:
    """An app that answers nothing and waits for the client to leave."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.left = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.started.set()
        await disconnected(receive)
        self.left.set()


@pytest.mark.parametrize(
    "behind",
    [b"", b"\r\n", get("/second"), b"\x00\xff garbage", b"x" * 300_000],
    ids=["nothing", "stray line end", "pipelined", "garbage", "much"],
)
@pytest.mark.parametrize("headers", [(), ("Connection: close",), ("Upgrade: h2c",)])
async def test_a_client_that_closes_is_gone_at_once(
    behind: bytes, headers: tuple[str, ...]
) -> None:
    app = Watcher()
    async with serving(http_app(app)) as server:
        async with server.connect() as client:
            await client.send(post(b"request", *headers) + behind)
            await app.started.wait()
        await app.left.wait()


async def test_a_client_that_resets_is_gone_at_once() -> None:
    app = Watcher()
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        linger_0 = b"\x01\0\0\0\0\0\0\0"
        client.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger_0)
        await client.stream.aclose()
        await app.left.wait()


async def test_a_client_that_half_closes_is_gone() -> None:
    """Our decision: the end of a client's input is its leaving."""
    app = Watcher()
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        await client.stream.send_eof()
        await app.left.wait()
        assert await client.at_eof()


async def test_a_client_that_leaves_within_its_body_is_gone() -> None:
    app = Watcher()
    async with serving(http_app(app)) as server:
        async with server.connect() as client:
            await client.send(post(b"request")[:-3])
            await app.started.wait()
        await app.left.wait()


async def test_sending_to_a_client_that_left_does_nothing_and_starves_nobody() -> None:
    sent = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/other":
            await reply(send, b"alive")
            return
        await disconnected(receive)
        await start(send)
        while not sent.is_set():
            await body(send, b"x", more=True)
            await receive()

    async with serving(http_app(app)) as server:
        async with server.connect() as client:
            await client.send(get())
        assert (await server.exchange(get("/other", "Connection: close"))).endswith(b"alive")
        sent.set()


async def test_reading_beyond_the_bound_ends_the_connection() -> None:
    app = Watcher()
    async with serving(http_app(app), max_read_ahead=2**17) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        with pytest.raises(trio.BrokenResourceError):
            await client.send(b"x" * 2**26)
        await app.left.wait()


async def test_a_head_sent_in_a_cancelled_scope_is_the_only_head() -> None:
    """The bytes are out, or the connection is closed; there is no second response."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with trio.CancelScope() as scope_:
            scope_.cancel("before the first byte")
            await start(send)
            await trio.lowlevel.checkpoint()

    async with serving(http_app(app)) as server:
        assert (await server.exchange(get())).count(b"HTTP/1.1") == 1
        async with server.connect() as client:
            await client.send(get() + get())


# What a client that reads nothing cannot have taken: more than both kernel buffers together.
FRAME = b"x" * 2**16
SMALL = {"SO_RCVBUF": 2**14}


def stalled(
    then: Callable[[Any, trio.CancelScope], Awaitable[None]],
) -> tuple[Any, trio.Event, trio.Event]:
    """An app that writes until a write blocks; ``then`` runs beside it, and the event says the end."""
    blocked, ended = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/other":
            await reply(send, b"alive")
            return
        async with trio.open_nursery() as nursery:
            await start(send)
            nursery.start_soon(writer, send, nursery.cancel_scope)
            await wait_all_tasks_blocked(0.02)
            blocked.set()
            await then(receive, nursery.cancel_scope)
            nursery.cancel_scope.cancel("the app is done")
        # No more bytes, whatever the app still says.
        await body(send, b"the end")
        ended.set()

    async def writer(send: Any, scope: trio.CancelScope) -> None:
        while True:
            await body(send, FRAME, more=True)

    return http_app(app), blocked, ended


async def test_a_cancelled_write_closes_the_connection_and_adds_nothing() -> None:
    async def at_once(receive: Any, scope: trio.CancelScope) -> None:
        scope.cancel("a deadline")
        await trio.lowlevel.checkpoint()

    app, _, ended = stalled(at_once)
    async with serving(app) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await ended.wait()
        assert b"the end" not in await client.rest()


async def test_a_write_without_progress_ends_and_tells_the_app() -> None:
    async def until_told(receive: Any, scope: trio.CancelScope) -> None:
        await disconnected(receive)

    app, _, ended = stalled(until_told)
    async with serving(app, write_timeout=0.1) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await ended.wait()
        assert b"the end" not in await client.rest()


async def test_a_stalled_client_that_leaves_frees_the_write() -> None:
    async def until_told(receive: Any, scope: trio.CancelScope) -> None:
        await disconnected(receive)

    app, blocked, ended = stalled(until_told)
    async with serving(app) as server:
        async with server.connect(**SMALL) as client:
            await client.send(get())
            await blocked.wait()
        await ended.wait()


async def test_a_stalled_client_disturbs_no_other() -> None:
    async def for_ever(receive: Any, scope: trio.CancelScope) -> None:
        await trio.sleep_forever()

    app, blocked, _ = stalled(for_ever)
    async with serving(app, graceful_timeout=0.1) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await blocked.wait()
        assert (await server.exchange(get("/other", "Connection: close"))).endswith(b"alive")


async def test_a_slow_client_gets_everything() -> None:
    size = 5 * 2**20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        for _ in range(size // len(FRAME)):
            await body(send, FRAME, more=True)
        await body(send, b"")

    async with serving(http_app(app)) as server, server.connect(SO_RCVBUF=2**16) as client:
        await client.send(get())
        await wait_all_tasks_blocked(0.02)  # the first write is blocked by now
        assert (await client.response())[2] == b"x" * size


async def test_an_app_that_returns_with_its_queue_full_holds_nothing_up() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/raise":
            raise ValueError("on purpose")
        await reply(send, b"too large", status=413)

    async with serving(http_app(app)) as server:
        for path, status in (("/", 413), ("/raise", 500)):
            answer = await server.exchange(post(b"x" * 17 * 2**20, path=path))
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" in answer


async def test_an_early_answer_and_an_unread_body_do_not_stop_the_connection() -> None:
    """The app goes on after its answer and reads nothing: the connection ends all the same."""
    closed = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"early", status=413)
        await closed.wait()

    async with serving(http_app(app)) as server:
        assert (await server.exchange(post(b"x" * 4 * 2**20))).endswith(b"early")
        closed.set()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_descriptors_and_tasks_stay_flat() -> None:
    finished = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal finished
        if scope["path"] == "/wait":
            await disconnected(receive)
        else:
            await reply(send, b"no", status=413)
        finished += 1

    big = post(b"x" * 2**18, path="/answer")
    requests = [b"", get("/wait"), big, big[: 2**17], get("/answer"), b"rubbish\r\n\r\n"]

    async with serving(http_app(app)) as server:
        await server.exchange(get("/answer", "Connection: close"))
        descriptors, tasks = open_descriptors(), trio.lowlevel.current_statistics().tasks_living
        for i in range(300):
            async with server.connect() as client:
                await client.send(requests[i % len(requests)])
        with trio.fail_after(BOUND):
            while open_descriptors() > descriptors or (
                trio.lowlevel.current_statistics().tasks_living > tasks
            ):
                await wait_all_tasks_blocked(0.01)
        assert finished > 50


async def test_an_idle_connection_is_one_task() -> None:
    async with serving(http_app(echo)) as server, server.connect() as first:
        await first.send(get())
        await first.response()
        before = trio.lowlevel.current_statistics().tasks_living
        async with server.connect() as client:
            await client.send(get())
            await client.response()
            await wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().tasks_living == before + 1


async def test_what_follows_an_answer_that_nobody_took_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client resets while the very end of its answer is written: the request behind it is for nobody."""
    write_now, failed = PlainStream.write_now, trio.Event()

    def fail_at_the_end(stream: PlainStream, data: bytes) -> int:
        if data == b"0\r\n\r\n":
            failed.set()
            raise ConnectionResetError
        return write_now(stream, data)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        if scope["method"] == "POST":
            await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all"})

    paths: list[str] = []
    monkeypatch.setattr(PlainStream, "write_now", fail_at_the_end)
    async with serving(http_app(app)) as server:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with server.connect() as client:
            await client.send(get("/first") + post(b"half", path="/second")[:-2])
            await failed.wait()
            assert await client.rest()
            await wait_until(lambda: trio.lowlevel.current_statistics().tasks_living == tasks)
    assert paths == ["/first"]
