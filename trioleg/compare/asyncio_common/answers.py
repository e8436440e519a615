"""What the twins' HTTP servers answer: the shared core's bodies, as Quart's responses.

Rules of this file: synchronous. When an answer is given, and what becomes of its request, is the twins' business.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import msgspec
from quart import Response

from ...output.submission import Submission, default_sampling_params, make_submission
from ...outputs import RequestOutput
from ...sampling_params import SamplingParams
from ...server.logprobs import listed_logprobs
from ...server.model_names import check_model
from ...server.protocol import (
    ChatCompletionRequest,
    error_body,
    error_of,
    full_response,
    is_expected,
    parse_chat_completion,
)
from ...server.sse import DONE, ChatCompletionFramer, error_event
from ...tokenizer import Tokenizer

__all__ = [
    "MAX_LOGPROBS",
    "SSE_HEADERS",
    "error_frames",
    "error_response",
    "json_response",
    "make_framer",
    "models_response",
    "parse_request",
    "submission_of",
    "whole_response",
]

_log = logging.getLogger("trioleg.compare")

# As ``EngineConfig`` and vLLM have it.
MAX_LOGPROBS = 20
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def parse_request(body: bytes, tokenizer: Tokenizer, model: str) -> ChatCompletionRequest:
    """A chat request, checked. Raises ``InvalidRequestError``."""
    chat = parse_chat_completion(body, partial(default_sampling_params, tokenizer))
    return check_model(chat, model)


def submission_of(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    **more: Any,
) -> Submission:
    """What the front end remembers of a request and the engine gets; its state has no sink yet. ``more``: see
    ``make_submission``. Raises ``InvalidRequestError``."""
    return make_submission(
        request_id,
        prompt_token_ids,
        params,
        tokenizer,
        max_model_len=max_model_len,
        max_logprobs=MAX_LOGPROBS,
        arrival=time.monotonic(),
        **more,
    )


def make_framer(
    request_id: str, chat: ChatCompletionRequest, prompt_token_ids: list[int], model: str
) -> ChatCompletionFramer:
    """Of a streamed answer."""
    return ChatCompletionFramer(
        request_id,
        created=int(time.time()),
        model=model,
        prompt_token_ids=prompt_token_ids,
        n=chat.params.n,
        top_logprobs=listed_logprobs(chat.params),
        include_usage=chat.include_usage,
        continuous_usage=chat.continuous_usage,
        return_token_ids=chat.return_token_ids,
    )


def error_frames(error: Exception) -> bytes:
    """The end of a stream that fails in the middle."""
    return error_event(error_of(error)[1]) + DONE


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status=status, content_type="application/json")


def error_response(error: Exception) -> Response:
    """What the client is told; a bug goes to the log with its traceback."""
    if not is_expected(error):
        _log.error("a request failed", exc_info=error)
    status, fields = error_of(error)
    return json_response(error_body(fields), status)


def whole_response(output: RequestOutput, chat: ChatCompletionRequest, model: str) -> Response:
    return json_response(full_response(output, chat, created=int(time.time()), model=model))


def models_response(model: str, max_model_len: int) -> Response:
    card = {"id": model, "object": "model", "owned_by": "trioleg", "max_model_len": max_model_len}
    return json_response(msgspec.json.encode({"object": "list", "data": [card]}))
