"""``create_app``: chat completions as an ASGI application of its own, in front of the other routes, on Quart.

Why not on Quart: there an answer is made in the handler and written after that has returned, by another task (Quart's
``wait_for`` makes one on Python 3.11). So no block of the handler can hold the stream while it is written, and a
stream that was opened in time for its status would belong to nobody in between. Here one block holds both.

A client's leaving is a message, ``http.disconnect``; a task beside the answer waits for it, and ends their group in the
only way that there is, by an error. The cancel that reaches the answer so is the group's, delivered once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from quart import Quart, Response
from quart.utils import encode_headers

from ...config import ServerConfig
from ...errors import InvalidRequestError
from ...outputs import RequestOutput
from ..asyncio_common.answers import (
    error_response,
    make_framer,
    models_response,
    parse_request,
    whole_response,
)
from .llm import LLM
from .request_stream import RequestStream
from .stream import ClientStalled, Send, serve_stream

__all__ = ["ChatApp", "create_app"]

_log = logging.getLogger("trioleg.compare.taskgroup_twin")
_CHAT = "/v1/chat/completions"
_MAX_BODY_BYTES = ServerConfig().max_body_bytes

Receive = Callable[[], Awaitable[Any]]


class _ClientLeft(Exception):
    """Ends the group of one request."""


class ChatApp:
    """The whole application; ``others`` has the routes that are not for chat."""

    def __init__(self, llm: LLM, model: str, others: Quart, write_timeout: float | None) -> None:
        self._llm = llm
        self._model = model
        self._others = others
        self._write_timeout = write_timeout

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """ASGI's."""
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", _CHAT):
            await self._chat(receive, send)
        else:
            await self._others(scope, receive, send)

    async def _chat(self, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                body = await _read_body(receive)
                watch = group.create_task(_watch_client(receive), name="wait_for_disconnect")
                await self._answer(body, _Answer(send))
                watch.cancel("the answer is complete")
        except* _ClientLeft:
            pass

    async def _answer(self, body: bytes | None, answer: _Answer) -> None:
        try:
            if body is None:
                raise InvalidRequestError(f"the body is too long; allowed: {_MAX_BODY_BYTES} bytes")
            await self._serve(body, answer)
        except ClientStalled as error:
            # Its answer stays incomplete, upon which Hypercorn closes the connection.
            _log.warning("%s", error)
        except Exception as error:
            if answer.has_begun:
                raise
            await answer.respond(error_response(error))

    async def _serve(self, body: bytes, answer: _Answer) -> None:
        chat = parse_request(body, self._llm.tokenizer, self._model)
        async with self._llm.open_stream(
            chat.messages,
            chat.params,
            chat.timeouts,
            priority=chat.priority,
            cache_salt=chat.cache_salt,
        ) as stream:
            if chat.stream:
                framer = make_framer(
                    stream.request_id, chat, list(stream.prompt_token_ids), self._model
                )
                await serve_stream(stream, framer, answer, write_timeout=self._write_timeout)
            else:
                output = await _whole(stream)
                await answer.respond(whole_response(output, chat, self._model))


class _Answer:
    """ASGI's ``send``, which knows whether the status is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Any) -> None:
        self.has_begun = True
        await self._send(message)

    async def respond(self, response: Response) -> None:
        headers = encode_headers(response.headers)
        status = response.status_code
        await self({"type": "http.response.start", "status": status, "headers": headers})
        body = await response.get_data(as_text=False)
        await self({"type": "http.response.body", "body": body, "more_body": False})


async def _read_body(receive: Receive) -> bytes | None:
    """None: it is too long. Raises ``_ClientLeft``."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _watch_client(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _ClientLeft


async def _whole(stream: RequestStream) -> RequestOutput:
    output = None
    async for one in stream:
        output = one
    assert output is not None, "a stream that ends well has had its final output"
    return output


def create_app(llm: LLM, model: str, *, write_timeout: float | None = None) -> ChatApp:
    """The app on ``llm``, which has to outlive it. ``model``: its name for clients. ``write_timeout``: see
    ``serve_stream``."""
    others = Quart(__name__, static_folder=None)

    async def models() -> Response:  # noqa: ASYNC124 - Quart runs others in a thread
        return models_response(model, llm.max_model_len)

    async def health() -> Response:  # noqa: ASYNC124 - likewise
        return Response(status=503 if llm.is_draining or llm.cause_of_death else 200)

    others.add_url_rule("/v1/models", view_func=models)
    others.add_url_rule("/health", view_func=health)
    return ChatApp(llm, model, others, write_timeout)
