"""The whole server and its clients over real sockets, with frames that go straight from the engine's link to them:
every text is whole, whoever reads slowly, and whatever ends it."""

from __future__ import annotations

import json
import random
import re
import ssl
from collections.abc import Callable
from functools import partial

import pytest
import trio
from certificates import Certificates
from connection_harness import Client, serving
from phases import endless
from process_helpers import wait_until
from scripted_app import open_app
from sse_grammar import Stream, read_stream
from test_direct_body import read_body
from test_stalled_clients import BOUND_S, chat, ended, open_server, see_end, until_behind

from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.server.http1 import DirectBody
from trioleg.server.tls import tls_context
from trioleg.testing import ScriptedTransport

COUNT = 300
STEADY = endless(*"abc", step_interval_s=0.001, max_model_len=10_000_000)
# Steps of a hundred letters: what the kernels hold is soon full.
BROAD = endless(*"abc", tokens_per_step=100, step_interval_s=0.001, max_model_len=10_000_000)


@pytest.fixture
def direct_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every piece that went the short way."""
    write, lengths = DirectBody.write, list[int]()

    def counted(direct: DirectBody, data: bytes) -> None:
        lengths.append(len(data))
        write(direct, data)

    monkeypatch.setattr(DirectBody, "write", counted)
    return lengths


def content(stream: Stream) -> str:
    return stream.choices[0].content


def letters(count: int) -> str:
    return ("abc" * (count // 3 + 1))[:count]


async def test_most_frames_go_the_short_way_request_by_request(direct_writes: list[int]) -> None:
    async with open_server(STEADY) as (_, __, port):
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        async with client.stream:
            for turn in range(1, 3):
                await client.send(chat(stream=True, max_tokens=COUNT))
                status, _, body = await client.response()
                assert (status, content(read_stream(body))) == (200, letters(COUNT))
                assert len(direct_writes) > turn * COUNT / 3


async def test_pipelined_streams_come_one_behind_the_other(direct_writes: list[int]) -> None:
    async with open_server(STEADY) as (_, __, port):
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        async with client.stream:
            await client.send(3 * chat(stream=True, max_tokens=COUNT))
            for _ in range(3):
                body = (await client.response())[2]
                assert content(read_stream(body)) == letters(COUNT)
    assert direct_writes


async def test_a_client_of_http_1_0_has_its_stream_by_the_loop(direct_writes: list[int]) -> None:
    async with open_server(STEADY) as (_, __, port):
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        async with client.stream:
            request = chat(stream=True, max_tokens=COUNT).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
            await client.send(request)
            _, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert content(read_stream(body)) == letters(COUNT)
    assert direct_writes == []


async def test_a_client_under_tls_has_its_stream_by_the_loop(
    certificates: Certificates, direct_writes: list[int]
) -> None:
    pair = {"certfile": certificates.pem("server"), "keyfile": certificates.key("server")}
    trusting = ssl.create_default_context(cafile=certificates.pem("ca"))
    request = chat(stream=True, max_tokens=COUNT)
    request = request.replace(b"Host: test", b"Host: test\r\nContent-Type: application/json")
    async with open_app(STEADY) as app, serving(app.app, tls=tls_context(pair)) as server:
        async with server.connect_tls(trusting) as client:
            await client.send(request)
            assert content(read_stream((await client.response())[2])) == letters(COUNT)
    assert direct_writes == []


# ---------------------------------------------------------------------------- clients that do not keep up


async def read_in_fits(port: int, chance: random.Random, request: bytes) -> bytes:
    """The body, read through a narrow socket, now and then not at all."""
    with trio.socket.socket() as sock:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 2**14)
        await sock.connect(("127.0.0.1", port))
        client = Client(trio.SocketStream(sock))
        await client.send(request)
        await client.until(b"\r\n\r\n")
        body = b""
        while chunk := await client.chunk():
            body += chunk
            if chance.random() < 0.02:
                await trio.sleep(chance.choice([0, 0.01, 0.1]))
        return body


async def test_clients_that_read_in_fits_get_every_token(direct_writes: list[int]) -> None:
    """Two choices: two pieces a step for one connection."""
    count, bodies = 30_000, list[bytes]()
    asked = chat(stream=True, max_tokens=count, n=2)

    async def read(seed: int) -> None:
        bodies.append(await read_in_fits(port, random.Random(seed), asked))

    async with open_server(BROAD) as (_, __, port), trio.open_nursery() as nursery:
        for seed in range(4):
            nursery.start_soon(read, seed)
    assert len(bodies) == 4
    for body in bodies:
        stream = read_stream(body, {"n": 2})
        assert [one.content for one in stream.choices.values()] == 2 * [letters(count)]
    assert direct_writes


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        (EndingKind.ABORTED, lambda llm, _: llm.abort(llm.live_requests()[0].request_id)),
        (EndingKind.ENGINE_DEAD, lambda _, transport: transport.inject_dead()),
        (EndingKind.SHUTDOWN, lambda llm, _: llm.shut_down("on purpose")),
    ],
)
async def test_an_ending_in_a_stall_leaves_no_gap(
    kind: EndingKind, end: Callable[[LLM, ScriptedTransport], object]
) -> None:
    """What the client gets when it reads on is the beginning of the text: all of it, or cut, which can be seen."""
    async with open_server(BROAD) as (llm, transport, port):
        with trio.socket.socket() as sock:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 2**14)
            await sock.connect(("127.0.0.1", port))
            client = Client(trio.SocketStream(sock))
            await client.send(chat(stream=True))
            await until_behind(llm, 1)
            (live,) = llm.live_requests()
            end(llm, transport)
            await wait_until(lambda: ended(llm, kind))
            data = await see_end(sock)
        assert data.startswith(b"HTTP/1.1 200")
        body, is_whole = read_body(data)
        assert is_whole is body.endswith(b"data: [DONE]\n\n")
        texts = [json.loads(text) for text in re.findall(rb'"content":("[abc]*")', body)]
        assert len(texts) > 100
        assert letters(live.num_output_tokens).startswith("".join(texts))


async def test_a_step_into_a_socket_that_was_just_closed_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients leave all the time, by a reset or not, while others read on."""
    async with open_server(STEADY) as (llm, _, port):
        bodies: list[bytes] = []

        async def read() -> None:
            request = chat(stream=True, max_tokens=3 * COUNT)
            bodies.append(await read_in_fits(port, random.Random(0), request))

        async def leave(by_reset: bool) -> None:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(chat(stream=True))
                for _ in range(5):
                    await stream.receive_some()
                if by_reset:
                    linger_0 = b"\x01\0\0\0\0\0\0\0"
                    stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger_0)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            for number in range(40):
                nursery.start_soon(leave, number % 2 == 0)
        await wait_until(lambda: not llm.live_requests())
        assert ended(llm, EndingKind.LEFT) == 40
    assert [content(read_stream(body)) for body in bodies] == 3 * [letters(3 * COUNT)]
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


