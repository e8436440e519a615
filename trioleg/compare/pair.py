"""Two streams of one server, side by side: what most scenarios about an engine or a fault look at."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from ..bench.client import Exchange
from .legs import Running
from .observing import asking, receive_tokens, watch
from .seen import Seen, phrases

__all__ = ["TOKENS", "Pair", "open_two", "said_by", "speak", "watch_all"]

# What each has had before something happens.
TOKENS = 3


@asynccontextmanager
async def open_two(server: Running, **body: Any) -> AsyncIterator[tuple[Exchange, Exchange, int]]:
    """Two streams that the engine has, and the first one's number."""
    number = (await server.puppet.state()).arrived
    async with asking(server, **body) as first:
        await server.puppet.wait_requests(number + 1)
        async with asking(server, **body) as second:
            await server.puppet.wait_requests(number + 2)
            yield first, second, number


async def speak(
    server: Running, numbers: Sequence[int], clients: Sequence[Exchange], tokens: int = TOKENS
) -> None:
    """The first ``tokens`` of each, which have come when this returns."""
    for step in range(1, tokens + 1):
        await server.puppet.say(numbers)
        for exchange in clients:
            await receive_tokens(exchange, step)


async def watch_all(clients: Sequence[Exchange], seconds: float) -> list[Seen]:
    """Read all to their ends, for so long at most."""
    pair = Pair(clients)
    await pair.watch(seconds)
    return pair.seen


class Pair:
    """Clients that are watched. ``over_at``: when the watching of the last one ended."""

    def __init__(self, clients: Sequence[Exchange]) -> None:
        self._clients = clients
        self._seen: dict[int, Seen] = {}
        self.over_at = time.monotonic()

    async def watch(self, seconds: float) -> None:
        """Until all are over, for so long at most."""
        async with trio.open_nursery() as nursery:
            for place, exchange in enumerate(self._clients):
                nursery.start_soon(self._see, place, exchange, seconds)

    async def _see(self, place: int, exchange: Exchange, seconds: float) -> None:
        self._seen[place] = await watch(exchange, seconds)
        self.over_at = time.monotonic()

    def is_over(self, place: int) -> bool:
        """Whether it has ended so far."""
        return place in self._seen and self._seen[place].is_over

    @property
    def seen(self) -> list[Seen]:
        """Of all, in their order; once they have been watched."""
        return [self._seen[place] for place in range(len(self._clients))]


def said_by(seen: Sequence[Seen]) -> str:
    """In one phrase; without counts where these are a matter of chance."""
    return phrases(seen, counts=all(one.chunks <= TOKENS for one in seen))
