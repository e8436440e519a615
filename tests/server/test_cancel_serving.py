"""A cancel at every point of the server's start and end, on a real listener: no socket and no task stays."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import trio
from cancel_everywhere import HOW, cuts
from connection_harness import post
from process_helpers import wait_until
from scripted_app import MESSAGES, open_chat_llm
from test_streaming_protocol import play

from trioleg.config import ServerConfig
from trioleg.runtime.llm import LLM
from trioleg.server.serve import BoundServer, bind_sockets, serve

GENEROUS_S = 120.0
PATH = "/v1/chat/completions"
ASKED = json.dumps({"messages": MESSAGES, "stream": True}).encode()
CONFIG = ServerConfig(host="localhost", port=0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def check_descriptors(number: int) -> None:
    """A name's look-up that was left goes on for a moment in its thread, with descriptors of its own; and one of
    before may have been among those that were counted."""
    await wait_until(lambda: open_descriptors() <= number)


class StopsWhenStarted:
    """What ``nursery.start`` hands a task, for a task that is no task of its own."""

    def __init__(self) -> None:
        self.shutdown = trio.Event()

    def started(self, value: BoundServer) -> None:
        self.shutdown.set()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("of_all", [False, True], ids=["the server's yields", "all tasks' yields"])
async def test_serving_from_start_to_end(of_all: bool, how: str) -> None:
    started = 0
    with trio.fail_after(GENEROUS_S):
        for cut in cuts(how, of_all=of_all):
            async with open_chat_llm(play("a")) as (llm, _):
                before = open_descriptors()
                server = StopsWhenStarted()
                with cut.made():
                    await serve(llm, CONFIG, shutdown=server.shutdown, task_status=server)
                started += server.shutdown.is_set()
                await check_descriptors(before)
    assert 1 < started <= cut.point


async def serve_one_request(llm: LLM) -> None:
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        bound: BoundServer = await nursery.start(partial(serve, llm, CONFIG, shutdown=shutdown))
        async with await trio.open_tcp_stream("127.0.0.1", bound.port) as connection:
            await connection.send_all(post(ASKED, "Content-Type: application/json", path=PATH))
            answer = b""
            while b"data: [DONE]" not in answer:
                answer += await connection.receive_some()
            shutdown.set()


@pytest.mark.parametrize("how", ["call", "both"])
async def test_a_server_with_a_stream_in_progress(how: str) -> None:
    """From its start to its end, with the client's own yields among those that count."""
    answered = 0
    with trio.fail_after(GENEROUS_S):
        for cut in cuts(how, of_all=True):
            async with open_chat_llm(play("a", "b", step_interval_s=0.0)) as (llm, transport):
                before = open_descriptors()
                with cut.made():
                    await serve_one_request(llm)
                await wait_until(lambda: not transport.core._live())
                assert llm.statistics().open_streams == 0
                assert llm.statistics().engines[0].processor.requests == 0
                answered += sum(llm.statistics().endings.values())
                await check_descriptors(before)
    assert 5 < answered <= cut.point + 1


@pytest.mark.parametrize("how", HOW)
async def test_taking_the_address(how: str) -> None:
    with trio.fail_after(GENEROUS_S):
        for cut in cuts(how):
            before = open_descriptors()
            with cut.made():
                for one in await bind_sockets(CONFIG):
                    one.close()
            await check_descriptors(before)
    assert cut.point >= 2
