"""Both shapes on asyncio and ``zmq.asyncio``.

A receive from a socket that has something is no point where others run there: its future is done before it is awaited,
and to await a future that is done does not go back to the loop. So a task that reads and processes lets the others run
by its own ``sleep(0)``; the socket task of vLLM's shape has none, and takes whatever is there before its handler sees any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import zmq
import zmq.asyncio

from ...messages import EngineCoreOutputs
from ...tokenizer import Tokenizer
from ..taskgroup_twin.mailbox import Mailbox
from .work import Load, Measured, Work

__all__ = ["one_task", "two_tasks"]

_Shape = Callable[[zmq.asyncio.Socket, Work], Awaitable[None]]
# As ``ipc/sockets.py`` has it.
_MAX_UNREAD_OUTPUTS = 1000


def one_task(
    address: str, tokenizer: Tokenizer, token_ids: Sequence[int], load: Load, seconds: float
) -> Measured:
    """Receives, decodes and processes. Raises ``TimeoutError`` after ``seconds``."""
    return asyncio.run(_measure(_one, address, tokenizer, token_ids, load, seconds))


def two_tasks(
    address: str, tokenizer: Tokenizer, token_ids: Sequence[int], load: Load, seconds: float
) -> Measured:
    """One receives and decodes, the other processes. Raises ``TimeoutError`` after ``seconds``."""
    return asyncio.run(_measure(_two, address, tokenizer, token_ids, load, seconds))


async def _measure(
    shape: _Shape,
    address: str,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    load: Load,
    seconds: float,
) -> Measured:
    mailboxes: list[Mailbox] = []

    def make_sink() -> Mailbox:
        mailboxes.append(Mailbox(aggregate=True, max_bytes=2**20))
        return mailboxes[-1]

    work = Work(tokenizer, token_ids, load, make_sink)
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD_OUTPUTS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            readers = [group.create_task(_read(mailbox)) for mailbox in mailboxes]
            await shape(socket, work)
            for reader in readers:
                reader.cancel("all has been processed")
    return work.measured()


async def _read(mailbox: Mailbox) -> None:
    while True:
        await mailbox.wait()
        mailbox.take()


async def _one(socket: zmq.asyncio.Socket, work: Work) -> None:
    while not work.is_done:
        work.posted()
        message = work.decode(await socket.recv_multipart())
        for _ in work.process(message):
            await asyncio.sleep(0)


async def _two(socket: zmq.asyncio.Socket, work: Work) -> None:
    queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def read_socket() -> None:
        while True:
            work.posted()
            queue.put_nowait(work.decode(await socket.recv_multipart()))
            work.queued(queue.qsize())

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read_socket())
        while not work.is_done:
            for is_last in work.process(await queue.get()):
                if not is_last:
                    await asyncio.sleep(0)
        reader.cancel("all has been processed")
