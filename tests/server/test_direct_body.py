"""``DirectBody``: pieces that are written past the app's ``send``, whatever the kernel takes of them.

Real sockets; what a client gets is read by h11, for every byte and the framing have to be right.
"""

from __future__ import annotations

import itertools
import os
import random
import ssl
from collections.abc import Callable
from typing import Any

import h11
import pytest
import trio
from certificates import Certificates
from connection_harness import (
    BOUND,
    Client,
    body,
    disconnected,
    get,
    http_app,
    reply,
    serving,
    start,
)
from process_helpers import wait_until
from trio.testing import wait_all_tasks_blocked

from trioleg.server.client_stream import PlainStream
from trioleg.server.http1 import DIRECT_BODY, DirectBody
from trioleg.server.tls import tls_context

SMALL = {"SO_RCVBUF": 2**14}


class Answer:
    """An app that sends a head and leaves the rest of its answer to the test, until ``finish``."""

    def __init__(self, *headers: tuple[bytes, bytes], status: int = 200) -> None:
        self.started, self.finish, self.left = trio.Event(), trio.Event(), trio.Event()
        self.direct: DirectBody
        self.send: Any
        self._headers = headers
        self._status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/other":
            await reply(send, b"alive")
            return
        self.direct, self.send = scope["extensions"][DIRECT_BODY]["body"], send
        assert not self.direct.is_free
        await start(send, self._status, *self._headers)
        self.started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._see_leave, receive)
            await self.finish.wait()
            nursery.cancel_scope.cancel("the answer is to end")
        await body(send, b"the end")

    async def _see_leave(self, receive: Any) -> None:
        await disconnected(receive)
        self.left.set()

    @property
    def connection(self) -> Any:
        return self.direct._owner

    @property
    def backlog_tasks(self) -> int:
        tasks = self.connection._nursery.child_tasks
        return sum("_write_rest" in task.name for task in tasks)

    def fill(self) -> bytes:
        """Write until the kernel takes no more; returns all that was written."""
        written = b""
        for number in itertools.count():
            if not self.direct.is_free:
                return written
            piece = b"%07d " % number * 2**13
            self.direct.write(piece)
            written += piece
        raise AssertionError("not reached")


def read_body(data: bytes) -> tuple[bytes, bool]:
    """The body of the first answer in ``data``, and whether it is whole. h11 raises for wrong framing."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "test")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    read = b""
    while (event := client.next_event()) is not h11.NEED_DATA:
        if isinstance(event, h11.Data):
            read += event.data
        elif isinstance(event, h11.EndOfMessage):
            return read, True
    return read, False


async def ask_again(client: Client) -> None:
    """The connection is as good as new."""
    await client.send(get("/other"))
    assert (await client.response())[2] == b"alive"


async def raw_answer(client: Client) -> bytes:
    return await client.until(b"the end\r\n0\r\n\r\n")


def take_at_most(monkeypatch: pytest.MonkeyPatch, num_bytes: Callable[[], int]) -> None:
    """A kernel that takes so much of what is written without a wait."""

    def write_now(stream: PlainStream, data: bytes) -> int:
        piece = data[: num_bytes()]
        return os.write(stream.socket.fileno(), piece) if piece else 0

    monkeypatch.setattr(PlainStream, "write_now", write_now)


# ---------------------------------------------------------------------------- whole and in order


async def test_both_ways_may_be_mixed() -> None:
    app = Answer()
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        for number in range(40):
            assert app.direct.is_free
            app.direct.write(b"%d," % number)
            await body(app.send, b"%d;" % number, more=True)
        app.finish.set()
        expected = b"".join(b"%d,%d;" % (number, number) for number in range(40))
        assert read_body(await raw_answer(client)) == (expected + b"the end", True)
        assert not app.direct.is_free
        await ask_again(client)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_the_kernel_takes_every_byte_arrives_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One to three pieces in a go, as of choices; a part of one is taken, or nothing; both ways in turns."""
    chance = random.Random(seed)
    take_at_most(monkeypatch, lambda: chance.choice([0, 1, 2, 5, 9, 10_000]))
    app, expected = Answer(), b""
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        for number in range(200):
            if app.direct.is_free:
                for piece in range(chance.randint(1, 3)):
                    data = b"%d.%d " % (number, piece) * chance.choice([1, 50])
                    app.direct.write(data)
                    expected += data
            else:
                await body(app.send, b"%d; " % number, more=True)
                expected += b"%d; " % number
            if chance.random() < 0.3:
                await trio.lowlevel.checkpoint()
        app.finish.set()
        assert read_body(await raw_answer(client)) == (expected + b"the end", True)
        await ask_again(client)


