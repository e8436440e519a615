"""``SamplingParams`` (and ``PoolingParams``): what a caller may ask of one request, checked where it
is made.

Names, ranges and meanings are vLLM's. On the engine-core wire one value out of range can end a whole
engine, not just its request, so every range is checked here, in the head, and again by our own engine.
Parameters of vLLM that are not here yet are refused by name at the API, never ignored.

Rules of this file: pure, immutable values; imports only ``errors`` and ``messages``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .errors import InvalidRequestError
from .messages import EnginePoolingParams, EngineSamplingParams

__all__ = ["PoolingParams", "RequestOutputKind", "SamplingParams", "StopHoldBack"]


class RequestOutputKind(enum.IntEnum):
    """What each ``RequestOutput`` holds; the numbers are vLLM's."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


class StopHoldBack(enum.StrEnum):
    """How much text is withheld while a stop string may be coming."""

    OVERLAP = "overlap"  # only a suffix that really is the beginning of a stop string
    FIXED = "fixed"  # vLLM's rule: always max(len(stop)) - 1 characters


_Member = TypeVar("_Member", bound=enum.Enum)

_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1

# OpenAI's bound: every answer is a request of its own in the engine.
_N_MAX = 128
# OpenAI's bound for top_logprobs, and vLLM's default for max_logprobs.
_LOGPROBS_MAX = 20

# Every token is looked through for every stop string, between those of all other requests. OpenAI allows 4.
_STOP_MAX = 64
_STOP_CHARACTERS_MAX = 2**16

