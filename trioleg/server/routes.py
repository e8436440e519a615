"""What each path answers. The work is done elsewhere: parsing in ``protocol``, frames in ``sse``,
the streaming loop in ``stream``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, request

from ..errors import EngineDeadError, RequestEnded
from ..outputs import RequestOutput
from ..runtime.llm import LLM
from .metrics import metrics_text
from .protocol import (
    ChatCompletionRequest,
    check_model,
    error_body,
    error_of,
    full_response,
    parse_chat_completion,
)
from .stream import SSE_HEADERS, Send, serve_stream

__all__ = ["EventStreamResponse", "Routes", "error_response", "json_response"]


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status=status, content_type="application/json")


def error_response(error: Exception, partial: bytes | None = None) -> Response:
    """An exception as a response; ``partial``: the JSON of what had been generated before it."""
    status, fields = error_of(error)
    if partial is not None:
        fields["partial"] = msgspec.Raw(partial)
    return json_response(error_body(fields), status)


class EventStreamResponse(Response):
    """A response whose body is written by ``serve`` itself, once the app has let go of the request.

    ``serve(start, send)``: see ``serve_stream``.
    """

    def __init__(
        self, serve: Callable[[Callable[[], Awaitable[None]], Send], Awaitable[None]]
    ) -> None:
        super().__init__(b"", status=200, headers=SSE_HEADERS)
        # The length is known when the stream ends.
        self.headers.remove("Content-Length")
        self.serve = serve


class Routes:
    """The handlers, bound to one LLM."""

    def __init__(
        self, llm: LLM, served_model_name: str, *, keep_alive_interval: float | None = None
    ) -> None:
        self._llm = llm
        self._name = served_model_name
        self._keep_alive_interval = keep_alive_interval
        self._created = int(time.time())

    def table(self) -> tuple[tuple[str, str, Callable[[], Awaitable[Response]]], ...]:
        """Method, path and handler of everything that is served."""
        return (
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
        )

    async def chat_completions(self) -> Response:
        """POST /v1/chat/completions."""
        body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
        chat = parse_chat_completion(body, self._llm.default_sampling_params)
        check_model(chat, self._name)
        return self._stream(chat) if chat.stream else await self._whole(chat)

    def _stream(self, chat: ChatCompletionRequest) -> Response:
        async def serve(start: Callable[[], Awaitable[None]], send: Send) -> None:
            await serve_stream(
                self._llm,
                chat,
                self._name,
                start,
                send,
                keep_alive_interval=self._keep_alive_interval,
            )

        return EventStreamResponse(serve)

    async def _whole(self, chat: ChatCompletionRequest) -> Response:
        try:
            output = await self._llm.generate(
                chat.messages, chat.params, priority=chat.priority, cache_salt=chat.cache_salt
            )
        except RequestEnded as error:
            partial = None if error.partial is None else self._body(chat, error.partial)
            return error_response(error, partial)
        return json_response(self._body(chat, output))

    def _body(self, chat: ChatCompletionRequest, output: RequestOutput) -> bytes:
        return full_response(output, chat, created=int(time.time()), model=self._name)

    async def models(self) -> Response:
        """GET /v1/models."""
        model = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trioleg",
            "max_model_len": self._llm.max_model_len,
        }
        return json_response(msgspec.json.encode({"object": "list", "data": [model]}))

    async def health(self) -> Response:
        """GET /health: 200 while the engine lives, else 503 with the cause."""
        cause = self._llm.cause_of_death
        if cause is not None:
            return error_response(EngineDeadError(cause))
        return json_response(b'{"status":"ok"}')

    async def metrics(self) -> Response:
        """GET /metrics."""
        return Response(metrics_text(self._llm), content_type=CONTENT_TYPE_LATEST)
