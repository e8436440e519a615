"""TLS under the connection: the same rows that hold for a plain one, on real sockets."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trio
from certificates import Certificates
from connection_harness import (
    BOUND,
    Client,
    Server,
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

from trioleg.server.client_stream import TlsStream
from trioleg.server.tls import tls_context

NOT_TLS = b"\x16\x03\x01\x00\x05\x01"


@pytest.fixture
def tls(certificates: Certificates) -> ssl.SSLContext:
    return tls_context(named(certificates))


def named(certificates: Certificates, **more: Any) -> dict[str, Any]:
    return {"certfile": certificates.pem("server"), "keyfile": certificates.key("server"), **more}


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Three chunks, of which the last comes after all others."""
    await start(send)
    for word in (b"one ", b"two "):
        await body(send, word, more=True)
    await body(send, b"three")


class Watcher:
    """An app that streams a word and waits for the client to leave."""

    def __init__(self) -> None:
        self.left = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await body(send, b"word", more=True)
        await disconnected(receive)
        self.left.set()


async def test_requests_follow_each_other_on_one_connection(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            for data in (b"first", b"x" * 100_000, b"third"):
                await client.send(post(data))
                assert (await client.response())[2] == b"POST / " + data


async def test_pipelined_requests_are_answered_in_order(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get("/1") + get("/2") + get("/3", "Connection: close"))
            assert [(await client.response())[2] for _ in range(3)] == [
                b"GET /1 ",
                b"GET /2 ",
                b"GET /3 ",
            ]
            assert await client.at_eof()


async def test_the_app_is_told_that_it_is_https(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, scope["scheme"].encode())

    async with serving(http_app(app), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            assert (await client.response())[2] == b"https"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_ends_with_a_close_notify(
    version: str, tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(stream), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get("/", "Connection: close", version=version))
            # Strict TLS: an end without it would be an error here.
            answer = await client.rest()
    assert answer.endswith(b"one two three" if version == "1.0" else b"three\r\n0\r\n\r\n")


async def test_a_stream_that_is_cut_ends_without_one(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async def cut(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        await body(send, b"half", more=True)

    async with serving(http_app(cut), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get(version="1.0"))
            await client.until(b"half")
            with pytest.raises(trio.BrokenResourceError):
                await client.at_eof()


async def test_an_early_answer_arrives_behind_a_body_that_nobody_reads(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"too large", 413)

    async with serving(http_app(refuse), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(post(b"x" * 2_000_000))
            assert (await client.response())[0] == 413
            assert await client.at_eof()


async def test_a_large_answer_is_whole_while_a_large_body_comes(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    size = 8_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        data = await read_body(receive)
        assert data is not None
        await reply(send, data)

    async with serving(http_app(app), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(post(b"y" * size))
            assert (await client.response())[2] == b"y" * size


async def _close_notify(client: Client, raw: socket.socket) -> None:
    await client.stream.aclose()


async def _fin(client: Client, raw: socket.socket) -> None:
    await trio.lowlevel.checkpoint()
    raw.shutdown(socket.SHUT_WR)


async def _reset(client: Client, raw: socket.socket) -> None:
    await trio.lowlevel.checkpoint()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    raw.close()


@pytest.mark.parametrize("leave", [_close_notify, _fin, _reset])
async def test_a_client_that_leaves_is_gone_at_once(
    leave: Callable[..., Any],
    tls: ssl.SSLContext,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Watcher()
    async with serving(http_app(app), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            await client.until(b"word")
            await leave(client, client.stream.transport_stream.socket)
            await app.left.wait()
    assert caplog.records == []


@pytest.mark.parametrize("bound", ["write", "shutdown"])
async def test_a_client_that_reads_nothing_holds_nobody_up(
    bound: str, tls: ssl.SSLContext, certificates: Certificates
) -> None:
    left = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                while True:
                    await body(send, b"z" * 100_000, more=True)
                    await trio.lowlevel.checkpoint()

            nursery.start_soon(write)
            await disconnected(receive)
            nursery.cancel_scope.cancel()
        left.set()

    limits = {"write_timeout": 0.2} if bound == "write" else {"graceful_timeout": 0.2}
    async with serving(http_app(app), tls=tls, **limits) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            await client.until(b"\r\n\r\n")
            await wait_all_tasks_blocked()
            if bound == "write":
                await left.wait()
            else:
                server.shutdown.set()
                await server.done.wait()


async def test_what_is_written_in_a_cancelled_scope_arrives(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    """An ending cancels a stream's loop, perhaps right before a write; its last frames follow."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        with trio.CancelScope() as scope_:
            scope_.cancel()
            await body(send, b"frame ", more=True)
        await body(send, b"last frame")

    async with serving(http_app(app), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get("/", "Connection: close", version="1.0"))
            assert (await client.rest()).endswith(b"frame last frame")


async def test_a_request_that_a_shutdown_cuts_is_answered(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    begun = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await trio.sleep_forever()

    async with serving(http_app(app), tls=tls, graceful_timeout=0) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            await begun.wait()
            server.shutdown.set()
            assert (await client.rest()).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("sent", [b"", NOT_TLS], ids=["nothing", "half a ClientHello"])
@pytest.mark.parametrize("end", ["timeout", "drain", "shutdown"])
async def test_a_client_that_never_shakes_hands_holds_nobody_up(
    sent: bytes, end: str, tls: ssl.SSLContext, certificates: Certificates
) -> None:
    timeout = {"handshake_timeout": 0.05} if end == "timeout" else {}
    async with serving(http_app(echo), tls=tls, **timeout) as server, server.connect() as idler:
        await idler.send(sent)
        await wait_until(lambda: len(server.connections))
        if end != "timeout":
            await _is_served(server, certificates)
            await wait_all_tasks_blocked()
        if end == "drain":
            server.connections.drain()
        elif end == "shutdown":
            server.shutdown.set()
        assert await idler.at_eof()


async def _is_served(server: Server, certificates: Certificates) -> None:
    async with server.connect_tls(certificates.context()) as client:
        await client.send(get("/", "Connection: close"))
        assert (await client.response())[0] == 200


async def test_an_idle_client_is_closed_by_a_drain(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            await client.response()
            server.connections.drain()
            assert await client.at_eof()


async def test_a_request_that_comes_with_the_drain_is_answered(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get("/1"))
            await client.response()
            await wait_all_tasks_blocked()
            await client.send(get("/2"))
            server.connections.drain()
            assert b"connection: close" in (await client.response())[1].lower()
            assert await client.at_eof()


async def test_plain_http_on_the_tls_port_is_told_so(
    tls: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(http_app(echo), tls=tls) as server:
        answer = await server.exchange(post(b"x" * 300_000))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"https://" in answer
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "TLS handshake failed" in record.message


async def test_tls_on_the_plain_port_is_refused(certificates: Certificates) -> None:
    async with serving(http_app(echo)) as server, server.connect() as plain:
        stream = trio.SSLStream(plain.stream, certificates.context(), server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()


async def test_garbage_ends_one_connection(tls: ssl.SSLContext, certificates: Certificates) -> None:
    async with serving(http_app(echo), tls=tls) as server, server.connect() as other:
        await other.send(b"\x16\x03\x01\x00\x04garbage" * 1000)
        assert await other.at_eof()
        await _is_served(server, certificates)


async def test_garbage_behind_the_handshake_is_an_end(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    app = Watcher()
    async with serving(http_app(app), tls=tls) as server:
        async with server.connect_tls(certificates.context()) as client:
            await client.send(get())
            await client.until(b"word")
            await client.stream.transport_stream.send_all(b"no record at all" * 10)
            await app.left.wait()


@pytest.mark.parametrize(
    ("mode", "client", "is_served"),
    [
        ("CERT_REQUIRED", "client", True),
        ("CERT_REQUIRED", None, False),
        ("CERT_REQUIRED", "stranger", False),
        ("CERT_OPTIONAL", None, True),
        ("CERT_OPTIONAL", "stranger", False),
    ],
)
async def test_certificates_of_clients(
    mode: str, client: str | None, is_served: bool, certificates: Certificates
) -> None:
    tls = tls_context(named(certificates, ca_certs=certificates.pem("ca"), verify_mode=mode))
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(certificates.context(client)) as asking:
            if is_served:
                await asking.send(get())
                assert (await asking.response())[0] == 200
            else:
                with pytest.raises(trio.BrokenResourceError):
                    # In TLS 1.3 a client takes itself for accepted before the server has looked.
                    await asking.send(get())
                    await asking.response()


async def test_http2_is_not_offered(tls: ssl.SSLContext, certificates: Certificates) -> None:
    context = certificates.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(http_app(echo), tls=tls) as server:
        async with server.connect_tls(context) as client:
            assert client.stream.selected_alpn_protocol() == "http/1.1"


async def test_a_full_server_closes_without_a_word(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    async with serving(http_app(echo), tls=tls, max_connections=1) as server:
        async with server.connect_tls(certificates.context()) as client:
            async with server.connect() as other:
                assert await other.at_eof()
            await client.send(get())
            assert (await client.response())[0] == 200


async def test_the_last_word_is_said_over_input_that_was_read_and_not_decrypted(
    tls: ssl.SSLContext, certificates: Certificates
) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(BOUND):
        async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()) as plain:
            ours = TlsStream(await listener.accept(), tls)
            client = trio.SSLStream(plain, certificates.context(), server_hostname="localhost")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.shake_hands)
                nursery.start_soon(client.do_handshake)
            # Two records, which the server reads together, and decrypts one by one.
            await client.send_all(b"x" * 32_000)
            while len(await ours.socket.recv(2**16, socket.MSG_PEEK)) < 32_000:
                pass
            assert len(await ours.receive()) < 32_000
            await ours.finish()
            assert await client.receive_some() == b""
            ours.close()
