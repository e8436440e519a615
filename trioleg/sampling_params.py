"""``SamplingParams`` (and ``PoolingParams``): what a caller may ask of one request, checked where it
is made.

Names, ranges and meanings are vLLM's. On the engine-core wire one value out of range can end a whole
engine, not just its request, so every range is checked here, in the head, and again by our own engine.
Parameters of vLLM that are not here yet are refused by name at the API, never ignored.

Rules of this file: pure, immutable values; imports only ``messages``, ``param_checks`` and
``structured_outputs``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from .messages import EnginePoolingParams, EngineSamplingParams
from .param_checks import (
    check_int,
    check_number,
    logit_bias_of,
    member_of,
    refusal,
    strings_of,
    token_ids_of,
)
from .structured_outputs import StructuredOutputsParams

__all__ = [
    "LOGPROB_TOKEN_IDS_MAX",
    "REPETITION_PENALTY_MAX",
    "REPETITION_PENALTY_MIN",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StopHoldBack",
]


class RequestOutputKind(enum.IntEnum):
    """What each ``RequestOutput`` holds; the numbers are vLLM's."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


class StopHoldBack(enum.StrEnum):
    """How much text is withheld while a stop string may be coming."""

    OVERLAP = "overlap"  # only a suffix that really is the beginning of a stop string
    FIXED = "fixed"  # vLLM's rule: always max(len(stop)) - 1 characters


_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1

# OpenAI's bound: every answer is a request of its own in the engine.
_N_MAX = 128
# vLLM's bound: each is a figure of every token's answer.
LOGPROB_TOKEN_IDS_MAX = 128

# Every token is looked through for every stop string, between those of all other requests. OpenAI allows 4.
_STOP_MAX = 64
_STOP_CHARACTERS_MAX = 2**16
# vLLM's bound for what becomes of them as token ids. They are tokenized between other requests' tokens, which
# for so many characters takes some milliseconds.
_BAD_WORDS_MAX = 128
_BAD_WORDS_CHARACTERS_MAX = 2**13

# It divides and multiplies logits, which are to stay numbers. People use 1 to 2.
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.001, 1000.0

# The numbers and their ranges.
_NUMBERS = {
    "temperature": ("a number from 0 to 2", 0.0, 2.0),
    "top_p": ("a number above 0 and up to 1", math.ulp(0.0), 1.0),
    "min_p": ("a number from 0 to 1", 0.0, 1.0),
    "presence_penalty": ("a number from -2 to 2", -2.0, 2.0),
    "frequency_penalty": ("a number from -2 to 2", -2.0, 2.0),
    "repetition_penalty": (
        f"a number from {REPETITION_PENALTY_MIN} to {REPETITION_PENALTY_MAX}",
        REPETITION_PENALTY_MIN,
        REPETITION_PENALTY_MAX,
    ),
}

