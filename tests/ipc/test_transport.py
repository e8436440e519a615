"""ZmqTransport: sends that fail quietly, and an engine that goes out of reach."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import zmq
from process_helpers import wait_until

from trioleg.errors import EngineStartError
from trioleg.ipc import transport as transport_module
from trioleg.ipc.sockets import Context, PeerMonitor, ZmqSocket, close_sockets, make_socket
from trioleg.ipc.transport import ZmqTransport
from trioleg.messages import EngineCoreRequestType

GENEROUS_S = 30.0
PROBE = (EngineCoreRequestType.ABORT, b"\x90")


@asynccontextmanager
async def open_transport() -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        identity=b"\0\0",
    )
    try:
        yield transport
    finally:
        await transport.aclose()


class Engine:
    """An engine's two sockets, connected."""

    def __init__(self, transport: ZmqTransport) -> None:
        self.context: Context = zmq.Context()
        self.input = ZmqSocket(make_socket(self.context, zmq.DEALER, identity=b"\0\0"))
        self.input.raw.connect(transport.input_address)
        self.output = ZmqSocket(make_socket(self.context, zmq.PUSH))
        self.output.raw.connect(transport.output_address)

    async def meet(self, transport: ZmqTransport) -> None:
        self.input.send_multipart([b"ready"])
        assert await transport.receive_ready() == b"ready"
        self.output.send_multipart([b"first"])
        assert await transport.receive() == [b"first"]

    async def aclose(self) -> None:
        await close_sockets(self.context, [self.input, self.output], linger=0.0)


async def test_a_send_to_an_engine_that_is_not_there_is_recorded_and_not_raised() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_transport() as transport:
            assert transport.send(*PROBE) is False
            engine = Engine(transport)
            await engine.meet(transport)
            assert transport.send(*PROBE) is True
            assert await engine.input.recv_multipart() == [b"\x01", b"\x90"]
            statistics = transport.statistics()
            assert (statistics.sent, statistics.unsent, statistics.received) == (1, 1, 1)
            assert statistics.last_send_error == "Host unreachable"
            await engine.aclose()
        assert transport.send(*PROBE) is False


async def test_only_the_engines_own_ready_frame_counts(caplog: pytest.LogCaptureFixture) -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_transport() as transport:
            context: Context = zmq.Context()
            other = ZmqSocket(make_socket(context, zmq.DEALER, identity=b"\x07\0"))
            other.raw.connect(transport.input_address)
            for _ in range(10):
                other.send_multipart([b"not this one"])
            engine = Engine(transport)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(transport.receive_ready)
                await wait_until(lambda: "ignored" in caplog.text)
                nursery.cancel_scope.cancel()
            await engine.meet(transport)
            await engine.aclose()
            await close_sockets(context, [other], linger=0.0)
    assert {one.getMessage() for one in caplog.records} == {"input leg: 1 frames of 0700 ignored"}
    assert len(caplog.records) <= 5


async def test_the_input_leg_takes_a_big_ready_response_and_not_anything() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_transport() as transport:
            engine = Engine(transport)
            engine.input.send_multipart([bytes(transport_module._MAX_READY_BYTES)])
            assert len(await transport.receive_ready()) == transport_module._MAX_READY_BYTES
            context: Context = zmq.Context()
            other = ZmqSocket(make_socket(context, zmq.DEALER, identity=b"\x07\0"))
            monitor = PeerMonitor(other, bound=False)
            other.raw.connect(transport.input_address)
            other.send_multipart([bytes(transport_module._MAX_READY_BYTES + 1)])
            await monitor.wait_deserted()
            monitor.close()
            await close_sockets(context, [other], linger=0.0)
            # Requests are not bounded by it.
            assert transport.send(EngineCoreRequestType.ADD, bytes(9_000_000))
            assert len((await engine.input.recv_multipart())[1]) == 9_000_000
            await engine.aclose()


async def test_an_engine_that_is_gone_is_noticed() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_transport() as transport:
            engine = Engine(transport)
            await engine.meet(transport)
            await engine.aclose()
            assert "connection is lost" in await transport.wait_lost()
            assert transport.send(*PROBE) is False
            await wait_until(lambda: transport.is_output_lost)
            assert transport.output_breaks == 1


async def test_a_break_has_an_end_and_the_route_comes_back() -> None:
    with trio.fail_after(GENEROUS_S):
        async with open_transport() as transport:
            engine = Engine(transport)
            await engine.meet(transport)
            await engine.aclose()
            await transport.wait_lost()
            engine = Engine(transport)
            await engine.meet(transport)
            await transport.wait_back()
            assert not transport.is_output_lost
            assert transport.send(*PROBE) is True
            await engine.aclose()


async def test_an_engine_that_never_came_is_not_lost() -> None:
    async with open_transport() as transport:
        with trio.move_on_after(0.6) as waited:
            await transport.wait_lost()
        assert waited.cancelled_caught


def test_an_address_that_cannot_be_bound_leaves_nothing_open() -> None:
    with pytest.raises(EngineStartError, match="ipc:///nonexistent/out"):
        ZmqTransport(
            "tcp://127.0.0.1:0",
            "ipc:///nonexistent/out",
            identity=b"\0\0",
        )


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
async def test_sockets_that_listen_already_are_taken_over(
    tmp_path: Path, family: socket.AddressFamily
) -> None:
    """As the descriptors that vLLM hands to its front end; they are closed at the end."""
    listeners = [socket.socket(family) for _ in range(2)]
    for number, listener in enumerate(listeners):
        is_unix = family == socket.AF_UNIX
        listener.bind(str(tmp_path / f"leg{number}") if is_unix else ("127.0.0.1", 0))
        listener.listen()
    names = [listener.getsockname() for listener in listeners]
    descriptors = [listener.detach() for listener in listeners]
    with trio.fail_after(GENEROUS_S):
        transport = ZmqTransport(*descriptors, identity=b"\0\0")
        addresses = [transport.input_address, transport.output_address]
        for name, address in zip(names, addresses, strict=True):
            assert address.endswith(str(name if family == socket.AF_UNIX else name[1]))
        assert not any(map(os.get_inheritable, descriptors))
        engine = Engine(transport)
        await engine.meet(transport)
        await engine.aclose()
        await transport.aclose()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_leg_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("precious")
    with pytest.raises(EngineStartError, match="a file that is no socket"):
        ZmqTransport(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", identity=b"\0\0")
    with pytest.raises(EngineStartError, match="a file that is no socket"):
        ZmqTransport(f"ipc://{tmp_path}/first", f"ipc://{tmp_path}/in", identity=b"\0\0")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("in", "precious")]


def test_a_descriptor_that_is_no_listeners_is_refused() -> None:
    with socket.socket() as unbound, pytest.raises(EngineStartError, match="does not listen"):
        ZmqTransport(unbound.fileno(), "tcp://127.0.0.1:0", identity=b"\0\0")
    with pytest.raises(EngineStartError, match="no socket's"):
        ZmqTransport("tcp://127.0.0.1:0", 2**20, identity=b"\0\0")
