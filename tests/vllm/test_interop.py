"""The engine-core wire from both sides, against vLLM as it was published.

vLLM's API server with our engine behind it, and vLLM's engine behind our server: the same questions must
get the same answers, and a client that leaves must be seen by the engine on the other side.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from programs import TRIOLEG, running, wait_until
from vllm_place import (
    MAX_MODEL_LEN,
    VLLM,
    VLLM_ENV,
    VLLM_PYTHON,
    VLLM_START_S,
    clear_cases,
    data_parallel,
    free_port,
    golden_cases,
    ready_url,
)


@pytest.fixture(scope="module")
def vllm_server(smollm2: Path) -> Iterator[str]:
    """The URL of vLLM's API server, without an engine of its own, with our engine behind it."""
    rpc_port, port = free_port(), free_port()
    local = ("--data-parallel-size", "1", "--data-parallel-size-local", "0")
    listen = ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", MAX_MODEL_LEN)
    command = ("serve", str(smollm2), *local, *data_parallel(rpc_port), *listen)
    ours = ("engine", "smollm2-135m", "--handshake", f"tcp://127.0.0.1:{rpc_port}")
    settings = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN)
    with running(*VLLM, *command, env=VLLM_ENV) as server, running(*TRIOLEG, *ours, *settings):
        server.wait_for("Application startup complete", VLLM_START_S)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def vllm_engine(smollm2: Path) -> Iterator[str]:
    """The URL of our server, with vLLM's engine behind it."""
    attach = ("--attach", "tcp://127.0.0.1:0")
    with running(*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *attach) as server:
        port = server.wait_for(r"waiting for an engine to join at tcp://127\.0\.0\.1:(\d+)")[1]
        settings = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN)
        command = ("serve", str(smollm2), "--headless", *data_parallel(int(port)), *settings)
        with running(*VLLM, *command, env=VLLM_ENV) as engine:
            yield ready_url(server, engine)


@pytest.fixture(params=["vllm_server", "vllm_engine"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def client(url: str) -> Iterator[tuple[OpenAI, str]]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        yield api, api.models.list().data[0].id


def test_streamed_answers_are_the_golden_ones(url: str) -> None:
    with client(url) as (api, model):
        for user, text in clear_cases():
            stream = api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": user}],
                temperature=0,
                max_tokens=48,
                stream=True,
                stream_options={"include_usage": True},
            )
            *chunks, usage = stream
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert "".join(pieces) == text
            assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
            assert len([piece for piece in pieces if piece]) > 3, "it did not come in pieces"
            assert usage.usage.completion_tokens >= len(pieces) - 2


def test_plain_answers_too(url: str) -> None:
    with client(url) as (api, model):
        answer = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
        )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.usage.completion_tokens == 8


def test_vllms_server_reads_our_engines_logprobs(vllm_server: str) -> None:
    case = golden_cases()[0]
    with client(vllm_server) as (api, model):
        answer = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": case["user"]}],
            temperature=0,
            logprobs=True,
            top_logprobs=5,
            extra_body={"prompt_logprobs": 2},
        )
    steps = answer.choices[0].logprobs.content
    assert len(steps) == answer.usage.completion_tokens == 8
    for step, right in zip(steps, case["top5_logprobs_first_4_steps"], strict=False):
        values = [value for _, value in right]
        assert [one.logprob for one in step.top_logprobs] == pytest.approx(values, abs=1e-3)
        assert step.logprob == step.top_logprobs[0].logprob
    # These arrays are large enough for frames of their own.
    first, *others = answer.prompt_logprobs
    assert first is None
    for token_id, place in zip(case["prompt_token_ids"][1:], others, strict=True):
        ranked = sorted((one["rank"], one["logprob"]) for one in place.values())
        assert [rank for rank, _ in ranked] in ([1, 2], [1, 2, place[str(token_id)]["rank"]])
        assert [value for _, value in ranked] == sorted((v for _, v in ranked), reverse=True)


PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def test_vllms_server_asks_our_engine_for_several_choices(vllm_server: str) -> None:
    with client(vllm_server) as (api, model):
        asked = {"model": model, "messages": PARIS, "seed": 7, "max_tokens": 12}
        choices = [api.chat.completions.create(**asked, n=3).choices for _ in range(2)]
    first, again = ([one.message.content for one in some] for some in choices)
    # Each has a seed of its own, so they differ from each other, and not from one time to the next.
    assert first == again
    assert len(set(first)) == 3


def test_vllms_server_stops_our_engine_at_a_token(vllm_server: str) -> None:
    case = golden_cases()[0]
    stop = case["greedy_token_ids"][4]
    with client(vllm_server) as (api, model):
        answer = api.chat.completions.create(
            model=model, messages=PARIS, temperature=0, extra_body={"stop_token_ids": [stop]}
        )
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].model_dump()["stop_reason"] == stop
    assert answer.usage.completion_tokens == 5


def test_vllms_server_shapes_our_engines_sampling(vllm_server: str) -> None:
    case = golden_cases()[0]
    first, second = case["greedy_token_ids"][:2]
    with client(vllm_server) as (api, model):

        def answer(**more: object) -> str:
            asked = {"model": model, "messages": PARIS, "temperature": 0, "max_tokens": 6, **more}
            return api.chat.completions.create(**asked).choices[0].message.content

        plain = answer()
        assert answer(logit_bias={str(first): -100}) != plain
        assert answer(extra_body={"bad_words": [" capital"]}) != plain
        # The most that OpenAI allows makes nearly any token win.
        forced = answer(extra_body={"allowed_token_ids": [first, second]}, presence_penalty=0.5)
        assert set(forced.split()) <= {"The", "capital"}
        assert answer(extra_body={"min_p": 1.0, "temperature": 1.0}) == plain
        assert len(answer(extra_body={"min_tokens": 6, "repetition_penalty": 1.3})) > 0


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["Paris", "Rome, maybe", "Łódź"]}, r"Paris|Rome, maybe|Łódź"),
        ({"regex": r"[A-Z]{3}-\d{2,4}"}, r"[A-Z]{3}-\d{2,4}"),
        ({"grammar": 'root ::= "yes" | "no" " indeed"'}, r"yes|no indeed"),
    ],
)
def test_vllms_server_constrains_our_engine(
    vllm_server: str, constraint: dict[str, object], pattern: str
) -> None:
    with client(vllm_server) as (api, model):
        for seed in range(3):
            answer = api.chat.completions.create(
                model=model,
                messages=PARIS,
                seed=seed,
                max_tokens=40,
                extra_body={"structured_outputs": constraint},
            )
            assert re.fullmatch(pattern, answer.choices[0].message.content)
            assert answer.choices[0].finish_reason == "stop"


def test_vllms_server_asks_our_engine_for_json(vllm_server: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    with client(vllm_server) as (api, model):
        answer = api.chat.completions.create(
            model=model, messages=PARIS, temperature=0, max_tokens=80, response_format=shape
        )
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["city"], str)
    assert isinstance(found["people"], int)
    assert len(found) == 2


def test_vllms_server_sees_what_our_engine_had_cached(vllm_server: str) -> None:
    question = [{"role": "user", "content": "Say this back to me: " + "one two three " * 20}]
    with client(vllm_server) as (api, model):
        for _ in range(2):
            api.chat.completions.create(model=model, messages=question, max_tokens=2)
    hits = running_requests(vllm_server, "vllm:prefix_cache_hits_total{")
    assert hits >= 64


SAMPLING = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"504": -3, "260": 1.5},
    "extra_body": {
        "repetition_penalty": 1.2,
        "bad_words": ["Paris", "France"],
        "allowed_token_ids": list(range(100, 20_000)),
        "min_tokens": 5,
    },
}


