"""What this engine refuses, and in which words: every field of an ADD is checked here, once.

Rules of this file: pure Python, no torch, no trio. The front end has checked most of it already; an
engine of vLLM dies of what slips through, and this one answers it. What is not implemented is refused
by name unless it holds a neutral value; nothing is ignored that could change an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from ..messages import EngineCoreRequest, EngineSamplingParams
from ..param_checks import check_token_ids
from ..sampling_params import (
    LOGPROB_TOKEN_IDS_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    RepetitionDetectionParams,
)
from ..structured_outputs import StructuredOutputsParams

__all__ = ["Limits", "check_request"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is measured against. ``cache_tokens``: what the whole key/value cache holds;
    ``max_logprobs`` -1: as many as there are tokens. ``takes_priority``: whether the scheduling policy is
    priority."""

    vocab_size: int
    max_model_len: int
    cache_tokens: int
    max_logprobs: int = 20
    takes_priority: bool = False


# Not implemented: each may only hold one of these values, which change nothing. data_parallel_rank is not
# here: it is the front end's hint to itself.
_NEUTRAL_REQUEST_FIELDS: dict[str, tuple[Any, ...]] = {
    "mm_features": (None, []),
    "pooling_params": (None,),
    "prompt_embeds": (None,),
}
_NEUTRAL_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
    "watermarking": (None, False),
    "extra_args": (None, {}),
}

# What the numbers may be; a comparison with NaN is false.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x <= 2, "a number from 0 to 2"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
    "top_k": (lambda x: x >= -1, "-1 or 0 (off), or at least 1"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    "repetition_penalty": (
        lambda x: REPETITION_PENALTY_MIN <= x <= REPETITION_PENALTY_MAX,
        f"a number from {REPETITION_PENALTY_MIN} to {REPETITION_PENALTY_MAX}",
    ),
}

# A head tokenizes 128 words at most, unless it was told otherwise; each token's step looks at some of them.
_BAD_WORDS_MAX = 1024


def check_request(request: EngineCoreRequest, limits: Limits) -> None:
    """Raises ``InvalidRequestError``, naming parameter, value and what is allowed."""
    for name, neutral in _NEUTRAL_REQUEST_FIELDS.items():
        _check_neutral(name, getattr(request, name), neutral)
    if request.lora_request is not None:
        allowed = "None only: this engine has no LoRA adapters (one of vLLM's has them, with --enable-lora)"
        raise _refusal("lora_request", request.lora_request, allowed)
    if request.client_index < 0:
        raise _refusal("client_index", request.client_index, "an integer of at least 0")
    if request.priority and not limits.takes_priority:
        allowed = "0, unless the engine's scheduling policy is priority"
        raise _refusal("priority", request.priority, allowed)
    if request.sampling_params is None:
        raise _refusal("sampling_params", None, "a map of sampling parameters")
    _check_sampling(request.sampling_params)
    _check_token_rules(request.sampling_params, limits)
    _check_logprobs(request.sampling_params, limits)
    if request.sampling_params.structured_outputs is not None:
        StructuredOutputsParams.from_engine(request.sampling_params.structured_outputs)
    _check_prompt(request.prompt_token_ids, limits)


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value not in neutral:
        raise _refusal(name, value, f"{neutral[0]!r} only, since this engine does not implement it")


def _check_sampling(params: EngineSamplingParams) -> None:
    for name, neutral in _NEUTRAL_PARAMETERS.items():
        _check_neutral(name, getattr(params, name), neutral)
    for name, (holds, allowed) in _RANGES.items():
        value = getattr(params, name)
        if not isinstance(value, int | float) or not holds(value):
            raise _refusal(name, value, allowed)
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise _refusal("seed", params.seed, "a 64-bit integer or None")
    if params.max_tokens is None or params.max_tokens < 1:
        raise _refusal("max_tokens", params.max_tokens, "an integer of at least 1")
    if not 0 <= params.min_tokens <= params.max_tokens:
        allowed = f"0 to max_tokens, which is {params.max_tokens}"
        raise _refusal("min_tokens", params.min_tokens, allowed)

    RepetitionDetectionParams.of(params.repetition_detection)


def _check_token_rules(params: EngineSamplingParams, limits: Limits) -> None:
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, limits, limits.vocab_size)
        if not params.allowed_token_ids:
            raise _refusal("allowed_token_ids", [], "at least one token id, or None")
    biases = params.logit_bias or {}
    _check_ids("logit_bias", list(biases), limits, limits.vocab_size)
    for bias in biases.values():
        if not -100 <= bias <= 100:
            raise _refusal("logit_bias", bias, "numbers from -100 to 100")
    words = params.bad_words_token_ids or []
    if len(words) > _BAD_WORDS_MAX:
        raise _refusal("bad_words_token_ids", f"{len(words)} long", f"at most {_BAD_WORDS_MAX}")
    for word in words:
        _check_ids("bad_words_token_ids", word, limits, limits.max_model_len)
        if not word:
            raise _refusal("bad_words_token_ids", word, "lists of at least one token id")


def _check_logprobs(params: EngineSamplingParams, limits: Limits) -> None:
    most = limits.vocab_size
    if limits.max_logprobs != -1:
        most = min(limits.max_logprobs, most)
    all_allowed = "-1 (all) or " if most == limits.vocab_size else ""
    listed = params.logprob_token_ids or []
    _check_ids("logprob_token_ids", listed, limits, LOGPROB_TOKEN_IDS_MAX)
    if listed and params.logprobs not in (None, len(listed)):
        allowed = f"None, or {len(listed)}, as many as there are logprob_token_ids"
        raise _refusal("logprobs", params.logprobs, allowed)
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        is_number_of_listed = name == "logprobs" and listed
        if k is None or is_number_of_listed or (k == -1 and all_allowed):
            continue
        if not 0 <= k <= most:
            raise _refusal(name, k, f"{all_allowed}0 to {most}, or None")


def _check_ids(name: str, token_ids: list[int], limits: Limits, count: int) -> None:
    if len(token_ids) > count:
        raise _refusal(name, f"{len(token_ids)} ids long", f"at most {count} ids")
    check_token_ids(name, token_ids, limits.vocab_size)


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
