"""``create_app``: the routes, on Quart.

Quart runs a handler beside a watch for the client's disconnect, which cancels it: that is how a client that leaves
gets into ``LLM.generate``. What fails before the status is sent gets one of its own; nothing that fails later is
seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from ...config import ServerConfig
from ...errors import EngineDeadError
from ...output.submission import Submission
from ...server.protocol import ChatCompletionRequest
from ..asyncio_common.answers import (
    SSE_HEADERS,
    error_response,
    make_framer,
    models_response,
    parse_request,
    whole_response,
)
from .llm import LLM, EngineGenerateError
from .stream import chat_completion_stream

__all__ = ["create_app"]


def create_app(llm: LLM, model: str, on_engine_error: Callable[[], None]) -> Quart:
    """The app on ``llm``, which has to outlive it. ``model``: its name for clients. ``on_engine_error``: called when an
    engine's error is answered."""
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = ServerConfig().max_body_bytes
    # Quart's own bounds know nothing of streams: it would cut one after a minute.
    app.config["RESPONSE_TIMEOUT"] = app.config["BODY_TIMEOUT"] = None
    routes = _Routes(llm, model)

    async def engine_failed(error: Exception) -> Response:  # noqa: ASYNC124 - Quart runs others in a thread
        on_engine_error()
        return error_response(error)

    async def failed(error: Exception) -> Response | HTTPException:  # noqa: ASYNC124 - likewise
        return error if isinstance(error, HTTPException) else error_response(error)

    app.add_url_rule("/v1/chat/completions", view_func=routes.chat_completions, methods=["POST"])
    app.add_url_rule("/v1/models", view_func=routes.models)
    app.add_url_rule("/health", view_func=routes.health)
    for kind in (EngineDeadError, EngineGenerateError):
        app.register_error_handler(kind, engine_failed)
    app.register_error_handler(Exception, failed)
    return app


class _Routes:
    def __init__(self, llm: LLM, model: str) -> None:
        self._llm = llm
        self._model = model

    async def chat_completions(self) -> Response:
        body: Any = await request.get_data(cache=False, as_text=False)
        chat = parse_request(body, self._llm.tokenizer, self._model)
        # Before a status can be sent.
        self._llm.check_health()
        submission = await self._llm.prepare(
            chat.messages,
            chat.params,
            self._llm.next_request_id(),
            priority=chat.priority,
            cache_salt=chat.cache_salt,
        )
        return (
            self._stream(chat, submission) if chat.stream else await self._whole(chat, submission)
        )

    def _stream(self, chat: ChatCompletionRequest, submission: Submission) -> Response:
        request_id, prompt = submission.state.request_id, submission.state.prompt_token_ids
        outputs = self._llm.generate(submission, chat.params, request_id)
        framer = make_framer(request_id, chat, prompt, self._model)
        return Response(chat_completion_stream(outputs, framer), headers=SSE_HEADERS)

    async def _whole(self, chat: ChatCompletionRequest, submission: Submission) -> Response:
        output = None
        request_id = submission.state.request_id
        async for one in self._llm.generate(submission, chat.params, request_id):
            output = one
        assert output is not None, "a request that ends well has had its final output"
        return whole_response(output, chat, self._model)

    async def models(self) -> Response:  # noqa: ASYNC124 - Quart runs others in a thread
        return models_response(self._model, self._llm.max_model_len)

    async def health(self) -> Response:  # noqa: ASYNC124 - likewise
        try:
            self._llm.check_health()
        except EngineDeadError:
            return Response(status=503)
        return Response(status=200)
