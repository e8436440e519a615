"""The engine-core wire from both sides, against vLLM as it was published.

vLLM's API server with our engine behind it, and vLLM's engine behind our server: the same questions must
get the same answers, and a client that leaves must be seen by the engine on the other side.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from programs import ROOT, TRIOLEG, Program, running, wait_until

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VLLM = (str(VLLM_PYTHON), str(Path(__file__).with_name("vllm_command.py")))
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: enough for a small model
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": "",
}
# Loading vLLM takes about half a minute on two cores, compiling and warming up as much again.
VLLM_START_S = 600.0

MAX_MODEL_LEN = "1024"

# Greedy answers in float32 whose every step has a clear winner, so that two engines must agree.
GOLDEN = ROOT / "tests" / "data" / "smollm2_greedy.json"
CLEAR_MARGIN = 0.04


def clear_cases() -> list[tuple[str, str]]:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    return [
        (case["user"], case["text"])
        for case in cases
        if case["smallest_top1_margin"] > CLEAR_MARGIN
    ]


def free_port() -> int:
    """vLLM cannot say which port it took, so it is given one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def data_parallel(port: int) -> tuple[str, ...]:
    return ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))


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
            yield _ready_url(server, engine)


def _ready_url(server: Program, engine: Program) -> str:
    try:
        return server.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)[1]
    except AssertionError as error:
        raise AssertionError(f"{error}\n-- the engine:\n{engine.said()}") from None


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
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"][0]
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


def test_the_environment_is_vllms_own() -> None:
    assert VLLM_PYTHON.exists(), "make test-vllm makes it"
    assert Path(sys.executable).parents[1] != VLLM_PYTHON.parents[1]
