"""``trioleg-frontend`` as vLLM starts it: its descriptors, its arguments, and every end of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import make_certificates
from programs import Program, alive, running, wait_until
from served import COUNTED, Server, open_client, write_script

from trioleg.model_store import resolve

LAUNCHER = (sys.executable, str(Path(__file__).with_name("vllm_launcher.py")))
# Tokens: 15 s of them, so that nothing here ends by itself.
LONG = 1500
VERSIONS = ("0.30", "0.32")
COMMON = {
    "engine_ready_timeout_secs": 60,
    "http_timeout_keep_alive": 5,
    "port": 1,
    "dtype": "float32",
}


def settings(version: str, flags: list[str] | None = None, **args: Any) -> dict[str, Any]:
    model = str(resolve("smollm2-135m"))
    args = {"model_tag": model, "served_model_name": ["counter"], **COMMON, **args}
    return {"version": version, "args": args, "flags": flags or []}


@contextmanager
def launched(
    folder: Path, version: str = "0.32", *, script: dict[str, Any] | None = None, **more: Any
) -> Iterator[Server]:
    file = write_script(folder, **{"step_interval_s": 0.01, **(script or {})})
    given = {**settings(version, **more), "script": str(file)}
    with running(*LAUNCHER, json.dumps(given)) as program:
        server = Server(program)
        program.wait_for(r"ready: counter at (https?://\S+)")
        server.url = f"http://127.0.0.1:{program.wait_for('port ([0-9]+)')[1]}"
        yield server


def refused(**more: Any) -> str:
    """The one line that a front end ends with, which will not start."""
    with running(*LAUNCHER, json.dumps(settings("0.32", **more))) as program:
        assert program.wait() == 1
        assert "front end ended with 1" in program.stdout
        return program.stderr.splitlines()[-1]


def pid_of(program: Program, what: str) -> int:
    return int(program.wait_for(rf"{what} is process (\d+)")[1])


@pytest.mark.parametrize("version", VERSIONS)
async def test_it_answers_and_a_client_that_leaves_is_seen_by_the_engine(
    tmp_path: Path, version: str
) -> None:
    with launched(tmp_path, version, flags=["--of-another-year", "7"]) as server:
        async with open_client(server) as client:
            streamed = await client.answered(max_tokens=60)
            plain = await client.answered(max_tokens=60, stream=False)
            assert streamed.is_exact
            assert plain.is_exact
            assert streamed.text == plain.text
            models = (await client.get("/v1/models")).json()
            assert [one["id"] for one in models["data"]] == ["counter"]
        async with open_client(server) as leaving:
            answer = leaving.ask(max_tokens=LONG)
            await leaving.until(lambda: answer.text)
            await leaving.until_in_engine(running=1, waiting=0)
        async with open_client(server) as client:
            await client.until_idle()
        assert "passed over: --of-another-year 7" in server.program.stderr
        assert "left to the engine: dtype, port" in server.program.stderr


async def test_a_drain_is_as_long_as_vllm_waits(tmp_path: Path) -> None:
    script = {"step_interval_s": 0.005}
    with launched(tmp_path, script=script, shutdown_timeout=20) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=300)
            await client.until(lambda: answer.text)
            server.signal(signal.SIGTERM)
            await client.until(lambda: answer.is_done)
            assert answer.is_exact
        assert await server.wait() == 0
        server.program.wait_for("front end ended with 143 after")


async def test_without_patience_streams_are_told_at_once(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=LONG)
            await client.until(lambda: answer.text)
            server.signal(signal.SIGTERM)
            await client.until(lambda: answer.is_done)
            assert answer.is_told
            assert COUNTED.startswith(answer.text)
        assert await server.wait() == 0
        server.program.wait_for("front end ended with 143 after")


async def test_the_engines_death_is_told_and_is_an_error(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        async with open_client(server) as client:
            answer = client.ask(max_tokens=LONG)
            await client.until(lambda: answer.text)
            os.kill(pid_of(server.program, "engine"), signal.SIGKILL)
            await client.until(lambda: answer.is_done)
            assert answer.is_told
        assert await server.wait() == 1
        server.program.wait_for("front end ended with 1 after")


async def test_it_does_not_outlive_vllm(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        family = [pid_of(server.program, "front end"), pid_of(server.program, "engine")]
        async with open_client(server) as client:
            answer = client.ask(max_tokens=LONG)
            await client.until(lambda: answer.text)
            server.signal(signal.SIGKILL)
            await client.until(lambda: answer.is_done)
            assert answer.is_told
            wait_until(lambda: not any(map(alive, family)))
        # Our engine looks after its owner by itself, and may be the first to notice.
        causes = ("the process that started it is gone", "it reported its own death")
        assert any(f"engine 0 is dead: {one}" in server.program.stderr for one in causes)


def test_it_does_not_wait_for_an_engine_of_a_vllm_that_is_gone() -> None:
    with running(*LAUNCHER, json.dumps(settings("0.32"))) as program:
        front_end = pid_of(program, "front end")
        program.wait_for("waiting for engine 0")
        program.process.kill()
        wait_until(lambda: not alive(front_end))
        program.wait()
        complaint = program.stderr.splitlines()[-1]
    assert complaint == (
        "trioleg-frontend: there is no engine: the process that started it is gone"
    )


def test_a_vllm_that_is_gone_before_anybody_could_look() -> None:
    """Whoever inherits an orphan has a process group of his own, and so is known not to be vLLM."""
    argv = ("frontend", "--listen-fd", "0", "--args-json", json.dumps({"model_tag": "any"}))
    with running(
        "setsid", "--wait", sys.executable, "-m", "trioleg.cli.frontend", *argv
    ) as program:
        assert program.wait() == 1
        assert program.stderr.splitlines() == [
            "trioleg-frontend: there is no engine: the process that started this one is gone"
        ]


def test_an_engine_that_does_not_come_is_given_up() -> None:
    assert refused(engine_ready_timeout_secs=0.5) == (
        "trioleg-frontend: there is no engine: it was not ready within 0.5 s"
    )


def test_signals_of_a_terminal_are_vllms(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        front_end = pid_of(server.program, "front end")
        os.kill(front_end, signal.SIGINT)
        assert httpx2.get(f"{server.url}/v1/models", trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"flags": ["--engine-count", "2"]}, "data-parallel-size is 1, with 2 engines"),
        ({"flags": ["--coordinator-address", "ipc:///tmp/x"]}, "no data parallel ones"),
        ({"flags": ["--grpc-listen-fd", "3"]}, "gRPC is not served"),
        ({"flags": ["--input-listener-fd", "2"]}, "descriptor 2 is no socket's"),
        ({"flags": ["--listen-fd", "7", "--input-listener-fd", "7"]}, "three that differ"),
        ({"tool_call_parser": "hermes"}, "--tool-call-parser is 'hermes'; allowed: not to give it"),
        ({"ssl_certfile": "/nowhere/a", "ssl_keyfile": "/nowhere/b"}, "/nowhere/a"),
        ({"model_tag": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_is_not_served_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    complaint = refused(**more)
    assert complaint.startswith("trioleg-frontend: ")
    assert words in complaint


def test_tls_is_that_of_vllms_arguments(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with launched(
        tmp_path, ssl_certfile=made.pem("server"), ssl_keyfile=made.key("server")
    ) as server:
        url = server.url.replace("http:", "https:")
        with httpx2.Client(base_url=url, verify=made.context(), trust_env=False) as http:
            assert http.get("/v1/models").status_code == 200


def test_keys_are_asked_for(tmp_path: Path) -> None:
    key = {"Authorization": "Bearer right"}
    with (
        launched(tmp_path, api_key=["other", "right"]) as server,
        httpx2.Client(base_url=server.url, trust_env=False) as http,
    ):
        for path in ("/health", "/ready", "/live", "/metrics"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.post("/v1/chat/completions", json={}, headers=headers).status_code == 401
            assert http.get("/nowhere", headers=headers).status_code == 401
        assert http.get("/v1/models", headers=key).status_code == 200
        assert "right" not in server.program.said()
