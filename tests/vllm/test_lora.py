"""LoRA adapters and the engine's controls on a stock engine of vLLM's, with its own API server as the judge.

The engine has room for one adapter at a time, so that they displace each other: it reads one again from its path
whenever a request needs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lora_adapter import write_adapter
from programs import TRIOLEG, running
from vllm_place import VLLM, VLLM_ENV, VLLM_START_S, data_parallel, free_port, ready_url

SETTINGS = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1")
QUESTIONS = ("What is the capital of France?", "Write one line about the sea.")


@pytest.fixture(scope="module")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters "first", "second" and "big", whose rank is too high."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        write_adapter(folder / name, smollm2, seed=seed)
    write_adapter(folder / "big", smollm2, seed=2, rank=16)
    return folder


def answers(http: httpx2.Client, model: str, **more: Any) -> list[str]:
    found = []
    for question in QUESTIONS:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 16,
            **more,
        }
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found += [one["message"]["content"] for one in answer.json()["choices"]]
    return found


@pytest.fixture(scope="module")
def vllms_own(smollm2: Path, adapters: Path) -> dict[str, list[str]]:
    """What vLLM's API server answers, with the adapters and without. It has ended when this is there."""
    port = free_port()
    modules = [f"{name}={adapters / name}" for name in ("first", "second")]
    listen = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2-135m")
    command = ("serve", str(smollm2), *listen, *SETTINGS, *LORA, "--lora-modules", *modules)
    with running(*VLLM, *command, env=VLLM_ENV) as server:
        server.wait_for("Application startup complete", VLLM_START_S)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            return {name: answers(http, name) for name in ("smollm2-135m", "first", "second")}


@pytest.fixture(scope="module")
def ours(smollm2: Path, adapters: Path, vllms_own: dict[str, list[str]]) -> Iterator[httpx2.Client]:
    """A client of our server with vLLM's engine behind it, which has loaded "first"."""
    options = ("--lora-modules", f"first={adapters / 'first'}", "--enable-engine-controls")
    attach = ("--attach", "tcp://127.0.0.1:0")
    with running(*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *attach, *options) as server:
        port = server.wait_for(r"waiting for an engine to join at tcp://127\.0\.0\.1:(\d+)")[1]
        command = ("serve", str(smollm2), "--headless", *data_parallel(int(port)), *SETTINGS, *LORA)
        with running(*VLLM, *command, env=VLLM_ENV) as engine:
            url = ready_url(server, engine)
            with httpx2.Client(base_url=url, timeout=120) as http:
                yield http


def load(http: httpx2.Client, name: str, path: Path, **more: Any) -> httpx2.Response:
    fields = {"lora_name": name, "lora_path": str(path), **more}
    return http.post("/v1/load_lora_adapter", json=fields)


def unload(http: httpx2.Client, name: str) -> httpx2.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(http: httpx2.Client) -> list[str]:
    return [one["id"] for one in http.get("/v1/models").json()["data"]]


def test_the_same_answers_as_vllms_server(
    ours: httpx2.Client, adapters: Path, vllms_own: dict[str, list[str]]
) -> None:
    assert len({tuple(one) for one in vllms_own.values()}) == 3, "the adapters change nothing"
    assert names(ours) == ["smollm2-135m", "first"]
    assert answers(ours, "smollm2-135m") == vllms_own["smollm2-135m"]
    assert answers(ours, "first") == vllms_own["first"]
    added = load(ours, "second", adapters / "second")
    assert (added.status_code, added.text) == (
        200,
        "Success: LoRA adapter 'second' added successfully.",
    )
    # They displace each other, and the prefix cache keeps them apart.
    for name in ("second", "first", "smollm2-135m", "second"):
        assert answers(ours, name) == vllms_own[name]
    twice = [one for one in vllms_own["first"] for _ in range(2)]
    assert answers(ours, "first", n=2) == twice
    assert unload(ours, "second").status_code == 200
    assert names(ours) == ["smollm2-135m", "first"]


