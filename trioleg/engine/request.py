"""One request inside the engine: its tokens, its blocks, its own noise, and when it stops.

Rules of this file: pure Python, no torch, no trio. A ``Request`` is made of a wire request that
``validation.py`` has passed, and belongs to one scheduler.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError
from ..messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    EngineSamplingParams,
    FinishReason,
    LogprobsTensors,
)
from ..sampling_params import RepetitionDetectionParams
from .kv_cache import root_hash
from .logprob_rows import LogprobRows
from .token_rules import TokenRules

if TYPE_CHECKING:
    from .grammar import Grammar

__all__ = ["Request", "Stop"]

# Below it a temperature would only amplify rounding. vLLM raises to the same value.
_MIN_TEMPERATURE = 0.01

# The parameters that can leave a step without any token.
_CAN_FORBID = {
    "min_tokens": "min_tokens",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words_token_ids": "bad_words",
    "structured_outputs": "structured_outputs",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a request is finished, as the wire says it."""

    reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(eq=False, slots=True)
class Request:
    """A live request. ``token_ids`` is the prompt and, behind it, all that was generated.

    ``num_computed_tokens`` of them have their keys and values in ``block_ids``; a preempted request
    starts again at 0 and keeps its tokens. ``noise`` is drawn from once a sampled token and never for a
    recomputed one, so a seeded request's noise is the same whatever shares its batch. (Its logits are so
    only up to rounding: in bfloat16 another batch can tip a close draw.)
    """

    request_id: str
    client_index: int
    params: EngineSamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    noise: random.Random
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    # Forbidden until min_tokens are out; only ids of the vocabulary.
    masked_token_ids: list[int]
    # What else its parameters do to its logits; None for nothing.
    rules: TokenRules | None
    repetition_detection: RepetitionDetectionParams | None
    # Columns of a generated token's logprobs beside its own; None if nobody asks.
    num_logprobs: int | None
    priority: int = 0
    # Where it stands among all requests: the scheduler's, and fixed once it is queued.
    place: tuple[int, int] = (0, 0)
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    # Names of its full blocks so far, and of what stands before the first one (kv_cache.py).
    root_hash: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    # What the scores of a prompt are made of must be computed, whatever the cache holds.
    skips_prefix_cache: bool = False
    # Tokens that were there when it was first admitted; None before that.
    num_cached_tokens: int | None = None
    events: list[EngineCoreEvent] = field(default_factory=list)
    # What is known of the prompt's tokens so far; None if nobody asks, or once it was taken.
    prompt_logprobs: LogprobRows | None = None
    # What the answer must look like; set before the request is scheduled.
    grammar: Grammar | None = None

    @classmethod
    def from_wire(cls, wire: EngineCoreRequest, *, vocab_size: int) -> Request:
        """The request of a wire request that ``check_request`` has passed."""
        params, prompt = wire.sampling_params, wire.prompt_token_ids
        assert params is not None
        assert prompt is not None
        assert params.max_tokens is not None
        eos = None if params.ignore_eos else params.eos_token_id
        stops = frozenset(params.stop_token_ids)
        masked = stops | set(params.all_stop_token_ids) | ({eos} if eos is not None else set())
        return cls(
            request_id=wire.request_id,
            client_index=wire.client_index,
            params=params,
            num_prompt_tokens=len(prompt),
            token_ids=list(prompt),
            max_tokens=params.max_tokens,
            temperature=max(params.temperature, _MIN_TEMPERATURE) if params.temperature else 0.0,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            noise=_noise(params.seed),
            eos_token_id=eos,
            stop_token_ids=stops,
            masked_token_ids=sorted(i for i in masked if 0 <= i < vocab_size),
            priority=wire.priority,
            root_hash=root_hash(wire.cache_salt),
            skips_prefix_cache=_skips_prefix_cache(params),
            rules=TokenRules.of(params, prompt),
            repetition_detection=RepetitionDetectionParams.of(params.repetition_detection),
            num_logprobs=_num_logprobs(params, vocab_size),
            prompt_logprobs=(
                None
                if params.prompt_logprobs is None
                else LogprobRows(_columns(params.prompt_logprobs, vocab_size))
            ),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_short(self) -> bool:
        """True until ``min_tokens`` are out."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def forbidden_token_ids(self) -> list[int]:
        """What may not be sampled now: stop tokens below ``min_tokens``, and ends of bad words."""
        forbidden = self.masked_token_ids if self.must_go_on else []
        if self.rules is None:
            return forbidden
        return forbidden + self.rules.bad_token_ids(self.token_ids, self.num_output_tokens)

    def refusal_of_all_tokens(self) -> InvalidRequestError:
        """What to answer where its parameters leave no token."""
        names = [shown for name, shown in _CAN_FORBID.items() if getattr(self.params, name)]
        together = "together " if len(names) > 1 else ""
        return InvalidRequestError(
            f"no token can be sampled: {', '.join(names)} {together}forbid every token; allowed: "
            "parameters that leave one",
            parameter=names[0] if names else None,
        )

    @property
    def must_go_on(self) -> bool:
        """No stop token may be sampled: it ``is_short``, and no grammar says that it has to end."""
        return self.is_short and not (self.grammar is not None and self.grammar.forces_end)

    def append(self, token_id: int, *, max_model_len: int) -> Stop | None:
        """Takes a sampled token. Returns why the request is finished by it, or None.

        An end token where its grammar has one finishes it, whatever ``ignore_eos`` says. Raises
        ``InvalidRequestError`` for a grammar that cannot be followed any further.
        """
        self.token_ids.append(token_id)
        is_complete = self.grammar is not None and self.grammar.accept(token_id)
        if self.rules is not None:
            self.rules.add(token_id)
        if token_id == self.eos_token_id:
            return Stop(FinishReason.STOP)
        if token_id in self.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        if is_complete:
            return Stop(FinishReason.STOP)
        if self.num_output_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            return Stop(FinishReason.LENGTH)
        if self.repetition_detection is not None and not self.is_short:
            generated = self.token_ids[self.num_prompt_tokens :]
            if self.repetition_detection.finds(generated):
                return Stop(FinishReason.REPETITION, "repetition_detected")
        return None

    def record(self, event_type: int) -> None:
        """Notes an event of the request's life; it travels with the next output."""
        self.events.append(EngineCoreEvent(type=event_type, timestamp=time.monotonic()))

    def take_events(self) -> list[EngineCoreEvent] | None:
        events, self.events = self.events, []
        return events or None

    def take_prompt_logprobs(self) -> LogprobsTensors | None:
        """The prompt's logprobs, once, when its last token has been computed."""
        rows, self.prompt_logprobs = self.prompt_logprobs, None
        return None if rows is None else rows.tensors()


def _skips_prefix_cache(params: EngineSamplingParams) -> bool:
    return params.prompt_logprobs is not None or bool(params.skip_reading_prefix_cache)


def _columns(logprobs: int, vocab_size: int) -> int:
    """-1 stands for all that there are."""
    return vocab_size if logprobs == -1 else logprobs


def _num_logprobs(params: EngineSamplingParams, vocab_size: int) -> int | None:
    if params.logprob_token_ids:
        return len(params.logprob_token_ids)
    return None if params.logprobs is None else _columns(params.logprobs, vocab_size)


def _noise(seed: int | None) -> random.Random:
    """Noise of its own. ``random.Random`` drops an int's sign, so a seed goes in as 64 unsigned bits."""
    return random.Random() if seed is None else random.Random(seed % 2**64)
