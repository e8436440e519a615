"""The clients that people have, against ``trioleg serve``: curl, openai, httpx2, h2load, nghttp, wrk. Nothing is odd.

``make test`` installs those that are programs.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio
from served import COUNTED, GENEROUS_S, Server, counting_ids, open_client, serving
from sse_grammar import read_answer, read_stream

from trioleg.model_store import resolve
from trioleg.tokenizer import Tokenizer

TOKENS = 20
# A few seconds, and nearly all that the model allows.
LONG = 2000
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": TOKENS}
JSON = ("-H", "Content-Type: application/json")


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of all tests here; in the end its log has nothing to tell."""
    with serving(tmp_path_factory.mktemp("clients"), step_interval_s=0.001) as server:
        yield server
        server.signal(signal.SIGTERM)
        assert server.program.wait(GENEROUS_S) == 0
    assert "Traceback" not in server.program.stderr
    assert " ERROR " not in server.program.stderr


@pytest.fixture(scope="module")
def text() -> str:
    """What an answer of so many tokens says."""
    tokenizer = Tokenizer.from_directory(resolve("smollm2-135m"))
    return tokenizer.decode(counting_ids()[:TOKENS])


@pytest.fixture
def chat(server: Server) -> str:
    return f"{server.url}/v1/chat/completions"


FAILURE = range(1, 126)


async def run(*argv: str, stdin: bytes = b"", codes: Container[int] = (0,)) -> tuple[str, str]:
    """What a program printed on its two outputs, once it has ended with one of ``codes``."""
    with trio.fail_after(GENEROUS_S):
        done = await trio.run_process(
            argv, stdin=stdin, capture_stdout=True, capture_stderr=True, check=False
        )
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode in codes, f"{argv} ended with {done.returncode}: {out}\n{errors}"
    return out, errors


async def curl(*argv: str, stdin: bytes = b"", codes: Container[int] = (0,)) -> tuple[str, str]:
    return await run("curl", "-sSN", "--noproxy", "*", *argv, stdin=stdin, codes=codes)


async def in_thread(talk: Callable[[], Any]) -> Any:
    with trio.fail_after(GENEROUS_S):
        return await trio.to_thread.run_sync(talk, abandon_on_cancel=True)


def asked(**fields: Any) -> str:
    return json.dumps({**ASKED, **fields})


# curl


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0", "--http2"])
async def test_curl_reads_streams_and_answers(chat: str, text: str, version: str) -> None:
    """``--http2`` offers h2c by an upgrade, and goes on with HTTP/1.1."""
    streamed, _ = await curl(version, *JSON, "-d", asked(stream=True), chat)
    assert read_stream(streamed.encode()).choices[0].content == text
    plain, _ = await curl(version, *JSON, "-d", asked(), chat)
    assert read_answer(plain.encode()).choices[0].content == text


async def test_curl_with_prior_knowledge_of_http_2_ends_at_once(server: Server) -> None:
    """It shows nothing of our 505, which is HTTP/1.1; but it does not hang."""
    url = f"{server.url}/health"
    out, errors = await curl("--http2-prior-knowledge", url, codes=FAILURE)
    assert not out
    assert errors.startswith("curl: ")


@pytest.mark.parametrize(
    "upload", [("-d", "@-"), ("-X", "POST", "-T", "-")], ids=["sized", "chunked"]
)
async def test_curl_asks_before_it_sends_a_large_body(
    chat: str, text: str, upload: tuple[str, ...]
) -> None:
    answer, log = await curl("-v", *JSON, *upload, chat, stdin=asked().encode() + b" " * 2**21)
    assert "> Expect: 100-continue" in log
    assert "< HTTP/1.1 100 Continue" in log
    assert "< HTTP/1.1 200 OK" in log
    assert read_answer(answer.encode()).choices[0].content == text


@pytest.mark.parametrize(
    "upload", [("-d", "@-"), ("-X", "POST", "-T", "-")], ids=["sized", "chunked"]
)
async def test_curl_gets_the_refusal_of_a_body_that_is_too_large(
    chat: str, upload: tuple[str, ...]
) -> None:
    answer, log = await curl("-v", *JSON, *upload, chat, stdin=b" " * 17 * 2**20)
    assert "< HTTP/1.1 413" in log
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


async def test_curl_asks_for_the_head_alone(server: Server) -> None:
    head, _ = await curl("-I", f"{server.url}/health")
    body, _ = await curl(f"{server.url}/health")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert f"content-length: {len(body)}\r\n" in head


async def test_curl_uses_its_connection_again(server: Server, chat: str) -> None:
    urls = (f"{server.url}/health", chat, f"{server.url}/v1/nowhere", f"{server.url}/v1/models")
    says = ("-o", "/dev/null", "-w", "%{http_code} %{num_connects}\n")
    argv = [word for url in urls for word in (*says, url)]
    out, _ = await curl(*argv)
    assert out.splitlines() == ["200 1", "405 0", "404 0", "200 0"]


@pytest.mark.parametrize("stream", [True, False])
async def test_curl_out_of_patience_frees_the_engine(
    server: Server, chat: str, stream: bool
) -> None:
    async with open_client(server) as client:
        left = await client.metric('trioleg_requests_total{reason="left"}')
        body = asked(stream=stream, max_tokens=LONG)
        out, _ = await curl("--max-time", "0.3", *JSON, "-d", body, chat, codes=[28])
        assert ("data: " in out) == stream
        await client.until_idle()
        assert await client.metric('trioleg_requests_total{reason="left"}') == left + 1


