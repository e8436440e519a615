"""The server of scripted answers, as programs under test meet it: real clients, a real socket."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import trio

import trioleg.testing
from trioleg.runtime.health import LLMState
from trioleg.testing import ScriptedServer, scripted_server
from trioleg.timeouts import Timeouts

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
STREAM: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "stream": True}
PLAIN: dict[str, Any] = {"model": "scripted", "messages": MESSAGES}
PATH = "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as one:
        yield one


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def client_of(server: ScriptedServer) -> openai.OpenAI:
    http = httpx2.Client(trust_env=False)
    return openai.OpenAI(
        base_url=server.base_url, api_key="any", max_retries=0, timeout=30, http_client=http
    )


def address_of(server: ScriptedServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


def deltas(client: openai.OpenAI, texts: list[str | None] | None = None, **more: Any) -> Any:
    """The contents behind the first chunk, which has the role. Into ``texts``, if an error may come."""
    texts = [] if texts is None else texts
    for chunk in client.chat.completions.create(**STREAM, **more):
        texts += [choice.delta.content for choice in chunk.choices]
    return texts[1:]


def text_of(client: openai.OpenAI, **more: Any) -> str | None:
    return client.chat.completions.create(**PLAIN, **more).choices[0].message.content


# ---------------------------------------------------------------------------- what is said


def test_each_piece_is_a_delta(server: ScriptedServer, client: openai.OpenAI) -> None:
    """Also without a pause between them, and of a character only the piece that completes it."""
    server.answer(["Hel", "lo", " w", b"\xc3", b"\xb6", "rld"])
    assert deltas(client) == ["Hel", "lo", " w", "", "ö", "rld"]
    many = [f"{number} " for number in range(300)]
    server.answer(many)
    assert deltas(client) == many


def test_a_text_is_said_word_by_word(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.answer("  Hello,\nbig wörld  ")
    assert deltas(client) == ["  Hello,", "\nbig", " wörld  "]
    server.answer(" \n")
    assert deltas(client) == [" \n"]
    server.answer("")
    assert text_of(client) == ""


def test_choices_usage_and_logprobs(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.answer("né")
    whole = client.chat.completions.create(**PLAIN, n=2, logprobs=True)
    assert [one.message.content for one in whole.choices] == ["né", "né"]
    assert [one.finish_reason for one in whole.choices] == ["stop", "stop"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * (3 + 1)
    entries = whole.choices[0].logprobs
    assert entries is not None
    assert [entry.bytes for entry in entries.content or []][:3] == [[0x6E], [0xC3], [0xA9]]


def test_how_it_ends(server: ScriptedServer, client: openai.OpenAI) -> None:
    """By the answer, by max_tokens, and at a stop string."""
    server.answer("cut", finish_reason="length")
    server.answer("hello")
    server.answer("one STOP two")
    seen = []
    for more in ({}, {"max_tokens": 4}, {"stop": " STOP"}):
        (choice,) = client.chat.completions.create(**PLAIN, **more).choices
        seen.append((choice.message.content, choice.finish_reason))
    assert seen == [("cut", "length"), ("hell", "length"), ("one", "stop")]
    assert [one.wait_ended().kind for one in server.requests] == ["length", "length", "stop_string"]
    assert not any(one.aborted for one in server.requests)


def test_structured_outputs_are_taken(server: ScriptedServer, client: openai.OpenAI) -> None:
    """The schema is checked as ever; that the answer has this form is the script's business."""
    form: Any = {"name": "city", "schema": {"type": "object"}}
    server.answer('{"city": "Rome"}')
    asked = text_of(client, response_format={"type": "json_schema", "json_schema": form})
    assert json.loads(asked or "") == {"city": "Rome"}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        text_of(client, response_format={"type": "json_schema", "json_schema": {"name": 1}})


