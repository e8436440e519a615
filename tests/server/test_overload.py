"""Overload over HTTP (E7): an early 429 that a program can read, and slots that come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
import trio
from connection_harness import Client
from scripted_app import MESSAGES, Answer, call, open_app, open_chat_llm
from tiny_tokenizers import ids
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import LLMConfig, ServerConfig, serve
from trioleg.testing import Script

LONG = Script(steps=[[one] for one in ids(*["a"] * 100)], step_interval_s=0.1)
LIMIT = 4


@pytest.mark.parametrize("stream", [False, True])
async def test_e7_limit_4_and_10_requests(autojump_clock: MockClock, stream: bool) -> None:
    async with open_app(LONG, llm_config=LLMConfig(max_inflight_requests=LIMIT)) as app:
        answers = [Answer() for _ in range(10)]
        async with trio.open_nursery() as nursery:
            for answer in answers:
                nursery.start_soon(partial(app.ask, answer, stream=stream, max_tokens=5))
        statuses = sorted(answer.status for answer in answers)
        assert statuses == [200] * LIMIT + [429] * 6
        turned_away = next(one for one in answers if one.status == 429)
        assert turned_away.error["type"] == "rate_limit_error"
        assert turned_away.error["code"] == "too_many_requests"
        assert "allowed: 4 (max_inflight_requests)" in turned_away.error["message"]
        assert int(turned_away.headers[b"retry-after"]) >= 1
        # It may be repeated, and there is room again.
        assert b"x-should-retry" not in turned_away.headers
        assert (await app.ask(max_tokens=5)).status == 200


async def test_n_counts_n(autojump_clock: MockClock) -> None:
    async with open_app(LONG, llm_config=LLMConfig(max_inflight_requests=LIMIT)) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, n=3, max_tokens=5))
            await wait_all_tasks_blocked()
            assert (await app.ask(n=2)).status == 429
            assert (await app.ask(n=1, max_tokens=5)).status == 200
        answer = await app.ask(n=5)
        assert (answer.status, answer.error["param"]) == (400, "n")


async def test_a_deadline_that_the_queue_would_outlast(autojump_clock: MockClock) -> None:
    one_at_a_time = Script(
        steps=[[one] for one in ids(*["a"] * 20)], step_interval_s=0.1, max_num_seqs=1
    )
    async with open_app(one_at_a_time) as app:
        await app.ask()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(app.ask)
            await trio.sleep(0.5)
            answer = await app.ask(headers={"X-Request-Timeout": "1.5"})
            assert (answer.status, answer.error["code"]) == (429, "deadline_too_short")
            assert int(answer.headers[b"retry-after"]) >= 4
            nursery.cancel_scope.cancel()


async def test_the_metrics_tell(autojump_clock: MockClock) -> None:
    async with open_app(LONG, llm_config=LLMConfig(max_inflight_requests=1)) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(app.ask)
            await wait_all_tasks_blocked()
            await app.ask()
            text = (await call(app.app, "GET", "/metrics")).body.decode()
            nursery.cancel_scope.cancel()
    assert "trioleg_inflight_requests 1.0" in text
    assert 'trioleg_requests_overloaded_total{code="too_many_requests"} 1.0' in text
    assert "trioleg_queued_prompt_tokens" in text


# ---------------------------------------------------------------------- on real sockets


@asynccontextmanager
async def full() -> AsyncIterator[tuple[int, list[Client]]]:
    """A server's port, and streams on all the slots that there are."""
    endless = Script(token_ids=ids("a"), step_interval_s=0.01)
    config = LLMConfig(max_inflight_requests=LIMIT)
    with trio.fail_after(30):
        async with open_chat_llm(endless, config) as (llm, _), AsyncExitStack() as stack:
            async with trio.open_nursery() as nursery:
                server_config = ServerConfig(port=0, drain_timeout=0)
                server = await nursery.start(partial(serve, llm, server_config))
                clients = []
                for _ in range(LIMIT):
                    client = Client(await trio.open_tcp_stream("127.0.0.1", server.port))
                    await stack.enter_async_context(client.stream)
                    await client.send(chat(stream=True, max_tokens=1000))
                    await client.until(b'"content":"a"')
                    clients.append(client)
                yield server.port, clients
                nursery.cancel_scope.cancel()


