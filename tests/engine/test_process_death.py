"""How an engine process ends: asked, by an error, killed, orphaned; and what its head gets to see."""

from __future__ import annotations

import os
import signal
import sys
from subprocess import PIPE

import pytest
import trio
import zmq
from engine_harness import (
    GENEROUS_S,
    engine_argv,
    importable,
    open_engine,
    open_loading_engine,
)
from process_helpers import open_front_end

from trioleg.engine.scripted import Fault, Script
from trioleg.ipc.parent import wait_gone
from trioleg.ipc.sockets import Context, ZmqSocket, close_sockets, make_socket
from trioleg.messages import FinishReason

__all__ = ["importable"]

pytestmark = pytest.mark.usefixtures("importable")
ENDLESS = Script(token_ids=[1], step_interval_s=0.001, max_model_len=10**9, num_gpu_blocks=10**9)


async def test_sigterm_aborts_what_is_in_progress_and_delivers_it(tmp_path) -> None:
    async with open_engine(ENDLESS, tmp_path) as head:
        for name in "abc":
            head.add(name, max_tokens=1_000_000)
        while len(head.answers) < 3:
            await head.receive()
        os.kill(head.process.engine_pid, signal.SIGTERM)
        ended = await head.process.wait()
        await head.receive_until_finished("abc")
        assert {answer.finish_reason for answer in head.answers.values()} == {FinishReason.ABORT}
    assert ended.code == 0


async def test_the_sentinel_comes_behind_every_output_from_a_process_that_has_left(
    tmp_path,
) -> None:
    """Twenty engines whose sixth step fails; the head reads only when the process is gone."""
    script = Script(token_ids=[1], faults=[Fault(after_steps=5, how="raise")])
    limiter = trio.CapacityLimiter(4)

    async def one_engine() -> None:
        async with limiter, open_engine(script, tmp_path) as head:
            head.add("r", max_tokens=1_000)
            ended = await head.process.wait()
            assert ended.code == 1
            assert head.process.last_error == "RuntimeError: the script says that this step fails"
            with trio.fail_after(GENEROUS_S):
                while await head.receive():
                    pass
            assert head.answers["r"].token_ids == [1] * 5

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one_engine)


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("sigkill", -9)])
async def test_a_process_that_is_suddenly_gone(tmp_path, how, code) -> None:
    script = Script(token_ids=[1], faults=[Fault(after_steps=5, how=how)])
    async with open_engine(script, tmp_path) as head:
        head.add("r", max_tokens=1_000)
        assert (await head.process.wait()).code == code
        assert "connection is lost" in await head.transport.wait_lost()


async def test_a_step_that_hangs_is_ended_by_the_guardian(tmp_path) -> None:
    script = Script(token_ids=[1], faults=[Fault(after_steps=2, how="hang")])
    async with open_engine(script, tmp_path, stop_timeout=0.3) as head:
        head.add("r", max_tokens=1_000)
        while "r" not in head.answers or len(head.answers["r"].token_ids) < 2:
            await head.receive()
        assert (await head.process.stop()).code == -9


async def test_a_second_signal_does_not_wait_for_a_step_that_hangs(tmp_path) -> None:
    script = Script(token_ids=[1], faults=[Fault(after_steps=0, how="hang")])
    async with open_engine(script, tmp_path) as head:
        head.add("r", max_tokens=1_000)
        os.kill(head.process.engine_pid, signal.SIGTERM)
        os.kill(head.process.engine_pid, signal.SIGINT)
        assert (await head.process.wait()).code == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_ends_it_at_once(tmp_path, signum) -> None:
    async with open_loading_engine(Script(token_ids=[1], load_s=600.0), tmp_path) as process:
        os.kill(process.engine_pid, signum)
        assert (await process.wait()).code == 0
        assert process.last_error == ""


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path) -> None:
    script = Script(token_ids=[1], load_error="model.safetensors is cut short")
    async with open_loading_engine(script, tmp_path) as process:
        assert (await process.wait()).code == 1
        assert process.last_error == "RuntimeError: model.safetensors is cut short"


async def test_an_engine_leaves_when_the_process_that_it_belongs_to_is_gone(tmp_path) -> None:
    parent = await trio.lowlevel.open_process(
        [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    async with open_engine(ENDLESS, tmp_path, more=(str(parent.pid),)) as head:
        head.add("r", max_tokens=1_000_000)
        while "r" not in head.answers:
            await head.receive()
        parent.kill()
        await parent.wait()
        assert (await head.process.wait()).code == 1
        assert f"process {parent.pid}, which this engine belongs to, is gone" in head.lines[-1]


@pytest.mark.parametrize("load_s", [0.0, 600.0])
async def test_a_killed_front_end_leaves_no_engine_also_while_it_loads(tmp_path, load_s) -> None:
    argv = engine_argv(
        Script(token_ids=[1], load_s=load_s), tmp_path / "s.json", "ipc://FOLDER/handshake"
    )
    with trio.fail_after(GENEROUS_S):
        async with open_front_end(argv) as front_end:
            context: Context = zmq.Context()
            head = ZmqSocket(make_socket(context, zmq.ROUTER))
            head.raw.bind(f"ipc://{front_end.folder}/handshake")
            await head.recv_multipart()
            front_end.process.kill()
            with trio.fail_after(2.0):
                await wait_gone(front_end.engine_pid)
            await wait_gone(front_end.guardian_pid)
            assert not front_end.folder.exists()
            await close_sockets(context, [head], linger=0.0)


async def test_a_process_is_watched_where_there_is_no_descriptor_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    # Neither our parent nor ended: what is watched here is any process, such as a front end.
    process = await trio.lowlevel.open_process([sys.executable, "-c", "input()"], stdin=PIPE)
    assert process.stdin is not None
    async with process.stdin:
        with trio.move_on_after(1.2) as alive:
            await wait_gone(process.pid)
        assert alive.cancelled_caught
        process.kill()
        await process.wait()
    with trio.fail_after(GENEROUS_S):
        await wait_gone(process.pid)
