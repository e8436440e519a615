"""M2, M3: clients that stop reading hold up nobody: no shutdown, no deadline, no other client, no memory.

Most of it is seen with the whole server and a scripted engine in this process, over real sockets; the end of a
server with 200 of them is that of the real program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from phases import endless
from process_helpers import wait_until
from scripted_app import MESSAGES, open_chat_llm
from served import COUNTED, GENEROUS_S, open_client, serving, wait_gone

from trioleg.bench.processes import resident_kb
from trioleg.config import LLMConfig, ServerConfig
from trioleg.outputs import EndingKind
from trioleg.runtime.llm import LLM
from trioleg.sampling_params import SamplingParams
from trioleg.server.serve import BoundServer, serve
from trioleg.testing import Script, ScriptedTransport

BOUND_S = 120.0
# Steps of a hundred letters; and of one, as fast as they come.
LETTERS = endless(*"abc", tokens_per_step=100, step_interval_s=0.001, max_model_len=10_000_000)
SINGLE = endless(*"abc", step_interval_s=0.0, max_model_len=200_000)
STEPS = 100_000


def chat(**asked: Any) -> bytes:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 5_000_000, **asked}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def stalled(port: int, data: bytes) -> AsyncIterator[trio.socket.SocketType]:
    """A client that sends ``data`` and has next to no room for an answer."""
    with trio.socket.socket() as sock:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 2048)
        await sock.connect(("127.0.0.1", port))
        await trio.SocketStream(sock).send_all(data)
        yield sock


async def see_end(sock: trio.socket.SocketType) -> bytes:
    """What the kernels still have, up to the end, in order or not."""
    data = b""
    try:
        while part := await sock.recv(2**20):
            data += part
    except ConnectionResetError:
        pass
    return data


@asynccontextmanager
async def open_server(
    script: Script, llm_config: LLMConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[LLM, ScriptedTransport, int]]:
    config = ServerConfig(port=0, **settings)
    with trio.fail_after(BOUND_S):
        async with open_chat_llm(script, llm_config) as (llm, transport):
            async with trio.open_nursery() as nursery:
                bound: BoundServer = await nursery.start(serve, llm, config)
                yield llm, transport, bound.port
                nursery.cancel_scope.cancel("the test is over")


async def until_behind(llm: LLM, count: int, num_bytes: int = 50_000) -> None:
    """So many streams have that much unread, which no reader has who keeps up."""
    await wait_until(
        lambda: (
            len(behind := llm.live_requests()) == count
            and all(one.mailbox.num_bytes >= num_bytes for one in behind)
        )
    )


def ended(llm: LLM, kind: EndingKind) -> int:
    return llm.statistics().endings.get(kind, 0)


# ---------------------------------------------------------------------------- memory


async def test_m3_a_hundred_thousand_steps_to_clients_that_never_read() -> None:
    """One merged output each, a few bytes a token; and whoever reads beside them gets every token."""
    num_stalled = 3
    async with open_server(SINGLE) as (llm, _, port), AsyncExitStack() as stack:
        await llm.generate([1], SamplingParams(max_tokens=100))
        before = resident_kb(os.getpid())
        for _ in range(num_stalled):
            await stack.enter_async_context(stalled(port, chat(stream=True, max_tokens=STEPS)))
        await wait_until(lambda: len(llm.live_requests()) == num_stalled)
        streams = llm.live_requests()
        read = await llm.generate([1], SamplingParams(max_tokens=STEPS))
        await wait_until(lambda: not llm.live_requests())
        grown = resident_kb(os.getpid()) - before
        assert read.outputs[0].text == ("abc" * STEPS)[:STEPS]
        statistics = llm.statistics()
        assert statistics.num_unread_requests == num_stalled
        for one in streams:
            assert one.num_output_tokens == STEPS
            # What the kernel's buffers took came before.
            assert one.statistics().num_merges > STEPS * 0.9
        assert statistics.num_unread_bytes < 10 * num_stalled * STEPS
    # The bound is field-cases' own; 25 MB of it would be ids and texts in lists, without what a server has anyway.
    assert grown < 20_000


async def test_all_readers_together_have_a_bound() -> None:
    config = LLMConfig(unread_max_bytes=400_000)
    async with open_server(LETTERS, config) as (llm, _, port), AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(stalled(port, chat(stream=True)))
        await wait_until(lambda: ended(llm, EndingKind.READER_TOO_SLOW) >= 2)
        async with llm.open_stream([1], SamplingParams(max_tokens=10_000)) as read:
            text = "".join([output.outputs[0].text async for output in read])
        assert text == ("abc" * 10_000)[:10_000]
        assert ended(llm, EndingKind.LENGTH) == 1


# ---------------------------------------------------------------------------- ends


async def test_m2_a_deadline_ends_a_client_that_never_reads() -> None:
    timed = chat(stream=True, timeouts={"total": 3.0})
    async with open_server(LETTERS) as (llm, transport, port):
        async with stalled(port, timed) as sock, stalled(port, chat(stream=True)):
            await until_behind(llm, 2)
            await wait_until(lambda: ended(llm, EndingKind.DEADLINE))
            await until_behind(llm, 1)
            # It hears of the other's end between two steps.
            await wait_until(lambda: len(transport.core._live()) == 1)
            # Cut in mid-write, so there is no error event, and no end that could be taken for a whole answer.
            assert b"[DONE]" not in await see_end(sock)


async def test_the_write_bound_ends_it_and_nobody_else() -> None:
    async with open_server(LETTERS, write_timeout=0.3) as (llm, transport, port):
        async with stalled(port, chat(stream=True)) as sock:
            await wait_until(lambda: llm.live_requests())
            asked = SamplingParams(max_tokens=100_000)
            async with llm.open_stream([1], asked) as other:
                text = ""
                async for output in other:
                    text += output.outputs[0].text
            assert text == ("abc" * 100_000)[:100_000]
            await wait_until(lambda: ended(llm, EndingKind.LEFT))
            assert transport.core._live() == []
            assert b"[DONE]" not in await see_end(sock)


async def test_a_big_answer_in_one_piece_that_nobody_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {"logprobs": True, "top_logprobs": 5, "max_tokens": 10_000}
    caplog.set_level("INFO", "trioleg.server.client_connection")
    async with open_server(LETTERS, write_timeout=0.3) as (llm, _, port):
        async with stalled(port, chat(**asked)) as sock:
            await wait_until(lambda: "its client reads nothing any more" in caplog.text)
            assert ended(llm, EndingKind.LENGTH) == 1
            # Whoever then reads sees that something is missing.
            head, _, body = (await see_end(sock)).partition(b"\r\n\r\n")
            size = re.search(rb"(?i)content-length: (\d+)", head)
            assert size is not None
            assert 0 < len(body) < int(size[1])


async def test_of_pipelined_requests_only_the_first_runs() -> None:
    async with open_server(LETTERS, write_timeout=0.5) as (llm, _, port):
        async with stalled(port, 3 * chat(stream=True)) as sock:
            await until_behind(llm, 1)
            await wait_until(lambda: ended(llm, EndingKind.LEFT))
            assert (await see_end(sock)).count(b"HTTP/1.1 200") == 1
        assert llm.statistics().open_streams == 0
        assert sum(llm.statistics().endings.values()) == 1


async def test_a_client_that_leaves_after_all_gives_its_slot_back() -> None:
    config = LLMConfig(max_inflight_requests=1)
    async with open_server(LETTERS, config) as (llm, _, port):
        async with stalled(port, chat(stream=True)):
            await until_behind(llm, 1)
            async with stalled(port, chat(max_tokens=5)) as other:
                assert (await other.recv(2**16)).startswith(b"HTTP/1.1 429")
        await wait_until(lambda: not llm.statistics().num_inflight_requests)
        async with stalled(port, chat(max_tokens=5)) as other:
            assert (await other.recv(2**16)).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------------------- the way down


NUM_STALLED = 200
DRAIN_S = GRACE_S = 1.0


async def test_m2_two_hundred_of_them_do_not_hold_up_sigterm(smollm2, tmp_path) -> None:
    settings = {"drain_timeout": DRAIN_S, "graceful_timeout": GRACE_S}
    # A name that makes events long, so that what the kernel takes is soon full.
    options = ("--served-model-name", 2000 * "m")
    script: dict[str, Any] = {"step_interval_s": 0.01, "max_model_len": 1_000_000}
    with serving(tmp_path, *options, server=settings, max_num_seqs=256, **script) as server:
        port = urlsplit(server.url).port
        assert port is not None
        family = server.family
        async with open_client(server, BOUND_S) as client, AsyncExitStack() as stack:
            data = chat(stream=True, max_tokens=900_000)
            opening = [stalled(port, data) for _ in range(NUM_STALLED)]
            socks = [await stack.enter_async_context(one) for one in opening]
            readers = [client.ask() for _ in range(10)]
            while await client.metric("trioleg_unread_bytes") < 1_000 * NUM_STALLED:
                pass
            await client.until(lambda: all(one.is_done for one in readers))
            assert all(one.is_exact and COUNTED.startswith(one.text) for one in readers)
            running = client.ask(max_tokens=900_000)
            await client.until(lambda: running.text)
            at = time.monotonic()
            server.signal(signal.SIGTERM)
            assert await server.wait() == 0
            assert time.monotonic() - at < DRAIN_S + GRACE_S + GENEROUS_S / 2
            await client.until(lambda: running.is_told)
            for sock in socks:
                assert b"HTTP/1.1 200" in await see_end(sock)
        wait_gone(*family)
    assert "Traceback" not in server.program.stderr
