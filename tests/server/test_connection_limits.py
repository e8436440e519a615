"""Time: idle connections, the lifespan, and the way down."""

from __future__ import annotations

from functools import partial
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
    lifespan,
    reply,
    serving,
    start,
)
from hypercorn.config import Config
from trio.testing import wait_all_tasks_blocked

from trioleg.server.connection import ConnectionLimits, serve_connections


@pytest.mark.parametrize("sent", [b"", get(), get()[:-2], b"\r\n"])
async def test_an_idle_connection_is_closed_after_its_time(sent: bytes) -> None:
    async with serving(http_app(echo), keep_alive_timeout=0.1) as server:
        assert (await server.exchange(sent)).count(b"HTTP/1.1 200") == (sent == get())


async def test_a_connection_is_idle_only_between_requests() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await trio.sleep(0.6)  # longer than an idle connection may live
        await reply(send, b"done")

    async with serving(http_app(app), keep_alive_timeout=0.5) as server:
        async with server.connect() as client:
            await client.send(get("/late"))
            await client.response()
            await client.send(get("/"))
            assert (await client.response())[2] == b"done"


@pytest.mark.parametrize(
    "name", ["keep_alive_timeout", "graceful_timeout", "write_timeout", "max_read_ahead"]
)
def test_a_negative_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1; allowed: a number of at least 0"):
        ConnectionLimits(**{name: -1})


def test_idle_connections_outlive_client_pools() -> None:
    assert ConnectionLimits().keep_alive_timeout >= 75


async def test_shutdown_closes_idle_connections_at_once() -> None:
    async with serving(http_app(echo), graceful_timeout=10 * BOUND) as server:
        async with server.connect() as fresh, server.connect() as used, server.connect() as half:
            await used.send(get())
            await used.response()
            await half.send(get()[:9])
            await wait_all_tasks_blocked()
            server.shutdown.set()
            await server.done.wait()
            assert await fresh.at_eof()
            assert await used.at_eof()


async def test_shutdown_lets_a_running_request_finish_and_takes_no_other() -> None:
    running, finish = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        await finish.wait()
        await reply(send, b"in time")

    async with serving(http_app(app), graceful_timeout=10 * BOUND) as server:
        async with server.connect() as client:
            await client.send(get() + get())
            await running.wait()
            server.shutdown.set()
            await wait_all_tasks_blocked()
            with pytest.raises(OSError, match="all attempts to connect"):
                async with server.connect():
                    pass
            finish.set()
            answer = await client.rest()
            assert b"connection: close" in answer
            assert answer.count(b"in time") == 1
            await server.done.wait()


async def test_shutdown_in_the_middle_of_an_answer_takes_no_other_request_either() -> None:
    running, finish = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        running.set()
        await finish.wait()
        await body(send, b"whole")

    async with serving(http_app(app), graceful_timeout=10 * BOUND) as server:
        async with server.connect() as client:
            await client.send(get() + get())
            await running.wait()
            server.shutdown.set()
            await wait_all_tasks_blocked()
            finish.set()
            assert (await client.response())[2] == b"whole"
            assert await client.at_eof()


async def test_what_is_left_at_the_limit_is_closed() -> None:
    """Without an answer: a 500. A stream: cut. A client that reads nothing: cut as well."""
    running = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        if scope["path"] != "/silent":
            await start(send)
            await body(send, b"first", more=True)
        while scope["path"] == "/flood":
            await body(send, b"x" * 2**16, more=True)
        await trio.sleep_forever()

    async with serving(http_app(app), graceful_timeout=0.1) as server:
        async with server.connect() as silent, server.connect() as stream:
            async with server.connect(SO_RCVBUF=2**14) as flood, server.connect() as other:
                await silent.send(get("/silent"))
                await stream.send(get("/stream"))
                await flood.send(get("/flood"))
                await other.send(get("/flood"))
                await stream.until(b"first\r\n")
                while running < 4:
                    await wait_all_tasks_blocked(0.01)
                server.shutdown.set()
                await server.done.wait()
                answer = await silent.rest()
                assert answer.startswith(b"HTTP/1.1 500")
                assert b"the server stopped before it could answer" in answer
                assert await stream.at_eof()
                assert b"\r\n0\r\n\r\n" not in await flood.rest()


async def test_an_app_that_fails_while_it_is_cancelled_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = trio.Event()

    async def fails_in_its_cleanup() -> None:
        try:
            running.set()
            await trio.sleep_forever()
        finally:
            raise ValueError("in the cleanup")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_in_its_cleanup)
            await trio.sleep_forever()

    async with serving(http_app(app), graceful_timeout=0) as server:
        async with server.connect() as client:
            await client.send(get())
            await running.wait()
            server.shutdown.set()
            await server.done.wait()
    assert [record.getMessage() for record in caplog.records] == ["the app failed on GET /"]
    assert "in the cleanup" in caplog.text


async def test_a_client_that_never_stops_sending_holds_no_close_up() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"early", status=413)

    async def feed(stream: trio.SocketStream) -> None:
        while True:
            await stream.send_all(b"x" * 2**16)

    bounds: list[dict[str, Any]] = [
        {"linger_timeout": 0.1, "max_linger_bytes": 2**60},
        {"linger_timeout": 10 * BOUND, "max_linger_bytes": 2**20},
    ]
    for limits in bounds:
        async with serving(http_app(app), **limits) as server, server.connect() as client:
            head = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 99999999999\r\n\r\n"
            await client.send(head)
            with pytest.RaisesGroup(trio.BrokenResourceError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(feed, client.stream)
                    assert (await client.response())[0] == 413


async def run_until_started(app: Any) -> None:
    """Start, and (unless it fails before) shut down again."""
    config = Config()
    config.errorlog = None
    shutdown = trio.Event()
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    serve = partial(serve_connections, app, config, [listener], shutdown=shutdown)
    try:
        with trio.fail_after(BOUND):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve)
                shutdown.set()
    finally:
        assert listener.socket.fileno() == -1


async def test_the_lifespan_encloses_the_serving() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        await lifespan(scope, receive, note)

    await run_until_started(app)
    assert seen == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_an_app_without_a_lifespan_is_served_all_the_same() -> None:
    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def leaves_at_once(scope: Any, receive: Any, send: Any) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert scope["type"] == "http"

    for app in (leaves, leaves_at_once, refuses):
        await run_until_started(app)


async def test_a_failed_start_raises_and_closes_the_listeners() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="no model"), flatten_subgroups=True):
        await run_until_started(app)


async def test_a_cancel_during_the_start_closes_the_listeners() -> None:
    waiting = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        waiting.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_until_started, app)  # which looks at its listener
        await waiting.wait()
        nursery.cancel_scope.cancel("the program ends")


async def test_cancelling_the_server_closes_everything_at_once() -> None:
    running = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        await disconnected(receive)

    with trio.CancelScope() as scope:
        async with serving(http_app(app), graceful_timeout=10 * BOUND) as server:
            async with server.connect() as client:
                await client.send(get())
                await running.wait()
                scope.cancel("the program ends")
                with trio.CancelScope(shield=True):
                    answer = await client.rest()
    assert scope.cancelled_caught
    assert answer.startswith(b"HTTP/1.1 500")
