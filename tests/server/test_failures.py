"""Errors of our own (M12, F15): one answer, one entry in the log with the cause, and none lost to a cancel."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from connection_harness import post, serving
from quart import Response
from scripted_app import Answer, ScriptedApp, call, open_app
from test_streaming_protocol import play
from trio.testing import MockClock, wait_all_tasks_blocked

from trioleg.errors import InvalidRequestError, OutputError
from trioleg.outputs import RequestOutput
from trioleg.server.sse import ChatCompletionFramer

ENDLESS = play(*("a", "b", "c") * 300)
SECRET = "the password is swordfish"


@asynccontextmanager
async def with_handler(handler: Callable[[], Awaitable[Any]]) -> AsyncIterator[ScriptedApp]:
    async with open_app(ENDLESS) as app:
        app.app.add_url_rule("/odd", "odd", handler)
        yield app


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def raised(record: logging.LogRecord) -> BaseException:
    assert record.exc_info is not None
    error = record.exc_info[1]
    assert error is not None
    return error


async def fail(error: BaseException) -> None:
    # Shielded: the first child's failure cancels the second, which is to fail all the same.
    await trio.lowlevel.cancel_shielded_checkpoint()
    raise error


def at_once(*failures: BaseException) -> Callable[[], Awaitable[Any]]:
    """A handler whose children all fail before any of them can be cancelled."""

    async def handler() -> Response:
        async with trio.open_nursery() as nursery:
            for error in failures:
                nursery.start_soon(fail, error)
        raise AssertionError

    return handler


# ---------------------------------------------------------------------------- without a cancel


async def test_a_bug_is_a_500_without_internals(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_handler(partial(fail, RuntimeError(SECRET))) as app:
        answer = await call(app.app, "GET", "/odd", headers={"X-Request-Id": "mine"})
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert answer.headers[b"content-type"] == b"application/json"
    assert answer.headers[b"x-request-id"] == b"mine"
    assert SECRET.encode() not in answer.body
    (entry,) = errors(caplog)
    assert entry.getMessage() == "GET /odd failed"
    assert str(raised(entry)) == SECRET


async def test_what_a_client_did_is_not_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = InvalidRequestError("n is 0; allowed: more", parameter="n")
    async with with_handler(partial(fail, refused)) as app:
        answer = await call(app.app, "GET", "/odd")
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert (await call(app.app, "GET", "/nowhere")).status == 404
        assert (await call(app.app, "POST", "/odd")).status == 405
    assert errors(caplog) == []


async def test_two_children_fail_at_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F15: one answer, by the first; one entry, with both."""
    both = LookupError(SECRET), ValueError("and this")
    async with with_handler(at_once(*both)) as app:
        answer = await call(app.app, "GET", "/odd")
    assert answer.status == 500
    assert SECRET.encode() not in answer.body
    (entry,) = errors(caplog)
    assert "GET /odd" in entry.getMessage()
    group = raised(entry)
    assert isinstance(group, BaseExceptionGroup)
    assert sorted(map(str, group.exceptions)) == sorted(map(str, both))