_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepetitionDetectionParams:
    """When generated tokens count as an endless repetition, which ends the request. Raises
    ``InvalidRequestError``.

    The last tokens are some pattern of min_pattern_size (0 stands for 1) to max_pattern_size tokens,
    min_count times in a row. max_pattern_size 0 is off; else min_count is at least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        prefix = "repetition_detection."
        check_int(f"{prefix}max_pattern_size", self.max_pattern_size, "an integer of at least 0", 0)
        allowed = f"0 to max_pattern_size, which is {self.max_pattern_size}"
        name = f"{prefix}min_pattern_size"
        check_int(name, self.min_pattern_size, allowed, 0, self.max_pattern_size)
        least = 2 if self.max_pattern_size else 0
        check_int(f"{prefix}min_count", self.min_count, f"an integer of at least {least}", least)

    @classmethod
    def of(cls, value: Any) -> RepetitionDetectionParams | None:
        """From an object of JSON or of the wire; None for None. Raises ``InvalidRequestError``."""
        if value is None or isinstance(value, cls):
            return value
        names = [one.name for one in fields(cls)]
        if not isinstance(value, Mapping) or not value.keys() <= set(names):
            raise refusal("repetition_detection", value, f"an object of {', '.join(names)}")
        return cls(**value)

    def finds(self, token_ids: Sequence[int]) -> bool:
        """True if the last of the generated ``token_ids`` are such a repetition."""
        for size in range(max(self.min_pattern_size, 1), self.max_pattern_size + 1):
            span = size * self.min_count
            if span > len(token_ids):
                return False
            # The first look spares the copies: it fails for nearly every size.
            if token_ids[-1] == token_ids[-1 - size]:
                tail = token_ids[-span:]
                if tail[size:] == tail[:-size]:
                    return True
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample, when to stop, and how to hand the text over. Raises ``InvalidRequestError``.

    n: answers to the same prompt, 1 to 128; with a seed, answer i samples with seed + i.
    temperature: 0 (greedy) to 2. The engine raises what lies between 0 and 0.01 to 0.01.
    top_p: above 0, up to 1. top_k: 0 or -1 is off, else at least 1. min_p: 0 to 1, the least probability
    of a token as a share of the most probable one's.
    presence_penalty, frequency_penalty: -2 to 2, subtracted from the logit of a token that was
    generated before, once or for each time. repetition_penalty: 0.001 to 1000; divides the positive logits
    of tokens that were generated or are in the prompt, and multiplies the negative ones.
    logit_bias: a number from -100 to 100 for each token id, added to its logit; a MappingProxyType,
    so parameters with a bias have no hash.
    allowed_token_ids: None for all. bad_words: up to 128 strings that are not generated, with or
    without a space before them (as they are tokenized alone: other spellings are not found).
    seed: makes this request's noise its own, whatever shares its batch. None: fresh noise.
    max_tokens: at least 1; None stands for all that the model's context has left.
    min_tokens: neither stop tokens nor stop strings end the request before this many tokens.
    ignore_eos: the end-of-sequence token is a token like any other.
    stop: up to 64 strings that end the text; stop_token_ids: tokens that do. Both are left out of the text,
    unless include_stop_str_in_output.
    logprobs: None, or for each token its own logprob and those of so many of the most probable ones
    (-1: of all), as far as the engine's max_logprobs goes; prompt_logprobs: the same for the tokens of
    the prompt. logprob_token_ids: in place of the most probable ones, up to 128 tokens to have the
    logprobs of; logprobs is None then, or their number.
    repetition_detection: see ``RepetitionDetectionParams``; a mapping of its fields will do.
    detokenize: False leaves the text empty; stop strings cannot be found then.
    skip_special_tokens: leaves special tokens out of the text. spaces_between_special_tokens: False
    takes out the space that some tokenizers' decoders write between two added tokens.
    output_kind: see ``RequestOutputKind``. stop_hold_back: see ``StopHoldBack``.
    stream_interval: hand outputs over every that many tokens (the first and the last at once). None:
    as often as ``LLMConfig.stream_interval`` allows, which holds where it is larger.
    structured_outputs: what the answer must look like. Where it may only end, it ends, whatever min_tokens
    says; and where it ends, ignore_eos does not make it go on.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    stop_hold_back: StopHoldBack = StopHoldBack.OVERLAP
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, f"1 to {_N_MAX}", 1, _N_MAX)
        for name, (allowed, low, high) in _NUMBERS.items():
            check_number(name, getattr(self, name), allowed, low, high)
        check_int("top_k", self.top_k, "-1 or 0 (off), or at least 1", -1)
        self._check_counts()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            allowed = "StructuredOutputsParams or None"
            raise refusal("structured_outputs", self.structured_outputs, allowed)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise refusal(name, getattr(self, name), "true or false")
        self._set("output_kind", member_of("output_kind", self.output_kind, RequestOutputKind))
        self._set("stop_hold_back", member_of("stop_hold_back", self.stop_hold_back, StopHoldBack))
        self._keep_strings()
        self._keep_token_ids()
        detection = RepetitionDetectionParams.of(self.repetition_detection)
        self._set("repetition_detection", detection)

    def _check_counts(self) -> None:
        if self.seed is not None:
            check_int("seed", self.seed, "a 64-bit integer or null", _SEED_MIN, _SEED_MAX)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, "an integer of at least 1, or null", 1)
        check_int("min_tokens", self.min_tokens, "an integer of at least 0", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            raise refusal("min_tokens", self.min_tokens, allowed)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), "-1 (all), at least 0, or null", -1)
        if self.stream_interval is not None:
            allowed = "an integer of at least 1, or null"
            check_int("stream_interval", self.stream_interval, allowed, 1)

    def _keep_strings(self) -> None:
        stop = strings_of("stop", self.stop, count=_STOP_MAX, characters=_STOP_CHARACTERS_MAX)
        if stop and not self.detokenize:
            allowed = "true where stop is set: stop strings are found in the text"
            raise refusal("detokenize", self.detokenize, allowed)
        self._set("stop", stop)
        bad_words = strings_of(
            "bad_words",
            self.bad_words,
            count=_BAD_WORDS_MAX,
            characters=_BAD_WORDS_CHARACTERS_MAX,
        )
        for word in bad_words:
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise refusal("bad_words", word, "Unicode characters, no half of a surrogate pair")
        self._set("bad_words", bad_words)

    def _keep_token_ids(self) -> None:
        self._set("stop_token_ids", token_ids_of("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed_ids = token_ids_of("allowed_token_ids", self.allowed_token_ids)
            if not allowed_ids:
                raise refusal("allowed_token_ids", [], "at least one token id, or null")
            self._set("allowed_token_ids", allowed_ids)
        if self.logit_bias is not None:
            bias = logit_bias_of("logit_bias", self.logit_bias)
            self._set("logit_bias", MappingProxyType(bias) if bias else None)
        name = "logprob_token_ids"
        ids = token_ids_of(name, self.logprob_token_ids, count=LOGPROB_TOKEN_IDS_MAX)
        if ids and self.logprobs not in (None, len(ids)):
            allowed = f"null, or {len(ids)}, as many as there are logprob_token_ids"
            raise refusal("logprobs", self.logprobs, allowed)
        self._set(name, ids)

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
        bad_words_token_ids: Sequence[list[int]] = (),
        index: int = 0,
    ) -> EngineSamplingParams:
        """These parameters as an engine reads them: what the head must fill in is filled in.

        ``index``: which of the ``n`` answers it is. Only the first one needs the prompt's logprobs.
        ``max_tokens`` is the number that holds (the caller has capped it to the context);
        ``other_eos_token_ids`` are the model's further end tokens, which stop like the user's own;
        ``bad_words_token_ids`` what the tokenizer makes of ``bad_words``.
        """
        eos = None if self.ignore_eos else eos_token_id
        stops = list(self.stop_token_ids)
        if not self.ignore_eos:
            stops += [i for i in other_eos_token_ids if i != eos_token_id and i not in stops]
        detection = RepetitionDetectionParams.of(self.repetition_detection)
        everything = stops if eos is None or eos in stops else [*stops, eos]
        return EngineSamplingParams(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=max(self.top_k, 0),
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=None if self.logit_bias is None else dict(self.logit_bias),
            allowed_token_ids=_list_or_none(self.allowed_token_ids),
            bad_words_token_ids=_list_or_none(bad_words_token_ids),
            seed=None if self.seed is None else _wrapped(self.seed + index),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            logprob_token_ids=_list_or_none(self.logprob_token_ids),
            repetition_detection=None if detection is None else asdict(detection),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            stop_token_ids=stops,
            eos_token_id=eos,
            all_stop_token_ids=everything,
            structured_outputs=(
                None if self.structured_outputs is None else self.structured_outputs.for_engine()
            ),
        )


def _list_or_none(values: Sequence[Any] | None) -> list[Any] | None:
    return list(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """What a caller may ask of a pooling model. Raises ``InvalidRequestError``.

    task: what the engine is asked for; "embed" makes one vector of a prompt. dimensions: shortens the
    vector, for models that were trained for it. use_activation: whether the model's last step is done
    (for "embed": scaling to length 1); None: as the model is meant to be used.
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise refusal("task", self.task, "the name of a pooling task, such as embed")
        if self.dimensions is not None:
            allowed = "an integer of at least 1, or null"
            check_int("dimensions", self.dimensions, allowed, 1)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise refusal("use_activation", self.use_activation, "true, false or null")

    def for_engine(self) -> EnginePoolingParams:
        """These parameters as an engine reads them."""
        return EnginePoolingParams(
            task=self.task,
            dimensions=self.dimensions,
            # Most models' default; an engine would take None for no.
            use_activation=self.use_activation is not False,
        )


def _wrapped(seed: int) -> int:
    """Seeds are 64 bits: behind the largest comes the smallest."""
    return (seed - _SEED_MIN) % 2**64 + _SEED_MIN
