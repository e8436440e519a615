"""C2: a client that closes its connection is gone at once, in every phase and every mode, on a real socket.

The server is the whole one; its engine is the scripted one in this process, so that what reached it can be seen.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from phases import PHASES, Phase, aborted_ids
from process_helpers import wait_until
from scripted_app import MESSAGES, open_chat_llm

from trioleg.config import ServerConfig
from trioleg.runtime.llm import LLM
from trioleg.server.metrics import metrics_text
from trioleg.server.serve import BoundServer, serve
from trioleg.testing import Script, ScriptedTransport

GENEROUS_S = 20.0


@asynccontextmanager
async def open_server(
    script: Script, config: ServerConfig
) -> AsyncIterator[tuple[LLM, ScriptedTransport, int]]:
    with trio.fail_after(GENEROUS_S):
        async with open_chat_llm(script) as (llm, transport), trio.open_nursery() as nursery:
            bound: BoundServer = await nursery.start(serve, llm, config)
            yield llm, transport, bound.port
            nursery.cancel_scope.cancel("the test is over")


@asynccontextmanager
async def asking(port: int, behind: bytes = b"", **asked: Any) -> AsyncIterator[trio.SocketStream]:
    """A request on a connection of its own; leaving the block closes it."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2000, **asked}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nX-Request-Id: mine\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
        await connection.send_all(head.encode() + body + behind)
        yield connection


@pytest.mark.parametrize("phase", PHASES, ids=str)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("keep_alive", [None, 0.01], ids=["silent", "with comments"])
async def test_a_client_that_closes(
    phase: Phase, n: int, stream: bool, keep_alive: float | None
) -> None:
    config = ServerConfig(port=0, sse_keep_alive_interval=keep_alive)
    async with open_server(phase.script, config) as (llm, transport, port):
        async with AsyncExitStack() as stack:
            if phase.needs_occupant:
                await stack.enter_async_context(llm.open_stream([1]))
            async with asking(port, stream=stream, n=n, **phase.asked):
                await wait_until(lambda: phase.is_reached(llm, transport))
            await wait_until(lambda: aborted_ids(transport))
            (ids,) = aborted_ids(transport)
            assert len(ids) == n
            assert llm.statistics().open_streams == phase.needs_occupant
            assert b'trioleg_requests_total{reason="left"} 1.0' in metrics_text(llm)
        await wait_until(lambda: not transport.core._live())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize(
    "behind",
    [b"\r\n", b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"],
    ids=["line end", "pipelined"],
)
async def test_bytes_behind_the_request_hide_nobodys_leaving(stream: bool, behind: bytes) -> None:
    """A line end too many, or the next request, sent ahead: the engine hears of the leaving all the same (M1)."""
    phase = PHASES[1]
    async with open_server(phase.script, ServerConfig(port=0)) as (llm, transport, port):
        async with asking(port, behind, stream=stream):
            await wait_until(lambda: phase.is_reached(llm, transport))
        await wait_until(lambda: aborted_ids(transport))
        await wait_until(lambda: not llm.statistics().open_streams)