def test_what_vllm_refuses_ends_no_engine(
    ours: httpx2.Client, adapters: Path, vllms_own: dict[str, list[str]]
) -> None:
    none = load(ours, "none", adapters / "none")
    assert none.status_code == 404
    assert "No adapter found for" in none.json()["error"]["message"]
    big = load(ours, "big", adapters / "big")
    assert big.status_code == 400
    assert "rank 16 is greater than max_lora_rank 8" in big.json()["error"]["message"]
    twice = load(ours, "first", adapters / "second")
    assert twice.status_code == 400
    body = {"model": "none", "messages": [{"role": "user", "content": "Hi"}]}
    unknown = ours.post("/v1/chat/completions", json=body)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert answers(ours, "first") == vllms_own["first"]


def test_files_that_are_gone_end_no_engine(
    ours: httpx2.Client, adapters: Path, vllms_own: dict[str, list[str]], tmp_path: Path
) -> None:
    """vLLM's engine would die in the step in which it reads a displaced adapter again."""
    shutil.copytree(adapters / "second", tmp_path / "gone")
    assert load(ours, "gone", tmp_path / "gone").status_code == 200
    assert answers(ours, "gone") == vllms_own["second"]
    assert answers(ours, "first") == vllms_own["first"]
    shutil.rmtree(tmp_path / "gone")
    body = {"model": "gone", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    refused = ours.post("/v1/chat/completions", json=body)
    assert refused.status_code == 404
    assert "No adapter found for" in refused.json()["error"]["message"]
    assert answers(ours, "first") == vllms_own["first"]
    assert unload(ours, "gone").status_code == 200


def test_other_weights_under_the_same_path(
    ours: httpx2.Client, adapters: Path, vllms_own: dict[str, list[str]], tmp_path: Path
) -> None:
    """The engine's prefix cache knows an adapter by name and path alone."""
    place = tmp_path / "place"
    shutil.copytree(adapters / "first", place)
    assert load(ours, "moving", place).status_code == 200
    assert answers(ours, "moving") == vllms_own["first"]
    shutil.rmtree(place)
    shutil.copytree(adapters / "second", place)
    assert load(ours, "moving", place, load_inplace=True).status_code == 200
    assert answers(ours, "moving") == vllms_own["second"]
    assert unload(ours, "moving").status_code == 200


def test_unloaded_in_the_middle_of_an_answer(ours: httpx2.Client, adapters: Path) -> None:
    assert load(ours, "brief", adapters / "second").status_code == 200
    body = {
        "model": "brief",
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    with ours.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        assert unload(ours, "brief").status_code == 200
        rest = list(lines)
    assert '"finish_reason":"length"' in "".join(rest)
    assert rest[-1 if rest[-1] else -2] == "data: [DONE]"
    assert names(ours) == ["smollm2-135m", "first"]


def test_sleep_wake_and_caches(ours: httpx2.Client, vllms_own: dict[str, list[str]]) -> None:
    """The build for CPUs has no memory to give back: there sleep is a pause. What waits is answered afterwards."""
    assert ours.get("/is_sleeping").json() == {"is_sleeping": False}
    assert ours.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert ours.get("/is_sleeping").json() == {"is_sleeping": True}
    assert ours.get("/health").status_code == 200
    waiting = {"messages": [{"role": "user", "content": "Hi"}], "timeouts": {"first_token": 0.5}}
    assert ours.post("/v1/chat/completions", json=waiting).status_code == 504
    assert ours.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert ours.get("/is_sleeping").json() == {"is_sleeping": False}
    assert answers(ours, "first") == vllms_own["first"]

    assert ours.post("/pause?mode=wait").json() == {"status": "paused"}
    assert ours.get("/is_paused").json() == {"is_paused": True}
    assert ours.post("/resume").json() == {"status": "resumed"}
    assert ours.post("/reset_prefix_cache").json() == {"success": True}
    assert answers(ours, "first") == vllms_own["first"]
