"""The output sender: real sockets, and bodies that really stay in flight."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import zmq
from process_helpers import wait_until
from wire_arrays import read_array

from trioleg.engine.output_sender import OutputSender
from trioleg.ipc.codec import decode_outputs, encode
from trioleg.ipc.launch import private_ipc_dir
from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket
from trioleg.messages import ArrayData, EngineCoreOutput, EngineCoreOutputs, NdArray

GENEROUS_S = 30.0


def outputs(number: int, size: int = 1) -> EngineCoreOutputs:
    """A message that is told from any other by every one of its ids."""
    output = EngineCoreOutput(f"r{number}", [number] * size)
    return EngineCoreOutputs(outputs=[output], timestamp=1.0)


@asynccontextmanager
async def open_clients(count: int, *, listening: bool = True) -> AsyncIterator[Clients]:
    with private_ipc_dir() as folder:
        clients = Clients(count, folder)
        try:
            if listening:
                clients.listen()
            yield clients
        finally:
            with trio.move_on_after(GENEROUS_S, shield=True):
                await close_sockets(clients.context, [*clients.pushes, *clients.pulls], linger=0.0)


class Clients:
    """``count`` PUSHes, and the PULLs that they are connected to, which may listen later."""

    def __init__(self, count: int, folder: Path) -> None:
        self.context: Context = zmq.Context()
        self.pushes = [ZmqSocket(make_socket(self.context, zmq.PUSH)) for _ in range(count)]
        self.pulls = [ZmqSocket(make_socket(self.context, zmq.PULL)) for _ in range(count)]
        self.addresses = [f"ipc://{folder}/{number}" for number in range(count)]
        for push, address in zip(self.pushes, self.addresses, strict=True):
            push.raw.connect(address)

    def listen(self) -> None:
        for pull, address in zip(self.pulls, self.addresses, strict=True):
            pull.raw.bind(address)


async def test_messages_come_in_order_and_to_the_right_client() -> None:
    async with open_clients(2) as clients:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        with trio.fail_after(GENEROUS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.run)
                thread = threading.Thread(target=hand_on_from_a_thread, args=(sender, 1_000))
                thread.start()
                for number in range(1_000):
                    frames = await clients.pulls[number % 2].recv_multipart()
                    assert decode_outputs(frames) == outputs(number)
                thread.join()
                sender.finish()
        assert sender.statistics().sent == 1_000
        assert sender.statistics().queued == 0


def hand_on_from_a_thread(sender: OutputSender, count: int) -> None:
    for number in range(count):
        sender.hand_on(number % 2, outputs(number))


@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_buffer_in_flight_is_never_written_to(size: int) -> None:
    """Fifty messages while nobody listens, small ones too: each keeps a buffer of its own."""
    async with open_clients(1, listening=False) as clients:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        for number in range(50):
            sender.hand_on(0, outputs(number, size))
        sender.finish()
        with trio.fail_after(GENEROUS_S):
            await sender.run()
            before = sender.statistics()
            assert before.in_flight == (50,)
            assert before.bytes_in_flight[0] >= 50 * size
            assert (before.made_buffers, before.spare_buffers) == (50, 0)
            clients.listen()
            for number in range(50):
                frames = await clients.pulls[0].recv_multipart()
                assert decode_outputs(frames) == outputs(number, size)
            await wait_until(lambda: sender.statistics().in_flight == (0,))
        after = sender.statistics()
        assert after.bytes_in_flight == (0,)
        assert after.spare_buffers == 2


def pooled(number: int, *sizes: int) -> EngineCoreOutputs:
    """A message with arrays, of these sizes, that are told from any other's."""
    message = EngineCoreOutputs(outputs=[], timestamp=1.0)
    for size in sizes:
        data = ArrayData(memoryview(array("i", [number] * size)))
        vector = NdArray("int32", [size], data)
        message.outputs.append(EngineCoreOutput(f"r{number}", [], pooling_output=vector))
    return message