@pytest.mark.parametrize("taken", [0, 1, 7])
async def test_two_pieces_in_one_go_behind_a_partial_write(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    app = Answer()
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        await app.started.wait()
        take_at_most(monkeypatch, lambda: taken)
        app.direct.write(b"first,")
        app.direct.write(b"second,")
        assert not app.direct.is_free
        assert app.backlog_tasks == 1
        await client.until(b"second,\r\n")
        await wait_until(lambda: app.direct.is_free)
        assert app.backlog_tasks == 0
        app.finish.set()


async def test_a_client_that_reads_on_gets_all_of_it_and_what_comes_behind() -> None:
    """One task for the backlog; ``send`` waits behind it, and so does the end of the answer."""
    app, is_sent = Answer(), trio.Event()

    async def send_behind() -> None:
        await body(app.send, b"behind", more=True)
        is_sent.set()
        app.finish.set()

    async with serving(http_app(app)) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await app.started.wait()
        written = app.fill()
        app.direct.write(b"one more")  # as of another choice, in the same go
        assert app.backlog_tasks == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_behind)
            await wait_all_tasks_blocked(0.01)
            assert not is_sent.is_set()
            assert not app.direct.is_free
            answer = await raw_answer(client)
        assert read_body(answer) == (written + b"one more" + b"behind" + b"the end", True)
        await ask_again(client)


async def test_it_is_free_again_when_the_backlog_has_left() -> None:
    app, answer = Answer(), b""

    async def read() -> None:
        nonlocal answer
        answer = await raw_answer(client)

    async with serving(http_app(app)) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await app.started.wait()
        expected = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for turn in range(5):
                expected += app.fill()
                assert app.backlog_tasks == 1
                await wait_until(lambda: app.direct.is_free)
                assert app.backlog_tasks == 0
                app.direct.write(b"turn %d" % turn)
                expected += b"turn %d" % turn
            app.finish.set()
        assert read_body(answer) == (expected + b"the end", True)
        await ask_again(client)


@pytest.mark.parametrize("finishes_first", [True, False])
async def test_a_shutdown_waits_for_a_backlog(finishes_first: bool) -> None:
    """The answer's end may stand behind it already when the shutdown comes, or not."""
    app = Answer()
    async with serving(http_app(app), graceful_timeout=10 * BOUND) as server:
        async with server.connect(**SMALL) as client:
            await client.send(get())
            await app.started.wait()
            written = app.fill()
            if finishes_first:
                app.finish.set()
                await wait_all_tasks_blocked(0.01)
            server.shutdown.set()
            await wait_all_tasks_blocked(0.01)
            app.finish.set()
            assert read_body(await client.rest()) == (written + b"the end", True)
            await server.done.wait()


# ---------------------------------------------------------------------------- cut


async def test_the_limit_of_a_shutdown_cuts_a_backlog() -> None:
    app = Answer()
    async with serving(http_app(app), graceful_timeout=0.1) as server:
        async with server.connect(**SMALL) as client:
            await client.send(get())
            await app.started.wait()
            written = app.fill()
            server.shutdown.set()
            await server.done.wait()
            read, is_whole = read_body(await client.rest())
            assert not is_whole
            assert 0 < len(read) < len(written)
            assert written.startswith(read)


