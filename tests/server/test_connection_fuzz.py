"""Whatever bytes come, they end at most their own connection."""

from __future__ import annotations

import random

import pytest
import trio
from connection_harness import Server, echo, get, http_app, post, serving
from trio.testing import wait_all_tasks_blocked

SEEDS = [
    get("/"),
    get("/", "Connection: close"),
    get("/", version="1.0"),
    get("/", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Protocol: a, b"),
    get("/", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    get("/a") + get("/b"),
    post(b'{"stream": true}', "Content-Type: application/json"),
    post(b"hi", "Expect: 100-continue"),
    b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: y\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"HEAD / HTTP/1.1\r\nHost: t\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
]
TOKENS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"\xff", b" ", b"\t", b":", b",", b"0\r\n\r\n", b"?", b"%",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n",
    b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"Expect: 100-continue\r\n",
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"GET / HTTP/1.1\r\n\r\n", b"ffffffffff\r\n",
]  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    """A seed after one to four edits: a token put in, bytes cut out, replaced, or said twice."""
    data = chance.choice(SEEDS)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randint(0, 8))
        put = chance.choice([b"", chance.randbytes(1), chance.choice(TOKENS), data[at:end] * 2])
        data = data[:at] + put + data[end:]
    return data


async def attack(server: Server, seed: int, count: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        async with server.connect() as client:
            data = mutated(chance)
            cut = chance.randrange(len(data) + 1)
            try:
                await client.send(data[:cut])
                await client.send(data[cut:])
                if chance.random() < 0.5:
                    await client.stream.send_eof()
                    await client.rest()
            except trio.BrokenResourceError:
                pass  # a server may close on what it does not like


async def test_mutated_requests_end_at_most_their_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(http_app(echo), drain_timeout=0.5) as server:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(attack, server, seed, 700)
        assert (await server.exchange(get("/", "Connection: close"))).endswith(b"GET / ")
        while trio.lowlevel.current_statistics().tasks_living > tasks:
            await wait_all_tasks_blocked(0.01)
    assert not caplog.records