# openai


def sync_openai(url: str) -> openai.OpenAI:
    http = httpx2.Client(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http)


async def test_openai_reads_streams_and_answers(server: Server, text: str) -> None:
    def talk() -> None:
        with sync_openai(server.url) as client:
            create = client.chat.completions.create
            assert create(model="smollm2-135m", **ASKED).choices[0].message.content == text
            chunks = list(create(model="smollm2-135m", stream=True, **ASKED))
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "length"

    await in_thread(talk)


async def test_openai_closes_a_stream_early_and_goes_on(server: Server, text: str) -> None:
    def talk() -> None:
        with sync_openai(server.url) as client:
            create = client.chat.completions.create
            for _ in range(5):
                long = {**ASKED, "max_tokens": LONG}
                with create(model="smollm2-135m", stream=True, **long) as stream:
                    next(iter(stream))
            assert create(model="smollm2-135m", **ASKED).choices[0].message.content == text

    await in_thread(talk)
    async with open_client(server) as client:
        await client.until_idle()


async def test_openai_on_asyncio_streams_and_closes_early(server: Server, text: str) -> None:
    async def one(client: openai.AsyncOpenAI, chunks: int, **fields: Any) -> str:
        said = ""
        create = client.chat.completions.create
        async with await create(model="smollm2-135m", stream=True, **{**ASKED, **fields}) as stream:
            async for chunk in stream:
                said += chunk.choices[0].delta.content or ""
                chunks -= 1
                if not chunks:
                    await stream.close()
                    break
        return said

    async def talk() -> list[str]:
        http = httpx2.AsyncClient(trust_env=False)
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any", http_client=http) as client:
            early = [one(client, 3, max_tokens=LONG) for _ in range(5)]
            whole = [one(client, -1) for _ in range(10)]
            return await asyncio.gather(*early, *whole)

    said = await in_thread(lambda: asyncio.run(talk()))
    assert all(COUNTED.startswith(one) for one in said[:5])
    assert said[5:] == [text] * 10
    async with open_client(server) as client:
        await client.until_idle()


# httpx2


async def test_httpx2_shares_a_small_pool_among_many_requests(
    server: Server, chat: str, text: str
) -> None:
    texts: list[str] = []

    async def one(http: httpx2.AsyncClient, stream: bool) -> None:
        answer = await http.post(chat, json={**ASKED, "stream": stream})
        read = read_stream if stream else read_answer
        texts.append(read(answer.content).choices[0].content)

    limits = httpx2.Limits(max_connections=10)
    with trio.fail_after(GENEROUS_S):
        async with httpx2.AsyncClient(trust_env=False, timeout=None, limits=limits) as http:
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(one, http, number % 2 == 0)
    assert texts == [text] * 50


async def test_httpx2_closes_streams_early(server: Server, chat: str) -> None:
    """In a thread: its asynchronous client leaves generators open behind a stream that is cut."""

    def talk() -> None:
        body = {**ASKED, "max_tokens": LONG, "stream": True}
        with httpx2.Client(trust_env=False, timeout=GENEROUS_S) as http:
            for _ in range(10):
                with http.stream("POST", chat, json=body) as answer:
                    assert next(answer.iter_lines()).startswith("data: ")

    await in_thread(talk)
    async with open_client(server) as client:
        await client.until_idle()


# The programs that make load


def posting(folder: Path) -> str:
    file = folder / "body.json"
    file.write_text(asked())
    return str(file)


@pytest.mark.parametrize("pipelined", [1, 4])
async def test_h2load_counts_no_failure(
    server: Server, chat: str, tmp_path: Path, pipelined: int
) -> None:
    load = ("h2load", "--h1", "-n", "200", "-c", "10", "-m", str(pipelined))
    for request in ((f"{server.url}/health",), ("-d", posting(tmp_path), *JSON, chat)):
        out, _ = await run(*load, *request)
        assert "200 done, 200 succeeded, 0 failed, 0 errored, 0 timeout" in out
        assert "status codes: 200 2xx, 0 3xx, 0 4xx, 0 5xx" in out


@pytest.mark.parametrize("program", [("nghttp",), ("h2load", "-n", "5", "-c", "1")], ids=str)
async def test_prior_knowledge_of_http_2_is_disappointed_at_once(
    server: Server, program: tuple[str, ...]
) -> None:
    out, errors = await run(*program, f"{server.url}/health")
    assert "processed=0" in errors or "5 failed" in out


@pytest.mark.parametrize("posts", [False, True], ids=["get", "post"])
async def test_wrk_sees_no_error(server: Server, chat: str, tmp_path: Path, posts: bool) -> None:
    load, url = ["wrk", "-t1", "-c10", "-d2s", "--timeout", "30s"], f"{server.url}/health"
    if posts:
        script = tmp_path / "post.lua"
        script.write_text(
            f'wrk.method = "POST"\nwrk.body = [[{asked()}]]\n'
            'wrk.headers["Content-Type"] = "application/json"\n'
        )
        load += ["-c4", "-s", str(script)]
        url = chat
    out, _ = await run(*load, url)
    requests = re.search(r"(\d+) requests in", out)
    assert requests
    assert int(requests[1]) > 0
    assert "Socket errors" not in out
    assert "Non-2xx" not in out
