"""Whatever bytes come, they end at most their own connection."""

from __future__ import annotations

import random

import pytest
import trio
from connection_harness import BOUND, Server, echo, get, http_app, serving
from hostile_bytes import mutated
from trio.testing import wait_all_tasks_blocked


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
    async with serving(http_app(echo), bound=10 * BOUND, linger_timeout=0.5) as server:
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(attack, server, seed, 700)
        assert (await server.exchange(get("/", "Connection: close"))).endswith(b"GET / ")
        while trio.lowlevel.current_statistics().tasks_living > tasks:
            await wait_all_tasks_blocked(0.01)
    assert not caplog.records