async def test_arrays_are_in_flight_with_their_message_and_count() -> None:
    sizes = (100, 20_000, 64)
    async with open_clients(1, listening=False) as clients:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        for number in range(20):
            sender.hand_on(0, pooled(number, *sizes))
        sender.finish()
        with trio.fail_after(GENEROUS_S):
            await sender.run()
            before = sender.statistics()
            assert (before.in_flight, before.made_buffers) == ((20,), 20)
            bodies = before.bytes_in_flight[0] - 20 * 4 * sum(sizes)
            assert 20 * 30 < bodies < 20 * 300
            clients.listen()
            for number in range(20):
                frames = await clients.pulls[0].recv_multipart()
                assert len(frames) == 1 + len(sizes)
                read = [
                    read_array(o.pooling_output, frames) for o in decode_outputs(frames).outputs
                ]
                assert read == [[number] * size for size in sizes]
            await wait_until(lambda: sender.statistics().in_flight == (0,))
        after = sender.statistics()
        # Bodies are used again, arrays never: the spare ones are no larger than a body.
        assert (after.bytes_in_flight, after.spare_buffers) == ((0,), 2)
        assert all(len(spare) < 300 for spare in sender._spare)


async def test_arrays_count_for_a_client_that_is_away() -> None:
    behind: list[int] = []
    async with open_clients(1, listening=False) as clients:
        sender = OutputSender(
            clients.pushes, on_client_behind=behind.append, max_bytes_in_flight=5_000
        )
        for number in range(3):
            sender.hand_on(0, pooled(number, 1_000))
        sender.finish()
        with trio.fail_after(GENEROUS_S):
            await sender.run()
    assert behind == [0, 0]


async def test_buffers_are_used_again() -> None:
    async with open_clients(1) as clients:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        with trio.fail_after(GENEROUS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.run)
                for number in range(200):
                    sender.hand_on(0, outputs(number))
                    await clients.pulls[0].recv_multipart()
                    await wait_until(lambda: sender.statistics().in_flight == (0,))
                sender.finish()
        assert sender.statistics().made_buffers == 1


async def test_a_client_that_is_away_is_bounded_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    behind: list[int] = []
    async with open_clients(2, listening=False) as clients:
        clients.pulls[1].raw.bind(clients.addresses[1])
        sender = OutputSender(
            clients.pushes, on_client_behind=behind.append, max_bytes_in_flight=5_000
        )
        with caplog.at_level(logging.WARNING), trio.fail_after(GENEROUS_S):
            for number in range(20):
                sender.hand_on(0, outputs(number, 1_000))
                sender.hand_on(1, outputs(number))
            sender.finish()
            await sender.run()
            for number in range(20):
                assert decode_outputs(await clients.pulls[1].recv_multipart()) == outputs(number)
    assert set(behind) == {0}
    assert len(behind) >= 10
    assert [record.getMessage() for record in caplog.records] == [
        f"client 0 has not taken {5 * len_of_a_body()} bytes of outputs (allowed: 5000); "
        "its requests are aborted"
    ]


def len_of_a_body() -> int:
    return len(encode(outputs(1, 1_000)))


def test_handing_on_after_trio_has_gone_raises_nothing() -> None:
    async def make() -> OutputSender:
        await trio.lowlevel.checkpoint()
        return OutputSender([], on_client_behind=lambda _: None)

    trio.run(make).hand_on(0, outputs(1))


async def test_a_client_that_falls_behind_is_waited_for() -> None:
    """It takes what it can hold; the rest stays here, and slows the engine down until it has been read."""
    many = 6000
    async with open_clients(1) as clients, trio.open_nursery() as nursery:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        nursery.start_soon(sender.run)
        assert sender.pause_s() == 0
        for number in range(many):
            sender.hand_on(0, outputs(number, size=2000))
        with trio.fail_after(GENEROUS_S):
            await wait_until(lambda: sender.statistics().queued == 0)
            assert sender.pause_s() > 0
            for number in range(many):
                message = decode_outputs(await clients.pulls[0].recv_multipart())
                assert message.outputs[0].request_id == f"r{number}"
            await wait_until(lambda: sender.statistics().bytes_in_flight == (0,))
        assert sender.pause_s() == 0
        sender.finish()


async def test_one_of_two_clients_slows_nobody_down() -> None:
    async with open_clients(2) as clients, trio.open_nursery() as nursery:
        sender = OutputSender(clients.pushes, on_client_behind=lambda _: None)
        nursery.start_soon(sender.run)
        for number in range(6000):
            sender.hand_on(0, outputs(number, size=2000))
        with trio.fail_after(GENEROUS_S):
            await wait_until(lambda: sender.statistics().queued == 0)
        assert sender.statistics().bytes_in_flight[0] > 2**23
        assert sender.pause_s() == 0
        sender.finish()
