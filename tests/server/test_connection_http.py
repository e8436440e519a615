"""HTTP/1.1 as clients speak it: framing, reuse, pipelining, what is refused."""

from __future__ import annotations

import json
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
            head, _, data = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
            assert b"connection: close" in head
            # It may be tried again.
            assert b"x-should-retry" not in head
            if method == b"GET":
                assert json.loads(data)["error"]["type"] == "server_error"
            else:
                assert not data
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


def upgrade(*headers: bytes, to: bytes = b"websocket") -> bytes:
    """The opening of a WebSocket, byte for byte."""
    lines = [b"GET / HTTP/1.1", b"Host: test", b"Upgrade: " + to, *headers]
    if not any(line.startswith(b"Connection") for line in headers):
        lines.append(b"Connection: Upgrade")
    return b"\r\n".join([*lines, b"", b""])


def head_of(size: int) -> bytes:
    """A request whose head has so many bytes."""
    return get("/", f"Cookie: {'x' * (size - len(get('/', 'Cookie: ')))}")


# The request, the status, and what the message says of it.
REFUSED = {
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00" * 20, 400, "illegal request line"),
    "no version": (b"GET /\r\n\r\n", 400, "illegal request line"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
    "two lengths": (post(b"", "Content-Length: 7"), 400, "Content-Length"),
    "a negative length": (get("/", "Content-Length: -1"), 400, "Content-Length"),
    "a length and chunks": (
        post(b"0\r\n\r\n", "Transfer-Encoding: chunked"),
        400,
        "both Content-Length and Transfer-Encoding; allowed: one of them",
    ),
    "a chunk's head too long": (
        CHUNKED_UPLOAD.replace(b"x=y", b"x" * 2**18),
        431,
        "or of a chunk, is too long; allowed: 65536 bytes",
    ),
    "unknown coding": (get("/", "Transfer-Encoding: gzip"), 501, "Transfer-Encoding"),
    "head one byte too long": (head_of(2**16 + 1), 431, "allowed: 65536 bytes"),
    "head far too long": (head_of(2**18), 431, "allowed: 65536 bytes"),
    "HTTP/2": (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
        505,
        "HTTP/2.0 is not spoken here; allowed: HTTP/1.1 and HTTP/1.0",
    ),
    "HTTP/3.1": (get(version="3.1"), 505, "HTTP/3.1"),
    "no path": (b"GET ? HTTP/1.1\r\nHost: x\r\n\r\n", 400, "no path"),
    "half a URL": (get("http://[/"), 400, "allowed: a path that begins with /, or a URL with one"),
    "half a URL, quoted": (get("http://%5b/"), 400, "no path"),
    "a URL without a path": (get("http://test"), 400, "no path"),
    "CONNECT": (b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", 501, "CONNECT"),
    "WebSocket": (upgrade(to=b"WebSocket"), 400, "WebSockets"),
    "WebSocket behind a space that is none in ASCII": (upgrade(to=b"\xa0websocket"), 400, "WebS"),
    "WebSocket with a frame": (upgrade() + b"\x81\x01x", 400, "WebSockets"),
    "ff in a protocol": (upgrade(b"Sec-WebSocket-Protocol: \xff"), 400, "WebSockets"),
    "ff in an extension": (upgrade(b"Sec-WebSocket-Extensions: \xff"), 400, "WebSockets"),
    "ff in Connection": (upgrade(b"Connection: Upgrade, \xff"), 400, "WebSockets"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_served_is_refused_with_a_status(name: str) -> None:
    request, status, said = REFUSED[name]
    async with serving(http_app(echo), linger_timeout=1) as server:
        answer = await server.exchange(request)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert said in refusal_in(answer)
        # And the server is still there.
        assert (await server.exchange(get("/", "Connection: close"))).endswith(b"GET / ")


def refusal_in(answer: bytes) -> str:
    """The message of an answer that is one of OpenAI's errors, and the last on its connection."""
    head, _, data = answer.partition(b"\r\n\r\n")
    headers = head.lower().split(b"\r\n")[1:]
    assert {b"content-type: application/json", b"connection: close"} <= set(headers)
    # openai's clients repeat what failed with a 5xx, unless they are told not to.
    assert b"x-should-retry: false" in headers
    error = json.loads(data)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error["message"]


async def test_a_head_of_just_the_limit_is_served() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(head_of(2**16))
        assert (await client.response())[0] == 200


async def test_a_refusal_quotes_only_a_little_of_what_was_sent() -> None:
    async with serving(http_app(echo)) as server:
        answer = await server.exchange(get("/", "\0" * 30_000))
    assert answer.startswith(b"HTTP/1.1 400")
    assert len(refusal_in(answer)) < 300


async def test_a_refusal_of_head_has_no_body() -> None:
    async with serving(http_app(echo)) as server:
        answer = await server.exchange(upgrade().replace(b"GET", b"HEAD"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("status", "phrase"), [(201, b"Created"), (299, b"Unknown")])
async def test_a_status_has_its_phrase(status: int, phrase: bytes) -> None:
    """h2load takes a response without one for a failed request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"", status=status)

    async with serving(http_app(app)) as server, server.connect() as client:
        await client.send(get())
        assert await client.until(b"\r\n") == b"HTTP/1.1 %d %b\r\n" % (status, phrase)


async def test_responses_name_the_server_that_answers() -> None:
    async with serving(http_app(echo)) as server, server.connect() as client:
        await client.send(post(b"hi", "Expect: 100-continue").removesuffix(b"hi"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hi" + get(version="4.0"))
        for _ in range(2):
            head = (await client.response())[1]
            assert b"\r\nserver: trioleg\r\n" in head
            assert b"\r\ndate: " in head


async def test_date_and_server_are_left_out_as_configured() -> None:
    config = Config()
    config.include_date_header = config.include_server_header = False
    async with serving(http_app(echo), config=config) as server, server.connect() as client:
        await client.send(get())
        assert (await client.response())[1] == b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"


async def test_a_request_for_another_servers_name_ends_the_connection() -> None:
    config = Config()
    config.server_names = ["test"]
    async with serving(http_app(echo), config=config) as server:
        answer = await server.exchange(post(b"").replace(b"test", b"else"))
        assert answer.startswith(b"HTTP/1.1 404")
        assert b"Host is 'else'; allowed: test" in answer
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
