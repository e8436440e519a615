"""The whole leg with a real model, from sampled token to data line, as its users meet it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from programs import TRIOLEG, Program, alive, descendants, running, wait_until
from prometheus_client.parser import text_string_to_metric_families
from sse_grammar import Choice, read_answer, read_stream

from trioleg.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
CASES = json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]
# Below this margin between the two likeliest tokens, another order of summing may choose the other.
CLEAR_MARGIN = 0.02


class Server:
    """A running ``trioleg serve``, and clients for it."""

    def __init__(self, program: Program, http: httpx2.Client) -> None:
        self.program = program
        self.url = str(http.base_url)
        self.http = http
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, http_client=http
        )

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

    def engine_pids(self) -> list[int]:
        """The engine's processes: the guardian, then the engine."""
        return descendants(self.program.process.pid)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    with running(*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *options) as program:
        url = program.wait_for(r"ready: .* at (http://\S+)")[1]
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
            yield Server(program, http)


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving("--dtype", "float32") as server:
        yield server


@pytest.fixture
def doomed_server(smollm2: Path) -> Iterator[Server]:
    """A server of the test's own, to be killed."""
    with serving() as server:
        yield server


def ask(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": case["user"]}]
    limit = len(case["greedy_token_ids"])
    return {
        "model": "smollm2-135m",
        "messages": messages,
        "temperature": 0,
        "max_tokens": limit,
        **more,
    }


def check(case: dict[str, Any], text: str, tokenizer: Tokenizer) -> None:
    """The text is the recorded one, up to the first step that numeric noise may decide."""
    unclear = (i for i, margin in enumerate(case["margin_per_step"]) if margin < CLEAR_MARGIN)
    first = next(unclear, None)
    if first is None:
        assert text == case["text"]
    else:
        assert text.startswith(tokenizer.decode(case["greedy_token_ids"][:first]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["user"][:20])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_recorded_answers_one_at_a_time(
    server: Server, smollm2: Path, case: dict[str, Any], stream: bool
) -> None:
    check(case, answer(server, case, stream), Tokenizer.from_directory(smollm2))


def test_recorded_answers_all_at_once(server: Server, smollm2: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2)
    jobs = [(case, stream) for case in CASES for stream in (False, True)] * 2
    with ThreadPoolExecutor(len(jobs)) as threads:
        texts = list(threads.map(lambda job: answer(server, *job), jobs))
    for (case, _), text in zip(jobs, texts, strict=True):
        check(case, text, tokenizer)


def answer(server: Server, case: dict[str, Any], stream: bool) -> str:
    if not stream:
        return server.openai.chat.completions.create(**ask(case)).choices[0].message.content or ""
    chunks = list(server.openai.chat.completions.create(**ask(case, stream=True)))
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes[-1] in ("stop", "length")
    assert set(finishes[:-1]) == {None}
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "return_token_ids": True},
        {"stop": [" of", "is"], "stop_hold_back": "fixed", "return_token_ids": True},
        {"stop": " of", "include_stop_str_in_output": True, "min_tokens": 6},
        {"n": 3, "seed": 5, "temperature": 1.5, "return_token_ids": True, "stream_interval": 4},
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 30},
        {"logprobs": True, "top_logprobs": 3, "stop": " of", "return_token_ids": True},
        {"logprobs": True, "n": 2, "stream_interval": 3},
    ],
    ids=lambda more: " ".join(more),
)
def test_streamed_and_plain_answers_are_equal(server: Server, more: dict[str, Any]) -> None:
    """With the real engine: greedy, or with a seed, the model says the same again."""
    asked = ask(CASES[0], **more)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = server.http.post("/v1/chat/completions", json=asked | usage)
    plain = server.http.post("/v1/chat/completions", json=asked)
    stream, answer = read_stream(streamed.read(), asked | usage), read_answer(plain.read(), asked)
    for index, choice in stream.choices.items():
        # Another batch sums in another order.
        figures = pytest.approx(logprobs_of(answer.choices[index]), abs=1e-3)
        assert logprobs_of(choice) == figures
        choice.logprobs = answer.choices[index].logprobs = None
    assert (stream.choices, stream.usage) == (answer.choices, answer.usage)
    different = {one.content for one in answer.choices.values()}
    assert len(different) == (3 if "seed" in more else 1)


A, B = 253, 260


