"""The same request, streamed and not, for many combinations of its parameters: the same answer.

The samples are drawn with a seed, so a failure can be looked at again; its message is the sample.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from scripted_app import Answer, open_app
from sse_grammar import Stream, read_answer, read_stream
from tiny_tokenizers import PIECES, ids
from trio.testing import MockClock

from trioleg.config import DETOKENIZERS, LLMConfig
from trioleg.engine.scripted import Script

_LETTERS = ids("a", "b", "c", "▁a", "▁b", "▁caf", "▁Paris", "▁", "�")
_CHARACTERS = [ids("C3", "A9"), ids("E2", "80", "A8"), ids("F0", "9F", "8C", "B6"), ids("C2", "85")]
_SPECIAL = ids("<s>", "</s>", "<unk>")
_STOPS = ("a", "ab", "bc", " a", "é", "abca", "🌶", "\u2028", "</s>", "�", "b b", "aé")


def draw_tokens(rng: random.Random) -> list[int]:
    """Words, characters in several tokens, broken ones, special tokens."""
    tokens: list[int] = []
    while len(tokens) < 24:
        kind = rng.random()
        if kind < 0.6:
            tokens += [rng.choice(_LETTERS)]
        elif kind < 0.85:
            tokens += rng.choice(_CHARACTERS)
        elif kind < 0.93:
            tokens += [rng.randrange(3, len(PIECES))]
        else:
            tokens += [rng.choice(_SPECIAL)]
    return tokens


def draw_script(rng: random.Random) -> Script:
    tokens, size = draw_tokens(rng), rng.choice((1, 1, 2, 5))
    steps = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    slots, finish = rng.choice((1, 64)), rng.choice(("stop", "length"))
    fields = {"steps": steps, "step_interval_s": 0.1, "max_num_seqs": slots, "finish": finish}
    return msgspec.convert(fields, Script)


def draw_parameters(rng: random.Random) -> dict[str, Any]:
    """Each is left out half of the time."""
    text = "".join(rng.choice(("a", "b", " caf", "é", "<s>", "</s>")) for _ in range(6))
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "n": rng.choice((2, 3)),
        "logprobs": True,
        "top_logprobs": rng.choice((0, 1, 3)),
        "stop": rng.sample(_STOPS, rng.choice((1, 2, 4))),
        "include_stop_str_in_output": rng.choice((True, False)),
        "stop_hold_back": rng.choice(("overlap", "fixed")),
        "stop_token_ids": rng.sample(_LETTERS, rng.choice((1, 2))),
        "min_tokens": rng.randrange(6),
        "max_tokens": rng.randrange(5, 30),
        "ignore_eos": rng.choice((True, False)),
        "skip_special_tokens": rng.choice((True, False)),
        "spaces_between_special_tokens": rng.choice((True, False)),
        "stream_interval": rng.randrange(1, 7),
        "return_token_ids": True,
    }
    asked = {name: value for name, value in asked.items() if rng.random() < 0.5}
    if not asked.get("logprobs"):
        asked.pop("top_logprobs", None)
    return asked


async def both_ways(rng: random.Random, asked: dict[str, Any]) -> tuple[Stream, Stream]:
    """The streamed answer, to a client that may be slow, and the plain one."""
    usage = {"include_usage": True, "continuous_usage_stats": rng.choice((True, False))}
    config = LLMConfig(stream_interval=rng.choice((1, 1, 3)), detokenizer=rng.choice(DETOKENIZERS))
    slow = Answer(pause=rng.choice((0.0, 0.25, 100.0)))
    async with open_app(draw_script(rng), llm_config=config) as app:
        app.vary_choices()
        streaming = {**asked, "stream": True, "stream_options": usage}
        streamed = await app.ask(slow, **streaming)
        plain = await app.ask(**asked)
    assert (streamed.status, plain.status) == (200, 200), plain.body
    return read_stream(streamed.body, streaming), read_answer(plain.body, asked)


@pytest.mark.parametrize("seed", range(12))
async def test_streamed_and_plain_answers_are_equal(autojump_clock: MockClock, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        asked = draw_parameters(rng)
        streamed, plain = await both_ways(rng, asked)
        assert streamed.choices == plain.choices, asked
        assert streamed.usage == plain.usage, asked
        assert streamed.prompt_token_ids == plain.prompt_token_ids, asked


async def test_the_samples_reach_what_they_should(autojump_clock: MockClock) -> None:
    """A comparison of answers that are all alike would prove little."""
    rng = random.Random(0)
    seen: set[Any] = set()
    for _ in range(60):
        asked = draw_parameters(rng)
        _, plain = await both_ways(rng, asked)
        choices = list(plain.choices.values())
        seen |= {one.finish_reason for one in choices}
        seen |= {type(one.stop_reason) for one in choices}
        seen |= {"choices differ" for one in choices if one.content != choices[0].content}
        seen |= {"logprobs" for one in choices if one.logprobs}
        seen |= {"a cut character" for one in choices if "�" in one.content}
    assert seen == {
        "stop",
        "length",
        str,
        int,
        type(None),
        "choices differ",
        "logprobs",
        "a cut character",
    }
