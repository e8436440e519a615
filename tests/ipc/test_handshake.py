"""The handshake between both of our sides, over ipc and tcp, and with peers that get it wrong."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import zmq
from process_helpers import wait_until

from trioleg.errors import EngineStartError
from trioleg.ipc.codec import encode
from trioleg.ipc.handshake import (
    AcceptedEngine,
    EngineListener,
    EngineSockets,
    join_head,
    listen_for_engine,
)
from trioleg.ipc.launch import private_ipc_dir
from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket
from trioleg.messages import EngineCoreRequestType, EngineReadyResponse

GENEROUS_S = 30.0
READY = EngineReadyResponse(max_model_len=128, num_gpu_blocks=64, instance_id="test")


async def load() -> EngineReadyResponse:
    await trio.lowlevel.checkpoint()
    return READY


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    if request.param == "tcp":
        yield "tcp://127.0.0.1:0"
        return
    with private_ipc_dir() as folder:
        yield f"ipc://{folder}/handshake"


@asynccontextmanager
async def open_stranger(address: str, identity: bytes) -> AsyncIterator[ZmqSocket]:
    """A DEALER at the handshake address that is under the test's own control."""
    context: Context = zmq.Context()
    socket = ZmqSocket(make_socket(context, zmq.DEALER, identity=identity))
    socket.raw.connect(address)
    try:
        yield socket
    finally:
        with trio.move_on_after(GENEROUS_S, shield=True):
            await close_sockets(context, [socket], linger=0.0)


async def shake_hands(listener: EngineListener, rank: int) -> tuple[AcceptedEngine, EngineSockets]:
    accepted: list[AcceptedEngine] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        sockets = await join_head(listener.address, load, engine_index=rank)
    return accepted[0], sockets


