"""The end of a server in good order (D6, D7), with real processes: who is refused, who may go on, who is told."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
import trio
from programs import alive
from served import COUNTED, Client, Server, open_client, serving, wait_gone

TERM, INT = signal.SIGTERM, signal.SIGINT

# A token every 20 ms: 100 of them take 2 s, and 3,000 a minute.
SLOW = {"step_interval_s": 0.02, "max_model_len": 8192}
SHORT, LONG = 100, 3000


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    """A connection of which the test sees every byte, and the end."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        yield client


def rest_of(client: socket.socket) -> bytes:
    """To the end of file; a reset is an error."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def get_live(client: socket.socket) -> None:
    """A whole request, after which the connection is idle."""
    client.sendall(b"GET /live HTTP/1.1\r\nHost: test\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def draining(
    folder: Path, seconds: float, *, number: int = TERM
) -> AsyncIterator[tuple[Server, Client]]:
    """A server that has been told to end, with a request of a minute running."""
    with serving(folder, "--drain-timeout", str(seconds), **SLOW) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=LONG)
            await client.until(lambda: answer.text)
            server.signal(number)
            await client.until_health(503, "draining")
            yield server, client


async def test_d6_who_is_done_in_time_is_served_and_the_others_are_told(smollm2, tmp_path) -> None:
    with serving(tmp_path, "--drain-timeout", "5", **SLOW) as server:
        async with open_client(server) as client:
            short = [client.ask(max_tokens=SHORT, stream=stream) for stream in (True, False)]
            long = [client.ask(max_tokens=LONG, stream=stream) for stream in (True, False)]
            await client.until(lambda: short[0].text and long[0].text)
            await client.until_in_engine(running=4, waiting=0)
            server.signal(TERM)
            begun = trio.current_time()
            await client.until(lambda: all(one.is_done for one in short))
            assert all(one.is_exact and one.finish_reason == "length" for one in short)
            # They were not hurried, and nobody else was.
            assert not any(one.is_done for one in long)
            await client.until(lambda: all(one.is_done for one in long))
            assert trio.current_time() - begun >= 4.5
            streamed, plain = long
            assert streamed.is_told
            assert streamed.error["code"] == plain.error["code"] == "server_shutdown"
            # Readers ran on during the drain.
            assert len(streamed.text) > len(short[0].text)
            assert COUNTED.startswith(streamed.text)
            assert plain.status == 503
            assert plain.text
            assert await server.wait() == 0
    assert server.program.stderr.count("shutdown") == 2
    assert "Traceback" not in server.program.stderr


async def test_d6_new_requests_are_refused_and_hear_why(smollm2, tmp_path) -> None:
    async with draining(tmp_path, 60) as (server, client):
        for stream in (True, False):
            answer = await client.answered(stream=stream)
            assert answer.status == 503
            assert answer.error["code"] == "server_shutdown"
            assert answer.headers["connection"] == "close"
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert health.headers["connection"] == "close"
        assert (await client.get("/live")).status_code == 200
        with connected(server) as late:
            late.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
            # Its end of file comes with the answer, while the server still drains.
            assert await trio.to_thread.run_sync(rest_of, late)
        assert alive(server.program.process.pid)
        server.signal(TERM)
        assert await server.wait() == 0


async def test_d7_idle_connections_are_closed_at_once(smollm2, tmp_path) -> None:
    with serving(tmp_path, "--drain-timeout", "60", **SLOW) as server:
        with connected(server) as used, connected(server) as fresh, connected(server) as half:
            get_live(used)
            half.sendall(b"GET /live HTTP/1.1\r\nHo")
            async with open_client(server) as client:
                answer = client.ask(max_tokens=LONG)
                await client.until(lambda: answer.text)
                server.signal(TERM)
                assert await trio.to_thread.run_sync(rest_of, used) == b""
                assert await trio.to_thread.run_sync(rest_of, fresh) == b""
                assert not answer.is_done
                # A request that has begun to come is answered, and then it ends.
                half.sendall(b"st: test\r\n\r\n")
                last = await trio.to_thread.run_sync(rest_of, half)
                assert last.startswith(b"HTTP/1.1 200")
                assert b"connection: close" in last.lower()
                server.signal(TERM)
                assert await server.wait() == 0


async def test_d7_idle_connections_do_not_delay_the_end(smollm2, tmp_path) -> None:
    long = {"drain_timeout": 600.0, "graceful_timeout": 600.0}
    with serving(tmp_path, server=long) as server:
        with ExitStack() as stack:
            opened = [stack.enter_context(connected(server)) for _ in range(50)]
            for one in opened[:25]:
                get_live(one)
            server.signal(TERM)
            assert await server.wait() == 0
            assert {rest_of(one) for one in opened} == {b""}


@pytest.mark.parametrize("second", [TERM, INT])
async def test_a_second_signal_ends_the_drain_and_everybody_is_told(
    smollm2, tmp_path, second
) -> None:
    with serving(tmp_path, "--drain-timeout", "600", **SLOW) as server:
        async with open_client(server) as client:
            answers = [client.ask(max_tokens=LONG, stream=stream) for stream in (True, False)]
            await client.until_in_engine(running=2, waiting=0)
            await client.until(lambda: answers[0].text)
            server.signal(INT)
            await client.until_health(503, "draining")
            family = server.family
            server.signal(second)
            await client.until(lambda: all(one.is_done for one in answers))
            assert answers[0].is_told
            assert [one.error["code"] for one in answers] == ["server_shutdown"] * 2
            assert await server.wait() == 0
        wait_gone(*family)


async def test_the_second_signal_waits_for_no_client(smollm2, tmp_path) -> None:
    """Nor for one that reads nothing, whatever the limits of connections are."""
    long = {"drain_timeout": 600.0, "graceful_timeout": 600.0, "write_timeout": 600.0}
    with serving(tmp_path, server=long, **{**SLOW, "step_interval_s": 0.0}) as server:
        with connected(server) as stalled:
            fields = {"messages": [{"role": "user", "content": "Count"}], "stream": True}
            body = json.dumps({**fields, "max_tokens": 8000, "ignore_eos": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}"
            stalled.sendall(head.encode() + b"\r\n\r\n" + body)
            assert stalled.recv(1)
            server.signal(TERM)
            server.program.wait_for("SIGTERM: the server ends")
            server.signal(TERM)
            assert await server.wait() == 0


async def test_a_body_that_does_not_come_holds_nothing_up(smollm2, tmp_path) -> None:
    long = {"drain_timeout": 600.0, "graceful_timeout": 600.0}
    with serving(tmp_path, server=long) as server, connected(server) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100"
        client.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100")
        server.signal(TERM)
        answer = await trio.to_thread.run_sync(rest_of, client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"server_shutdown" in answer
        client.close()
        assert await server.wait() == 0


async def test_who_only_comes_to_hear_that_it_drains_does_not_hold_it_up(smollm2, tmp_path) -> None:
    with serving(tmp_path, server={"drain_timeout": 600.0}) as server:
        async with open_client(server) as client, trio.open_nursery() as nursery:

            async def ask_again(begun: trio.Event) -> None:
                with suppress(httpx2.TransportError):
                    while True:
                        await client.get("/health")
                        begun.set()

            for _ in range(20):
                begun = trio.Event()
                nursery.start_soon(ask_again, begun)
                await begun.wait()
            server.signal(TERM)
            assert await server.wait() == 0


async def test_a_big_prompt_that_is_not_tokenized_in_time_is_told(smollm2, tmp_path) -> None:
    big = {"max_model_len": 2**22, "num_gpu_blocks": 2**18}
    with serving(tmp_path, "--drain-timeout", "0", **big) as server:
        async with open_client(server) as client:
            messages = [{"role": "user", "content": "a few words " * 800_000}]
            answer = client.ask(messages=messages, stream=False)
            while not await client.metric("trioleg_inflight_requests"):
                pass
            server.signal(TERM)
            await client.until(lambda: answer.is_done)
            assert (answer.status, answer.error["code"]) == (503, "server_shutdown")
            assert await server.wait() == 0
    assert "ended: left" not in server.program.stderr


async def test_a_server_without_requests_ends_at_once(smollm2, tmp_path) -> None:
    with serving(tmp_path, server={"drain_timeout": 600.0, "graceful_timeout": 600.0}) as server:
        server.signal(TERM)
        assert await server.wait() == 0