def test_both_engines_take_sampling_parameters_alike(vllm_server: str, vllm_engine: str) -> None:
    """Ours behind vLLM's server, vLLM's behind ours: one greedy answer, and the same figures."""
    answers = []
    for url in (vllm_server, vllm_engine):
        with client(url) as (api, model):
            answer = api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=24,
                logprobs=True,
                **SAMPLING,
            )
        (choice,) = answer.choices
        figures = [step.logprob for step in choice.logprobs.content]
        answers.append((choice.message.content, figures))
    (text, one), (same_text, other) = answers
    assert text == same_text
    assert "Paris" not in text
    assert one == pytest.approx(other, abs=1e-2)


def test_both_engines_end_a_repetition(url: str) -> None:
    with client(url) as (api, model):
        answer = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=50,
            extra_body={
                "allowed_token_ids": [253],
                "repetition_detection": {"max_pattern_size": 2, "min_count": 5},
            },
        )
    assert answer.choices[0].finish_reason == "repetition"
    assert answer.usage.completion_tokens == 5


def running_requests(url: str, metric: str) -> float:
    lines = httpx2.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


@contextlib.contextmanager
def long_stream(url: str) -> Iterator[Iterator[object]]:
    """A stream with minutes to go, if nobody ends it."""
    with client(url) as (api, model):
        stream = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with stream:
            yield iter(stream)


def test_our_engine_hears_of_a_client_that_leaves_vllms_server(vllm_server: str) -> None:
    with long_stream(vllm_server) as chunks:
        for _ in range(5):
            next(chunks)
        wait_until(lambda: running_requests(vllm_server, "vllm:num_requests_running{") == 1)
    # These figures are what our engine says of itself after its latest step or abort.
    wait_until(lambda: running_requests(vllm_server, "vllm:num_requests_running{") == 0)


def test_vllms_engine_hears_of_a_client_that_leaves_our_server(vllm_engine: str) -> None:
    with long_stream(vllm_engine) as chunks:
        for _ in range(5):
            next(chunks)
        assert running_requests(vllm_engine, "trioleg_engine_running_requests{") == 1
    wait_until(lambda: running_requests(vllm_engine, "trioleg_open_streams ") == 0)
    # vLLM's engine says how many run only when it steps: the next request shows that it runs alone.
    with long_stream(vllm_engine) as chunks:
        for _ in range(5):
            next(chunks)
        assert running_requests(vllm_engine, "trioleg_engine_running_requests{") == 1
    left = httpx2.get(f"{vllm_engine}/metrics", trust_env=False).text
    assert 'trioleg_requests_total{reason="left"}' in left


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def is_city(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["city", "big"] and len(value["city"]) <= 9 and value["big"] in (True, False)
    )


@pytest.mark.parametrize(
    ("constraint", "judge"),
    [
        ({"json": CITY}, is_city),
        ({"regex": r"(yes|no), \d{2}!"}, re.compile(r"(yes|no), \d{2}!").fullmatch),
        ({"choice": ["Wien", "Zürich", "東京"]}, ["Wien", "Zürich", "東京"].__contains__),
        ({"grammar": 'root ::= "a" [0-9] | "b"'}, re.compile("a[0-9]|b").fullmatch),
    ],
    ids=["json", "regex", "choice", "grammar"],
)
def test_structured_outputs(
    url: str, constraint: dict[str, Any], judge: Callable[[str], object]
) -> None:
    """Each head sends a constraint in its own words, and each engine keeps to it."""
    with client(url) as (api, model):
        for seed in (1, 2):
            answer = api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Name a place."}],
                temperature=1,
                seed=seed,
                max_tokens=120,
                extra_body={"structured_outputs": constraint},
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            assert judge(choice.message.content or ""), choice.message.content


def test_the_environment_is_vllms_own() -> None:
    assert VLLM_PYTHON.exists(), "make test-vllm makes it"
    assert Path(sys.executable).parents[1] != VLLM_PYTHON.parents[1]
