"""Pooling models: vLLM's engine makes a vector of a prompt, our front end reads it off the wire.

all-MiniLM-L6-v2 is asked the same through our server and through vLLM's own, one after the other.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from minilm import all_minilm, without_weights
from programs import TRIOLEG, running
from test_interop import client
from vllm_place import MAX_MODEL_LEN, VLLM, VLLM_ENV, VLLM_START_S, data_parallel, free_port

from trioleg import LLMConfig, PoolingParams, open_llm
from trioleg.errors import InvalidRequestError
from trioleg.tokenizer import Tokenizer

SEA, OCEAN, PRICES = "The sea is blue.", "The ocean is azure.", "Prices fell in March."
NUMBERS = " ".join(map(str, range(150)))
# sentence_bert_config.json: max_seq_length.
MAX_SEQ_LENGTH = 256

# Both round in float32, and sum in another order where they batch otherwise.
TOLERANCE = 1e-5

ALIKE: list[dict[str, Any]] = [
    {"input": SEA},
    {"input": [SEA, OCEAN, PRICES, NUMBERS, "été ÉTÉ 你好 🌶", "", SEA]},
    {"input": [PRICES, SEA], "encoding_format": "base64"},
    {"input": [[101, 1996, 2712, 102], [2712]]},
    {"input": [101, 1996, 2712, 102]},
    {"input": "sea " * (MAX_SEQ_LENGTH - 2)},
    {"input": [NUMBERS, SEA], "truncate_prompt_tokens": 5},
    {"input": "sea " * 1000, "truncate_prompt_tokens": -1},
    {"input": [SEA, OCEAN], "add_special_tokens": False},
    {"input": [SEA, OCEAN], "use_activation": False},
]
REFUSED: list[dict[str, Any]] = [
    {"input": "sea " * (MAX_SEQ_LENGTH - 1)},
    {"input": [SEA, [2712] * (MAX_SEQ_LENGTH + 1)]},
    {"input": SEA, "dimensions": 64},
    {"input": SEA, "normalize": True},
    {"input": SEA, "truncate_prompt_tokens": MAX_SEQ_LENGTH + 1},
    {"input": SEA, "encoding_format": "hex"},
    {"input": [999_999]},
]
# vLLM takes it, and its first-come-first-served scheduler does not look at it.
IGNORED_BY_VLLM = {"input": SEA, "priority": 1}


@contextmanager
def our_server(minilm: Path, front: Path) -> Iterator[str]:
    """The URL of our server, whose own directory has no weights, with vLLM's engine behind it."""
    attach = ("--attach", "tcp://127.0.0.1:0")
    with running(*TRIOLEG, "serve", str(front), "--port", "0", *attach) as server:
        port = server.wait_for(r"waiting for an engine to join at tcp://127\.0\.0\.1:(\d+)")[1]
        command = ("serve", str(minilm), "--headless", "--dtype", "float32")
        with running(*VLLM, *command, *data_parallel(int(port)), env=VLLM_ENV):
            yield server.wait_for(r"ready: .* at (http://\S+)", VLLM_START_S)[1]


@contextmanager
def vllm_server(minilm: Path) -> Iterator[str]:
    port = str(free_port())
    command = ("serve", str(minilm), "--dtype", "float32", "--host", "127.0.0.1", "--port", port)
    with running(*VLLM, *command, env=VLLM_ENV) as server:
        server.wait_for("Application startup complete", VLLM_START_S)
        yield f"http://127.0.0.1:{port}"


def ask(url: str, body: dict[str, Any]) -> httpx2.Response:
    with httpx2.Client(base_url=url, trust_env=False, timeout=120) as http:
        return http.post("/v1/embeddings", json=body)


def answers(url: str) -> list[tuple[list[list[float]], dict[str, int]]]:
    """Vectors and usage of each of ``ALIKE``."""
    found = []
    for body in ALIKE:
        answer = ask(url, body)
        assert answer.status_code == 200, (body, answer.text)
        data = answer.json()["data"]
        assert [one["index"] for one in data] == list(range(len(data)))
        usage = {name: answer.json()["usage"][name] for name in ("prompt_tokens", "total_tokens")}
        found.append(([numbers(one["embedding"]) for one in data], usage))
    return found


