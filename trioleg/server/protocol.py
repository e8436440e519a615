"""The API's requests and responses: what is accepted, what is refused, and how both look.

Pure. A request body goes in as bytes and comes out as a ``ChatCompletionRequest`` whose every
parameter is honoured. A parameter that is not honoured is refused by name, unless it holds the one
value that asks for nothing; one that nobody knows is refused too. The errors are OpenAI's form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import (
    DeadlineExceeded,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    LoRAAdapterNotFoundError,
    OutputError,
    OverloadedError,
    ReaderTooSlow,
    RequestAborted,
    ServerShutdown,
    TriolegError,
    WireError,
)
from ..lora import LoRARequest
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..timeouts import Timeouts
from .fields import boolean, json_of, model, object_of, refusal, refuse_others, timeouts
from .ids import completion_id
from .logprobs import choice_logprobs, listed_logprobs, prompt_logprobs_json
from .structured_outputs import STRUCTURED_OUTPUTS, read_structured_outputs

__all__ = [
    "ChatCompletionRequest",
    "ControlsOffError",
    "ModelNotFoundError",
    "RequestNotFoundError",
    "error_body",
    "error_of",
    "full_response",
    "is_expected",
    "parse_chat_completion",
    "usage_of",
]

# Parameters of OpenAI's and vLLM's chat requests that are not honoured, with the values that ask for
# nothing and are therefore accepted. null is accepted for every one of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "detokenize": (True,),
    "truncate_prompt_tokens": (),
    "request_id": (),
    "thinking_token_budget": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

# Parameters that go into SamplingParams under their own names.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "repetition_detection",
    "stop_hold_back",
    "stream_interval",
)

# "user" says whose request it is, which changes nothing about the answer; it is not kept.
_OWN = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "priority",
    "cache_salt",
    "timeouts",
    "user",
    *STRUCTURED_OUTPUTS,
)

_HONOURED = frozenset((*_OWN, *_SAMPLING))

_ROLES = ("system", "developer", "user", "assistant")


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this server does not serve."""


class ControlsOffError(InvalidRequestError):
    """The path is for operators, and this server was started without it."""


class RequestNotFoundError(InvalidRequestError):
    """No live request has the id that was named."""


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A chat request, checked. ``messages``: role and content (text), ready for a chat template.
    ``model`` None: whichever is served. ``return_token_ids``: of prompt and answer, as vLLM does.
    ``continuous_usage``: the usage so far in every chunk; only with ``include_usage``. ``priority`` and
    ``cache_salt`` are as they came: ``LLM.open_stream`` checks them, before the first byte.
    ``lora_request``: see ``model_names.check_model``."""

    model: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    priority: int = 0
    cache_salt: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    lora_request: LoRARequest | None = None


def parse_chat_completion(
    body: bytes, make_params: Callable[..., SamplingParams]
) -> ChatCompletionRequest:
    """Parse and check a request body. ``make_params`` takes what was asked for by keyword and knows
    the model's defaults. Raises ``InvalidRequestError`` naming the parameter."""
    try:
        return _parse(object_of(body), make_params)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply to be looked at") from None


def _parse(
    fields: dict[str, Any], make_params: Callable[..., SamplingParams]
) -> ChatCompletionRequest:
    refuse_others(fields, _HONOURED, _NEUTRAL)
    stream = boolean(fields, "stream")
    include_usage, continuous_usage = _stream_options(fields, stream=stream)
    return ChatCompletionRequest(
        model=model(fields),
        messages=_messages(fields),
        params=make_params(**_sampling(fields, stream=stream)),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=boolean(fields, "return_token_ids"),
        priority=0 if fields.get("priority") is None else fields["priority"],
        cache_salt=fields.get("cache_salt"),
        timeouts=timeouts(fields),
    )


