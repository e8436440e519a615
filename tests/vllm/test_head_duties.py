"""What a head must never send: each kind would cost vLLM's engine its life, or its ears.

Its engine does not look: a prompt that is too long, a token beyond the vocabulary, a second request of the same
id end its process; a parameter out of range or of another type ends the thread that hears requests. So each of
them is a 400 here, and afterwards the engine answers as before. Tests of each check alone are beside what they
check.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from programs import TRIOLEG, running
from vllm_place import VLLM_ENV, VLLM_PYTHON, VLLM_START_S

from trioleg import LLM, LLMConfig, SamplingParams, StructuredOutputsParams, VLLMConfig, open_llm
from trioleg.errors import InvalidRequestError
from trioleg.runtime.health import LLMState

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
ANSWER = "The capital of France is Paris."
PROMPT_IDS = [504, 3575, 282, 4649, 314]
MAX_MODEL_LEN, VOCABULARY = 1024, 49152
SETTINGS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN))
HUGE = 2**63
GENEROUS_S = 240.0

# What the answer's ``param`` is, and the body beside the question.
INTEGER = {"type": "integer"}
BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": "warm"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": 10**400}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.5}),
    ("top_k", {"top_k": HUGE}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("seed", {"seed": HUGE}),
    ("seed", {"seed": 1.5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": HUGE}),
    ("max_tokens", {"max_tokens": "12"}),
    ("max_tokens", {"max_tokens": MAX_MODEL_LEN}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("n", {"n": 0}),
    ("n", {"n": HUGE}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [1]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [HUGE]}),
    ("stop_token_ids", {"stop_token_ids": ["2"]}),
    ("logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("logprob_token_ids", {"logprobs": True, "logprob_token_ids": [VOCABULARY]}),
    # Right, but other requests of the same step would get these tokens' logprobs as well.
    ("logprob_token_ids", {"logprobs": True, "logprob_token_ids": [5]}),
    ("logit_bias", {"logit_bias": {str(VOCABULARY): 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"5": "much"}}),
    ("allowed_token_ids", {"allowed_token_ids": [VOCABULARY]}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("bad_words", {"bad_words": [""]}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "root ::= nowhere"}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "of another world"}}}),
    # What shows only with the model's vocabulary: the engine would take it, and end the answer at once.
    ("structured_outputs", {"structured_outputs": {"regex": "(.{1,1000}){1,1000}"}}),
    ("structured_outputs", {"structured_outputs": {"regex": r"[^\s\S]"}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "root ::= root"}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "start: <|nope|>"}}),
    # Minutes, and gigabytes.
    ("structured_outputs", {"structured_outputs": {"json": {"multipleOf": 9999991, **INTEGER}}}),
    ("repetition_detection", {"repetition_detection": {"max_pattern_size": -1, "min_count": 2}}),
    ("priority", {"priority": 1}),
    ("priority", {"priority": "high"}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": 7}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "word " * MAX_MODEL_LEN}]}),
    ("of_a_later_version", {"of_a_later_version": 1}),
]


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    vllm = ("--engine", "vllm", "--vllm-python", str(VLLM_PYTHON))
    argv = ("serve", "smollm2-135m", "--port", "0", *vllm, "--", *SETTINGS)
    with running(*TRIOLEG, *argv, env=VLLM_ENV) as program:
        yield program.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)[1]


@contextmanager
def open_http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, trust_env=False, timeout=GENEROUS_S) as http:
        yield http


def ask(http: httpx2.Client, body: Any, **headers: str) -> httpx2.Response:
    content = json.dumps(body).encode() if not isinstance(body, bytes) else body
    json_type = {"Content-Type": "application/json"}
    return http.post("/v1/chat/completions", content=content, headers={**json_type, **headers})


def check_alive(http: httpx2.Client) -> None:
    answer = ask(http, {**QUESTION, "temperature": 0, "max_tokens": 20})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_bad_request_is_a_400_and_the_engine_lives(url: str, stream: bool) -> None:
    with open_http(url) as http:
        for parameter, body in BAD_BODIES:
            answer = ask(http, {**QUESTION, **body, "stream": stream})
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert (error["param"] or "").startswith(parameter), (body, error)
        # Numbers that JSON has no word for, and text that is none.
        for text in (b"NaN", b"Infinity", b"1e999", b"-1e999"):
            body = json.dumps({**QUESTION, "temperature": 0}).encode()
            answer = ask(http, body.replace(b'"temperature": 0', b'"temperature": ' + text))
            assert answer.status_code == 400, (text, answer.text)
        half = json.dumps({**QUESTION, "stop": "\ud83c"}).encode()
        assert ask(http, half).status_code == 400
        check_alive(http)


def test_constraints_that_vllms_own_way_would_not_survive(url: str) -> None:
    """Blank lines that it would look at for minutes, with everybody waiting; more options than its grammars have."""
    options = [f"option {number}" for number in range(5000)]
    with open_http(url) as http:
        for constraint, allowed in (
            ({"grammar": "\n" * 100_000 + 'root ::= "a"'}, ["a"]),
            ({"choice": options}, options),
        ):
            body = {**QUESTION, "structured_outputs": constraint, "max_tokens": 16}
            answer = ask(http, body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] in allowed
        check_alive(http)


def test_the_same_id_twice_at_once_is_two_requests(url: str) -> None:
    body = {**QUESTION, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    with open_http(url) as http:
        request = http.build_request(
            "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "same"}
        )
        first = http.send(request, stream=True)
        second = ask(http, {**QUESTION, "max_tokens": 5}, **{"X-Request-Id": "same"})
        assert second.status_code == 200
        assert first.read().endswith(b"data: [DONE]\n\n")
        check_alive(http)


@asynccontextmanager
async def opened(smollm2: Path) -> AsyncIterator[LLM]:
    vllm = VLLMConfig(python=VLLM_PYTHON, arguments=SETTINGS)
    with trio.fail_after(2 * VLLM_START_S):
        async with open_llm(smollm2, LLMConfig(vllm=vllm, start_timeout=VLLM_START_S)) as llm:
            yield llm


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=5, **fields)


BAD_PROMPTS: list[Any] = [
    [],
    "",
    [VOCABULARY],
    [-1],
    [2**31],
    [2**64],
    [True],
    ["1"],
    [5] * MAX_MODEL_LEN,
    [5] * (MAX_MODEL_LEN + 1),
    "word " * (MAX_MODEL_LEN + 1),
    "\ud83c",
    7,
]


async def test_what_a_program_asks(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids come from programs; the engine would die of most of these."""
    for name, value in VLLM_ENV.items():
        monkeypatch.setenv(name, value)
    async with opened(smollm2) as llm:
        for prompt in BAD_PROMPTS:
            with pytest.raises(InvalidRequestError) as refused:
                await llm.generate(prompt, params())
            assert refused.value.parameter == "prompt", prompt
        with pytest.raises(InvalidRequestError):
            await llm.generate(
                PROMPT_IDS, params(structured_outputs=StructuredOutputsParams(regex="("))
            )
        # The longest that there is a token's room behind, and the shortest.
        for prompt in ([5] * (MAX_MODEL_LEN - 1), [5], [0], [VOCABULARY - 1]):
            output = await llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
            assert len(output.outputs[0].token_ids) == 1
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(llm.generate, PROMPT_IDS, params(temperature=0))
        assert llm.health().state is LLMState.READY
