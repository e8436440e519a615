"""Ten thousand hostile inputs against ``trioleg serve`` itself: it lives, leaks nothing, and serves others meanwhile."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import trio
from hostile_bytes import hostile
from process_helpers import wait_until
from served import GENEROUS_S, Client, Server, open_client, serving

INPUTS = 10_000
ATTACKERS = 8
STREAMS = 3

# The program's log comes through a pipe and a thread: what made it complain is among the last few.
SUSPECTS = 4 * ATTACKERS

LINGER_0 = b"\x01\0\0\0\0\0\0\0"


class Attack:
    """The inputs that are left, shared by all attackers, and those that were sent last."""

    def __init__(self, server: Server, numbers: Iterator[int]) -> None:
        self._server = server
        self._numbers = numbers
        self._last: deque[int] = deque(maxlen=SUSPECTS)
        self._log_read = 0
        self.is_going_on = True

    async def run(self) -> None:
        for number in self._numbers:
            self._last.append(number)
            try:
                with trio.fail_after(GENEROUS_S):
                    await self._send(number)
                self._check_log()
            except (AssertionError, OSError, trio.TooSlowError) as error:
                inputs = "\n".join(f"{n}: {hostile(n)!r:.300}" for n in self._last)
                error.add_note(f"at input {number}, or another of the last:\n{inputs}")
                raise
        self.is_going_on = False

    async def _send(self, number: int) -> None:
        """One connection: all at once or in two pieces, and one of three ways to leave."""
        data, chance = hostile(number), random.Random(-number)
        cut = chance.choice([0, chance.randrange(len(data) + 1)])
        async with await trio.open_tcp_stream(*self._server.address) as connection:
            try:
                for piece in (data[:cut], data[cut:]):
                    await connection.send_all(piece)
                match chance.choice(["end", "end", "close", "reset"]):
                    case "end":
                        await connection.send_eof()
                        while await connection.receive_some():
                            pass
                    case "reset":
                        connection.setsockopt(
                            trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, LINGER_0
                        )
            except trio.BrokenResourceError:
                pass  # a server may close on what it does not like

    def _check_log(self) -> None:
        log = self._server.program.stderr
        assert "Traceback" not in log[self._log_read :], log[self._log_read :]
        self._log_read = max(0, len(log) - len("Traceback"))


async def stream_on(client: Client, attack: Attack, texts: set[str]) -> None:
    """One exact stream after the other, for as long as the attack goes on."""
    while attack.is_going_on:
        answer = await client.answered()
        assert answer.is_exact
        texts.add(answer.text)


async def test_hostile_bytes_end_at_most_their_connection(tmp_path: Path) -> None:
    with serving(tmp_path, step_interval_s=0.01) as server:
        async with open_client(server, seconds=20 * GENEROUS_S) as client:
            alone = (await client.answered()).text
            await client.until_idle()
            descriptors, tasks = server.descriptors, server.tasks()

            texts = {alone}
            attack = Attack(server, iter(range(INPUTS)))
            async with trio.open_nursery() as nursery:
                for _ in range(STREAMS):
                    nursery.start_soon(stream_on, client, attack, texts)
                for _ in range(ATTACKERS):
                    nursery.start_soon(attack.run)
            assert texts == {alone}

            with trio.fail_after(GENEROUS_S):
                await client.until_idle()
                await client.until_health(200)
                # The streams' connections stay in this client's pool.
                await wait_until(lambda: server.descriptors <= descriptors + STREAMS)
                await wait_until(lambda: server.tasks() <= tasks + STREAMS)
        server.signal(signal.SIGTERM)
        assert await server.wait() == 0
        assert "Traceback" not in server.program.stderr
