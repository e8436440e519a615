"""The handshake between both of our sides, over ipc and tcp, and with peers that get it wrong."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import trio
import zmq
from process_helpers import wait_until

from trioleg.errors import EngineStartError
from trioleg.ipc import handshake
from trioleg.ipc.codec import encode
from trioleg.ipc.handshake import AcceptedEngine, EngineListener, listen_for_engine
from trioleg.ipc.joining import EngineSockets, join_head
from trioleg.ipc.launch import private_ipc_dir
from trioleg.ipc.sockets import Context, PeerMonitor, ZmqSocket, close_sockets, make_socket
from trioleg.messages import WIRE_VERSION, EngineCoreRequestType, EngineReadyResponse

GENEROUS_S = 30.0
READY = EngineReadyResponse(max_model_len=128, num_gpu_blocks=64, vllm_version=WIRE_VERSION)


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


async def shake_hands(
    listener: EngineListener,
    rank: int,
    load: Callable[[], Awaitable[EngineReadyResponse]] = load,
) -> tuple[AcceptedEngine, EngineSockets]:
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


@pytest.mark.parametrize(
    ("identity", "frames", "complaint"),
    [
        (b"\x01\0", [b"\xc1"], "cannot be decoded"),
        (b"\x01\0", [encode(["HELLO"])], "cannot be decoded"),
        (b"\x01\0", [encode({"status": "READY"}), b"more"], "2 frames instead of 1"),
        (
            b"\x01\0",
            [encode({"status": "READY"})],
            # Or READY of the right one, if that has come by then.
            "READY of engine 0100 ignored, since HELLO ",
        ),
        (b"too long", [encode({"status": "HELLO"})], "identity of 8 bytes instead of 2"),
        (b"x" * 255, [encode({"status": "HELLO"})], "identity of 255 bytes instead of 2"),
        (
            b"\x01\0",
            [encode({"status": "A\n1 ERROR \x1b[31m\u202e"})],
            r"A\n1 ERROR \x1b[31m\u202e",
        ),
        (b"\x01\0", [encode({"status": "A" * 60_000})], "A" * 60 + " of engine"),
    ],
)
async def test_wrong_hellos_are_logged_and_the_right_one_is_taken(
    identity: bytes, frames: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine("tcp://127.0.0.1:0") as listener:
            async with (
                open_stranger(listener.address, identity) as wrong,
                trio.open_nursery() as nursery,
            ):
                for _ in range(10):
                    wrong.send_multipart(frames)
                nursery.start_soon(listener.accept)
                await wait_until(lambda: caplog.records)
                nursery.cancel_scope.cancel()
            head, engine = await shake_hands(listener, 0)
        await engine.aclose()
        await head.transport.aclose()
    # A few lines, whatever they hold and however often it comes; others follow them seldom.
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 5
    for line in lines:
        assert complaint in line
        assert line.isprintable()
        assert len(line) < 300


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


@pytest.mark.parametrize(
    ("ready", "complaint"),
    [
        ({"max_model_len": "long", "vllm_version": "0.32.0"}, r"ready response .*max_model_len"),
        ({"max_model_len": 9, "num_gpu_blocks": 9}, r"a vLLM that does not say its version"),
        ({"vllm_version": "0.22.1"}, r"is vLLM 0.22.1, whose wire is too old; allowed: vLLM 0.23"),
    ],
)
async def test_a_ready_response_that_cannot_be_read(
    address: str, ready: object, complaint: str
) -> None:
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
                leg.send_multipart([encode(ready)])
                handshake.send_multipart([encode({"status": "READY"})])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(pretend)
                with pytest.raises(EngineStartError, match=complaint):
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
        ("ipc://*", "allowed: tcp://IP:PORT, ipc://PATH"),
        ("ipc://", "allowed: tcp://IP:PORT, ipc://PATH"),
    ],
)
async def test_an_address_that_cannot_be_used_is_named(bad: str, complaint: str) -> None:
    with pytest.raises(EngineStartError, match=re.escape(complaint)) as caught:
        async with listen_for_engine(bad):
            pass
    assert bad in str(caught.value)


async def test_two_listeners_on_one_address(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as first:
            with pytest.raises(EngineStartError, match="in use"):
                async with listen_for_engine(first.address):
                    pass
            head, engine = await shake_hands(first, 0)
        await engine.aclose()
        await head.transport.aclose()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
async def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "join"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to("elsewhere")
    before = path.lstat()
    with pytest.raises(EngineStartError, match=f"{path}.*a file that is no socket"):
        async with listen_for_engine(f"ipc://{path}"):
            pass
    assert path.lstat() == before


async def test_a_socket_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "join"))
    async with listen_for_engine(f"ipc://{tmp_path}/join"):
        assert (tmp_path / "join").is_socket()
    assert not (tmp_path / "join").exists()


@pytest.mark.parametrize("beside", ["ipc://FOLDER/", "ipc://@trioleg-test-PID-"])
async def test_two_listeners_in_one_folder_keep_their_engines_apart(
    tmp_path: Path, beside: str
) -> None:
    """Both load their models at the same time, so that the legs of both are open before either comes to them."""
    beside = beside.replace("FOLDER", str(tmp_path)).replace("PID", str(os.getpid()))
    loading: list[int] = []
    pairs: list[tuple[AcceptedEngine, EngineSockets]] = []

    async def load_together() -> EngineReadyResponse:
        loading.append(1)
        await wait_until(lambda: len(loading) == 2)
        return READY

    async def meet(listener: EngineListener) -> None:
        pairs.append(await shake_hands(listener, 0, load_together))

    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(beside + "a") as a, listen_for_engine(beside + "b") as b:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meet, a)
                nursery.start_soon(meet, b)
            for number, (head, engine) in enumerate(pairs):
                engine.outputs[0].send_multipart([b"%d" % number])
                assert await head.transport.receive() == [b"%d" % number]
            for head, engine in pairs:
                await engine.aclose()
                await head.transport.aclose()
    assert not list(tmp_path.iterdir())


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


async def test_those_who_only_say_hello_do_not_keep_the_engine_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with private_ipc_dir() as folder, trio.fail_after(GENEROUS_S):
        async with AsyncExitStack() as stack:
            listener = await stack.enter_async_context(listen_for_engine(f"ipc://{folder}/join"))
            accepted: list[AcceptedEngine] = []

            async def accept() -> None:
                accepted.append(await listener.accept())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                for number in range(1, handshake._MAX_LOADING + 2):
                    one = open_stranger(listener.address, bytes([number, 0]))
                    stranger = await stack.enter_async_context(one)
                    stranger.send_multipart([encode({"status": "HELLO"})])
                    await stranger.recv_multipart()
                # Two files for each, and the handshake's.
                assert len(list(folder.iterdir())) == 2 * handshake._MAX_LOADING + 1
                engine = await join_head(listener.address, load, engine_index=0)
            assert accepted[0].rank == 0
            await engine.aclose()
            await accepted[0].transport.aclose()
    assert "engine 0100 gives way: 8 others said HELLO after it" in caplog.text


async def test_too_big_a_message_ends_its_senders_connection(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            async with open_stranger(listener.address, b"zz") as stranger:
                monitor = PeerMonitor(stranger, bound=False)
                stranger.send_multipart([bytes(handshake._MAX_HANDSHAKE_BYTES + 1)])
                await monitor.wait_deserted()
                monitor.close()
            head, engine = await shake_hands(listener, 0)
        await engine.aclose()
        await head.transport.aclose()


async def test_what_strangers_send_while_an_engine_serves_is_not_kept(address: str) -> None:
    with trio.fail_after(GENEROUS_S):
        async with listen_for_engine(address) as listener:
            head, engine = await shake_hands(listener, 0)
            async with open_stranger(listener.address, b"zz") as stranger:
                stranger.raw.setsockopt(zmq.SNDHWM, 1)
                # So that a connection has the option.
                stranger.raw.disconnect(listener.address)
                stranger.raw.connect(listener.address)
                sent = 0
                with trio.move_on_after(1.0):
                    while True:
                        await trio.lowlevel.checkpoint()
                        with suppress(zmq.Again):
                            stranger.send_multipart([bytes(60_000)])
                            sent += 1
                # The kernel holds a few megabytes of it. Without a bound it would be thousands of messages.
                assert 0 < sent < 500
                await engine.aclose()
                await head.transport.aclose()
                head, engine = await shake_hands(listener, 1)
            assert head.rank == 1
            await engine.aclose()
            await head.transport.aclose()


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
