"""HTTP/1.1 as clients speak it: framing, reuse, pipelining, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from connection_harness import (
    body,
    echo,
    get,
    http_app,
    post,
    read_body,
    reply,
    serving,
    start,
)
from hypercorn.config import Config
from trio.testing import wait_all_tasks_blocked

CHUNKED_UPLOAD = (
    b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n there\r\n0\r\n\r\n"
)


async def stream_three(scope: Any, receive: Any, send: Any) -> None:
    await start(send, 200, (b"content-type", b"text/event-stream"))
    for part in (b"one", b"two", b"three"):
        await body(send, part, more=True)
    await body(send, b"")


async def test_a_connection_is_used_again() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        for i in range(3):
            await client.send(post(b"%d" % i, path="/a"))
            status, head, data = await client.response()
            assert (status, data) == (200, b"POST /a %d" % i)
            assert b"connection" not in head.lower()


async def test_more_requests_than_hypercorn_allows_a_connection() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        for _ in range(1100):
            await client.send(get())
            assert (await client.response())[0] == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(b"".join(post(b"%d" % i) for i in range(50)))
        for i in range(50):
            assert (await client.response())[2] == b"POST / %d" % i


async def test_a_request_may_come_byte_by_byte() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        for byte in CHUNKED_UPLOAD:
            await client.send(bytes([byte]))
        assert (await client.response())[2] == b"POST / hello there"


async def test_empty_lines_between_requests_are_skipped() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(b"\r\n\r\n" + post(b"a") + b"\r\n" + post(b"b") + b"\r\n")
        assert (await client.response())[2] == b"POST / a"
        assert (await client.response())[2] == b"POST / b"
        await client.send(b"\r")
        await client.send(b"\n" + post(b"c"))
        assert (await client.response())[2] == b"POST / c"


@pytest.mark.parametrize(
    "request_",
    [
        get("/", "Connection: close"),
        get("/", version="1.0"),
        get("/", "Connection: close") + b"\r\n",
        get("/", version="1.0") + b"\r\nGET / HTTP/1.1\r\n",
    ],
)
async def test_a_client_that_wants_the_end_of_file_gets_it(request_: bytes) -> None:
    async with serving(http_app(echo)) as server:
        answer = await server.exchange(request_)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\nGET / ")
    assert answer.count(b"HTTP/1.1") == 1


async def test_chunks_of_a_stream_are_framed_one_by_one() -> None:
    async with serving(http_app(stream_three)) as server, server.connect() as client:
        await client.send(get())
        head = await client.until(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        assert [await client.chunk() for _ in range(4)] == [b"one", b"two", b"three", b""]
        await client.send(get())
        assert (await client.response())[2] == b"onetwothree"


async def test_http_1_0_gets_a_stream_without_chunks() -> None:
    async with serving(http_app(stream_three)) as server:
        answer = await server.exchange(get(version="1.0"))
    assert answer.endswith(b"\r\n\r\nonetwothree")
    assert b"chunked" not in answer


async def test_head_has_the_head_alone() -> None:
    async with serving(http_app(stream_three)) as server, server.connect() as client:
        await client.send(get().replace(b"GET", b"HEAD") + get())
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert (await client.response())[2] == b"onetwothree"


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_none(status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/empty":
            await start(send, status)
            await body(send, b"must not be seen")
        else:
            await reply(send, b"next")

    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get("/empty") + get("/"))
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d" % status)
        assert (await client.response())[2] == b"next"


async def test_a_body_is_announced_before_it_is_sent() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await client.send(b"hi")
        assert (await client.response())[2] == b"POST / hi"


async def test_an_app_that_fails_before_its_answer_gets_a_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise ExceptionGroup("two at once", [ValueError("the cause"), OSError("another")])

    async with serving(http_app(app)) as server:
        for method in (b"GET", b"HEAD"):
            answer = await server.exchange(get().replace(b"GET", method))
            assert answer.startswith(b"HTTP/1.1 500")
            assert b"connection: close" in answer
    assert [record.getMessage() for record in caplog.records] == [
        "the app failed on GET /",
        "the app failed on HEAD /",
    ]
    assert "the cause" in caplog.text


async def test_an_app_that_answers_nothing_gets_a_500() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)

    async with serving(http_app(app)) as server:
        assert (await server.exchange(get())).startswith(b"HTTP/1.1 500")


@pytest.mark.parametrize("how", ["return", "raise", "bad length"])
async def test_half_an_answer_never_looks_whole(how: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"9")] if how == "bad length" else []
        await start(send, 200, *length)
        await body(send, b"half", more=how != "bad length")
        if how == "raise":
            raise ValueError("in the middle")

    async with serving(http_app(app)) as server:
        answer = await server.exchange(get())
    end = b"\r\n\r\nhalf" if how == "bad length" else b"\r\n\r\n4\r\nhalf\r\n"
    assert answer.endswith(end)


async def test_an_illegal_header_is_a_500_and_not_a_split_response() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await start(send, 200, (b"x", b"a\r\n\r\nHTTP/1.1 200 OK"))

    async with serving(http_app(app)) as server:
        assert (await server.exchange(get())).startswith(b"HTTP/1.1 500")


async def test_a_long_head_is_no_error() -> None:
    request = get("/", "Cookie: " + "x" * 2**15)
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(request[:-2])
        await wait_all_tasks_blocked()  # it has been read, and is not whole
        await client.send(request[-2:])
        assert (await client.response())[0] == 200


REFUSED = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00" * 20, 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two lengths": (post(b"", "Content-Length: 7"), 400),
    "unknown coding": (get("/", "Transfer-Encoding: gzip"), 501),
    "head too long": (get("/", "Cookie: " + "x" * 2**17), 431),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", 505),
    "HTTP/3.1": (get(version="3.1"), 505),
    "no path": (b"GET ? HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", 501),
    "WebSocket": (get("/", "Connection: Upgrade", "Upgrade: WebSocket"), 400),
    "WebSocket with a frame": (
        get("/", "Connection: Upgrade", "Upgrade: websocket") + b"\x81\x01x",
        400,
    ),
    "ff in a protocol": (
        get("/", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Protocol: @").replace(
            b"@", b"\xff"
        ),
        400,
    ),
    "ff in an extension": (
        get(
            "/", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Extensions: @"
        ).replace(b"@", b"\xff"),
        400,
    ),
    "ff in Connection": (
        get("/", "Upgrade: websocket", "Connection: Upgrade, @").replace(b"@", b"\xff"),
        400,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_served_is_refused_with_a_status(name: str) -> None:
    request, status = REFUSED[name]
    async with serving(http_app(echo), drain_timeout=1) as server:
        answer = await server.exchange(request)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        # And the server is still there.
        assert (await server.exchange(get("/", "Connection: close"))).endswith(b"GET / ")


async def test_a_request_for_another_servers_name_ends_the_connection() -> None:
    config = Config()
    config.server_names = ["test"]
    async with serving(http_app(echo), config=config) as server:
        assert (await server.exchange(post(b"").replace(b"test", b"else"))).startswith(
            b"HTTP/1.1 404"
        )
        assert (await server.exchange(get("/", "Connection: close"))).endswith(b"GET / ")


async def test_a_half_request_at_the_end_of_file_is_a_400() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(b"GET / HT")
        await client.stream.send_eof()
        assert (await client.rest()).startswith(b"HTTP/1.1 400")


async def test_an_offer_of_h2c_is_ignored() -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(get("/", *offer) + get("/next"))
        assert (await client.response())[2] == b"GET / "
        assert (await client.response())[2] == b"GET /next "


async def test_a_broken_chunk_ends_the_request_with_a_400() -> None:
    async with serving(http_app(echo)) as server:
        answer = await server.exchange(CHUNKED_UPLOAD.replace(b"6;", b"q;"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