async def test_both_sides_meet_and_both_legs_carry(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            head, engine = await shake_hands(listener, 3)
        assert (head.rank, head.ready) == (3, READY)
        assert head.transport.send(EngineCoreRequestType.ABORT, b"\x90")
        assert await engine.inputs[0].recv_multipart() == [b"\x01", b"\x90"]
        engine.outputs[0].send_multipart([b"body", b"aux"])
        assert await head.transport.receive() == [b"body", b"aux"]
        await engine.aclose()
        await head.transport.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await head.transport.receive()


async def test_a_wildcard_port_is_known_before_anyone_comes() -> None:
    async with listen_for_engine("tcp://127.0.0.1:0") as listener:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", listener.address)


async def test_hello_comes_before_the_model_loads() -> None:
    with private_ipc_dir() as folder, trio.fail_after(GENEROUS_S):
        context: Context = zmq.Context()
        head = ZmqSocket(make_socket(context, zmq.ROUTER))
        head.raw.bind(f"ipc://{folder}/handshake")
        loading = trio.Event()

        async def load_for_ever() -> EngineReadyResponse:
            loading.set()
            await trio.sleep_forever()
            raise AssertionError

        async def join() -> None:
            await join_head(f"ipc://{folder}/handshake", load_for_ever, engine_index=0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            identity, body = await head.recv_multipart()
            status = msgspec.msgpack.decode(body)
            assert (identity, status["status"]) == (b"\0\0", "HELLO")
            assert (status["local"], status["headless"]) == (False, True)
            assert not loading.is_set()
            legs = {"inputs": [f"ipc://{folder}/i"], "outputs": [f"ipc://{folder}/o"]}
            head.send_multipart([identity, encode({"addresses": legs, "parallel_config": {}})])
            await loading.wait()
            nursery.cancel_scope.cancel()
        await close_sockets(context, [head], linger=0.0)


async def test_wrong_hellos_are_logged_and_the_right_one_is_taken(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            async with (
                open_stranger(listener.address, b"\x01\0") as garbled,
                open_stranger(listener.address, b"too long") as long,
                trio.open_nursery() as nursery,
            ):
                garbled.send_multipart([b"\xc1"])
                garbled.send_multipart([encode({"status": "READY"}), b"more"])
                garbled.send_multipart([encode({"status": "READY"})])
                garbled.send_multipart([encode(["HELLO"])])
                long.send_multipart([encode({"status": "HELLO"})])
                nursery.start_soon(listener.accept)
                await wait_until(lambda: len(caplog.records) >= 5)
                nursery.cancel_scope.cancel()
            head, engine = await shake_hands(listener, 0)
        await engine.aclose()
        await head.transport.aclose()
    complaints = [record.getMessage() for record in caplog.records]
    assert any("cannot be decoded" in line for line in complaints)
    assert any("2 frames instead of 1" in line for line in complaints)
    assert any("identity of 8 bytes instead of 2" in line for line in complaints)
    assert any(
        "READY of engine 0100 ignored, since HELLO is awaited" in line for line in complaints
    )


async def test_an_engine_that_starts_anew_while_it_loads_gets_init_again(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            async with open_stranger(listener.address, b"\0\0") as first:
                accepted: list[AcceptedEngine] = []

                async def accept() -> None:
                    accepted.append(await listener.accept())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accept)
                    first.send_multipart([encode({"status": "HELLO"})])
                    assert b"addresses" in (await first.recv_multipart())[0]
                    engine = await join_head(listener.address, load, engine_index=0)
        assert accepted[0].ready == READY
        await engine.aclose()
        await accepted[0].transport.aclose()


async def test_a_ready_response_that_cannot_be_read(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            context: Context = zmq.Context()
            handshake = ZmqSocket(make_socket(context, zmq.DEALER, identity=b"\0\0"))
            handshake.raw.connect(listener.address)
            leg = ZmqSocket(make_socket(context, zmq.DEALER, identity=b"\0\0"))

            async def pretend() -> None:
                handshake.send_multipart([encode({"status": "HELLO"})])
                init = msgspec.msgpack.decode((await handshake.recv_multipart())[0])
                leg.raw.connect(init["addresses"]["inputs"][0])
                leg.send_multipart([encode({"max_model_len": "long"})])
                handshake.send_multipart([encode({"status": "READY"})])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pretend)
                with pytest.raises(EngineStartError, match=r"ready response .*max_model_len"):
                    await listener.accept()
            await close_sockets(context, [handshake, leg], linger=0.0)


@pytest.mark.parametrize(
    ("init", "complaint"),
    [
        ({"addresses": {"inputs": ["ipc:///a"], "outputs": []}}, "1 input and 0 output"),
        ({"addresses": {"inputs": [], "outputs": []}}, "at least one client"),
        ({"addresses": {"inputs": ["a"]}}, "outputs"),
        ({"addresses": {"inputs": ["carrier://pigeon"], "outputs": ["x"]}}, "carrier://pigeon"),
        (
            {"addresses": {"inputs": ["a"], "outputs": ["b"], "coordinator_input": "tcp://c:1"}},
            "coordinator",
        ),
    ],
)
async def test_an_init_that_cannot_be_followed(init: object, complaint: str) -> None:
    with private_ipc_dir() as folder, trio.fail_after(GENEROUS_S):
        context: Context = zmq.Context()
        head = ZmqSocket(make_socket(context, zmq.ROUTER))
        head.raw.bind(f"ipc://{folder}/handshake")

        async def answer() -> None:
            identity, _ = await head.recv_multipart()
            head.send_multipart([identity, encode(init)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            with pytest.raises(EngineStartError, match=complaint):
                await join_head(f"ipc://{folder}/handshake", load, engine_index=0)
        await close_sockets(context, [head], linger=0.0)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("127.0.0.1:29550", "allowed: tcp://IP:PORT, ipc://PATH"),
        ("udp://127.0.0.1:1", "udp"),
        ("tcp://0.0.0.0:1", "the one IP address"),
        ("tcp://*:1", "the one IP address"),
        ("tcp://no such host:1", "cannot listen on"),
        ("ipc:///nonexistent/folder/handshake", "cannot listen on"),
        ("ipc:///tmp/" + "x" * 120, "at most 107 bytes"),
    ],
)
async def test_an_address_that_cannot_be_used_is_named(bad: str, complaint: str) -> None:
    with pytest.raises(EngineStartError, match=re.escape(complaint)) as caught:
        async with listen_for_engine(bad):
            pass
    assert bad in str(caught.value)


async def test_two_listeners_on_one_address() -> None:
    async with listen_for_engine("tcp://127.0.0.1:0") as first:
        with pytest.raises(EngineStartError, match="Address already in use"):
            async with listen_for_engine(first.address):
                pass


async def test_a_cancelled_accept_leaves_no_socket_file(tmp_path: Path) -> None:
    with private_ipc_dir() as folder, trio.fail_after(GENEROUS_S):
        async with listen_for_engine(f"ipc://{folder}/handshake") as listener:
            async with open_stranger(listener.address, b"\0\0") as engine:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(listener.accept)
                    engine.send_multipart([encode({"status": "HELLO"})])
                    await engine.recv_multipart()
                    assert len(list(folder.iterdir())) == 3
                    nursery.cancel_scope.cancel()
            assert [path.name for path in folder.iterdir()] == ["handshake"]
        assert not list(folder.iterdir())


async def test_an_engine_that_left_while_it_loaded_does_not_hold_up_the_next(address: str) -> None:
    accepted: list[AcceptedEngine] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            async with open_stranger(listener.address, b"zz") as stranger:
                stranger.send_multipart([encode({"status": "HELLO"})])
                await stranger.recv_multipart()
            sockets = await join_head(listener.address, load, engine_index=0)
        assert accepted[0].rank == 0
        await sockets.aclose()
        await accepted[0].transport.aclose()
