"""openai's own client, against a scripted engine behind real sockets: what it makes of our streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import openai
import pytest
import trio
from scripted_app import MESSAGES, open_chat_llm
from sse_grammar import read_stream
from test_streaming_protocol import play

from trioleg.config import ServerConfig
from trioleg.engine.scripted import Script
from trioleg.server.serve import BoundServer, serve

T = TypeVar("T")
ASKED: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "stream": True}


@asynccontextmanager
async def open_server(script: Script, interval: float | None = None) -> AsyncIterator[str]:
    """Yields its URL."""
    config = ServerConfig(port=0, sse_keep_alive_interval=interval)
    async with open_chat_llm(script) as (llm, _), trio.open_nursery() as nursery:
        bound: BoundServer = await nursery.start(serve, llm, config)
        yield bound.url
        nursery.cancel_scope.cancel()


async def with_client(url: str, talk: Callable[[openai.OpenAI], T]) -> T:
    """``talk`` in a thread: openai's asynchronous client leaves generators open behind an error."""

    def run() -> T:
        with (
            httpx2.Client(trust_env=False) as http,
            openai.OpenAI(
                base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http
            ) as client,
        ):
            return talk(client)

    with trio.fail_after(60):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def test_keep_alive_comments_are_not_seen() -> None:
    """B22: an engine that is silent for several intervals, before its first token and between two."""
    script = play("a", "b", "c", first_token_delay_s=0.3, step_interval_s=0.15)
    async with open_server(script, interval=0.05) as url:

        def talk(client: openai.OpenAI) -> list[str | None]:
            stream = client.chat.completions.create(**ASKED)
            return [chunk.choices[0].delta.content for chunk in stream]

        assert await with_client(url, talk) == ["", "a", "b", "c"]

        def read() -> bytes:
            with httpx2.Client(base_url=url, trust_env=False) as http:
                return http.post("/v1/chat/completions", json=ASKED).read()

        stream = read_stream(await trio.to_thread.run_sync(read))
        assert stream.choices[0].deltas == ["a", "b", "c"]
        assert stream.num_comments >= 3


async def test_an_error_in_mid_stream_is_raised() -> None:
    """B20: behind the text that came before it, with what it says."""
    script = play(*"abcabc", step_interval_s=0.01, faults=[{"after_steps": 3, "how": "raise"}])
    texts: list[str | None] = []

    def talk(client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIError) as caught:
            texts.extend(
                chunk.choices[0].delta.content for chunk in client.chat.completions.create(**ASKED)
            )
        error: Any = caught.value
        assert (error.code, error.type) == ("engine_dead", "service_unavailable_error")
        assert "engine" in error.message

    async with open_server(script) as url:
        await with_client(url, talk)
    assert "".join(text or "" for text in texts) == "abc"


async def test_logprobs_and_choices_are_read() -> None:
    """Its models take every field of ours that is OpenAI's."""
    asked = {"logprobs": True, "top_logprobs": 2, "n": 2}

    def talk(client: openai.OpenAI) -> None:
        plain = client.chat.completions.create(**{**ASKED, **asked, "stream": False})
        streamed: list[list[Any]] = [[], []]
        for chunk in client.chat.completions.create(**ASKED, **asked):
            (choice,) = chunk.choices
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.content or []
        assert [one.index for one in plain.choices] == [0, 1]
        for one in plain.choices:
            assert one.message.content == "é"
            assert one.logprobs is not None
            assert one.logprobs.content == streamed[one.index]
            assert [entry.bytes for entry in one.logprobs.content or []] == [[0xC3], [0xA9]]

    async with open_server(play("C3", "A9")) as url:
        await with_client(url, talk)
