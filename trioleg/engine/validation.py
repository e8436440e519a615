"""What this engine refuses, and in which words: every field of an ADD is checked here, once.

Rules of this file: pure Python, no torch, no trio. The front end has checked most of it already; an
engine of vLLM dies of what slips through, and this one answers it. What is not implemented is refused
by name unless it holds a neutral value; nothing is ignored that could change an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from ..messages import EngineCoreRequest, EngineSamplingParams

__all__ = ["Limits", "check_request"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is measured against. ``cache_tokens``: what the whole key/value cache holds."""

    vocab_size: int
    max_model_len: int
    cache_tokens: int


# Not implemented: each may only hold one of these values, which change nothing. cache_salt is not here,
# since there is no prefix cache to salt, nor data_parallel_rank, which is the front end's hint to itself.
_NEUTRAL_REQUEST_FIELDS: dict[str, tuple[Any, ...]] = {
    "mm_features": (None, []),
    "pooling_params": (None,),
    "lora_request": (None,),
    "prompt_embeds": (None,),
    "priority": (0,),
}
_NEUTRAL_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logprob_token_ids": (None, []),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
    "watermarking": (None, False),
    "extra_args": (None, {}),
    "bad_words_token_ids": (None, []),
}


# vLLM's default for max_logprobs, and OpenAI's bound for top_logprobs.
_MAX_LOGPROBS = 20


def check_request(request: EngineCoreRequest, limits: Limits) -> None:
    """Raises ``InvalidRequestError``, naming parameter, value and what is allowed."""
    for name, neutral in _NEUTRAL_REQUEST_FIELDS.items():
        _check_neutral(name, getattr(request, name), neutral)
    if request.client_index < 0:
        raise _refusal("client_index", request.client_index, "an integer of at least 0")
    if request.sampling_params is None:
        raise _refusal("sampling_params", None, "a map of sampling parameters")
    _check_sampling(request.sampling_params)
    _check_logprobs(request.sampling_params, limits)
    _check_prompt(request.prompt_token_ids, limits)


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value not in neutral:
        raise _refusal(name, value, f"{neutral[0]!r} only, since this engine does not implement it")


def _check_sampling(params: EngineSamplingParams) -> None:
    for name, neutral in _NEUTRAL_PARAMETERS.items():
        _check_neutral(name, getattr(params, name), neutral)
    if not 0 <= params.temperature <= 2:
        raise _refusal("temperature", params.temperature, "a number from 0 to 2")
    if not 0 < params.top_p <= 1:
        raise _refusal("top_p", params.top_p, "a number above 0 and up to 1")
    if params.top_k < -1:
        raise _refusal("top_k", params.top_k, "-1 or 0 (off), or at least 1")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise _refusal("seed", params.seed, "a 64-bit integer or None")
    if params.max_tokens is None or params.max_tokens < 1:
        raise _refusal("max_tokens", params.max_tokens, "an integer of at least 1")
    if not 0 <= params.min_tokens <= params.max_tokens:
        allowed = f"0 to max_tokens, which is {params.max_tokens}"
        raise _refusal("min_tokens", params.min_tokens, allowed)


def _check_logprobs(params: EngineSamplingParams, limits: Limits) -> None:
    most = min(_MAX_LOGPROBS, limits.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and not 0 <= k <= most:
            raise _refusal(name, k, f"0 to {most}, or None")


def _check_prompt(prompt: list[int] | None, limits: Limits) -> None:
    longest = limits.max_model_len - 1
    if not prompt or len(prompt) > longest:
        count = 0 if prompt is None else len(prompt)
        raise _refusal("prompt_token_ids", f"{count} tokens long", f"1 to {longest} tokens")
    if len(prompt) > limits.cache_tokens:
        allowed = f"at most {limits.cache_tokens}, the tokens that the key/value cache holds"
        raise _refusal("prompt_token_ids", f"{len(prompt)} tokens long", allowed)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        allowed = f"ids from 0 to {limits.vocab_size - 1}"
        raise _refusal("prompt_token_ids", low if low < 0 else high, allowed)


def _refusal(name: str, value: object, allowed: str) -> InvalidRequestError:
    shown = value if isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)
