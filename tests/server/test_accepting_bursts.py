"""Clients that come together are taken together, and the bound on them holds all the same."""

from __future__ import annotations

import pytest
import trio
from process_helpers import wait_until

from trioleg.server.accepting import Acceptor, connections_within_limits

NUM_CLIENTS = 20
# Only to end a test that hangs.
PATIENCE = 30.0


class Served:
    """Connections that stay until ``over``; ``turns``: when each was taken."""

    def __init__(self, room: int) -> None:
        self.over = trio.Event()
        self.turns: list[int] = []
        self._room = room
        self.turn = 0

    def has_room(self) -> bool:
        return len(self.turns) < self._room

    async def serve(self, stream: trio.SocketStream, _tls: None) -> None:
        self.turns.append(self.turn)
        async with stream:
            await self.over.wait()


class CountTurns(trio.abc.Instrument):
    def __init__(self, served: Served) -> None:
        self._served = served

    def after_io_wait(self, timeout: float) -> None:
        self._served.turn += 1


async def accept_all(served: Served) -> int:
    """A whole burst is in the queue before anybody accepts; how many were refused."""
    acceptor = Acceptor(served.serve, served.has_room)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=NUM_CLIENTS)
    port = listener.socket.getsockname()[1]
    with trio.fail_after(PATIENCE):
        clients = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(NUM_CLIENTS)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(acceptor.run, listener, nursery)
            await wait_until(lambda: len(served.turns) + acceptor.num_refused == NUM_CLIENTS)
            nursery.cancel_scope.cancel()
    for client in clients:
        await client.aclose()
    return acceptor.num_refused


async def test_a_burst_is_taken_in_a_turn_or_two() -> None:
    served = Served(room=NUM_CLIENTS)
    counter = CountTurns(served)
    trio.lowlevel.add_instrument(counter)
    try:
        assert await accept_all(served) == 0
    finally:
        trio.lowlevel.remove_instrument(counter)
    assert served.turns[-1] - served.turns[0] <= 2


async def test_a_burst_is_no_way_round_the_bound() -> None:
    served = Served(room=5)
    assert await accept_all(served) == NUM_CLIENTS - 5
    assert len(served.turns) == 5


def test_a_system_without_proc_has_room_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with_proc = connections_within_limits()

    def listdir(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr("os.listdir", listdir)
    assert connections_within_limits() >= with_proc