# ---------------------------------------------------------------------------- fairness

NUM_STREAMS = 500
PROBES = 5
PATIENCE = 10.0


async def test_a_probe_is_answered_beside_500_streams_at_full_speed() -> None:
    """The engine never waits, and neither do the writes: of order, not of speed."""
    script = endless(*"abc", step_interval_s=0.0, max_num_seqs=NUM_STREAMS, num_gpu_blocks=10**6)
    request = chat(stream=True, max_tokens=1000)
    received: dict[int, int] = {}

    async def read_on(number: int) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            while data := await stream.receive_some():
                received[number] = received.get(number, 0) + len(data)

    async with open_server(script) as (_, __, port), trio.open_nursery() as streams:
        for number in range(NUM_STREAMS):
            streams.start_soon(partial(read_on, number))
        await wait_until(lambda: len(received) == NUM_STREAMS)
        for _ in range(PROBES):
            before = dict(received)
            with trio.fail_after(PATIENCE):
                async with await trio.open_tcp_stream("127.0.0.1", port) as probe:
                    await probe.send_all(
                        b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
                    )
                    answer = b"".join([part async for part in probe])
            assert answer.startswith(b"HTTP/1.1 200")
        # Nobody was passed over.
        with trio.fail_after(BOUND_S):
            await wait_until(lambda: all(received[one] > before[one] for one in before))
        streams.cancel_scope.cancel()
