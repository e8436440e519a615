"""What each path answers. The work is done elsewhere: parsing in ``protocol``, frames in ``sse``,
the streaming loop in ``stream``."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
import trio
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, request

from ..errors import (
    DeadlineExceeded,
    EngineDeadError,
    EngineUnavailableError,
    OverloadedError,
    RequestEnded,
    ServerShutdown,
    TriolegError,
)
from ..output.pooling import PoolingState
from ..outputs import Ending, EndingKind, RequestOutput
from ..runtime.health import Health, LLMState
from ..runtime.llm import LLM
from ..runtime.request_stream import RequestStream
from .embeddings import embedding_json, embeddings_json, parse_embeddings
from .failures import error_response, json_response, set_retry_after
from .ids import completion_id, embedding_id
from .incoming import FromHeaders, IncomingRequest, pooling_options, request_options
from .metrics import metrics_text
from .model_names import adapter_cards, check_model, check_model_name
from .protocol import (
    ChatCompletionRequest,
    RequestNotFoundError,
    error_of,
    full_response,
    parse_chat_completion,
)
from .stream import SSE_HEADERS, DirectBody, Send, serve_stream

__all__ = ["EventStreamResponse", "Routes", "ServeEvents"]


ServeEvents: TypeAlias = Callable[
    [Callable[[], Awaitable[None]], Send, DirectBody | None], Awaitable[None]
]


class EventStreamResponse(Response):
    """A response whose body is written by ``serve`` itself, once the app has let go of the request.

    ``serve(start, send, direct)``: see ``serve_stream``.
    """

    def __init__(self, serve: ServeEvents) -> None:
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

    def table(self) -> tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...]:
        """Method, path and handler of everything that is served."""
        return (
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/v1/embeddings", self.embeddings),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/requests", self.requests),
            ("DELETE", "/v1/requests/<request_id>", self.abort),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/live", self.live),
            ("GET", "/metrics", self.metrics),
        )

    async def chat_completions(self) -> Response:
        """POST /v1/chat/completions."""
        incoming = cast(IncomingRequest, request)
        arrival = incoming.arrival()
        # First: to read, parse and tokenize what will be turned away would make the overload worse.
        await self._refuse_early(incoming)
        body = await self._body_of(incoming, arrival)
        chat = parse_chat_completion(body, self._llm.default_sampling_params)
        chat = check_model(chat, self._name, self._llm.adapters.by_name)
        return self._stream(chat, arrival) if chat.stream else await self._whole(chat, arrival)

    async def _refuse_early(self, incoming: IncomingRequest) -> None:
        error: OverloadedError | None = None
        try:
            self._llm.check_room()
        except OverloadedError as caught:
            error = caught
        if error is not None:
            await incoming.drop_small_body()
            raise error

    async def _body_of(self, incoming: IncomingRequest, arrival: FromHeaders) -> bytes:
        try:
            with self._llm.until_drain():
                return await incoming.body_within(arrival, self._llm.timeouts)
        except DeadlineExceeded as error:
            self._llm.note_unsent(
                Ending(EndingKind.DEADLINE, str(error)),
                arrived_at=arrival.at,
                external_req_id=arrival.external_req_id,
            )
            raise

    def _stream(self, chat: ChatCompletionRequest, arrival: FromHeaders) -> Response:
        return EventStreamResponse(
            partial(
                serve_stream,
                self._llm,
                chat,
                self._shown_name(chat),
                keep_alive_interval=self._keep_alive_interval,
                arrival=arrival,
            )
        )

    async def _whole(self, chat: ChatCompletionRequest, arrival: FromHeaders) -> Response:
        try:
            output = await self._llm.generate(
                chat.messages, chat.params, **request_options(chat, arrival)
            )
        except RequestEnded as error:
            partial = None if error.partial is None else self._body(chat, error.partial)
            return error_response(error, self._llm.health(), partial)
        return json_response(self._body(chat, output))

    def _body(self, chat: ChatCompletionRequest, output: RequestOutput) -> bytes:
        return full_response(output, chat, created=int(time.time()), model=self._shown_name(chat))

    def _shown_name(self, chat: ChatCompletionRequest) -> str:
        return self._name if chat.lora_request is None else chat.lora_request.lora_name

    async def embeddings(self) -> Response:
        """POST /v1/embeddings."""
        incoming = cast(IncomingRequest, request)
        arrival = incoming.arrival()
        await self._refuse_early(incoming)
        asked = parse_embeddings(await self._body_of(incoming, arrival))
        check_model_name(asked.model, self._name)
        outputs = await self._llm.embed(
            asked.input, asked.params, tokenize=asked.tokenize, **pooling_options(asked, arrival)
        )
        vectors = []
        for index, output in enumerate(outputs):
            vectors.append(embedding_json(index, output, asked.encoding_format))
            # There may be thousands, and others' streams do not wait for them.
            await trio.lowlevel.checkpoint()
        num_tokens = sum(len(one.prompt_token_ids) for one in outputs)
        return json_response(embeddings_json(vectors, model=self._name, num_tokens=num_tokens))

    async def models(self) -> Response:
        """GET /v1/models: the model and its LoRA adapters."""
        model = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trioleg",
            "max_model_len": self._llm.max_model_len,
            "parent": None,
        }
        adapters = self._llm.adapters.by_name
        cards = adapter_cards(adapters, parent=self._name, created=self._created)
        return json_response(msgspec.json.encode({"object": "list", "data": [model, *cards]}))

    async def requests(self) -> Response:
        """GET /v1/requests: those that the engine has and that have not ended, oldest first."""
        data = [_listed(stream) for stream in self._llm.live_requests()]
        return json_response(msgspec.json.encode({"object": "list", "data": data}))

    async def abort(self, request_id: str) -> Response:
        """DELETE /v1/requests/ID, the id as answers have it, the whole of it."""
        live = self._llm.live_requests()
        asked = next((one.request_id for one in live if _shown_id(one) == request_id), None)
        if asked is None or not self._llm.abort(asked):
            raise RequestNotFoundError(
                f"id is {request_id!r:.300}, which is no live request's; allowed: an id that GET "
                "/v1/requests lists",
                parameter="id",
            )
        aborted = {"id": request_id, "object": "request", "aborted": True}
        return json_response(msgspec.json.encode(aborted))

    async def health(self) -> Response:
        """GET /health: 200 while requests are taken, else 503 with the state and the cause."""
        health = self._llm.health()
        return _probed(health, is_well=health.state is LLMState.READY)

    async def ready(self) -> Response:
        """GET /ready: as /health, under the name that load balancers ask for."""
        return await self.health()

    async def live(self) -> Response:
        """GET /live: 503 only where nothing but a new start of the server helps."""
        health = self._llm.health()
        return _probed(health, is_well=health.state is not LLMState.DEAD)

    async def metrics(self) -> Response:
        """GET /metrics."""
        return Response(metrics_text(self._llm), content_type=CONTENT_TYPE_LATEST)


def _shown_id(stream: RequestStream) -> str:
    is_pooling = isinstance(stream.submission.state, PoolingState)
    return (embedding_id if is_pooling else completion_id)(stream.request_id)


def _listed(stream: RequestStream) -> dict[str, Any]:
    age = trio.current_time() - stream.submitted_at
    return {
        "id": _shown_id(stream),
        "object": "request",
        "created": math.floor(time.time() - age),
        "client_request_id": stream.external_req_id,
        "num_prompt_tokens": len(stream.prompt_token_ids),
        "num_output_tokens": stream.num_output_tokens,
    }


def _probed(health: Health, *, is_well: bool) -> Response:
    """What a probe is answered."""
    body: dict[str, Any] = {"status": health.state}
    if is_well:
        return json_response(msgspec.json.encode(body))
    status, body["error"] = error_of(_refusal(health))
    response = json_response(msgspec.json.encode(body), status)
    set_retry_after(response, health.retry_after)
    return response


def _refusal(health: Health) -> TriolegError:
    """What a request would be refused with at this moment."""
    if health.state is LLMState.DEAD:
        return EngineDeadError(health.cause)
    if health.state is LLMState.DRAINING:
        return ServerShutdown(health.cause)
    return EngineUnavailableError(health.cause, retry_after=health.retry_after or 0.0)
