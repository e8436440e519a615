"""A quart-trio app, as it comes, over the connection."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from connection_harness import get, post, serving
from quart import jsonify, request
from quart.wrappers.response import ResponseBody
from quart_trio import QuartTrio
from trio.testing import wait_all_tasks_blocked


def make_app() -> tuple[Any, trio.Event]:
    app = QuartTrio("connection_test")
    left = trio.Event()

    @app.errorhandler(413)
    async def too_large(error: Exception) -> Any:
        await trio.lowlevel.checkpoint()
        return jsonify(error="too large"), 413

    @app.post("/echo")
    async def echo() -> Any:
        return jsonify(got=len(await request.get_data()))

    @app.get("/wait")
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            left.set()

    @app.get("/stream")
    async def stream() -> Any:
        await trio.lowlevel.checkpoint()
        return app.response_class(Frames(), content_type="text/event-stream")

    return app, left


class Frames(ResponseBody):
    """Three frames, without an async generator."""

    def __init__(self) -> None:
        self.left = [b"data: 3\n\n", b"data: 2\n\n", b"data: 1\n\n"]

    async def __aenter__(self) -> Frames:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def __aiter__(self) -> Frames:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()


async def test_answers_and_streams_share_a_connection() -> None:
    app, _ = make_app()
    async with serving(app) as server, server.connect() as client:
        await client.send(post(b"12345", path="/echo"))
        assert json.loads((await client.response())[2]) == {"got": 5}
        await client.send(get("/stream"))
        status, head, data = await client.response()
        assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n")
        assert b"text/event-stream" in head
        await client.send(get("/nowhere"))
        assert (await client.response())[0] == 404


async def test_the_end_of_file_comes_at_once_when_it_was_asked_for() -> None:
    app, _ = make_app()
    async with serving(app) as server:
        for request_ in (get("/stream", "Connection: close"), get("/stream", version="1.0")):
            assert b"data: 3" in await server.exchange(request_)  # far under the idle time


@pytest.mark.parametrize("behind", [b"", b"\r\n", get("/wait")])
async def test_a_handler_is_cancelled_when_its_client_leaves(behind: bytes) -> None:
    app, left = make_app()
    async with serving(app) as server:
        async with server.connect() as client:
            await client.send(get("/wait") + behind)
            await wait_all_tasks_blocked(0.01)
        await left.wait()


async def test_a_body_over_the_limit_gets_the_apps_own_answer() -> None:
    app, _ = make_app()
    async with serving(app) as server:
        for headers in ((), ("Expect: 100-continue",)):
            answer = await server.exchange(post(b"x" * 17 * 2**20, *headers, path="/echo"))
            answer = answer.removeprefix(answer[: answer.index(b"HTTP/1.1 413")])
            assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": "too large"}
