"""POST /v1/embeddings: OpenAI's form, vLLM's parameters, and the same manners as for chat."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
import trio
from ending_lines import EndingLines
from scripted_app import Answer, ScriptedApp, call, chat_tokenizer
from test_openai_client import with_client
from tiny_tokenizers import ids
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg import LLMConfig, ServerConfig, create_app, serve
from trioleg.engine.scripted import Script
from trioleg.errors import InvalidRequestError
from trioleg.messages import EngineCoreRequest
from trioleg.pooling_model import PoolingModel
from trioleg.server.embeddings import parse_embeddings
from trioleg.server.serve import BoundServer
from trioleg.testing import ScriptedTransport, open_scripted_llm
from trioleg.timeouts import Timeouts

# What float32 holds exactly, so that both encodings say the same.
VECTOR = [0.5, -0.25, 0.125, 3.0]
SCRIPT = Script(steps=[ids("a")], pooling=VECTOR, max_model_len=8)
MATRYOSHKA = PoolingModel(is_matryoshka=True)


def number_by_prompt(transport: ScriptedTransport) -> None:
    """Each vector begins with its prompt's last token id, and later prompts are ready earlier."""
    core, add_request = transport.core, transport.core.add_request

    def add(request: EngineCoreRequest) -> None:
        add_request(request)
        newest = core._waiting[-1]
        newest.pooling = [float(newest.prompt[-1]), *newest.pooling[1:]]
        newest.prefill_left = max(0, 20 - newest.number)

    core.add_request = add


@asynccontextmanager
async def open_app(
    script: Script = SCRIPT, config: LLMConfig | None = None, model: PoolingModel = MATRYOSHKA
) -> AsyncIterator[ScriptedApp]:
    tokenizer = replace(chat_tokenizer(), pooling=model)
    async with open_scripted_llm(script, tokenizer, config) as (llm, transport):
        number_by_prompt(transport)
        yield ScriptedApp(create_app(llm), llm, transport)


async def embed(
    app: ScriptedApp,
    answer: Answer | None = None,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Answer:
    body = json.dumps({"input": "a", **fields}).encode()
    return await call(app.app, "POST", "/v1/embeddings", body, answer=answer, headers=headers)


def vectors(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    assert [one["index"] for one in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [one["embedding"] for one in answer.json["data"]]


def of(token: str) -> list[float]:
    return [float(ids(token)[0]), *VECTOR[1:]]


async def test_the_answer(autojump_clock: MockClock) -> None:
    async with open_app() as app:
        answer = await embed(app, headers={"X-Request-Id": "mine"}, user="somebody")
    assert answer.headers[b"content-type"] == b"application/json"
    assert answer.headers[b"x-request-id"] == b"mine"
    assert answer.json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": of("a")}],
        "model": "scripted",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }


@pytest.mark.parametrize(
    ("given", "last_tokens", "count"),
    [
        ("ab", ["b"], 2),
        (["a", "bc", "b"], ["a", "c", "b"], 4),
        (ids("a", "c"), ["c"], 2),
        ([ids("a"), ids("c", "b"), ids("c")], ["a", "b", "c"], 4),
        (["a", ids("b")], ["a", "b"], 2),
    ],
)
async def test_inputs_of_every_form_in_order(
    autojump_clock: MockClock, given: Any, last_tokens: list[str], count: int
) -> None:
    async with open_app() as app:
        answer = await embed(app, input=given, encoding_format="float")
        assert vectors(answer) == [of(token) for token in last_tokens]
        assert answer.json["usage"] == {"prompt_tokens": count, "total_tokens": count}


async def test_base64_is_little_endian_float32(autojump_clock: MockClock) -> None:
    async with open_app() as app:
        (text,) = vectors(await embed(app, encoding_format="base64"))
    assert list(struct.unpack("<4f", base64.b64decode(text))) == of("a")


async def test_what_is_honoured(autojump_clock: MockClock) -> None:
    async with open_app() as app:
        assert vectors(await embed(app, dimensions=1)) == [of("a")[:1]]
        long = ids(*"abcabcabcab")
        for side, last in (("left", long[-1]), ("right", long[2]), (None, long[2])):
            fields = {"truncate_prompt_tokens": 3, "truncation_side": side}
            answer = await embed(app, input=[long, "abcabcabcab"], **fields)
            assert [one[0] for one in vectors(answer)] == [last, last]
            assert answer.json["usage"]["prompt_tokens"] == 6
        assert vectors(await embed(app, add_special_tokens=False)) == [of("a")]
        neutral = {"embed_dtype": "float32", "endianness": "little", "padding": "do_not_pad"}
        nothing = dict.fromkeys(("dimensions", "priority", "cache_salt", "normalize", "messages"))
        assert vectors(await embed(app, **neutral, **nothing)) == [of("a")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": ["a", []]}, "input[1]"),
    ({"input": [[{"role": "user", "content": "a"}]]}, "input[0]"),
    ({"input": [True]}, "input[0]"),
    ({"input": [4, "a"]}, "input"),
    ({"input": [[4], [9999]]}, "input[1]"),
    ({"input": "a" * 9}, "input"),
    ({"input": ["a", "a" * 9]}, "input[1]"),
    ({"input": ["a", "a" * 999]}, "input[1]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"encoding_format": "bytes"}, "encoding_format"),
    ({"encoding_format": 5}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 5}, "dimensions"),
    ({"dimensions": "4"}, "dimensions"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"use_activation": 1}, "use_activation"),
    ({"normalize": True}, "normalize"),
    ({"embed_dtype": "float16"}, "embed_dtype"),
    ({"endianness": "big"}, "endianness"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"priority": 1}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"timeouts": {"total": 0}}, "timeouts.total"),
    ({"model": 5}, "model"),
    ({"temperature": 1}, "temperature"),
]


@pytest.mark.parametrize(("fields", "parameter"), REFUSED)
async def test_what_is_not_honoured_is_named(
    autojump_clock: MockClock, fields: dict[str, Any], parameter: str
) -> None:
    async with open_app() as app:
        answer = await embed(app, **fields)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert answer.error["param"] == parameter
        if fields.get("temperature") is None:
            assert "allowed: " in answer.error["message"]
        # The engine lives, and no place is lost.
        assert app.llm.statistics().num_inflight_requests == 0
        assert vectors(await embed(app)) == [of("a")]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": ' + b"[" * 5000])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="the body is"):
        parse_embeddings(body)


async def test_models_and_tasks(autojump_clock: MockClock) -> None:
    async with open_app() as app:
        other = await embed(app, model="other")
        assert (other.status, other.error["code"]) == (404, "model_not_found")
        assert vectors(await embed(app, model="scripted")) == [of("a")]
    async with open_app(model=PoolingModel()) as app:
        answer = await embed(app, dimensions=2)
        assert (answer.status, answer.error["param"]) == (400, "dimensions")
    async with open_app(Script(steps=[ids("a")])) as app:
        answer = await embed(app)
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "makes no embeddings" in answer.error["message"]


async def test_deadlines_and_names(autojump_clock: MockClock, ending_lines: EndingLines) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=60.0)
    async with open_app(slow) as app:
        for more in ({"headers": {"X-Request-Timeout": "2"}}, {"timeouts": {"first_token": 2}}):
            answer = await embed(app, input=["a", "b"], **more)
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            assert answer.headers[b"x-should-retry"] == b"false"
        bad = await embed(app, headers={"X-Request-Timeout": "soon"})
        assert (bad.status, bad.error["param"]) == (400, "X-Request-Timeout")
        assert app.llm.statistics().num_inflight_requests == 0


def test_timeouts_and_priority_are_read() -> None:
    asked = parse_embeddings(b'{"input": "a", "timeouts": {"total": 3}, "priority": -2}')
    assert (asked.timeouts, asked.priority) == (Timeouts(total=3), -2)


async def test_a_client_that_leaves_ends_all_inputs(autojump_clock: MockClock) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=60.0)
    async with open_app(slow) as app, trio.open_nursery() as nursery:
        answer = Answer()
        nursery.start_soon(partial(embed, app, answer, input=["a", "b", "c"]))
        await wait_all_tasks_blocked()
        assert len(app.llm.live_requests()) == 3
        answer.leave.set()
        await wait_all_tasks_blocked()
        assert app.llm.live_requests() == ()
        assert app.llm.statistics().num_inflight_requests == 0
        assert trio.current_time() < 1


async def test_one_aborted_input_ends_all(autojump_clock: MockClock) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=60.0)
    async with open_app(slow) as app, trio.open_nursery() as nursery:
        answer = Answer()
        nursery.start_soon(partial(embed, app, answer, input=["a", "b"]))
        await wait_all_tasks_blocked()
        listed = (await call(app.app, "GET", "/v1/requests")).json["data"]
        assert len(listed) == 2
        shown = [one["id"] for one in listed]
        assert all(one.startswith("embd-") for one in shown)
        as_chat = shown[1].replace("embd-", "chatcmpl-")
        assert (await call(app.app, "DELETE", f"/v1/requests/{as_chat}")).status == 404
        assert len(app.llm.live_requests()) == 2
        await call(app.app, "DELETE", f"/v1/requests/{shown[1]}")
        await wait_all_tasks_blocked()
        assert (answer.status, answer.error["code"]) == (500, "request_aborted")
        assert answer.headers[b"x-should-retry"] == b"false"
        assert app.llm.live_requests() == ()


