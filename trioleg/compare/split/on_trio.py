"""Both shapes on Trio and ``ipc/sockets.py``.

A receive is always a checkpoint there, so whoever reads a socket that always has more lets the others run after each
message, in either shape.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import trio
import zmq

from ...ipc.sockets import ZmqSocket, close_sockets, make_context, make_socket
from ...messages import EngineCoreOutputs
from ...runtime.mailbox import Mailbox
from ...tokenizer import Tokenizer
from .work import Load, Measured, Work

__all__ = ["one_task", "two_tasks"]

_Shape = Callable[[ZmqSocket, Work], Awaitable[None]]


def one_task(
    address: str, tokenizer: Tokenizer, token_ids: Sequence[int], load: Load, seconds: float
) -> Measured:
    """Receives, decodes and processes. Raises ``trio.TooSlowError`` after ``seconds``."""
    return trio.run(_measure, _one, address, tokenizer, token_ids, load, seconds)


def two_tasks(
    address: str, tokenizer: Tokenizer, token_ids: Sequence[int], load: Load, seconds: float
) -> Measured:
    """One receives and decodes, the other processes. Raises ``trio.TooSlowError`` after ``seconds``."""
    return trio.run(_measure, _two, address, tokenizer, token_ids, load, seconds)


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

    context = make_context()
    socket = ZmqSocket(make_socket(context, zmq.PULL))
    try:
        work = Work(tokenizer, token_ids, load, make_sink)
        socket.raw.bind(address)
        with trio.fail_after(seconds):
            async with trio.open_nursery() as nursery:
                for mailbox in mailboxes:
                    nursery.start_soon(_read, mailbox)
                await shape(socket, work)
                nursery.cancel_scope.cancel(reason="all has been processed")
    finally:
        await close_sockets(context, [socket], linger=0.0)  # noqa: ASYNC102 - it shields itself
    return work.measured()


async def _read(mailbox: Mailbox) -> None:
    while True:
        await mailbox.wait()
        mailbox.take()


async def _one(socket: ZmqSocket, work: Work) -> None:
    while not work.is_done:
        work.posted()
        message = work.decode(await socket.recv_multipart())
        for is_last in work.process(message):
            if not is_last:
                await trio.lowlevel.checkpoint()


async def _two(socket: ZmqSocket, work: Work) -> None:
    sender, receiver = trio.open_memory_channel[EngineCoreOutputs](math.inf)

    async def read_socket() -> None:
        while True:
            work.posted()
            sender.send_nowait(work.decode(await socket.recv_multipart()))
            work.queued(sender.statistics().current_buffer_used)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_socket)
        while not work.is_done:
            message = await receiver.receive()
            for is_last in work.process(message):
                if not is_last:
                    await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel(reason="all has been processed")