async def test_a_client_that_never_reads_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trioleg.server.client_connection")
    app = Answer()
    async with serving(http_app(app), write_timeout=0.2) as server:
        async with server.connect(**SMALL) as client:
            await client.send(get())
            await app.started.wait()
            written = app.fill()
            await app.left.wait()
            assert not app.direct.is_free
            app.direct.write(b"to nobody")
            app.finish.set()
            read, is_whole = read_body(await client.rest())
            assert not is_whole
            assert written.startswith(read)
    assert [one.getMessage() for one in caplog.records] == [
        "closing a connection: its client reads nothing any more"
    ]


async def test_a_client_that_leaves_a_backlog_behind() -> None:
    app = Answer()
    async with serving(http_app(app)) as server:
        async with server.connect(**SMALL) as client:
            await client.send(get())
            await app.started.wait()
            app.fill()
        await app.left.wait()
        assert not app.direct.is_free
        app.direct.write(b"to nobody")
        app.finish.set()
        async with server.connect() as other:
            await ask_again(other)


@pytest.mark.parametrize("with_backlog", [True, False])
async def test_a_reset_is_met_by_the_write_itself(
    caplog: pytest.LogCaptureFixture, with_backlog: bool
) -> None:
    """It raises nothing, and the app is told."""
    app = Answer()
    async with serving(http_app(app)) as server, server.connect(**SMALL) as client:
        await client.send(get())
        await app.started.wait()
        if with_backlog:
            app.fill()
        linger_0 = b"\x01\0\0\0\0\0\0\0"
        client.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger_0)
        client.stream.socket.close()
        # No checkpoint has passed, so nobody has heard of it.
        assert app.direct.is_free is not with_backlog
        app.direct.write(b"to nobody")
        app.direct.write(b"to nobody")
        assert not app.direct.is_free
        await app.left.wait()
        app.finish.set()
        await body(app.send, b"to nobody", more=True)
    assert not caplog.records


# ---------------------------------------------------------------------------- where there is no such way


@pytest.mark.parametrize(
    ("request_", "status", "headers"),
    [
        (get(version="1.0"), 200, ()),
        (get().replace(b"GET", b"HEAD"), 200, ()),
        (get(), 200, ((b"content-length", b"7"),)),
        (get(), 204, ()),
        (get(), 304, ()),
    ],
    ids=["HTTP/1.0", "HEAD", "Content-Length", "204", "304"],
)
async def test_no_direct_way_where_no_chunks_go(
    request_: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    app = Answer(*headers, status=status)
    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(request_)
        await app.started.wait()
        assert not app.direct.is_free
        app.finish.set()
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)


async def test_no_direct_way_under_tls(certificates: Certificates) -> None:
    pair = {"certfile": certificates.pem("server"), "keyfile": certificates.key("server")}
    trusting = ssl.create_default_context(cafile=certificates.pem("ca"))
    app = Answer()
    async with serving(http_app(app), tls=tls_context(pair)) as server:
        async with server.connect_tls(trusting) as client:
            await client.send(get())
            await app.started.wait()
            assert not app.direct.is_free
            await body(app.send, b"some, ", more=True)
            assert not app.direct.is_free
            app.finish.set()
            assert read_body(await raw_answer(client)) == (b"some, the end", True)


async def test_a_late_piece_of_the_answer_before_is_not_written_into_the_next() -> None:
    """Between two requests of a connection, and with two that were sent at once."""
    answers: list[Answer] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answers.append(Answer())
        await answers[-1](scope, receive, send)

    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get() + get())
        await wait_until(lambda: answers and answers[0].started.is_set())
        first = answers[0]
        assert first.direct.is_free
        first.finish.set()
        assert read_body(await raw_answer(client)) == (b"the end", True)
        await wait_until(lambda: len(answers) == 2 and answers[1].started.is_set())
        second = answers[1]
        assert second.direct.is_free
        assert not first.direct.is_free
        second.direct.write(b"mine, ")
        second.finish.set()
        assert read_body(await raw_answer(client)) == (b"mine, the end", True)
        assert not first.direct.is_free
        assert not second.direct.is_free
        await ask_again(client)
        assert not first.direct.is_free
        assert not second.direct.is_free