@pytest.mark.parametrize(
    ("asked", "token_ids"),
    [
        ({"allowed_token_ids": [A]}, [A] * 6),
        ({"logit_bias": {str(A): 100}}, [A] * 6),
        # Each time makes a token less likely by 2, so that the two must take turns.
        ({"allowed_token_ids": [A, B], "frequency_penalty": 2, "max_tokens": 20}, None),
        ({"min_p": 1, "temperature": 2}, CASES[0]["greedy_token_ids"][:6]),
    ],
    ids=str,
)
def test_what_is_asked_of_sampling_reaches_the_logits(
    server: Server, asked: dict[str, Any], token_ids: list[int] | None
) -> None:
    asked = {"max_tokens": 6, "return_token_ids": True, "ignore_eos": True, **asked}
    answer = server.http.post("/v1/chat/completions", json=ask(CASES[0], **asked)).json()
    got = answer["choices"][0]["token_ids"]
    if token_ids is None:
        assert set(got) == {A, B}
    else:
        assert got == token_ids


def test_a_bad_word_is_not_said(server: Server) -> None:
    word = CASES[0]["text"].split()[1]
    asked = ask(CASES[0], bad_words=[word])
    answer = server.http.post("/v1/chat/completions", json=asked).json()
    assert word not in answer["choices"][0]["message"]["content"].split()


def test_a_repetition_ends_the_answer(server: Server) -> None:
    detection = {"max_pattern_size": 2, "min_count": 5}
    asked = ask(CASES[0], allowed_token_ids=[A], repetition_detection=detection, max_tokens=50)
    answer = server.http.post("/v1/chat/completions", json=asked).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert answer["usage"]["completion_tokens"] == 5


def test_logprobs_of_tokens_by_id(server: Server) -> None:
    asked = ask(CASES[0], logprobs=True, logprob_token_ids=[B, A], max_tokens=3)
    answer = server.http.post("/v1/chat/completions", json=asked).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        chosen, b, a = entry["top_logprobs"]
        assert chosen["token"] == entry["token"]
        assert (b["logprob"], a["logprob"]) < (0, 0)


def logprobs_of(choice: Choice) -> dict[tuple[int, str], float]:
    """By place and token: of the chosen tokens and the most probable ones."""
    entries = enumerate(choice.logprobs or [])
    return {
        (place, one["token"]): one["logprob"]
        for place, entry in entries
        for one in (entry, *entry["top_logprobs"])
    }


# ---------------------------------------------------------------------------- the openai client


def test_openai_usage(server: Server) -> None:
    case = CASES[0]
    plain = server.openai.chat.completions.create(**ask(case))
    assert plain.usage is not None
    expected = (len(case["prompt_token_ids"]), len(case["greedy_token_ids"]))
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == expected
    options = {"include_usage": True}
    *chunks, last = server.openai.chat.completions.create(
        **ask(case, stream=True, stream_options=options)
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == plain.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {last.id}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("bad", "parameter"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 200}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs"),
        ({"logprobs": True, "extra_body": {"logprob_token_ids": [10**6]}}, "logprob_token_ids"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"extra_body": {"bad_words": [" "] * 129}}, "bad_words"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 20_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        ({"stop": ""}, "stop"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_openai_raises_on_a_bad_request(
    server: Server, bad: dict[str, Any], parameter: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"allowed|unknown") as caught:
        server.openai.chat.completions.create(**ask(CASES[0], stream=stream) | bad)
    assert caught.value.param == parameter


def test_openai_raises_on_an_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="allowed: 'smollm2-135m'"):
        server.openai.chat.completions.create(**ask(CASES[0]) | {"model": "gpt-9"})


def test_openai_lists_the_model(server: Server) -> None:
    assert [model.id for model in server.openai.models.list()] == ["smollm2-135m"]


def test_openai_async(server: Server) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            stream = await client.chat.completions.create(**ask(CASES[0], stream=True))
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == CASES[0]["text"]
            plain = await client.chat.completions.create(**ask(CASES[0]))
            assert plain.choices[0].message.content == CASES[0]["text"]
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**ask(CASES[0], top_p=0))

    # asyncio, as nearly all of its users run it.
    asyncio.run(talk())


# ---------------------------------------------------------------------------- other paths


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions", 400),
    ],
)
def test_every_error_is_json(server: Server, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path, headers={"X-Request-Id": "mine"})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "allowed: POST /v1/chat/completions, " in error["message"] or status == 400
    assert response.headers["x-request-id"] == "mine"


def test_a_body_over_the_bound_is_a_413(server: Server) -> None:
    response = server.http.post("/v1/chat/completions", content=b" " * 17 * 2**20)
    assert response.status_code == 413
    assert "error" in response.json()