_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample, when to stop, and how to hand the text over. Raises ``InvalidRequestError``.

    n: answers to the same prompt, 1 to 128; with a seed, answer i samples with seed + i.
    temperature: 0 (greedy) to 2. The engine raises what lies between 0 and 0.01 to 0.01.
    top_p: above 0, up to 1. top_k: 0 or -1 is off, else at least 1.
    seed: makes this request's noise its own, whatever shares its batch. None: fresh noise.
    max_tokens: at least 1; None stands for all that the model's context has left.
    min_tokens: neither stop tokens nor stop strings end the request before this many tokens.
    ignore_eos: the end-of-sequence token is a token like any other.
    stop: up to 64 strings that end the text; stop_token_ids: tokens that do. Both are left out of the text,
    unless include_stop_str_in_output.
    logprobs: None, or for each token its own logprob and those of the 0 to 20 most probable ones;
    prompt_logprobs: the same for the tokens of the prompt.
    detokenize: False leaves the text empty; stop strings cannot be found then.
    skip_special_tokens: leaves special tokens out of the text. spaces_between_special_tokens: False
    takes out the space that some tokenizers' decoders write between two added tokens.
    output_kind: see ``RequestOutputKind``. stop_hold_back: see ``StopHoldBack``.
    stream_interval: hand outputs over every that many tokens (the first and the last at once). None:
    as often as ``LLMConfig.stream_interval`` allows, which holds where it is larger.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    stop_hold_back: StopHoldBack = StopHoldBack.OVERLAP
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, f"1 to {_N_MAX}", 1, _N_MAX)
        _check_number("temperature", self.temperature, "a number from 0 to 2", 0.0, 2.0)
        _check_number("top_p", self.top_p, "a number above 0 and up to 1", 0.0, 1.0)
        if self.top_p == 0:
            raise _refusal("top_p", self.top_p, "a number above 0 and up to 1")
        _check_int("top_k", self.top_k, "-1 or 0 (off), or at least 1", -1)
        if self.seed is not None:
            _check_int("seed", self.seed, "a 64-bit integer or null", _SEED_MIN, _SEED_MAX)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, "an integer of at least 1, or null", 1)
        _check_int("min_tokens", self.min_tokens, "an integer of at least 0", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            raise _refusal("min_tokens", self.min_tokens, allowed)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                allowed = f"0 to {_LOGPROBS_MAX}, or null"
                _check_int(name, getattr(self, name), allowed, 0, _LOGPROBS_MAX)
        if self.stream_interval is not None:
            allowed = "an integer of at least 1, or null"
            _check_int("stream_interval", self.stream_interval, allowed, 1)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "true or false")
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("output_kind", _member("output_kind", self.output_kind, RequestOutputKind))
        self._set("stop_hold_back", _member("stop_hold_back", self.stop_hold_back, StopHoldBack))
        if self.stop and not self.detokenize:
            allowed = "true where stop is set: stop strings are found in the text"
            raise _refusal("detokenize", self.detokenize, allowed)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def with_output_kind(self, kind: RequestOutputKind) -> SamplingParams:
        """The same parameters with another output kind."""
        return self if self.output_kind is kind else replace(self, output_kind=kind)

    def for_engine(
        self,
        *,
        max_tokens: int,
        eos_token_id: int | None,
        other_eos_token_ids: Sequence[int] = (),
        index: int = 0,
    ) -> EngineSamplingParams:
        """These parameters as an engine reads them: what the head must fill in is filled in.

        ``index``: which of the ``n`` answers it is. Only the first one needs the prompt's logprobs.
        ``max_tokens`` is the number that holds (the caller has capped it to the context);
        ``other_eos_token_ids`` are the model's further end tokens, which stop like the user's own.
        """
        eos = None if self.ignore_eos else eos_token_id
        stops = list(self.stop_token_ids)
        if not self.ignore_eos:
            stops += [i for i in other_eos_token_ids if i != eos_token_id and i not in stops]
        everything = stops if eos is None or eos in stops else [*stops, eos]
        return EngineSamplingParams(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=max(self.top_k, 0),
            seed=None if self.seed is None else _wrapped(self.seed + index),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            stop_token_ids=stops,
            eos_token_id=eos,
            all_stop_token_ids=everything,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """What a caller may ask of a pooling model. Raises ``InvalidRequestError``.

    task: what the engine is asked for; "embed" makes one vector of a prompt. dimensions: shortens the
    vector, for models that were trained for it. use_activation: whether the model's last step is done
    (for "embed": scaling to length 1).
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise _refusal("task", self.task, "the name of a pooling task, such as embed")
        if self.dimensions is not None:
            allowed = "an integer of at least 1, or null"
            _check_int("dimensions", self.dimensions, allowed, 1)
        if not isinstance(self.use_activation, bool):
            raise _refusal("use_activation", self.use_activation, "true or false")

    def for_engine(self) -> EnginePoolingParams:
        """These parameters as an engine reads them."""
        return EnginePoolingParams(
            task=self.task, dimensions=self.dimensions, use_activation=self.use_activation
        )


def _wrapped(seed: int) -> int:
    """Seeds are 64 bits: behind the largest comes the smallest."""
    return (seed - _SEED_MIN) % 2**64 + _SEED_MIN


def _refusal(name: str, value: Any, allowed: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)


def _check_number(name: str, value: Any, allowed: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(name, value, allowed)
    # Also false for NaN; and an int that no float can hold is compared all the same.
    if not low <= value <= high:
        raise _refusal(name, value, allowed)


# Integers travel as MessagePack's 64 bits; what an engine takes is smaller (it counts in int32).
_INT_MAX = 2**31 - 1


def _check_int(name: str, value: Any, allowed: str, low: int, high: int = _INT_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, value, allowed)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    allowed = "a non-empty string or a list of them"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise _refusal(name, value, allowed)
    if not all(isinstance(one, str) and one for one in strings):
        raise _refusal(name, value, allowed)
    total = sum(map(len, strings))
    if len(strings) > _STOP_MAX or total > _STOP_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"{name} has {len(strings)} strings of {total} characters in all; allowed: at most "
            f"{_STOP_MAX} strings and {_STOP_CHARACTERS_MAX} characters",
            parameter=name,
        )
    return tuple(strings)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    allowed = "a list of token ids of at least 0"
    if not isinstance(value, list | tuple):
        raise _refusal(name, value, allowed)
    for token_id in value:
        _check_int(name, token_id, allowed, 0)
    return tuple(value)


def _member(name: str, value: Any, kind: type[_Member]) -> _Member:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(one.value) for one in kind)
        raise _refusal(name, value, allowed) from None
