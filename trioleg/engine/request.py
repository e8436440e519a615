"""One request inside the engine: its tokens, its blocks, its own noise, and when it stops.

Rules of this file: pure Python, no torch, no trio. A ``Request`` is made of a wire request that
``validation.py`` has passed, and belongs to one scheduler.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from ..messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    EngineSamplingParams,
    FinishReason,
    LogprobsTensors,
)
from .logprob_rows import LogprobRows

__all__ = ["Request", "Stop"]

# Below it a temperature would only amplify rounding. vLLM raises to the same value.
_MIN_TEMPERATURE = 0.01


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
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    events: list[EngineCoreEvent] = field(default_factory=list)
    # What is known of the prompt's tokens so far; None if nobody asks, or once it was taken.
    prompt_logprobs: LogprobRows | None = None

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
            prompt_logprobs=(
                None if params.prompt_logprobs is None else LogprobRows(params.prompt_logprobs)
            ),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def must_go_on(self) -> bool:
        """True until ``min_tokens`` are out: no stop token may be sampled."""
        return self.num_output_tokens < self.params.min_tokens

    def append(self, token_id: int, *, max_model_len: int) -> Stop | None:
        """Takes a sampled token. Returns why the request is finished by it, or None."""
        self.token_ids.append(token_id)
        if token_id == self.eos_token_id:
            return Stop(FinishReason.STOP)
        if token_id in self.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        if self.num_output_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            return Stop(FinishReason.LENGTH)
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


def _noise(seed: int | None) -> random.Random:
    """Noise of its own. ``random.Random`` drops an int's sign, so a seed goes in as 64 unsigned bits."""
    return random.Random() if seed is None else random.Random(seed % 2**64)
