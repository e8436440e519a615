"""How a server starts, or does not, and how it ends when an engine's death and signals meet.

Rows D4, D5, D8, D9 and D10: exit codes are for supervisors, and what is left behind is nobody's.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from itertools import cycle

import httpx2
import pytest
import trio
from programs import TRIOLEG, alive, running, wait_until
from served import Server, open_client, serving, starting, stopped, wait_gone

from trioleg.ipc.joining import join_head
from trioleg.messages import WIRE_VERSION, EngineReadyResponse

TERM, INT = signal.SIGTERM, signal.SIGINT
SIGNALS = [(TERM,), (INT,), (TERM, INT), (INT, TERM), (TERM, TERM), (INT, INT)]


def names(numbers: tuple[signal.Signals, ...]) -> str:
    return "-".join(number.name for number in numbers)


def assert_ended_by_its_engine(server: Server) -> None:
    assert server.last_line.startswith("trioleg: engine 0 is dead: it was killed by SIGKILL")
    assert "Traceback" not in server.program.stderr


@pytest.mark.parametrize("numbers", SIGNALS, ids=names)
async def test_d4_signals_while_the_server_says_that_its_engine_is_dead(
    smollm2, tmp_path, numbers
) -> None:
    with serving(tmp_path) as server:
        async with open_client(server) as client:
            os.kill(server.engine, signal.SIGKILL)
            await client.until_health(503)
            server.signal(*numbers)
            assert await server.wait() == 1
    assert_ended_by_its_engine(server)


@pytest.mark.parametrize("numbers", [(TERM,), (INT,), (TERM, INT)], ids=names)
async def test_d4_signals_before_anybody_has_seen_that_the_engine_is_dead(
    smollm2, tmp_path, numbers
) -> None:
    with serving(tmp_path) as server:
        engine = server.engine
        # The server is stopped, so that it finds all of it at once.
        with stopped(server.program.process.pid):
            os.kill(engine, signal.SIGKILL)
            wait_gone(engine)
            server.signal(*numbers)
        assert await server.wait() == 1
    assert_ended_by_its_engine(server)


async def test_d4_signals_while_everything_is_taken_down(smollm2, tmp_path) -> None:
    with serving(tmp_path, server={"engine_death_linger": 0.1}) as server:
        numbers = cycle((TERM, INT))
        os.kill(server.engine, signal.SIGKILL)
        server.program.wait_for("is dead")
        while alive(server.program.process.pid):
            server.signal(next(numbers))
        assert await server.wait() == 1
    assert_ended_by_its_engine(server)


async def test_a_second_signal_does_not_wait_for_an_engine_that_does_not_listen(
    smollm2, tmp_path
) -> None:
    hangs = {"faults": [{"after_steps": 5, "how": "hang"}]}
    with serving(tmp_path, llm={"engine_stop_timeout": 600.0}, **hangs) as server:
        async with open_client(server) as client:
            answer = client.ask()
            await client.until(lambda: answer.text)
            server.signal(TERM)
            await client.until(lambda: answer.is_done)
            family = server.family
            server.signal(INT)
            assert await server.wait() == 0
        wait_gone(*family)


@pytest.mark.parametrize("more", [(), (TERM,), (INT, TERM)], ids=names)
async def test_d4_the_engine_dies_while_the_server_drains(smollm2, tmp_path, more) -> None:
    with serving(tmp_path, server={"drain_timeout": 60.0}, step_interval_s=0.05) as server:
        async with open_client(server) as client:
            answer = client.ask()
            await client.until(lambda: answer.text)
            server.signal(TERM)
            await client.until_health(503, "draining")
            os.kill(server.engine, signal.SIGKILL)
            await client.until(lambda: answer.is_told)
            assert answer.error["code"] == "engine_dead"
            server.signal(*more)
            assert await server.wait() == 1
    assert_ended_by_its_engine(server)


@pytest.mark.parametrize("more", [(), (TERM,), (INT, TERM)], ids=names)
async def test_d4_the_engine_dies_while_the_connections_close(smollm2, tmp_path, more) -> None:
    with serving(tmp_path, server={"graceful_timeout": 20.0}) as server:
        with client_that_sends_no_body(server) as client:
            server.signal(TERM)
            await trio.to_thread.run_sync(wait_until, lambda: is_refused(server))
            os.kill(server.engine, signal.SIGKILL)
            server.program.wait_for("is dead")
            server.signal(*more)
            client.shutdown(socket.SHUT_RDWR)
            assert await server.wait() == 1
    assert_ended_by_its_engine(server)


def client_that_sends_no_body(server: Server) -> socket.socket:
    """A request that is still on its way. It is refused, and the server lets its client read that, and finish."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100"
    client.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
    # The server asks for the body, so it has the request.
    assert client.recv(100).startswith(b"HTTP/1.1 100")
    return client