def test_stream_headers(server: Server) -> None:
    request = ask(CASES[0], stream=True)
    headers = {"X-Request-Id": "mine"}
    with server.http.stream("POST", "/v1/chat/completions", json=request, headers=headers) as one:
        assert one.headers["content-type"].startswith("text/event-stream")
        assert one.headers["cache-control"] == "no-cache"
        assert one.headers["x-accel-buffering"] == "no"
        assert one.headers["x-request-id"] == "mine"
        assert one.read().endswith(b"data: [DONE]\n\n")


def test_health_and_models(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smollm2-135m", 8192)


# ---------------------------------------------------------------------------- leaving and dying


def test_a_disconnect_gives_the_blocks_back(server: Server) -> None:
    total = server.metric("trioleg_engine_blocks", engine="0")
    wait_until(lambda: server.metric("trioleg_engine_free_blocks", engine="0") == total)
    left = server.metric("trioleg_requests_total", reason="left")
    request = ask(CASES[0], stream=True, max_tokens=4000, ignore_eos=True)
    with server.http.stream("POST", "/v1/chat/completions", json=request) as response:
        next(response.iter_lines())
        wait_until(lambda: server.metric("trioleg_engine_free_blocks", engine="0") < total)
    wait_until(lambda: server.metric("trioleg_engine_free_blocks", engine="0") == total)
    assert server.metric("trioleg_requests_total", reason="left") == left + 1
    assert server.metric("trioleg_engine_running_requests", engine="0") == 0


def test_a_plain_request_that_leaves_gives_the_blocks_back(server: Server) -> None:
    total = server.metric("trioleg_engine_blocks", engine="0")
    request = ask(CASES[0], max_tokens=4000, ignore_eos=True)
    left = server.metric("trioleg_requests_total", reason="left")
    with pytest.raises(httpx2.ReadTimeout):
        server.http.post("/v1/chat/completions", json=request, timeout=0.5)
    wait_until(lambda: server.metric("trioleg_requests_total", reason="left") == left + 1)
    wait_until(lambda: server.metric("trioleg_engine_free_blocks", engine="0") == total)


def test_a_killed_engine_is_told_to_every_client(doomed_server: Server) -> None:
    server = doomed_server
    endless = ask(CASES[1], max_tokens=4000, ignore_eos=True)

    def stream() -> bytes:
        with server.http.stream(
            "POST", "/v1/chat/completions", json=endless | {"stream": True}
        ) as r:
            return r.read()

    def plain() -> httpx2.Response:
        return server.http.post("/v1/chat/completions", json=endless)

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream) for _ in range(4)]
        plains = [threads.submit(plain) for _ in range(2)]
        wait_until(lambda: server.metric("trioleg_engine_output_tokens_total", engine="0") > 20)
        os.kill(server.engine_pids()[-1], signal.SIGKILL)
        for one in streams:
            stream_ = read_stream(one.result(timeout=20))
            assert stream_.error is not None
            assert "killed by SIGKILL" in stream_.error["message"]
        for one in plains:
            response = one.result(timeout=20)
            assert response.status_code == 503
            assert response.json()["error"]["partial"]["choices"][0]["message"]["content"]
    health = server.http.get("/health")
    assert health.status_code == 503
    assert "SIGKILL" in health.json()["error"]["message"]
    assert server.http.post("/v1/chat/completions", json=endless).status_code == 503
    server.program.process.send_signal(signal.SIGTERM)
    assert server.program.wait() == 1
    assert "killed by SIGKILL" in server.program.stderr


def test_a_killed_front_end_leaves_no_engine(doomed_server: Server) -> None:
    pids = doomed_server.engine_pids()
    assert len(pids) == 2
    doomed_server.program.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_answers_have_the_form_that_was_asked_for(server: Server) -> None:
    """By openai's client, streamed and not; a bad schema is a 400 while a stream goes on."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    create: Any = server.openai.chat.completions.create
    asked = ask(CASES[0], max_tokens=80, temperature=1, n=2, seed=3)
    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = create(**asked, response_format=named)
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            value = json.loads(choice.message.content)
            assert list(value) == ["city", "people"]
            assert type(value["people"]) is int
    assert "stop" in [choice.finish_reason for choice in answer.choices]

    bound = {"structured_outputs": {"regex": r"(yes|no), \d{2}!"}}
    with create(**ask(CASES[0], stream=True, max_tokens=30), extra_body=bound) as stream:
        chunks = iter(stream)
        text = next(chunks).choices[0].delta.content or ""
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
            bad = {"name": "bad", "schema": {"uniqueItems": True, "type": "array"}}
            create(**asked, response_format={"type": "json_schema", "json_schema": bad})
        assert caught.value.param == "response_format.json_schema.schema"
        text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert re.fullmatch(r"(yes|no), \d{2}!", text)
