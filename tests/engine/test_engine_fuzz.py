"""Five thousand requests with anything in them, and a cache far too small: every one ends, and nothing else does.

What a front end would never send is among them: values out of every range, constraints that contradict each
other, prompts that cannot fit. Aborts, clients that leave, pauses and resets come in between.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import load_tiny_llama, make_core, save_tiny_llama, wire_request

from trioleg.engine.core import EngineCore
from trioleg.ipc.codec import UndecodableRequest, decode_request, encode_request
from trioleg.messages import EngineCoreRequest, EngineSamplingParams, FinishReason
from trioleg.tokenizer import Tokenizer

REQUESTS = 5_000
NUM_BLOCKS = 12
MAX_MODEL_LEN = 160
EOS = 2
# A step that hangs shows as too many of them: there are about 2 a request.
MAX_STEPS = 20 * REQUESTS
# Memory is compared from here on: allocators and caches have filled up by then, mostly. On a machine with other
# work torch's threads have taken 30 MB more.
WARM = REQUESTS // 5
GROWTH_BYTES = 48 * 2**20

BEGINNINGS = [[i + 3] * length for i, length in enumerate((16, 40, 64))]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Callable[[], EngineCore]:
    """A random model with a real vocabulary, for grammars; tiny, so that steps are short."""
    path = tmp_path_factory.mktemp("fuzz")
    vocab_size = Tokenizer.from_directory(smollm2).vocab_size
    save_tiny_llama(
        path,
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    model = load_tiny_llama(path, max_model_len=MAX_MODEL_LEN)
    return lambda: make_core(
        model,
        num_blocks=NUM_BLOCKS,
        model_dir=smollm2,
        max_num_batched_tokens=48,
        scheduling_policy="priority",
        max_logprobs=30,
    )


def some(rng: random.Random, *choices: Callable[[], Any]) -> Any:
    return rng.choice(choices)()


def good_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Most parameters at their defaults, the others anywhere in their ranges."""
    token = lambda: rng.randrange(vocab)  # noqa: E731  (a word for what is drawn all over this function)
    tokens = lambda: [token() for _ in range(rng.randint(1, 5))]  # noqa: E731
    everything: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0.0, 1e-9, 0.7, 1.0, 2.0]),
        "top_p": lambda: rng.choice([1e-9, 0.5, 0.95, 1.0]),
        "top_k": lambda: rng.choice([-1, 0, 1, 5, 10**6]),
        "min_p": lambda: rng.choice([0.0, 0.1, 1.0]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice([1e-3, 0.5, 1.3, 1e3]),
        "seed": lambda: rng.choice([0, -1, 2**63 - 1, rng.getrandbits(60)]),
        "ignore_eos": lambda: rng.random() < 0.5,
        "stop_token_ids": tokens,
        "logit_bias": lambda: {token(): rng.uniform(-100, 100) for _ in range(4)},
        "allowed_token_ids": lambda: [*tokens(), *([EOS] if rng.random() < 0.5 else [])],
        "bad_words_token_ids": lambda: [tokens() for _ in range(3)],
        "logprobs": lambda: rng.choice([0, 1, 30]),
        "prompt_logprobs": lambda: rng.choice([0, 3]),
        "logprob_token_ids": tokens,
        "repetition_detection": lambda: {"max_pattern_size": 3, "min_count": 3},
        "skip_reading_prefix_cache": lambda: rng.random() < 0.5,
        "structured_outputs": lambda: grammar(rng),
    }
    names = rng.sample(sorted(everything), rng.choice([0, 1, 1, 2, 3, 8]))
    params = {name: everything[name]() for name in names}
    if "logprob_token_ids" in params:
        params.pop("logprobs", None)
    return params


def grammar(rng: random.Random) -> dict[str, Any]:
    constraint = some(
        rng,
        lambda: {"choice": ["yes", "no", "日本"]},
        lambda: {"regex": r"[a-z]{2,9}(-\d+)?"},
        lambda: {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
        lambda: {"json_object": True},
        lambda: {"grammar": 'start: "a" start | "b"'},
        lambda: {"choice": ["a"]},
        # Not right, or not there.
        lambda: rng.choice([{"regex": "(["}, {"grammar": "start: missing"}, {"choice": []}, {}]),
    )
    return {**constraint, "_backend": "guidance"}


BAD_VALUES = (
    -1,
    0,
    2**31,
    10**400,
    float("nan"),
    float("inf"),
    -1e300,
    [],
    [-1],
    [2**40],
    {},
    "x",
    [[]],
)


def make_request(rng: random.Random, number: int, vocab: int) -> EngineCoreRequest:
    prompt = rng.choice(BEGINNINGS)[: rng.randint(1, 64)] if rng.random() < 0.5 else []
    prompt = prompt + [rng.randrange(vocab) for _ in range(rng.choice([1, 3, 20, 60, 150]))]
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 30]),
        "eos_token_id": EOS,
        **good_params(rng, vocab),
    }
    params["min_tokens"] = rng.choice([0, 0, params["max_tokens"]])
    params["all_stop_token_ids"] = [EOS, *params.get("stop_token_ids", [])]
    if rng.random() < 0.3:
        params["logit_bias"] = {EOS: rng.uniform(0, 20)}
    if rng.random() < 0.1:
        params[rng.choice(EngineSamplingParams.__struct_fields__)] = rng.choice(BAD_VALUES)
    if rng.random() < 0.02:
        prompt = rng.choice([[], [vocab], [-1], [1] * 1000, None])
    request = wire_request(f"r{number}", prompt, client_index=rng.randrange(3), **params)
    request.priority = rng.randint(-3, 3)
    request.cache_salt = rng.choice([None, None, "a", "b"])
    return request


