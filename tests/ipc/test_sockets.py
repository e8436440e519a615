"""ZmqSocket: ZeroMQ's edge-triggered descriptor under Trio, with real sockets."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import zmq
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket

GENEROUS_S = 60.0


@asynccontextmanager
async def open_pair(
    kind: int, peer_kind: int, address: str
) -> AsyncIterator[tuple[ZmqSocket, ZmqSocket]]:
    """A bound socket of ``kind`` and one of ``peer_kind`` that is connected to it."""
    context: Context = zmq.Context()
    bound = ZmqSocket(make_socket(context, kind))
    bound.raw.bind(address)
    peer = ZmqSocket(make_socket(context, peer_kind, identity=b"\0\0"))
    peer.raw.connect(bytes(bound.raw.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
    try:
        yield bound, peer
    finally:
        with trio.move_on_after(GENEROUS_S, shield=True):
            await close_sockets(context, [bound, peer], linger=0.0)


async def test_100_000_messages_in_bursts_with_sends_and_receives_mixed() -> None:
    """F1: both sides send and receive on one socket each; a lost edge would leave one asleep.

    No burst begins before the last one has arrived: the next message would wake who has missed this one.
    """
    count, chance = 50_000, random.Random(1)
    async with open_pair(zmq.ROUTER, zmq.DEALER, "tcp://127.0.0.1:*") as (router, dealer):
        dealer.send_multipart([b"hello"])
        await router.recv_multipart()
        # How much has arrived at either side, and who waits for that.
        arrived: Counter[ZmqSocket] = Counter()
        news = trio.lowlevel.ParkingLot()

        async def send(socket: ZmqSocket, peer: ZmqSocket, *prefix: bytes) -> None:
            sent = 0
            while sent < count:
                for number in range(sent, min(count, sent + chance.randint(1, 400))):
                    socket.send_multipart([*prefix, number.to_bytes(4, "little")])
                    sent += 1
                    if chance.random() < 0.01:
                        await trio.lowlevel.checkpoint()
                while arrived[peer] < sent:
                    await news.park()

        async def receive(socket: ZmqSocket) -> None:
            while arrived[socket] < count:
                # To be asleep with messages waiting is the fault that this is about.
                with trio.fail_after(10.0):
                    frames = await socket.recv_multipart()
                assert frames[-1] == arrived[socket].to_bytes(4, "little")
                arrived[socket] += 1
                news.unpark_all()

        with trio.fail_after(GENEROUS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, router, dealer, b"\0\0")
                nursery.start_soon(send, dealer, router)
                nursery.start_soon(receive, router)
                nursery.start_soon(receive, dealer)


async def receive_into(got: list[bytes], socket: ZmqSocket) -> None:
    got.extend(await socket.recv_multipart())


async def test_cancelled_receives_lose_nothing_and_keep_the_order() -> None:
    chance, got = random.Random(2), []
    async with open_pair(zmq.PULL, zmq.PUSH, "inproc://cancelled") as (pull, push):
        cancelled = sent = 0
        with trio.fail_after(GENEROUS_S):
            await trio.lowlevel.checkpoint()
            while len(got) < 1_000:
                if sent < 1_000 and chance.random() < 0.4:
                    push.send_multipart([str(sent).encode()])
                    sent += 1
                with trio.move_on_after(chance.choice([0, 0, 0.0005])) as scope:
                    await receive_into(got, pull)
                cancelled += scope.cancelled_caught
    assert got == [str(number).encode() for number in range(1_000)]
    assert cancelled > 100


async def test_a_receive_is_a_checkpoint_even_with_data() -> None:
    async with open_pair(zmq.PULL, zmq.PUSH, "inproc://checkpoint") as (pull, push):
        for number in range(2):
            push.send_multipart([bytes([number])])
        with trio.fail_after(GENEROUS_S), assert_checkpoints():
            assert await pull.recv_multipart() == [b"\0"]
        with trio.CancelScope() as scope:
            scope.cancel()
            await pull.recv_multipart()
        assert scope.cancelled_caught
        assert await pull.recv_multipart() == [b"\1"]


async def test_a_socket_that_is_never_empty_starves_nobody() -> None:
    """One turn for each message: whoever is ready runs as often."""
    async with open_pair(zmq.PULL, zmq.PUSH, "inproc://never-empty") as (pull, push):
        turns = 0

        async def run_beside() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        for number in range(200):
            push.send_multipart([b"%d" % number])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_beside)
            for number in range(200):
                assert await pull.recv_multipart() == [b"%d" % number]
            nursery.cancel_scope.cancel("all has been received")
        assert turns > 190


async def take_edge(router: ZmqSocket, dealer: ZmqSocket, message: bytes) -> None:
    """A message comes, and whoever looks at the socket first is not its parked reader."""
    await wait_all_tasks_blocked()
    dealer.send_multipart([message])
    give_up = time.monotonic() + GENEROUS_S
    # No checkpoint: the reader does not run, and Trio does not look at the descriptor.
    while not router.is_readable():
        assert time.monotonic() < give_up


async def open_router(router: ZmqSocket, dealer: ZmqSocket) -> None:
    dealer.send_multipart([b"hello"])
    with trio.fail_after(GENEROUS_S):
        assert await router.recv_multipart() == [b"\0\0", b"hello"]


async def test_a_send_that_consumes_the_edge_wakes_the_reader() -> None:
    async with open_pair(zmq.ROUTER, zmq.DEALER, "tcp://127.0.0.1:*") as (router, dealer):
        await open_router(router, dealer)
        # More than once: a descriptor that was woken by hand can be waited for again.
        for turn in range(5):
            got: list[bytes] = []
            with trio.fail_after(GENEROUS_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive_into, got, router)
                    await take_edge(router, dealer, b"%d" % turn)
                    router.send_multipart([b"\0\0", b"an answer"])
            assert got == [b"\0\0", b"%d" % turn]


@pytest.mark.parametrize("wakes", [True, False])
async def test_a_reader_that_is_cancelled_with_a_message_there_loses_nothing(wakes: bool) -> None:
    """Also if a send has woken it at the same moment: it has the message then, or the next one gets it."""
    async with open_pair(zmq.ROUTER, zmq.DEALER, "tcp://127.0.0.1:*") as (router, dealer):
        await open_router(router, dealer)
        got: list[bytes] = []
        with trio.fail_after(GENEROUS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive_into, got, router)
                await take_edge(router, dealer, b"first")
                if wakes:
                    router.send_multipart([b"\0\0", b"an answer"])
                nursery.cancel_scope.cancel("nobody waits any more")
            dealer.send_multipart([b"second"])
            while got[-1:] != [b"second"]:
                await receive_into(got, router)
        assert [part for part in got if part != b"\0\0"] == [b"first", b"second"]


async def test_closing_wakes_a_reader_whose_message_was_there() -> None:
    """Closed is closed: what was not received by then is not."""
    async with open_pair(zmq.ROUTER, zmq.DEALER, "tcp://127.0.0.1:*") as (router, dealer):
        await open_router(router, dealer)

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError, match="this ZeroMQ socket is closed"):
                await router.recv_multipart()

        with trio.fail_after(GENEROUS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await take_edge(router, dealer, b"too late")
                router.close(0.0)
                router.close(0.0)


async def test_a_second_reader_is_refused_and_closing_ends_the_first() -> None:
    async with open_pair(zmq.PULL, zmq.PUSH, "inproc://busy") as (pull, _):
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                with pytest.raises(trio.ClosedResourceError, match="closed"):
                    await pull.recv_multipart()

            nursery.start_soon(first)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError, match="another task"):
                await pull.recv_multipart()
            pull.close(0.0)
        with pytest.raises(trio.ClosedResourceError):
            await pull.recv_multipart()


async def test_closing_delivers_what_was_sent_even_when_cancelled() -> None:
    pull_context: Context = zmq.Context()
    pull = ZmqSocket(make_socket(pull_context, zmq.PULL))
    pull.raw.bind("tcp://127.0.0.1:*")
    push_context: Context = zmq.Context()
    push = ZmqSocket(make_socket(push_context, zmq.PUSH))
    push.raw.connect(bytes(pull.raw.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
    for _ in range(2_000):
        push.send_multipart([b"x" * 1_000])
    with trio.CancelScope() as scope:
        scope.cancel()
        await close_sockets(push_context, [push], linger=30.0)
    with trio.fail_after(GENEROUS_S):
        for _ in range(2_000):
            await pull.recv_multipart()
        await close_sockets(pull_context, [pull], linger=0.0)
        await close_sockets(pull_context, [pull], linger=0.0)


async def test_closing_is_bounded_when_nobody_takes_what_was_sent() -> None:
    context: Context = zmq.Context()
    push = ZmqSocket(make_socket(context, zmq.PUSH))
    push.raw.connect("ipc:///nonexistent/nobody")
    push.send_multipart([b"for nobody"])
    with trio.fail_after(GENEROUS_S):
        await close_sockets(context, [push], linger=0.05)
    assert context.closed
    assert threading.active_count() < 20