def chat(*headers: str, length: int | None = None, **fields: Any) -> bytes:
    body = json.dumps({"messages": MESSAGES, **fields}).encode()
    head = f"Content-Length: {len(body) if length is None else length}"
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: test", head, *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def ask(port: int, request: bytes) -> tuple[int, bytes, Any]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        client = Client(stream)
        await client.send(request)
        status, head, body = await client.response()
        return status, head.lower(), json.loads(body)


async def get(port: int, path: str) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        client = Client(stream)
        await client.send(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        return (await client.response())[2]


async def close(client: Client) -> None:
    await client.stream.aclose()


async def half_close(client: Client) -> None:
    await client.stream.send_eof()


@pytest.mark.parametrize("leave", [close, half_close])
async def test_a_slot_comes_back_when_a_client_leaves(leave: Callable[[Client], Any]) -> None:
    async with full() as (port, clients):
        status, head, body = await ask(port, chat(max_tokens=3))
        assert (status, body["error"]["code"]) == (429, "too_many_requests")
        assert b"retry-after: 1" in head
        await leave(clients[2])
        while status == 429:
            status, _, _ = await ask(port, chat(max_tokens=3))
        assert status == 200


async def test_openais_client_comes_again() -> None:
    async with full() as (port, clients), trio.open_nursery() as nursery:
        finished = trio.Event()

        async def ask_by_openai() -> None:
            async with httpx2.AsyncClient(trust_env=False) as http:
                openai_client = openai.AsyncOpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key="any", http_client=http
                )
                answer = await openai_client.chat.completions.create(
                    model="scripted", messages=MESSAGES, max_tokens=3
                )
                assert answer.choices[0].message.content == "aaa"
            finished.set()

        nursery.start_soon(ask_by_openai)
        metrics = b""
        while b'{code="too_many_requests"} 1.0' not in metrics:
            metrics = await get(port, "/metrics")
        await close(clients[0])
        await finished.wait()


async def test_it_is_early(caplog: pytest.LogCaptureFixture) -> None:
    """A body that has not come yet, and would be a long one, is not waited for."""
    async with full() as (port, _):
        status, head, _ = await ask(port, chat(length=10_000_000))
        assert status == 429
        assert b"connection: close" in head


async def test_a_body_is_not_asked_for_that_is_not_wanted() -> None:
    """RFC 9110, 10.1.1: the final status at once, if the head decides it."""
    async with full() as (port, _):
        for length, status in ((100, 429), (10**9, 429)):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                head = chat("Expect: 100-continue", length=length).partition(b"\r\n\r\n")[0]
                await stream.send_all(head + b"\r\n\r\n")
                assert (await Client(stream).response())[0] == status


async def test_a_body_over_the_limit_is_not_asked_for() -> None:
    async with full() as (port, clients), await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await close(clients[0])
        status = 429
        while status == 429:
            status, _, _ = await ask(port, chat(max_tokens=3))
        head = chat("Expect: 100-continue", length=10**9).partition(b"\r\n\r\n")[0]
        await stream.send_all(head + b"\r\n\r\n")
        assert (await Client(stream).response())[0] == 413


async def test_a_small_body_that_comes_later_costs_no_connection() -> None:
    async with full() as (port, _), await trio.open_tcp_stream("127.0.0.1", port) as stream:
        client = Client(stream)
        for count in (1, 2):
            head, end, body = chat(max_tokens=3).partition(b"\r\n\r\n")
            await client.send(head + end)
            metrics = b""
            while b'{code="too_many_requests"} %d.0' % count not in metrics:
                metrics = await get(port, "/metrics")
            await client.send(body)
            status, answer_head, _ = await client.response()
            assert status == 429
            assert b"connection: close" not in answer_head.lower()


async def test_a_connection_outlives_a_429() -> None:
    async with full() as (port, _), await trio.open_tcp_stream("127.0.0.1", port) as stream:
        client = Client(stream)
        for _ in range(3):
            await client.send(chat(max_tokens=3))
            status, head, _ = await client.response()
            assert status == 429
            assert b"connection: close" not in head.lower()
