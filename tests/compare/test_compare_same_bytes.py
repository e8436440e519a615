"""On every good path, and for every refusal, a twin answers with trioleg's bytes.

Both are served at once, each by an engine that does what it is told. Streams go in lock-step: a step comes when the
client has read the frames of the one before, so that nothing ever merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from tiny_tokenizers import byte_fallback_tokenizer, ids

from trioleg.bench.client import CHAT, Exchange, ask
from trioleg.compare.legs import ASYNCIO, TASKGROUP, TRIOLEG, Case, Running, serving
from trioleg.model_store import resolve
from trioleg.tokenizer import Tokenizer

TWINS = [ASYNCIO, TASKGROUP]
# For a table of requests that takes a second or two.
GENEROUS_S = 60.0


@dataclass(frozen=True)
class Request:
    """``steps``: the tokens of each, by choice if they differ. ``finish``: None where a stop string does that."""

    name: str
    fields: dict[str, Any]
    steps: Sequence[list[int]] = ()
    finish: str | None = "length"
    others: Sequence[Sequence[list[int]]] = field(default=())

    @property
    def n(self) -> int:
        return int(self.fields.get("n", 1))


SMOLLM = resolve("smollm2-135m")
TOKENIZER = Tokenizer.from_directory(SMOLLM)


def steps_of(text: str, each: int = 1) -> list[list[int]]:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return [token_ids[i : i + each] for i in range(0, len(token_ids), each)]


COUNT = steps_of("One, two, three, four, five, six.")
USAGE = {"include_usage": True}
TOP = {"logprobs": True, "top_logprobs": 3}
STOP = {"stop": [" four", "nowhere at all"]}

# Played twice: streamed, and whole.
BOTH: list[Request] = [
    Request("plain", {}, COUNT),
    Request("end token", {}, COUNT, "stop"),
    Request("one token", {"max_tokens": 1}, COUNT[:1]),
    Request("several tokens a step", {}, steps_of("One, two, three, four, five, six.", 4)),
    Request("letters of other scripts", {}, steps_of("naïve café – 東京 🙂👩‍👩‍👧")),
    Request("a character that never ends", {}, steps_of("ok 🙂")[:-1]),
    Request("line separators", {}, steps_of("a\u2028b\u2029c\u0085d")),
    Request("what JSON escapes", {}, steps_of('"\\\t\n</script>')),
    Request("three choices", {"n": 3}, COUNT, others=[steps_of("Uno, dos."), COUNT[:4]]),
    Request("logprobs", {"logprobs": True}, COUNT[:5]),
    Request("top_logprobs", TOP, COUNT[:5]),
    Request("logprobs of three choices", {**TOP, "n": 3}, COUNT[:4]),
    Request("logprobs of half characters", TOP, steps_of("é🙂")),
    Request("a stop string", STOP, COUNT, None),
    Request(
        "a stop string that is kept", {**STOP, "include_stop_str_in_output": True}, COUNT, None
    ),
    Request("fixed hold-back", {**STOP, "stop_hold_back": "fixed"}, COUNT, None),
    Request("fixed hold-back, no stop", {"stop": ["zzzzzz"], "stop_hold_back": "fixed"}, COUNT),
    Request("a stop string with logprobs", {**STOP, **TOP}, COUNT, None),
    Request("a stop string before min_tokens", {"stop": [","], "min_tokens": 5}, COUNT, None),
    Request("stop_token_ids", {"stop_token_ids": [30]}, COUNT, "stop"),
    Request("return_token_ids", {"return_token_ids": True}, COUNT),
    Request("seeds", {"seed": 7, "temperature": 0.5, "top_p": 0.9}, COUNT),
    Request("special tokens shown", {"skip_special_tokens": False}, [[1], *COUNT[:3], [2]]),
    Request("special tokens hidden", {}, [[1], *COUNT[:3], [2]]),
]
STREAMED = [
    Request("usage", {"stream_options": USAGE}, COUNT),
    Request(
        "usage in every chunk",
        {"stream_options": {**USAGE, "continuous_usage_stats": True}, "n": 2},
        COUNT,
    ),
    Request(
        "all of it",
        {"stream_options": USAGE, "return_token_ids": True, **TOP, **STOP},
        COUNT,
        None,
    ),
]
REFUSED: list[Request] = [
    Request("no messages", {"messages": []}),
    Request("a role that is none", {"messages": [{"role": "wizard", "content": "x"}]}),
    Request("a content that is none", {"messages": [{"role": "user", "content": 7}]}),
    Request("temperature", {"temperature": -1}),
    Request("top_p", {"top_p": 2}),
    Request("n", {"n": 0}),
    Request("max_tokens", {"max_tokens": 10**9}),
    Request("two names for max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    Request("min_tokens over max_tokens", {"max_tokens": 5, "min_tokens": 6}),
    Request("too many logprobs", {"logprobs": True, "top_logprobs": 21}),
    Request("top_logprobs alone", {"top_logprobs": 2}),
    Request("a token id out of the vocabulary", {"logit_bias": {"99999999": 1}}),
    Request("an empty stop string", {"stop": [""]}),
    Request("what nobody knows", {"beam": 3}),
    Request("what is not honoured", {"tools": [{"type": "function"}]}),
    Request("another model", {"model": "gpt-17"}),
    Request("a priority without its policy", {"priority": 3}),
]

BYTES: list[Request] = [
    Request("a character over two tokens", {}, [ids("caf"), ids("C3"), ids("A9"), ids("▁Paris")]),
    Request("a character that breaks off", {}, [ids("caf"), ids("C3"), ids("a")]),
    Request("its end is missing", {}, [ids("caf"), ids("F0"), ids("9F")]),
    Request("its logprobs", TOP, [ids("caf"), ids("C3"), ids("A9")]),
    Request("a stop string of bytes", {"stop": ["é"]}, [ids("caf"), ids("C3"), ids("A9")], None),
    Request("a literal replacement character", {}, [ids("�"), ids("▁caf"), ids("�")]),
]


@pytest.mark.parametrize("twin", TWINS)
async def test_a_twin_answers_with_the_same_bytes(twin: str) -> None:
    table = [*with_stream(BOTH, stream=True), *with_stream(BOTH, stream=False)]
    table += with_stream(STREAMED, stream=True)
    table += [*with_stream(REFUSED, stream=True), *with_stream(REFUSED, stream=False)]
    case = Case(SMOLLM, (1,))
    with trio.fail_after(GENEROUS_S):
        assert await differences(twin, case, table) == []


@pytest.mark.parametrize("twin", TWINS)
async def test_a_twin_spells_bytes_in_the_same_way(twin: str, tmp_path: Path) -> None:
    case = Case(byte_fallback_model(tmp_path), (1,))
    table = [*with_stream(BYTES, stream=True), *with_stream(BYTES, stream=False)]
    with trio.fail_after(GENEROUS_S):
        assert await differences(twin, case, table) == []


def with_stream(table: Sequence[Request], *, stream: bool) -> list[Request]:
    return [
        Request(one.name, {**one.fields, "stream": stream}, one.steps, one.finish, one.others)
        for one in table
    ]


async def differences(twin: str, case: Case, table: Sequence[Request]) -> list[Any]:
    """Of each request that is answered differently: its name, and both answers."""
    found = []
    async with serving(TRIOLEG, case) as ours, serving(twin, case) as its:
        for request in table:
            expected, answer = await played(ours, request), await played(its, request)
            is_good = expected[0] == 200
            assert is_good == bool(request.steps), (request.name, expected)
            if answer != expected:
                found.append((request.name, request.fields["stream"], expected, answer))
    return found


async def played(leg: Running, request: Request) -> tuple[int | None, str]:
    """The answer's status, and its body but for what is another one's each time."""
    body = {"model": "model", "max_tokens": 50, "messages": [{"role": "user", "content": "Count."}]}
    if request.fields["stream"]:
        body["stream"] = True
    arrived = (await leg.puppet.state()).arrived
    async with ask(
        leg.port or 0, CHAT, json.dumps({**body, **request.fields}).encode()
    ) as exchange:
        if request.steps:
            await leg.puppet.wait_requests(arrived + request.n)
            await say(leg, exchange, request, arrived)
        else:
            await exchange.receive_all()
    text = re.sub(r"chatcmpl-[0-9a-z-]+", "ID", exchange.body.decode())
    return exchange.status, re.sub(r'"created":\d+', '"created":0', text)


async def say(leg: Running, exchange: Exchange, request: Request, first: int) -> None:
    """All steps, of each choice; returns when the answer is whole."""
    scripts = [request.steps, *request.others]
    scripts += [request.steps] * (request.n - len(scripts))
    num_chunks = 0
    for step in range(max(map(len, scripts))):
        for choice, script in enumerate(scripts):
            if step >= len(script):
                continue
            is_last = step == len(script) - 1
            finish: Any = request.finish if is_last else None
            await leg.puppet.say([first + choice], script[step], finish=finish)
            num_chunks += 2 if step == 0 else 1
            # A whole answer has no frames, and there is none to come behind a stop string.
            while request.fields["stream"] and exchange.body.count(b"\n\n") < num_chunks:
                if not await exchange.receive():
                    return
    await exchange.receive_all()


def byte_fallback_model(folder: Path) -> Path:
    """What a server needs of a model that spells bytes as tokens."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    # Whether there are weights is looked at; what is in them is an engine's business.
    (folder / "model.safetensors").touch()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder
