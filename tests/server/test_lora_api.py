"""LoRA adapters over HTTP: chosen as the model, listed, loaded and unloaded as vLLM does it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from scripted_app import Answer, ScriptedApp, call, open_app
from sse_grammar import read_stream
from test_streaming_protocol import play
from tiny_tokenizers import ids
from trio.testing import MockClock

from trioleg.config import LLMConfig, ServerConfig
from trioleg.errors import InvalidRequestError
from trioleg.lora import LoRAModulePath

SERVED = play(
    *("a" * 4),
    finish="length",
    loras={"/sql": ids("b"), "/chat": ids("c"), "/big": []},
    max_loras=2,
)
ON = ServerConfig(enable_engine_controls=True)
AT_START = LLMConfig(
    lora_modules=(LoRAModulePath("sql", "/sql"), LoRAModulePath("chat", "/chat", "a base"))
)


@asynccontextmanager
async def loaded() -> AsyncIterator[ScriptedApp]:
    async with open_app(SERVED, ON, AT_START) as app:
        yield app


async def post(app: ScriptedApp, what: str, **fields: object) -> Answer:
    return await call(app.app, "POST", f"/v1/{what}_lora_adapter", json.dumps(fields).encode())


async def content(app: ScriptedApp, model: str | None, **more: object) -> str:
    answer = await app.ask(model=model, max_tokens=4, **more)
    assert (answer.status, answer.json["model"]) == (200, model or "scripted")
    return "|".join(one["message"]["content"] for one in answer.json["choices"])


async def models(app: ScriptedApp) -> list[str]:
    data = (await call(app.app, "GET", "/v1/models")).json["data"]
    return [one["id"] for one in data]


async def test_the_model_of_a_request_is_its_adapter(autojump_clock: MockClock) -> None:
    async with loaded() as app:
        assert await content(app, "sql") == "bbbb"
        assert await content(app, "chat", n=3) == "cccc|cccc|cccc"
        assert await content(app, "scripted") == "aaaa"
        assert await content(app, None) == "aaaa"
        asked = {"model": "sql", "max_tokens": 4}
        streamed = await app.ask(stream=True, **asked)
        assert read_stream(streamed.body, asked).choices[0].content == "bbbb"
        first = json.loads(streamed.body.split(b"\n\n")[0].removeprefix(b"data: "))
        assert first["model"] == "sql"


async def test_they_are_listed(autojump_clock: MockClock) -> None:
    async with loaded() as app:
        base, sql, chat = (await call(app.app, "GET", "/v1/models")).json["data"]
    assert (base["id"], base["parent"]) == ("scripted", None)
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "scripted", "/sql")
    assert (chat["id"], chat["parent"], chat["object"]) == ("chat", "a base", "model")


async def test_an_unknown_one(autojump_clock: MockClock) -> None:
    async with loaded() as app:
        answer = await app.ask(model="none")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "allowed: 'scripted', 'sql', 'chat'" in answer.error["message"]


async def test_load_and_unload(autojump_clock: MockClock) -> None:
    async with open_app(SERVED, ON) as app:
        answer = await post(app, "load", lora_name="sql", lora_path="/sql")
        words = b"Success: LoRA adapter 'sql' added successfully."
        assert (answer.status, answer.body) == (200, words)
        assert await models(app) == ["scripted", "sql"]
        assert await content(app, "sql") == "bbbb"
        twice = await post(app, "load", lora_name="sql", lora_path="/chat")
        assert (twice.status, twice.error["param"]) == (400, "lora_name")
        assert "has already been loaded" in twice.error["message"]
        assert await content(app, "sql") == "bbbb"
        again = await post(app, "load", lora_name="sql", lora_path="/chat", load_inplace=True)
        assert (again.status, await content(app, "sql")) == (200, "cccc")
        answer = await post(app, "unload", lora_name="sql", lora_int_id=1)
        words = b"Success: LoRA adapter 'sql' removed successfully."
        assert (answer.status, answer.body) == (200, words)
        assert (await models(app), (await app.ask(model="sql")).status) == (["scripted"], 404)
        gone = await post(app, "unload", lora_name="sql")
        assert (gone.status, gone.error["code"]) == (404, "adapter_not_found")
        assert await app.llm.list_loras() == set()


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({}, 400, "lora_name", "lora_name is null; allowed: a text"),
        ({"lora_name": "sql"}, 400, "lora_path", "lora_path is null; allowed: a text"),
        ({"lora_name": "", "lora_path": "/sql"}, 400, "lora_name", "allowed: a text"),
        (
            {"lora_name": 5, "lora_path": "/sql"},
            400,
            "lora_name",
            "lora_name is 5; allowed: a text",
        ),
        ({"lora_name": "a", "lora_path": "/none"}, 404, "lora_path", "No adapter found for /none"),
        ({"lora_name": "a", "lora_path": "/big"}, 400, "lora_path", "LoRA rank 64 is greater"),
        ({"lora_name": "scripted", "lora_path": "/sql"}, 400, "lora_name", "the served model's"),
        (
            {"lora_name": "a", "lora_path": "/sql", "load_inplace": 1},
            400,
            "load_inplace",
            "load_inplace is 1; allowed: true, false or null",
        ),
        ({"lora_name": "a", "lora_path": "/sql", "x": 1}, 400, "x", "unknown parameter: 'x'"),
    ],
)
async def test_what_cannot_be_loaded(
    autojump_clock: MockClock, fields: dict[str, object], status: int, param: str, words: str
) -> None:
    async with open_app(SERVED, ON) as app:
        answer = await post(app, "load", **fields)
        assert (answer.status, answer.error["param"]) == (status, param)
        assert words in answer.error["message"]
        assert await models(app) == ["scripted"]
        assert await content(app, None) == "aaaa"


async def test_what_cannot_be_unloaded(autojump_clock: MockClock) -> None:
    async with loaded() as app:
        for fields, words in (
            ({"lora_name": "sql", "lora_int_id": 2}, "lora_int_id is 2; allowed: 1"),
            ({"lora_name": "sql", "lora_path": "/sql"}, "unknown parameter: 'lora_path'"),
            ({}, "lora_name is null"),
        ):
            answer = await post(app, "unload", **fields)
            assert answer.status == 400
            assert words in answer.error["message"]
        assert await content(app, "sql") == "bbbb"


async def test_an_engine_without_lora(autojump_clock: MockClock) -> None:
    async with open_app(play(*"aaaa"), ON) as app:
        answer = await post(app, "load", lora_name="sql", lora_path="/sql")
    assert answer.status == 400
    assert "started with --enable-lora" in answer.error["message"]


async def test_unload_in_the_middle_of_an_answer(autojump_clock: MockClock) -> None:
    """The answer is whole, and the engine keeps the adapter for so long."""
    running = Answer()
    async with loaded() as app:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(app.ask, running, model="sql", stream=True, max_tokens=20))
            await trio.sleep(0.55)
            assert (await post(app, "unload", lora_name="sql")).status == 200
            assert (await app.ask(model="sql")).status == 404
            assert await app.llm.list_loras() == {1, 2}
        assert await app.llm.list_loras() == {2}
    assert read_stream(running.body, {}).choices[0].content == "b" * 20


async def test_abort_and_leave_let_the_adapter_go(autojump_clock: MockClock) -> None:
    left, aborted = Answer(), Answer()
    async with loaded() as app:
        async with trio.open_nursery() as nursery:
            for answer in (left, aborted):
                ask = partial(app.ask, answer, model="sql", stream=True, n=2, max_tokens=200)
                nursery.start_soon(ask)
            await trio.sleep(0.55)
            await post(app, "unload", lora_name="sql")
            left.leave.set()
            await trio.sleep(0.1)
            (one,) = (await call(app.app, "GET", "/v1/requests")).json["data"]
            assert await app.llm.list_loras() == {1, 2}
            await call(app.app, "DELETE", f"/v1/requests/{one['id']}")
        assert await app.llm.list_loras() == {2}


async def test_a_name_that_is_the_models(autojump_clock: MockClock) -> None:
    config = LLMConfig(lora_modules=(LoRAModulePath("scripted", "/sql"),))
    with pytest.raises(InvalidRequestError, match="lora_name is 'scripted', which is the served"):
        async with open_app(SERVED, None, config):
            pytest.fail("two models with one name")