def _sampling(fields: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """What the request asks of ``SamplingParams``, by its names there."""
    asked = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    if stream and "prompt_logprobs" in asked:
        raise refusal("prompt_logprobs", asked["prompt_logprobs"], "null, unless stream is false")
    max_tokens = _max_tokens(fields)
    if max_tokens is not None:
        asked["max_tokens"] = max_tokens
    asked["logprobs"] = _logprobs(fields)
    asked["structured_outputs"] = read_structured_outputs(fields)
    asked["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return asked


def _max_tokens(fields: Mapping[str, Any]) -> Any:
    """max_completion_tokens is the newer name of max_tokens; two different values are an error."""
    older, newer = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise refusal("max_tokens", older, f"the same as max_completion_tokens ({json_of(newer)})")
    return older if newer is None else newer


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    """OpenAI's two parameters as one: how many tokens beside the chosen one (-1: all); None: no
    logprobs, or those that logprob_token_ids names. How many there may be is the engine's affair."""
    wanted, top = boolean(fields, "logprobs"), fields.get("top_logprobs")
    token_ids = fields.get("logprob_token_ids")
    if top is None:
        top = 0
    if type(top) is not int or not -1 <= top < 2**31:
        raise refusal("top_logprobs", top, "-1 (all), at least 0, or null")
    if top and not wanted:
        raise refusal("top_logprobs", top, "0 or null, unless logprobs is true")
    if token_ids and not wanted:
        raise refusal("logprob_token_ids", token_ids, "[] or null, unless logprobs is true")
    if token_ids and top:
        raise refusal("top_logprobs", top, "0 or null beside logprob_token_ids")
    return top if wanted and not token_ids else None


_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def _stream_options(fields: Mapping[str, Any], *, stream: bool) -> tuple[bool, bool]:
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise refusal("stream_options", options, "null, unless stream is true")
    if not isinstance(options, dict):
        raise refusal("stream_options", options, "an object")
    for name, value in options.items():
        known = name in _STREAM_OPTIONS
        if value is not None and not (isinstance(value, bool) if known else value is False):
            allowed = "true or false" if known else f"only {' and '.join(_STREAM_OPTIONS)}"
            raise refusal(f"stream_options.{name}", value, allowed)
    include_usage, continuous = (bool(options.get(name)) for name in _STREAM_OPTIONS)
    if continuous and not include_usage:
        allowed = "false, unless include_usage is true"
        raise refusal("stream_options.continuous_usage_stats", continuous, allowed)
    return include_usage, continuous


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in fields:
        raise InvalidRequestError(
            "messages is missing; allowed: a list of at least one message", parameter="messages"
        )
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise refusal("messages", messages, "a list of at least one message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refusal(where, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise refusal(f"{where}.role", role, ", ".join(_ROLES))
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        # Clients send an assistant's message back as they got it, with its empty fields.
        if value is not None and value != []:
            raise refusal(f"{where}.{name}", value, "only role and content are supported")
    # Templates know the older name of the developer's role.
    role = "system" if role == "developer" else role
    return {"role": role, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refusal(where, content, "a string or a list of text parts")
    return "".join(_text_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise refusal(where, part, 'a part of type "text"')
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal(f"{where}.text", text, "a string")
    return text


# ---------------------------------------------------------------------------- responses


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Any:
    """OpenAI's usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def full_response(
    output: RequestOutput, request: ChatCompletionRequest, *, created: int, model: str
) -> bytes:
    """The body of an answer that is not streamed. Also for an unfinished one: finish_reason null.
    ``created``: seconds since the epoch. The prompt counts once, however many choices there are."""
    choices = sorted(output.outputs, key=lambda one: one.index)
    body = {
        "id": completion_id(output.request_id),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(one, request) for one in choices],
        "usage": usage_of(
            len(output.prompt_token_ids),
            sum(len(one.token_ids) for one in choices),
            output.num_cached_tokens,
        ),
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return msgspec.json.encode(body)


def _choice(one: CompletionOutput, request: ChatCompletionRequest) -> dict[str, Any]:
    choice = {
        "index": one.index,
        "message": {"role": "assistant", "content": one.text},
        "logprobs": choice_logprobs(one.logprobs, listed_logprobs(request.params)),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = one.token_ids
    return choice


# Our errors as HTTP statuses and OpenAI's types; the first match wins.
_ERRORS: tuple[tuple[type[TriolegError], int, str, str | None], ...] = (
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (RequestNotFoundError, 404, "invalid_request_error", "request_not_found"),
    (ControlsOffError, 404, "invalid_request_error", "engine_controls_off"),
    (LoRAAdapterNotFoundError, 404, "invalid_request_error", "adapter_not_found"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (OverloadedError, 429, "rate_limit_error", None),
    (EngineUnavailableError, 503, "service_unavailable_error", "engine_unavailable"),
    (EngineDeadError, 503, "service_unavailable_error", "engine_dead"),
    (ServerShutdown, 503, "service_unavailable_error", "server_shutdown"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (RequestAborted, 500, "server_error", "request_aborted"),
    (ReaderTooSlow, 500, "server_error", "reader_too_slow"),
    (OutputError, 500, "server_error", "output_error"),
    # The answer to a call by name: the engine's own words.
    (WireError, 500, "server_error", "engine_refused"),
)


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """An exception as an HTTP status and OpenAI's error object. Strangers are told nothing of a bug
    but that it is one."""
    for kind, status, type_, code in _ERRORS:
        if isinstance(error, kind):
            parameter, code = getattr(error, "parameter", None), getattr(error, "code", code)
            return status, {"message": str(error), "type": type_, "param": parameter, "code": code}
    message = "the server failed to answer; its log says why"
    return 500, {"message": message, "type": "server_error", "param": None, "code": None}


def is_expected(error: BaseException) -> bool:
    """Whether the answer says all that there is to say of ``error``."""
    return any(isinstance(error, kind) for kind, *_ in _ERRORS)


def error_body(error: Mapping[str, Any]) -> bytes:
    """``{"error": …}`` as JSON."""
    return msgspec.json.encode({"error": error})