def numbers(embedding: Any) -> list[float]:
    if not isinstance(embedding, str):
        return list(embedding)
    return list(struct.unpack("<384f", base64.b64decode(embedding)))


def statuses(url: str) -> list[int]:
    return [ask(url, body).status_code for body in REFUSED]


def check_ours(url: str, tokenizer: Tokenizer) -> None:
    """What only ours is asked."""
    # Where a side is named, vLLM cuts the special token of that side, too; here a text keeps both.
    ids = tokenizer.encode(NUMBERS)
    cut = {"input": NUMBERS, "truncate_prompt_tokens": 5, "truncation_side": "left"}
    vectors = [ask(url, one).json()["data"] for one in (cut, {"input": ids[:1] + ids[-4:]})]
    assert vectors[0][0]["embedding"] == pytest.approx(vectors[1][0]["embedding"], abs=TOLERANCE)
    with client(url) as (api, model):
        assert (
            httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["max_model_len"]
            == MAX_SEQ_LENGTH
        )
        many = [SEA, OCEAN, PRICES] * 40
        sea, ocean, prices, *others = (
            one.embedding for one in api.embeddings.create(model=model, input=many).data
        )
        assert cosine(sea, ocean) > 0.5 > 0.3 > cosine(sea, prices)
        for place, other in enumerate(others):
            assert other == pytest.approx((sea, ocean, prices)[place % 3], abs=TOLERANCE)
    chat = {"messages": [{"role": "user", "content": SEA}]}
    with httpx2.Client(base_url=url, trust_env=False) as http:
        refused = http.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert http.get("/health").status_code == 200


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / (math.hypot(*one) * math.hypot(*other))


def test_the_same_vectors_as_vllms_own_server(tmp_path: Path) -> None:
    minilm = all_minilm()
    front = without_weights(minilm, tmp_path / "all-MiniLM-L6-v2")
    tokenizer = Tokenizer.from_directory(front)
    with our_server(minilm, front) as url:
        ours, refused = answers(url), statuses(url)
        assert ask(url, IGNORED_BY_VLLM).status_code == 400
        check_ours(url, tokenizer)
    assert refused == [400] * len(REFUSED)
    with vllm_server(minilm) as url:
        theirs = answers(url)
        assert statuses(url) == refused
        assert ask(url, IGNORED_BY_VLLM).status_code == 200
    for body, (vectors, usage), (expected, expected_usage) in zip(ALIKE, ours, theirs, strict=True):
        assert usage == expected_usage, body
        for vector, other in zip(vectors, expected, strict=True):
            assert vector == pytest.approx(other, abs=TOLERANCE), body
    (sea,), _ = ours[0]
    assert math.hypot(*sea) == pytest.approx(1.0, abs=1e-4)
    (raw, _), _ = ours[-1]
    assert math.hypot(*raw) > 2.0, "use_activation false leaves it unscaled"
    # The tests' own sanity: the inputs are as long as they say.
    assert ours[5][1]["prompt_tokens"] == len(tokenizer.encode(ALIKE[5]["input"])) == MAX_SEQ_LENGTH


async def test_a_model_that_generates_as_one_that_pools(smollm2: Path) -> None:
    port = free_port()
    pooling = ("--runner", "pooling", "--convert", "embed")
    settings = ("--dtype", "float32", "--max-model-len", MAX_MODEL_LEN, "--headless")
    command = ("serve", str(smollm2), *pooling, *settings, *data_parallel(port))
    config = LLMConfig(start_timeout=VLLM_START_S)
    with running(*VLLM, *command, env=VLLM_ENV):
        opening = partial(open_llm, attach=f"tcp://127.0.0.1:{port}")
        async with opening(smollm2, config) as llm:
            with trio.fail_after(120):
                first = await llm.encode(SEA)
                again, other = await llm.embed([SEA, PRICES], PoolingParams(task="embed"))
            with pytest.raises(InvalidRequestError, match="asks for 'generate'"):
                await llm.generate(SEA)
    assert first.outputs.shape == (576,)
    assert math.hypot(*first.outputs.data) == pytest.approx(1.0, abs=1e-3)
    assert again.outputs.data == pytest.approx(first.outputs.data, abs=1e-4)
    assert other.outputs.data != pytest.approx(first.outputs.data, abs=1e-2)