async def test_of_two_the_first_is_answered(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Quart alone would take the first that has a handler, and forget the other."""
    bug, ours = LookupError("a bug"), InvalidRequestError("no", parameter="n")

    async def handler() -> None:
        await trio.lowlevel.checkpoint()
        raise ExceptionGroup("both", [bug, ExceptionGroup("inner", [ours])])

    async with with_handler(handler) as app:
        assert (await call(app.app, "GET", "/odd")).status == 500
        assert len(errors(caplog)) == 1


async def test_one_child_alone_is_answered_as_itself(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_handler(at_once(InvalidRequestError("no", parameter="n"))) as app:
        answer = await call(app.app, "GET", "/odd")
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert errors(caplog) == []


# ---------------------------------------------------------------------------- beside a disconnect


async def cleanup_fails() -> Response:
    try:
        await trio.sleep_forever()
    finally:
        raise RuntimeError(SECRET)


async def a_childs_cleanup_fails() -> Response:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cleanup_fails)
        nursery.start_soon(trio.sleep_forever)
    raise AssertionError


async def two_cleanups_fail() -> Response:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cleanup_fails)
        nursery.start_soon(cleanup_fails)
        nursery.start_soon(trio.sleep_forever)
    raise AssertionError


@pytest.mark.parametrize("handler", [cleanup_fails, a_childs_cleanup_fails, two_cleanups_fail])
async def test_an_error_beside_a_disconnect(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    handler: Callable[[], Awaitable[Any]],
) -> None:
    """M12, over the real connection: one entry with the cause and the path; the server goes on."""
    logged = trio.Event()

    def note(record: logging.LogRecord) -> bool:
        logged.set()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [note])
    caplog.set_level(logging.ERROR)
    async with with_handler(handler) as app, serving(app.app) as server:
        async with server.connect() as client:
            await client.send(b"GET /odd HTTP/1.1\r\nHost: test\r\n\r\n")
            await wait_all_tasks_blocked(0.01)
        await logged.wait()
        await server.exchange(b"GET /live HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
    (entry,) = errors(caplog)
    assert "GET /odd" in entry.getMessage()
    error = raised(entry)
    leaves = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    # The nursery's own cancel and the one of the child that only slept may stand beside them.
    assert {str(one) for one in leaves if not isinstance(one, trio.Cancelled)} == {SECRET}


async def test_a_disconnect_alone_is_no_error(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler() -> Response:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
        raise AssertionError

    answer = Answer()
    async with with_handler(handler) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(call, app.app, "GET", "/odd", answer=answer))
        await trio.sleep(1)
        answer.leave.set()
    assert answer.status is None
    assert errors(caplog) == []


# ---------------------------------------------------------------------------- streams


def break_frames(monkeypatch: pytest.MonkeyPatch, after: int, *failures: Exception) -> None:
    """A bug in our framing, at the ``after``-th output of a stream."""
    frames, seen = ChatCompletionFramer.frames, 0

    def broken(self: ChatCompletionFramer, output: RequestOutput) -> bytes:
        nonlocal seen
        seen += 1
        if seen <= after:
            return frames(self, output)
        if len(failures) == 1:
            raise failures[0]
        raise ExceptionGroup("several", failures)

    monkeypatch.setattr(ChatCompletionFramer, "frames", broken)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_bug_before_the_first_frame(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    break_frames(monkeypatch, 0, *[RuntimeError(SECRET) for _ in range(count)])
    async with open_app(ENDLESS) as app:
        answer = await app.ask(stream=True, headers={"X-Request-Id": "mine"})
        assert app.llm.statistics().endings == {"output_error": 1}
    assert (answer.status, answer.error["code"]) == (500, "output_error")
    assert answer.headers[b"x-request-id"] == b"mine"
    assert SECRET.encode() not in answer.body
    (entry,) = errors(caplog)
    assert SECRET in str(raised(entry)) or count > 1


async def test_a_known_error_in_a_group_has_its_status(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_frames(monkeypatch, 0, OutputError("bad"), RuntimeError(SECRET))
    async with open_app(ENDLESS) as app:
        answer = await app.ask(stream=True)
    assert (answer.status, answer.error["code"]) == (500, "output_error")
    assert len(errors(caplog)) == 1


async def test_a_bug_in_the_middle_of_a_stream(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is out, so the client is told by an event, and not what the bug is."""
    break_frames(monkeypatch, 3, RuntimeError(SECRET))
    body = b'{"stream":true,"messages":[{"role":"user","content":"a"}]}'
    async with open_app(play(*"abcabc", step_interval_s=0.01)) as app, serving(app.app) as server:
        headers = ("Content-Type: application/json", "Connection: close")
        request = post(body, *headers, path="/v1/chat/completions")
        answer = await server.exchange(request)
        assert app.llm.statistics().open_streams == 0
        assert app.llm.statistics().endings == {"output_error": 1}
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"content":"a"' in answer
    assert b'"code":"output_error"' in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in answer
    assert SECRET.encode() not in answer
    (entry,) = errors(caplog)
    assert str(raised(entry)) == SECRET
