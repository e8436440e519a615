"""`vllm serve`, as it was published, with trioleg for its front end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from programs import ROOT, Program, alive, descendants, running, wait_until
from vllm_place import MAX_MODEL_LEN, VLLM, VLLM_ENV, VLLM_START_S, clear_cases, free_port

KEY = "a-key-of-ours"
NAME = "smol"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
# vLLM gives its front end five seconds, and its engines as many.
END_S = 60.0


def make_executable(folder: Path) -> str:
    """The console script, as an installation makes it."""
    script = folder / "trioleg-frontend"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from trioleg.cli.frontend import main\nmain()\n"
    )
    script.chmod(0o755)
    return str(script)


@contextlib.contextmanager
def vllm_serve(folder: Path, model: Path, *flags: str) -> Iterator[tuple[Program, str]]:
    port = free_port()
    listen = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME)
    settings = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN, "--enforce-eager")
    env = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": make_executable(folder)}
    argv = (*VLLM, "serve", str(model), *listen, *settings, "--api-key", KEY, *flags)
    with running(*argv, env={**VLLM_ENV, **env}) as program:
        program.wait_for(rf"ready: {NAME} at ", VLLM_START_S)
        yield program, f"http://127.0.0.1:{port}"


def running_requests(http: httpx2.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("trioleg_engine_running_requests")
    )


def endless(**fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": QUESTION, "stream": True, "max_tokens": 900}
    return {**body, "ignore_eos": True, **fields}


def check_openai(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as api:
        assert [one.id for one in api.models.list().data] == [NAME]
        for user, text in clear_cases():
            messages: list[Any] = [{"role": "user", "content": user}]
            create = api.chat.completions.create
            fixed: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0}
            stream = create(**fixed, max_tokens=48, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
            assert create(**fixed, max_tokens=48).choices[0].message.content == text
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as api:
        with pytest.raises(openai.AuthenticationError):
            api.models.list()


def check_curl(url: str) -> None:
    body = {"model": NAME, "messages": QUESTION, "temperature": 0, "stream": True}
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
    argv = ["curl", "-sSN", f"{url}/v1/chat/completions", *headers, "-d", json.dumps(body)]
    *events, done = subprocess.check_output(argv, text=True).split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ANSWER
    assert done == "data: [DONE]"


def check_leaving(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json=endless()) as response:
        lines = response.iter_lines()
        wait_until(lambda: '"content"' in next(lines))
        wait_until(lambda: running_requests(http) == 1)
    wait_until(lambda: running_requests(http) == 0)


def last_events(http: httpx2.Client, program: Program, number: int) -> list[str]:
    """The last two events of a stream in which vLLM gets a signal."""
    with http.stream("POST", "/v1/chat/completions", json=endless()) as response:
        lines = filter(None, response.iter_lines())
        wait_until(lambda: '"content"' in next(lines))
        os.kill(program.process.pid, number)
        return list(lines)[-2:]


def test_it_answers_and_ends_with_vllm(tmp_path: Path, smollm2: Path) -> None:
    with vllm_serve(tmp_path, smollm2) as (program, url):
        check_openai(url)
        check_curl(url)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
            check_leaving(http)
            family = descendants(program.process.pid)
            error, done = last_events(http, program, signal.SIGTERM)
        assert "the server is shutting down" in error
        assert done == "data: [DONE]"
        program.wait(END_S)
        wait_until(lambda: not any(map(alive, family)))
        assert KEY not in program.stderr + program.stdout


def test_nothing_outlives_a_vllm_that_was_killed(tmp_path: Path, smollm2: Path) -> None:
    with vllm_serve(tmp_path, smollm2) as (program, url):
        headers = {"Authorization": f"Bearer {KEY}"}
        family = descendants(program.process.pid)
        assert len(family) > 1
        with httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
            error, done = last_events(http, program, signal.SIGKILL)
        assert "the process that started it is gone" in error
        assert done == "data: [DONE]"
        wait_until(lambda: not any(map(alive, family)))
