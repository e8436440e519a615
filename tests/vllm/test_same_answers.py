"""One engine of vLLM's behind each of two servers, vLLM's own and ours: the same questions, the same answers.

Both run at once, in float32, where what an engine answers does not depend on what else it is doing; questions come
one by one. Answers are compared as clients see them: text, how it ended, figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from programs import TRIOLEG, running
from vllm_place import (
    MAX_MODEL_LEN,
    VLLM,
    VLLM_ENV,
    VLLM_PYTHON,
    VLLM_START_S,
    clear_cases,
    free_port,
)

SETTINGS = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN, "--enforce-eager")
GENEROUS_S = 240.0
# Logprobs of the same float32 model; sums in another order where a step has other company.
TOLERANCE = 1e-3

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def greedy(messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": 32, **fields}


QUESTIONS: dict[str, dict[str, Any]] = {
    "length": greedy(POEM),
    "a stop string": greedy(POEM, stop=["the"]),
    "a stop string over two tokens": greedy(FRANCE, stop=["of Fra", "zzz"]),
    "a stop string that is kept": greedy(FRANCE, stop=["France"], include_stop_str_in_output=True),
    "a stop token": greedy(FRANCE, stop_token_ids=[4649, 282]),
    "beyond the end": greedy(FRANCE, ignore_eos=True, skip_special_tokens=False),
    "at least so many": greedy(FRANCE, min_tokens=20),
    "logprobs": greedy(FRANCE, logprobs=True, top_logprobs=3),
    "logprobs of the prompt": greedy(FRANCE, prompt_logprobs=2),
    "long logprobs of the prompt": greedy(
        [{"role": "user", "content": "sea " * 200}], prompt_logprobs=5, max_tokens=2
    ),
    "three choices": greedy(POEM, n=3, temperature=1, seed=7),
    "sampled": greedy(POEM, temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, seed=11),
    "penalties": greedy(POEM, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.1),
    "shaped": greedy(FRANCE, logit_bias={"504": -5, "260": 2}, bad_words=["Paris"]),
    "only some tokens": greedy(FRANCE, allowed_token_ids=list(range(300, 20_000))),
    "JSON": greedy(FRANCE, response_format={"type": "json_object"}, max_tokens=40),
    "a regex": greedy(FRANCE, structured_outputs={"regex": "(Paris|Rome), [0-9]{2}!"}),
    "a choice": greedy(FRANCE, structured_outputs={"choice": ["Rome", "Paris", "Zürich"]}),
    "a grammar": greedy(FRANCE, structured_outputs={"grammar": 'root ::= "It is " ("A" | "B")'}),
    "a salt": greedy(FRANCE, cache_salt="x"),
}


@pytest.fixture(scope="module")
def servers(smollm2: Path) -> Iterator[tuple[httpx2.Client, httpx2.Client]]:
    """vLLM's own, and ours."""
    port = free_port()
    listen = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2-135m")
    theirs = (*VLLM, "serve", str(smollm2), *listen, *SETTINGS)
    vllm = ("--engine", "vllm", "--vllm-python", str(VLLM_PYTHON), "--", *SETTINGS)
    ours = (*TRIOLEG, "serve", "smollm2-135m", "--port", "0", *vllm)
    with ExitStack() as stack:
        own = stack.enter_context(running(*theirs, env=VLLM_ENV))
        own.wait_for("Application startup complete", VLLM_START_S)
        leg = stack.enter_context(running(*ours, env=VLLM_ENV))
        url = leg.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)[1]
        yield tuple(
            stack.enter_context(httpx2.Client(base_url=one, trust_env=False, timeout=GENEROUS_S))
            for one in (f"http://127.0.0.1:{port}", url)
        )


def plain(http: httpx2.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"model": "smollm2-135m", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx2.Client, body: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Of each choice the text, the reason of its end and what stopped it."""
    asked = {"model": "smollm2-135m", **body, "stream": True}
    found: dict[int, list[Any]] = {}
    with http.stream("POST", "/v1/chat/completions", json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    one = found.setdefault(choice["index"], ["", None, None])
                    one[0] += choice["delta"].get("content") or ""
                    if choice["finish_reason"] is not None:
                        one[1:] = choice["finish_reason"], choice.get("stop_reason")
    return [tuple(found[index]) for index in sorted(found)]


def ends(answer: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (one["message"]["content"], one["finish_reason"], one.get("stop_reason"))
        for one in answer["choices"]
    ]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_answer(servers: tuple[httpx2.Client, httpx2.Client], name: str) -> None:
    body = QUESTIONS[name]
    theirs, ours = (plain(http, body) for http in servers)
    assert ends(ours) == ends(theirs)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][count] == theirs["usage"][count]
    assert_alike(logprobs(ours), logprobs(theirs))
    assert_alike(ours.get("prompt_logprobs"), theirs.get("prompt_logprobs"))
    if body.get("prompt_logprobs") is None:  # vLLM refuses to stream them
        assert streamed(servers[1], body) == streamed(servers[0], body) == ends(theirs)


def test_the_same_text_of_greedy_prompts(servers: tuple[httpx2.Client, httpx2.Client]) -> None:
    for user, text in clear_cases():
        body = greedy([{"role": "user", "content": user}], max_tokens=48)
        theirs, ours = (streamed(http, body) for http in servers)
        assert ours == theirs
        assert ours[0][0] == text


def test_vllms_own_benchmark(
    servers: tuple[httpx2.Client, httpx2.Client], smollm2: Path, tmp_path: Path
) -> None:
    lengths = ("--random-input-len", "40", "--random-output-len", "12")
    load = ("--dataset-name", "random", *lengths, "--num-prompts", "6", "--max-concurrency", "3")
    model = ("--model", "smollm2-135m", "--tokenizer", str(smollm2), "--ignore-eos")
    chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
    for number, http in enumerate(servers):
        result = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", f"{number}")
        argv = (*VLLM, "bench", "serve", "--base-url", str(http.base_url), *chat, *model, *load)
        with running(*argv, *result, env=VLLM_ENV) as bench:
            assert bench.wait(GENEROUS_S) == 0, bench.said()
        figures = json.loads((tmp_path / str(number)).read_text())
        assert (figures["completed"], figures["failed"]) == (6, 0), bench.said()
        assert figures["total_output_tokens"] == 6 * 12


def test_a_schema_is_kept_to(servers: tuple[httpx2.Client, httpx2.Client]) -> None:
    """vLLM's server prefers xgrammar, ours llguidance, and they do not allow the same spaces."""
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for http in servers:
        ((text, reason, _),) = ends(plain(http, greedy(FRANCE, response_format=schema)))
        assert reason == "stop"
        assert list(json.loads(text)) == ["city", "big"]


def logprobs(answer: dict[str, Any]) -> list[Any]:
    return [one.get("logprobs") for one in answer["choices"]]


def assert_alike(ours: Any, theirs: Any) -> None:
    """Numbers may differ by ``TOLERANCE``; fields that only one of them has count as empty."""
    if isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            assert_alike(ours.get(key), theirs.get(key))
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    else:
        assert ours == theirs
