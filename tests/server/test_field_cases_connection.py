"""What a server on this stack was seen to do wrong (M1 to M17), each by the case that showed it, on real sockets.

Against ``trioleg serve`` where nothing more is needed. Where an app has to misbehave, the case is elsewhere:

- M2, a client that stops reading: test_fault_matrix_real.py, and test_connection_leaving.py write by write;
- M3, HTTP/2 is not served: test_connection_http.py, test_other_clients.py;
- M6, the limits of a head and of the shutdown: test_connection_http.py, test_connection_limits.py;
- M12, an error in a cleanup beside a disconnect: test_failures.py;
- M16, a head sent in a cancelled scope: test_connection_leaving.py;
- M17, an app that raises with 17 MiB unread: test_connection_leaving.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from connection_harness import Client, get, post
from hostile_bytes import CHAT_PATH, chat
from process_helpers import wait_until
from scripted_app import open_chat_llm
from served import GENEROUS_S, Server, open_client, serving
from sse_grammar import read_stream
from test_streaming_protocol import play
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.config import ServerConfig
from trioleg.server import serve as serve_module
from trioleg.server.serve import BoundServer, serve

# Ten seconds, and nearly all that the model allows.
LONG = {"max_tokens": 2000}
LINGER_0 = b"\x01\0\0\0\0\0\0\0"


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of all tests here; in the end its log has nothing to tell."""
    with serving(tmp_path_factory.mktemp("field"), step_interval_s=0.005) as server:
        yield server
    assert "Traceback" not in server.program.stderr


@asynccontextmanager
async def connecting(
    address: tuple[str, int], seconds: float = GENEROUS_S
) -> AsyncIterator[Client]:
    with trio.fail_after(seconds):
        async with await trio.open_tcp_stream(*address) as stream:
            yield Client(stream)


async def exchange(server: Server, request: bytes, seconds: float = GENEROUS_S) -> bytes:
    """Everything to the end of file, which has to come within the time."""
    async with connecting(server.address, seconds) as client:
        await client.send(request)
        return await client.rest()


# M1, M5, M10