def over_the_wire(request: EngineCoreRequest) -> EngineCoreRequest | None:
    """What an engine's process would make of it; None: it would be answered there."""
    try:
        return decode_request(encode_request(request))
    except (UndecodableRequest, OverflowError):
        return None


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


class Fuzz:
    """The requests' way, as their front ends would know it."""

    def __init__(self, core: EngineCore, rng: random.Random, vocab: int) -> None:
        self.core, self.rng, self.vocab = core, rng, vocab
        self.live: dict[str, int] = {}
        self.ended: Counter[FinishReason] = Counter()
        self.num_aborted = 0
        self.added = 0
        self.paused = False

    def run(self) -> tuple[int, int]:
        """Returns the memory at two moments: when warm, and at the end."""
        warm = 0
        for _ in range(MAX_STEPS):
            if self.added == WARM and not warm:
                warm = resident_bytes()
            if self.added == REQUESTS and self.core.wait_s() is None:
                if not self.paused:
                    return warm, resident_bytes()
                self.resume()
            self.act()
            self.step()
        raise AssertionError(f"not at rest after {MAX_STEPS} steps; live: {list(self.live)[:5]}")

    def act(self) -> None:
        rng = self.rng
        for _ in range(min(REQUESTS - self.added, rng.choice([0, 0, 1, 2]))):
            request = over_the_wire(make_request(rng, self.added, self.vocab))
            if request is None:
                continue
            self.added += 1
            self.live[request.request_id] = request.client_index
            self.core.add_request(request)
            if self.added == WARM:
                break
        if self.live and rng.random() < 0.03:
            self.forget([rng.choice(list(self.live))])
        if rng.random() < 0.001:
            client = rng.randrange(3)
            self.core.abort_client(client)
            self.forget([name for name, owner in self.live.items() if owner == client])
        if rng.random() < 0.005:
            self.core.call_utility("reset_prefix_cache", [rng.random() < 0.5])
        if rng.random() < 0.005 and not self.paused:
            self.core.call_utility("pause_scheduler", [rng.choice(["wait", "keep"]), True])
            self.paused = True
        elif self.paused and rng.random() < 0.2:
            self.resume()

    def resume(self) -> None:
        self.core.call_utility("resume_scheduler", [])
        self.paused = False

    def forget(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)
        self.num_aborted += len(request_ids)
        for request_id in request_ids:
            del self.live[request_id]

    def step(self) -> None:
        for client, message in self.core.step().items():
            for output in message.outputs:
                # Only live requests speak, on their own client's leg, and nothing comes after an end.
                assert self.live[output.request_id] == client
                assert all(0 <= token < self.vocab for token in output.new_token_ids)
                if output.finish_reason is not None:
                    del self.live[output.request_id]
                    self.ended[output.finish_reason] += 1


@pytest.mark.filterwarnings("error")
def test_every_request_ends_and_memory_is_flat(
    make: Callable[[], EngineCore], caplog: pytest.LogCaptureFixture
) -> None:
    core = make()
    fuzz = Fuzz(core, random.Random(11), core._runner.model.config.vocab_size)
    with torch.inference_mode():
        warm, at_end = fuzz.run()
    # An exception that nobody foresaw would have been logged, and have ended its own request.
    assert [record.message for record in caplog.records] == []
    assert fuzz.live == {}
    assert fuzz.ended.total() + fuzz.num_aborted == REQUESTS
    assert core.scheduler.pool.num_free == NUM_BLOCKS
    assert core.scheduler.requests == {}
    # Each way to end was taken by many.
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR):
        assert fuzz.ended[reason] > 100, fuzz.ended
    assert fuzz.ended[FinishReason.REPETITION] > 0
    assert at_end - warm < GROWTH_BYTES, (warm, at_end)
    # The engine is as good as a new one.
    core.add_request(wire_request("last", [1, 2, 3], max_tokens=5))
    while core.wait_s() is not None:
        (message,) = core.step().values()
    assert message.outputs[0].finish_reason == FinishReason.LENGTH
    core.close()