def is_refused(server: Server) -> bool:
    """Nobody listens any more."""
    try:
        httpx2.get(f"{server.url}/health", trust_env=False)
    except httpx2.ConnectError:
        return True
    return False


@pytest.mark.parametrize("phase", ["loading", "serving"])
async def test_d5_a_killed_front_end_leaves_neither_engine_nor_files(
    smollm2, tmp_path, phase
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    load_s = 600.0 if phase == "loading" else 0.0
    with starting(tmp_path, env={"TMPDIR": str(folder)}, load_s=load_s) as server:
        if phase == "loading":
            wait_until(lambda: len(server.family) == 2)
        else:
            server.program.wait_for("ready: ")
        assert list(folder.iterdir())
        family = server.family
        server.program.process.kill()
        with trio.fail_after(10.0):
            await trio.to_thread.run_sync(wait_gone, *family)
        assert not list(folder.iterdir())


def test_d8_twenty_servers_at_once(smollm2, tmp_path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(starting(tmp_path, env={"TMPDIR": str(folder)})) for _ in range(20)
        ]
        urls = {one.program.wait_for(r"ready: .* at (http://\S+)")[1] for one in servers}
        assert len(urls) == 20
        assert all(httpx2.get(f"{url}/health", trust_env=False).is_success for url in urls)
        assert len(list(folder.iterdir())) == 20
        for one in servers:
            one.signal(TERM)
        assert [one.program.wait() for one in servers] == [0] * 20
    assert not list(folder.iterdir())


@pytest.mark.parametrize("what", ["wrong path", "load error"])
def test_d9_a_start_that_fails_is_one_message(smollm2, tmp_path, what) -> None:
    options = ("--log-level", "error")
    if what == "wrong path":
        argv = (*TRIOLEG, "serve", str(tmp_path / "nowhere"), "--port", "0", *options)
        expected = str(tmp_path / "nowhere")
        context = running(*argv)
    else:
        # Nothing is gained by trying a first start again: a setting stays wrong.
        expected = "the weights are cut short"
        context = starting(tmp_path, *options, "--restart-engine", load_error=expected)
    with context as started:
        program = started.program if isinstance(started, Server) else started
        assert program.wait() == 1
    (line,) = program.stderr.splitlines()
    assert line.startswith("trioleg: ")
    assert expected in line
    assert program.stdout == ""


async def test_d10_an_engine_that_is_never_ready(smollm2, tmp_path) -> None:
    options = ("--start-timeout", "1", "--log-level", "error")
    with starting(tmp_path, *options, load_s=600.0) as server:
        await trio.to_thread.run_sync(wait_until, lambda: len(server.family) == 2)
        family = server.family
        assert await server.wait() == 1
        assert not any(map(alive, family))
    assert server.program.stderr == "trioleg: the engine was not ready within 1 s\n"


async def test_d10_an_engine_that_says_ready_and_nothing_more(smollm2, tmp_path) -> None:
    address = f"ipc://{tmp_path}/join"
    options = ("--attach", address, "--start-timeout", "1", "--log-level", "error")
    ready = EngineReadyResponse(max_model_len=2048, num_gpu_blocks=100, vllm_version=WIRE_VERSION)

    async def load() -> EngineReadyResponse:
        await trio.lowlevel.checkpoint()
        return ready

    with trio.fail_after(30.0):
        with running(*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *options) as program:
            sockets = await join_head(address, load, engine_index=0)
            assert await Server(program).wait() == 1
            await sockets.aclose()
    assert program.stderr == (
        "trioleg: engine 0 said that it was ready, and answers nothing (start_timeout is 1 s)\n"
    )