@pytest.mark.parametrize("leave", ["close", "half-close"])
@pytest.mark.parametrize("behind", [b"", b"\r\n", get("/health")], ids=["nothing", "line", "next"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_that_leaves_frees_the_engine_at_once(
    server: Server, stream: bool, behind: bytes, leave: str
) -> None:
    """Whatever it sent behind its request. The end of its input is its leaving (decision 6)."""
    async with open_client(server) as other:
        left = await other.metric('trioleg_requests_total{reason="left"}')
        async with connecting(server.address) as client:
            await client.send(chat(stream=stream, **LONG) + behind)
            await other.until_in_engine(running=1, waiting=0)
            if leave == "close":
                await client.stream.aclose()
            else:
                await client.stream.send_eof()
            with trio.fail_after(5):
                await other.until_idle()
        assert await other.metric('trioleg_requests_total{reason="left"}') == left + 1


# M4, M6: time. A clock that runs faster, or is set forward, since nobody waits for these.


@pytest.fixture
def clock() -> MockClock:
    return MockClock(rate=10)


@asynccontextmanager
async def in_this_process(*pieces: str, **more: Any) -> AsyncIterator[tuple[str, int]]:
    """A server that plays these tokens, one in 0.2 s. ``more``: of its configuration."""
    script = play(*pieces, step_interval_s=0.2)
    async with open_chat_llm(script) as (llm, _), trio.open_nursery() as nursery:
        bound: BoundServer = await nursery.start(serve, llm, ServerConfig(port=0, **more))
        yield bound.host, bound.port
        nursery.cancel_scope.cancel(reason="the test is over")


async def test_quarts_own_timeout_cuts_no_stream(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M4: it is 2 s, and the stream takes more than 4 s."""

    def create_app(*args: Any) -> Any:
        app = create(*args)
        app.config["RESPONSE_TIMEOUT"] = 2
        return app

    create = serve_module.create_app
    monkeypatch.setattr(serve_module, "create_app", create_app)
    async with in_this_process(*"abc" * 8) as address:
        async with connecting(address, 10 * GENEROUS_S) as client:
            begun = trio.current_time()
            await client.send(chat(stream=True, max_tokens=24))
            status, _, body = await client.response()
            assert trio.current_time() - begun >= 4
    assert status == 200
    assert read_stream(body).choices[0].finish_reason == "length"


async def test_an_idle_connection_is_kept_as_long_as_client_pools_keep_theirs(
    clock: MockClock,
) -> None:
    async with in_this_process("a") as address, connecting(address, 10 * GENEROUS_S) as client:
        for idle in (10, 70):
            clock.jump(idle)
            await client.send(get("/health"))
            assert (await client.response())[0] == 200
            await wait_all_tasks_blocked()  # the connection has seen that it is idle
        clock.jump(76)
        assert await client.at_eof()


async def test_a_head_has_to_come_within_the_idle_time(clock: MockClock) -> None:
    """Byte by byte, with never a pause as long as that."""
    async with in_this_process("a") as address, connecting(address, 10 * GENEROUS_S) as client:
        for byte in get("/health")[:4]:
            await client.send(bytes([byte]))
            clock.jump(20)
        assert await client.at_eof()


async def test_a_body_has_its_own_time(clock: MockClock) -> None:
    async with in_this_process("a", body_timeout=50) as address:
        async with connecting(address, 10 * GENEROUS_S) as client:
            request = chat()
            await client.send(request[:-9])
            await trio.sleep(1)
            clock.jump(50)
            status, head, body = await client.response()
            await client.stream.send_eof()
            assert await client.at_eof()
    assert status == 408
    assert b"connection: close" in head
    assert "allowed: 50 s for all of it" in json.loads(body)["error"]["message"]


async def test_a_body_over_16_mib_is_a_413(server: Server) -> None:
    """M6, and M17: nobody reads those 17 MiB."""
    answer = await exchange(server, post(b" " * 17 * 2**20, path=CHAT_PATH))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    error = json.loads(body)["error"]
    assert error["message"] == "the request's body is too long; allowed: 16777216 bytes"
    assert error["type"] == "invalid_request_error"


async def test_a_connection_has_no_number_of_requests(server: Server) -> None:
    """M6: Hypercorn would close it after a thousand."""
    async with connecting(server.address) as client:
        await client.send(get("/live") * 1100)
        for _ in range(1100):
            assert (await client.response())[0] == 200


# M14


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", ["Connection: close", "HTTP/1.0"])
async def test_the_end_of_file_comes_with_the_end_of_the_answer(
    server: Server, how: str, stream: bool
) -> None:
    request = chat(stream=stream)
    if how == "HTTP/1.0":
        request = request.replace(b"HTTP/1.1", b"HTTP/1.0")
    else:
        request = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    # Far under the idle time, which would close it, too.
    answer = await exchange(server, request, seconds=5)
    assert answer.startswith(b"HTTP/1.1 200")
    if stream:
        assert b"data: [DONE]" in answer


# M15


WEBSOCKET = (
    b"GET @ HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
UPGRADES = {
    "ff in a protocol": WEBSOCKET + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
    "ff in an extension": WEBSOCKET + b"Sec-WebSocket-Extensions: \xff\r\n\r\n",
    "ff in Connection": WEBSOCKET.replace(b": Upgrade\r", b": Upgrade, \xff\r") + b"\r\n",
    "a frame with the handshake": WEBSOCKET + b"\r\n\x81\x85\0\0\0\0hello",
}


@pytest.mark.parametrize("path", [b"/", CHAT_PATH.encode(), b"/nowhere"])
@pytest.mark.parametrize("name", UPGRADES)
async def test_no_upgrade_ends_the_server(server: Server, name: str, path: bytes) -> None:
    answer = await exchange(server, UPGRADES[name].replace(b"@", path))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"WebSockets are not offered" in answer
    ready = await exchange(server, get("/health", "Connection: close"))
    assert ready.startswith(b"HTTP/1.1 200")


# M16, M17


async def test_descriptors_and_tasks_stay_flat_whatever_clients_leave_unsaid(
    server: Server,
) -> None:
    """2,000 that connect and close, many of them before the first byte of an answer."""
    big = post(b" " * 2**17, path=CHAT_PATH)
    too_big = get(CHAT_PATH, "Content-Length: 99999999").replace(b"GET", b"POST")
    requests = [
        b"",
        chat(stream=True),
        chat(),
        get("/health"),
        big[: 2**16],
        too_big,
        b"rubbish\r\n\r\n",
    ]

    async def come_and_go(first: int) -> None:
        for number in range(first, 2000, 4):
            async with await trio.open_tcp_stream(*server.address) as stream:
                if number % 2:
                    stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, LINGER_0)
                await stream.send_all(requests[number % len(requests)])

    async with open_client(server, 4 * GENEROUS_S) as client:
        await client.until_idle()
        descriptors, tasks = server.descriptors, server.tasks()
        async with trio.open_nursery() as nursery:
            for first in range(4):
                nursery.start_soon(come_and_go, first)
        await client.until_idle()
        await wait_until(lambda: server.descriptors <= descriptors)
        await wait_until(lambda: server.tasks() <= tasks)
        await client.until_health(200)
