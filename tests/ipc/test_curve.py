"""Keys in files, and at sockets: the handshake and both legs, and those who are not let in."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import zmq
from process_helpers import wait_until

from trioleg.errors import EngineStartError, InvalidRequestError
from trioleg.ipc import joining
from trioleg.ipc.curve import (
    EngineKeys,
    FrontEndKeys,
    make_keys,
    read_engine_keys,
    read_front_end_keys,
)
from trioleg.ipc.doorkeeper import Doorkeeper
from trioleg.ipc.handshake import AcceptedEngine, EngineListener, listen_for_engine
from trioleg.ipc.joining import join_head
from trioleg.ipc.sockets import Context, PeerMonitor, ZmqSocket, close_sockets, make_socket
from trioleg.messages import WIRE_VERSION, EngineCoreRequestType, EngineReadyResponse

GENEROUS_S = 30.0
ADDRESSES = pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://FOLDER/handshake"])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path / "keys")


# ---------------------------------------------------------------- files


def test_each_side_gets_what_it_needs_and_no_more(folders: tuple[Path, Path]) -> None:
    front_end, engine = (read(one) for read, one in zip(READERS, folders, strict=True))
    assert isinstance(engine, EngineKeys)
    assert front_end.engines == {engine.public}
    assert zmq.curve_public(front_end.secret) == engine.front_end
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o700
        (secret,) = folder.glob("*.key_secret")
        assert secret.stat().st_mode & 0o777 == 0o600
    assert engine.secret not in b"".join(one.read_bytes() for one in all_files(folders[0]))
    assert front_end.secret not in b"".join(one.read_bytes() for one in all_files(folders[1]))


READERS = (read_front_end_keys, read_engine_keys)


def all_files(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.is_file()]


def test_a_secret_is_never_shown(folders: tuple[Path, Path]) -> None:
    for read, folder in zip(READERS, folders, strict=True):
        keys = read(folder)
        assert keys.secret.decode() not in repr(keys)


def test_more_engines_share_one_front_end(folders: tuple[Path, Path]) -> None:
    before = read_front_end_keys(folders[0])
    _, second = make_keys(folders[0].parent, "gpu-2")
    after = read_front_end_keys(folders[0])
    assert after.secret == before.secret
    assert after.engines == before.engines | {read_engine_keys(second).public}
    (folders[0] / "engines" / "engine.key").unlink()
    assert read_front_end_keys(folders[0]).engines == {read_engine_keys(second).public}


@pytest.mark.parametrize("name", ["engine", "frontend", "", "..", "a/b", "-x"])
def test_a_name_that_cannot_be(folders: tuple[Path, Path], name: str) -> None:
    before = {one: one.read_bytes() for one in all_files(folders[0].parent)}
    with pytest.raises(InvalidRequestError, match=re.escape(f"engine is {name!r}")):
        make_keys(folders[0].parent, name)
    assert {one: one.read_bytes() for one in all_files(folders[0].parent)} == before


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read(folders: tuple[Path, Path], mode: int) -> None:
    for read, folder in zip(READERS, folders, strict=True):
        next(folder.glob("*.key_secret")).chmod(mode)
        with pytest.raises(InvalidRequestError, match=f"has mode {mode:04o}") as caught:
            read(folder)
        assert caught.value.parameter == "curve_keys"


def test_folders_that_are_not_what_they_should_be(folders: tuple[Path, Path]) -> None:
    front_end, engine = folders
    swapped = [(read_front_end_keys, engine), (read_engine_keys, front_end)]
    nowhere = [(read, front_end.parent / "nowhere") for read in READERS]
    for read, folder in (*swapped, *nowhere):
        with pytest.raises(InvalidRequestError, match="that `trioleg keys` made"):
            read(folder)


def test_files_that_are_broken(folders: tuple[Path, Path]) -> None:
    front_end, engine = folders
    stranger, _ = zmq.curve_keypair()
    secret = engine / "engine.key_secret"
    good = secret.read_text()
    own = read_engine_keys(engine).public.decode()
    for bad in ("", "nonsense", good.replace(own, stranger.decode()), good.replace(own, "short")):
        secret.write_text(bad)
        with pytest.raises(InvalidRequestError, match="curve_keys is"):
            read_engine_keys(engine)
    (front_end / "engines" / "engine.key").unlink()
    with pytest.raises(InvalidRequestError, match="nobody could come in"):
        read_front_end_keys(front_end)


@pytest.mark.parametrize("bad", ["~" * 40, "#" * 40, "é" * 20, "é" * 40, "short"])
def test_keys_that_are_no_z85(folders: tuple[Path, Path], bad: str) -> None:
    front_end, engine = folders
    for name in ("engine.key_secret", "frontend.key"):
        path = engine / name
        good = path.read_text()
        for kind in re.findall(r"(public|secret)-key", good):
            path.write_text(re.sub(f"{kind}-key = .*", f'{kind}-key = "{bad}"', good))
            with pytest.raises(
                InvalidRequestError, match=f"{re.escape(name)} (does not )?holds? a"
            ):
                read_engine_keys(engine)
        path.write_text(good)
    read_engine_keys(engine)
    (front_end / "engines" / "bad.key").write_text(f'public-key = "{bad}"\n')
    with pytest.raises(
        InvalidRequestError, match=r"engines/bad\.key holds .* not 40 characters of Z85"
    ):
        read_front_end_keys(front_end)


def test_a_missing_folder_of_engines_is_made(folders: tuple[Path, Path]) -> None:
    engines = folders[0] / "engines"
    (engines / "engine.key").unlink()
    engines.rmdir()
    _, second = make_keys(folders[0].parent, "second")
    assert engines.stat().st_mode & 0o777 == 0o700
    assert read_front_end_keys(folders[0]).engines == {read_engine_keys(second).public}


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link"])
def test_a_key_that_is_no_regular_file(folders: tuple[Path, Path], kind: str) -> None:
    odd = folders[0] / "engines" / "odd.key"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to("engine.key" if kind == "link" else "nowhere")
    with pytest.raises(InvalidRequestError, match=r"engines/odd\.key is no regular file"):
        read_front_end_keys(folders[0])


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o1777])
def test_folders_that_others_can_write_to(folders: tuple[Path, Path], mode: int) -> None:
    front_end, engine = folders
    for read, given, part in (
        (read_front_end_keys, front_end, front_end),
        (read_front_end_keys, front_end, front_end / "engines"),
        (read_engine_keys, engine, engine),
    ):
        part.chmod(mode)
        with pytest.raises(InvalidRequestError, match=f"others can write to {part} ") as caught:
            read(given)
        assert caught.value.parameter == "curve_keys"
        part.chmod(0o700)
        read(given)


# ---------------------------------------------------------------- sockets


async def load() -> EngineReadyResponse:
    await trio.lowlevel.checkpoint()
    return EngineReadyResponse(max_model_len=128, num_gpu_blocks=64, vllm_version=WIRE_VERSION)


@asynccontextmanager
async def open_listener(address: str, folder: Path, keys: FrontEndKeys):  # type: ignore[no-untyped-def]
    with trio.fail_after(GENEROUS_S):
        async with trio.open_nursery() as nursery:
            doorkeeper = Doorkeeper(keys, nursery)
            where = address.replace("FOLDER", str(folder))
            async with listen_for_engine(where, doorkeeper=doorkeeper) as listener:
                yield listener
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_pair(
    listener: EngineListener, keys: EngineKeys
) -> AsyncIterator[tuple[AcceptedEngine, joining.EngineSockets]]:
    accepted: list[AcceptedEngine] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        engine = await join_head(listener.address, load, engine_index=0, keys=keys)
    try:
        yield accepted[0], engine
    finally:
        await engine.aclose()
        await accepted[0].transport.aclose()


@ADDRESSES
async def test_all_three_legs_carry(
    address: str, folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = read_engine_keys(folders[1])
    async with open_listener(address, tmp_path, read_front_end_keys(folders[0])) as listener:
        async with open_pair(listener, keys) as (head, engine):
            assert head.transport.send(EngineCoreRequestType.ABORT, b"\x90")
            assert await engine.inputs[0].recv_multipart() == [b"\x01", b"\x90"]
            # More than ZeroMQ packs into one read, and without a copy.
            body = b"x" * 1_000_000
            engine.outputs[0].send_multipart([body, b"aux"], copy=False)
            assert await head.transport.receive() == [body, b"aux"]
            assert not head.transport.is_output_lost
    assert not [one for one in caplog.records if "not let in" in one.getMessage()]


@pytest.mark.parametrize("leg", ["input", "output"])
async def test_a_leg_lets_nobody_in_either(
    folders: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    leg: str,
) -> None:
    """A stranger with keys of its own, and one without: nothing that they send arrives, and the engine's does."""
    keys = read_engine_keys(folders[1])
    _, stranger_folder = make_keys(tmp_path / "other")
    stranger = read_engine_keys(stranger_folder)
    stranger = EngineKeys(stranger.public, stranger.secret, keys.front_end)
    async with open_listener("tcp://127.0.0.1:0", tmp_path, read_front_end_keys(folders[0])) as one:
        async with open_pair(one, keys) as (head, engine), trio.open_nursery() as nursery:
            # As the link does: it follows the connections all the time.
            nursery.start_soon(head.transport.wait_lost)
            context: Context = zmq.Context()
            kind = zmq.DEALER if leg == "input" else zmq.PUSH
            sockets = [ZmqSocket(make_socket(context, kind, identity=b"\0\0")) for _ in range(2)]
            stranger.set_up(sockets[0].raw)
            address = getattr(head.transport, f"{leg}_address")
            for socket_ in sockets:
                socket_.raw.connect(address)
                socket_.send_multipart([b"evil"])
                await wait_until(lambda: f"{leg} leg: somebody at" in caplog.text)
            engine.outputs[0].send_multipart([b"mine"])
            assert await head.transport.receive() == [b"mine"]
            assert head.transport.send(EngineCoreRequestType.ABORT, b"\x90")
            assert await engine.inputs[0].recv_multipart() == [b"\x01", b"\x90"]
            await close_sockets(context, sockets, linger=0.0)
            nursery.cancel_scope.cancel()


async def test_without_a_doorkeepers_task_nobody_comes_in(folders: tuple[Path, Path]) -> None:
    """libzmq's own rule is the opposite: a question that nobody answers is a yes."""
    context: Context = zmq.Context()
    with trio.fail_after(GENEROUS_S):
        guarded = ZmqSocket(make_socket(context, zmq.ROUTER))
        read_front_end_keys(folders[0]).set_up(guarded.raw, "input")
        monitor = PeerMonitor(guarded, bound=True, on_refused=(refusals := []).append)
        guarded.raw.bind("tcp://127.0.0.1:0")
        peer = ZmqSocket(make_socket(context, zmq.DEALER))
        read_engine_keys(folders[1]).set_up(peer.raw)
        peer.raw.connect(guarded.raw.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        peer.send_multipart([b"hello"])
        while not refusals:
            await monitor.wait_for_change()
        with pytest.raises(zmq.Again):
            guarded.raw.recv_multipart(zmq.NOBLOCK)
        monitor.close()
        await close_sockets(context, [guarded, peer], linger=0.0)


@asynccontextmanager
async def open_rude_head() -> AsyncIterator[str]:
    """Takes every connection, and ends it at once: as a proxy does that has nobody behind it."""
    with trio.fail_after(GENEROUS_S):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, trio.open_nursery() as nursery:

            async def serve() -> None:
                while True:
                    await (await listener.accept()).aclose()

            nursery.start_soon(serve)  # noqa: ASYNC113  the block is this nursery's own
            yield f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
            nursery.cancel_scope.cancel()


async def test_a_head_that_ends_every_handshake(
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With keys they are the wrong ones; without, the head may come yet, and the engine says what it waits for."""
    monkeypatch.setattr(joining, "_REFUSED_AFTER_S", 0.2)
    keys = read_engine_keys(folders[1])
    async with open_rude_head() as address:
        with pytest.raises(EngineStartError, match="does not let this engine in: the connection"):
            await join_head(address, load, engine_index=0, keys=keys)
        assert not caplog.records
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(join_head, address, load, engine_index=0))
            await wait_until(lambda: caplog.records)
            nursery.cancel_scope.cancel()
    (warning,) = caplog.records
    assert f"the head at '{address}' does not let this engine in so far" in warning.getMessage()


async def test_a_few_refusals_are_logged_at_once_and_then_few(
    folders: tuple[Path, Path], autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        doorkeeper = Doorkeeper(read_front_end_keys(folders[0]), nursery)
        question = [b"1.0", b"1", b"input", b"10.0.0.9", b"", b"CURVE", bytes(32)]
        for _ in range(50):
            assert doorkeeper._reply(question)[:3] == [b"1.0", b"1", b"400"]
        assert len(caplog.records) == 5
        assert "input leg: somebody at 10.0.0.9 is not let in: its public key '000" in caplog.text
        await trio.sleep(10.0)
        assert doorkeeper._reply(question)[2] == b"400"
        assert "(45 more refused since the last such line)" in caplog.records[5].getMessage()
        assert doorkeeper._reply([*question[:5], b"NULL"])[2] == b"400"


# ---------------------------------------------------------------- strangers at a monitored socket


async def test_a_socket_lives_though_nobody_reads_of_its_strangers() -> None:
    """ZeroMQ's thread would wait for a full monitor, and with it every connection of the context."""
    context: Context = zmq.Context()
    with trio.fail_after(GENEROUS_S):
        bound = ZmqSocket(make_socket(context, zmq.PULL))
        monitor = PeerMonitor(bound, bound=True)
        bound.raw.bind("tcp://127.0.0.1:0")
        address = bound.raw.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        port = int(address.rpartition(":")[2])
        for _ in range(1_100):
            socket.create_connection(("127.0.0.1", port)).close()
        other: Context = zmq.Context()
        peer = ZmqSocket(make_socket(other, zmq.PUSH))
        peer.raw.connect(address)
        peer.send_multipart([b"still there"])
        assert await bound.recv_multipart() == [b"still there"]
        monitor.close()
        await close_sockets(other, [peer], linger=0.0)
        await close_sockets(context, [bound], linger=0.0)