def test_without_an_answer_it_says_so(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.answer("one")
    assert text_of(client) == "one"
    with pytest.raises(openai.BadRequestError, match=r"request number 2 of the test.*answer\("):
        text_of(client)
    server.always("ever")
    server.answer("once")
    assert [text_of(client), text_of(client), text_of(client)] == ["once", "ever", "ever"]


@pytest.mark.parametrize(
    ("content", "how", "complaint"),
    [
        (["a", ""], {}, "content has '' in it; allowed: a text, bytes, or a list of these"),
        (["a", 1], {}, "content has 1 in it"),
        (5, {}, "content has 5 in it; allowed: a text"),
        ({"city": "Rome"}, {}, "content has {'city': 'Rome'} in it"),
        (None, {}, "content has None in it"),
        (b"", {}, "content has b'' in it"),
        ("a", {"die_afer": 1}, "die_afer=1 is no option; allowed: finish_reason, .*error_after"),
        ("a", {"stall": 3}, "stall is 3 without stall_after; allowed: stall_after=k, stall=3"),
        ("a", {"die_after": 0, "error_after": 1}, "die_after is 0 and error_after 1; allowed: one"),
        ("a", {"die_after": "1"}, "die_after is '1'; allowed: 0 to 1"),
        ("a", {"interval": "1"}, "interval is '1'; allowed: 0 seconds"),
        ([], {"finish_reason": "length"}, r"pieces are \[\]"),
        ("a b", {"die_after": 3}, "die_after is 3; allowed: 0 to 2"),
        ("a", {"stall_after": -1}, "stall_after is -1"),
        ("a", {"interval": -0.1}, "interval is -0.1; allowed: 0 seconds"),
        ("a", {"stall": float("nan")}, "stall is nan"),
        ("a", {"finish_reason": "end"}, "finish_reason is 'end'"),
    ],
)
def test_a_mistake_shows_where_it_is_made(
    server: ScriptedServer, content: Any, how: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        server.answer(content, **how)


# ---------------------------------------------------------------------------- what goes wrong


def test_the_engine_dies_in_the_middle(server: ScriptedServer, client: openai.OpenAI) -> None:
    """For every request; then another engine takes its place."""
    server.answer("left hanging", stall_after=1)
    server.answer(["a", "b", "c"], die_after=2)
    with httpx2.Client(base_url=server.url, trust_env=False, timeout=30) as http:
        with http.stream("POST", PATH, json=STREAM) as bystander:
            server.wait_for_requests(1)
            texts: list[str | None] = []
            with pytest.raises(openai.APIError, match="engine 0 is dead"):
                deltas(client, texts)
            assert texts == ["", "a", "b"]
            events = bystander.read().decode().split("\n\n")
        assert "engine_dead" in events[-3]
        assert events[-2:] == ["data: [DONE]", ""]
        assert server.health.state is LLMState.RESTARTING
        assert http.post(PATH, json=PLAIN).is_server_error
    assert [one.wait_ended().kind for one in server.requests[:2]] == ["engine_dead"] * 2
    assert server.requests[2].ending is None
    server.wait_ready()
    server.answer("back")
    assert text_of(client) == "back"


def test_an_engine_that_stays_dead() -> None:
    with scripted_server(restart_engine=False) as server, client_of(server) as client:
        server.answer("never said", die_after=0)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                text_of(client)
            assert caught.value.status_code == 503
        assert server.health.state is LLMState.DEAD
        # At once: the test's bound would be another error.
        with pytest.raises(RuntimeError, match=r"dead for good \(engine 0 is dead"):
            server.wait_ready(timeout=600)
        with pytest.raises(RuntimeError, match="the engine is dead"):
            server.kill_engine()


def test_death_behind_the_last_piece(server: ScriptedServer, client: openai.OpenAI) -> None:
    """All of the text, and no finish_reason."""
    server.answer(["a", "b"], die_after=2)
    texts: list[str | None] = []
    with pytest.raises(openai.APIError, match="engine 0 is dead"):
        deltas(client, texts)
    assert texts == ["", "a", "b"]


@pytest.mark.parametrize("after", [1, 2])
def test_one_request_alone_fails(server: ScriptedServer, client: openai.OpenAI, after: int) -> None:
    server.answer(["a", "b"], error_after=after)
    texts: list[str | None] = []
    with pytest.raises(openai.APIError, match="the script says that this request fails"):
        deltas(client, texts)
    assert texts == ["", "a", "b"][: after + 1]
    assert server.requests[0].wait_ended().kind == "output_error"
    server.answer("well")
    assert text_of(client) == "well"


def test_a_request_that_fails_before_its_first_piece(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """One choice of two fails, and so do both."""
    server.answer(["a", "b"], error_after=0)
    with pytest.raises(openai.InternalServerError, match="the script says that") as caught:
        deltas(client, n=2)
    assert caught.value.status_code == 500


def test_a_stall_outlasts_the_clients_patience(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """The client gives up, and the engine is told."""
    server.answer("never said", stall_after=0)
    with pytest.raises(openai.APITimeoutError):
        text_of(client, timeout=0.5)
    (request,) = server.wait_for_requests(1)
    request.wait_aborted()
    assert request.status is None
    with pytest.raises(TimeoutError, match="1 of 2 requests came in 0 s"):
        server.wait_for_requests(2, timeout=0)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stall_that_ends(after: int) -> None:
    """A silence of some length, with comments in it; the answer is whole all the same."""
    with scripted_server(keep_alive_interval=0.02) as server:
        for finish_reason in ("stop", "length"):
            server.answer(["a", "b"], stall_after=after, stall=0.2, finish_reason=finish_reason)
            answer = httpx2.post(f"{server.url}{PATH}", json=STREAM, trust_env=False, timeout=30)
            assert answer.text.count(": keep-alive") > 2
            assert f'"finish_reason":"{finish_reason}"' in answer.text
            assert answer.text.count('"content":"b"') == 1


def test_a_deadline_of_the_server() -> None:
    with scripted_server(timeouts=Timeouts(total=0.2)) as server, client_of(server) as client:
        server.answer(["a", "b"], stall_after=1)
        with pytest.raises(openai.APIError):
            deltas(client)
        assert server.requests[0].wait_ended().kind == "deadline"
        server.requests[0].wait_aborted()


def test_a_frozen_engine_and_one_that_is_killed(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    server.answer("never said", stall_after=0)
    server.freeze_engine()
    with pytest.raises(openai.InternalServerError, match="does not answer"):
        text_of(client)
    assert server.health.state is LLMState.FROZEN
    with pytest.raises(RuntimeError, match="the engine is frozen"):
        server.freeze_engine()
    server.thaw_engine()
    server.wait_ready()
    server.answer("thawed")
    assert text_of(client) == "thawed"
    server.kill_engine()
    server.answer("again")
    server.wait_ready()
    assert text_of(client) == "again"


# ---------------------------------------------------------------------------- what is seen


def test_a_client_that_leaves_is_seen(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.answer(["a", "b"], stall_after=1)
    with client.chat.completions.create(**STREAM) as stream:
        assert next(stream).choices[0].delta.role == "assistant"
        assert next(stream).choices[0].delta.content == "a"
        (request,) = server.requests
        assert not request.aborted
        with pytest.raises(TimeoutError, match="it is still being answered"):
            request.wait_ended(timeout=0)
    request.wait_aborted()
    assert request.ending is not None
    assert request.ending.kind == "left"


def test_a_client_that_leaves_before_the_engine_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompt is being read; to leave is an abort all the same."""

    async def read_for_ever(self: object, *asked: object) -> list[int]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr("trioleg.runtime.prompts.PromptReader.read", read_for_ever)
    with scripted_server() as server, socket.create_connection(address_of(server)) as client:
        body = json.dumps(PLAIN).encode()
        client.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        client.sendall(body)
        (request,) = server.wait_for_requests(1)
        assert not request.aborted
        client.close()
        request.wait_aborted()
        assert (request.ending, request.status) == (None, None)


def test_what_came_in(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.always("ok")
    client.chat.completions.create(**PLAIN, extra_headers={"X-Request-Id": "mine"})
    httpx2.post(f"{server.url}{PATH}", content=b"{", trust_env=False)
    httpx2.get(f"{server.base_url}/models", trust_env=False)
    first, second = server.requests
    assert (first.path, first.status) == (PATH, 200)
    assert first.headers["x-request-id"] == "mine"
    assert first.headers["authorization"] == "Bearer any"
    assert first.body == PLAIN
    assert (second.content, second.status, second.ending) == (b"{", 400, None)
    assert not any(one.aborted for one in (first, second))
    with pytest.raises(ValueError, match="Expecting"):
        assert second.body
    assert repr(first) == f"<ReceivedRequest {PATH}: status 200, stop>"
    assert repr(second) == f"<ReceivedRequest {PATH}: status 400, no ending>"


def test_what_is_left_over(server: ScriptedServer, client: openai.OpenAI) -> None:
    server.always("ever")
    text_of(client)
    server.check()
    server.answer("a " * 100)
    with pytest.raises(AssertionError, match=r"^nobody asked for the answer 'a a.*\.\.\..* a '$"):
        server.check()


def test_a_request_that_found_no_answer(server: ScriptedServer, client: openai.OpenAI) -> None:
    """Not one that was refused for its own faults, which needs none."""
    for model in ("another", "scripted"):
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model=model, messages=MESSAGES)
    with pytest.raises(AssertionError, match=f"^no answer was left for request number 2 .{PATH}.$"):
        server.check()


def test_two_servers_know_nothing_of_each_other(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    with scripted_server(model="other") as other, client_of(other) as others_client:
        assert other.base_url != server.base_url
        server.answer("one")
        other.answer("two", die_after=0)
        with pytest.raises(openai.InternalServerError):
            others_client.chat.completions.create(model="other", messages=MESSAGES)
        assert text_of(client) == "one"
        assert (len(server.requests), len(other.requests)) == (1, 1)


# ---------------------------------------------------------------------------- programs of every kind


def test_an_asyncio_program(server: ScriptedServer) -> None:
    """Openai's asynchronous client; two streams at a time, answered in the order in which they came."""

    async def ask(client: openai.AsyncOpenAI) -> list[str | None]:
        stream = await client.chat.completions.create(**STREAM)
        return [chunk.choices[0].delta.content async for chunk in stream]

    async def main() -> list[list[str | None]]:
        http = httpx2.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key="any", max_retries=0, http_client=http
        ) as client:
            server.answer(["a", "b"], interval=0.01)
            server.answer(["a", "b"], interval=0.01)
            return list(await asyncio.gather(ask(client), ask(client)))

    assert asyncio.run(main()) == [["", "a", "b"]] * 2


async def test_a_trio_program(server: ScriptedServer) -> None:
    """It shares the test's thread, so what waits is called in another one."""
    server.answer(["a", "b"], stall_after=1)
    with trio.fail_after(30):
        async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as http:
            async with http.stream("POST", PATH, json=STREAM) as response:
                (request,) = await trio.to_thread.run_sync(server.wait_for_requests, 1)
                assert response.status_code == 200
                assert server.health.state is LLMState.READY
            await trio.to_thread.run_sync(request.wait_aborted)


# ---------------------------------------------------------------------------- the end


def test_what_is_open_at_the_end_is_told() -> None:
    with httpx2.Client(trust_env=False, timeout=30) as http:
        with scripted_server() as server:
            server.answer(["a", "b"], stall_after=1)
            response = http.send(
                http.build_request("POST", f"{server.url}{PATH}", json=STREAM), stream=True
            )
        *_, error, done, _ = response.read().decode().split("\n\n")
        assert "the scripted server is being closed" in error
        assert done == "data: [DONE]"
    assert [one.name for one in threading.enumerate() if one.name == "scripted server"] == []
    assert server.requests[0].wait_ended(timeout=0).kind == "shutdown"
    with pytest.raises(RuntimeError, match="has been closed"):
        assert server.health


def test_the_packages_names_are_what_they_say() -> None:
    """Whatever was imported before: a module of the same name would take an export's place."""
    modules = {module.name for module in pkgutil.iter_modules(trioleg.testing.__path__)}
    assert modules.isdisjoint(trioleg.testing.__all__)
    for name in trioleg.testing.__all__:
        assert getattr(trioleg.testing, name).__name__ == name


def test_a_server_that_broke_is_no_secret() -> None:
    with pytest.raises(trio.TrioInternalError), scripted_server() as server:
        server._inside.token.run_sync_soon(lambda: 1 / 0)
