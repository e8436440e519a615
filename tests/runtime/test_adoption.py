"""An engine that somebody else has started, and what becomes of it when that is gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import trio
import zmq

from trioleg.errors import EngineStartError
from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket
from trioleg.runtime.adoption import EngineLegs, adopt_engine

GENEROUS_S = 30.0
READY = msgspec.msgpack.encode({"max_model_len": 64, "num_gpu_blocks": 8, "vllm_version": "0.32.0"})


def legs_in(folder: Path, owner: int) -> EngineLegs:
    return EngineLegs(f"ipc://{folder}/in", f"ipc://{folder}/out", 3, owner)


class AnEngine:
    """The input leg of engine 3, which has said that it is ready."""

    def __init__(self, legs: EngineLegs, ready: bytes = READY) -> None:
        self._context: Context = zmq.Context()
        self.socket = ZmqSocket(make_socket(self._context, zmq.DEALER, identity=b"\3\0"))
        self.socket.raw.connect(legs.input)
        self.socket.send_multipart([ready])

    async def aclose(self) -> None:
        await close_sockets(self._context, [self.socket], linger=0.0)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_an_engine_of_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    legs = legs_in(tmp_path, os.getppid())
    with trio.fail_after(GENEROUS_S):
        async with aclosing(AnEngine(legs)) as it:
            async with adopt_engine(legs, GENEROUS_S) as engine:
                assert (engine.rank, engine.ready.vllm_version) == (3, "0.32.0")
                assert engine.watch is not None
                assert engine.watch.death is None
                assert not engine.watch.sees_exit
            with pytest.raises(zmq.Again):
                it.socket.raw.recv_multipart(zmq.NOBLOCK)


async def test_an_engine_whose_owner_is_gone_is_dead_and_told_to_end(
    tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    legs = legs_in(tmp_path, owner.pid)
    with trio.fail_after(GENEROUS_S):
        async with aclosing(AnEngine(legs)) as it:
            async with adopt_engine(legs, GENEROUS_S) as engine:
                assert engine.watch is not None
                owner.kill()
                assert await engine.watch.wait() == "the process that started it is gone"
                assert engine.watch.death == "the process that started it is gone"
            # EXECUTOR_FAILED, and nil.
            assert await it.socket.recv_multipart() == [b"\x04", b"\xc0"]


async def test_a_ready_response_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    legs = legs_in(tmp_path, os.getppid())
    with trio.fail_after(GENEROUS_S):
        async with aclosing(AnEngine(legs, b"\x01")):
            with pytest.raises(EngineStartError, match="ready response"):
                async with adopt_engine(legs, GENEROUS_S):
                    raise AssertionError("there is none")