async def test_overload_is_a_429_for_all_inputs(autojump_clock: MockClock) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=5.0)
    async with open_app(slow, LLMConfig(max_inflight_requests=4)) as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(embed, app, input=["a", "b", "c"]))
            await wait_all_tasks_blocked()
            answer = await embed(app, input=["a", "b"])
            assert (answer.status, answer.error["code"]) == (429, "too_many_requests")
            assert int(answer.headers[b"retry-after"]) >= 1
            nursery.start_soon(partial(embed, app, input=["a"]))
            await wait_all_tasks_blocked()
            # Full: not even the body is looked at.
            assert (await embed(app, input=5)).status == 429
        too_many = await embed(app, input=["a"] * 5)
        assert (too_many.status, too_many.error["param"]) == (400, "input")


async def test_a_drain_refuses_and_lets_finish(autojump_clock: MockClock) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=5.0)
    async with open_app(slow) as app:
        answer = Answer()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(embed, app, answer, input=["a", "b"]))
            await wait_all_tasks_blocked()
            app.llm.drain("the server is told to leave")
            refused = await embed(app)
            assert (refused.status, refused.error["code"]) == (503, "server_shutdown")
        assert len(vectors(answer)) == 2


async def test_a_dead_engine_is_a_503(autojump_clock: MockClock) -> None:
    slow = Script(steps=[ids("a")], pooling=VECTOR, first_token_delay_s=5.0)
    async with open_app(slow) as app, trio.open_nursery() as nursery:
        answer = Answer()
        nursery.start_soon(partial(embed, app, answer, input=["a", "b", "c"]))
        await wait_all_tasks_blocked()
        app.transport.inject_dead()
        await trio.sleep(2)
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300])
async def test_numbers_that_are_none_are_an_error(number, autojump_clock: MockClock) -> None:
    script = Script(steps=[ids("a")], pooling=[1.0, number])
    async with open_app(script) as app:
        answer = await embed(app, input=["a", "b"])
        assert (answer.status, answer.error["code"]) == (500, "output_error")
        assert "NaN" in answer.error["message"]


@asynccontextmanager
async def open_server() -> AsyncIterator[str]:
    async with (
        open_scripted_llm(SCRIPT, replace(chat_tokenizer(), pooling=MATRYOSHKA)) as (
            llm,
            transport,
        ),
        trio.open_nursery() as nursery,
    ):
        number_by_prompt(transport)
        bound: BoundServer = await nursery.start(serve, llm, ServerConfig(port=0))
        yield bound.url
        nursery.cancel_scope.cancel()


ENCODINGS: list[Any] = [openai.NOT_GIVEN, "float", "base64"]


async def test_openais_client_takes_both_encodings() -> None:
    """Unasked, it wants base64 and decodes it by itself."""

    def talk(client: openai.OpenAI) -> None:
        for encoding in ENCODINGS:
            answer = client.embeddings.create(
                model="scripted", input=["a", "b", "c"], dimensions=3, encoding_format=encoding
            )
            assert [one.index for one in answer.data] == [0, 1, 2]
            found = [one.embedding for one in answer.data]
            if encoding == "base64":
                # Asked for by name, it is left as it came.
                found = [list(struct.unpack("<3f", base64.b64decode(one))) for one in found]  # type: ignore[arg-type]
            assert found == [of(token)[:3] for token in "abc"]
            assert answer.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="scripted", input=["a", ""])
        assert caught.value.param == "input[1]"

    async with open_server() as url:
        await with_client(url, talk)


async def test_openais_asynchronous_client() -> None:
    async def talk(url: str) -> list[list[float]]:
        async with (
            httpx2.AsyncClient(trust_env=False) as http,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http
            ) as client,
        ):
            found = []
            for encoding in (openai.NOT_GIVEN, "float"):
                answer = await client.embeddings.create(
                    model="scripted", input=[ids("a"), ids("c")], encoding_format=encoding
                )
                found.append([one.embedding for one in answer.data])
            assert found[0] == found[1]
            return found[0]

    async with open_server() as url:
        with trio.fail_after(60):
            assert await talk(url) == [of("a"), of("c")]
