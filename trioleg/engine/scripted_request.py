"""A request as the scripted engine has it: what it gets step by step, and where it ends.

Rules of this file: pure; one request at a time (queue, blocks and steps are ``scripted.py``'s).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InvalidRequestError
from ..messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineSamplingParams,
    FinishReason,
    PrefillStats,
)
from .script import Script

__all__ = ["ScriptedRequest", "accept_request"]

_NEEDS_A_MODEL = ("logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs")


# Compared by identity: two requests may well be alike.
@dataclass(slots=True, eq=False)
class ScriptedRequest:
    """``limit`` is how many tokens max_tokens and the context leave room for, ``blocks`` what these
    and the prompt take, ``number`` counts arrivals from 0. Times are the core's clock."""

    number: int
    request_id: str
    client_index: int
    prompt_length: int
    params: EngineSamplingParams
    limit: int
    blocks: int
    # The ids of each step, and whether it is the script's last.
    steps: Iterator[tuple[list[int], bool]]
    finish: FinishReason
    prefill_left: int
    arrived_at: float
    admitted_at: float = 0.0
    ready_at: float = 0.0
    made: int = 0
    bad_token_id: int | None = None

    def advance(self) -> EngineCoreOutput:
        """The next step's output; the last one has a finish_reason."""
        ids, is_last = next(self.steps)
        if self.bad_token_id is not None:
            ids = [self.bad_token_id, *ids[1:]]
            self.bad_token_id = None
        ids, reason, stop_id = self._end_in(ids)
        if reason is None and is_last:
            reason = self.finish
        output = EngineCoreOutput(self.request_id, ids, finish_reason=reason, stop_reason=stop_id)
        if self.made == 0:
            self._add_first_figures(output)
        self.made += len(ids)
        return output

    def _end_in(self, ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """A step's ids up to the request's own end, and that end, in the order of a real engine."""
        for count, token_id in enumerate(ids, start=1):
            made = self.made + count
            if made >= self.params.min_tokens:
                if token_id == self.params.eos_token_id and not self.params.ignore_eos:
                    return ids[:count], FinishReason.STOP, None
                if token_id in self.params.stop_token_ids:
                    return ids[:count], FinishReason.STOP, token_id
            if made >= self.limit:
                return ids[:count], FinishReason.LENGTH, None
        return ids, None, None

    def _add_first_figures(self, output: EngineCoreOutput) -> None:
        output.events = [
            EngineCoreEvent(EngineCoreEvent.QUEUED, self.arrived_at),
            EngineCoreEvent(EngineCoreEvent.SCHEDULED, self.admitted_at),
        ]
        output.prefill_stats = PrefillStats(
            num_prompt_tokens=self.prompt_length, num_computed_tokens=self.prompt_length
        )


def accept_request(
    request: EngineCoreRequest, script: Script, *, number: int, now: float
) -> ScriptedRequest:
    """The request as ``script`` serves it. Raises ``InvalidRequestError`` if it cannot be served."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None:
        raise InvalidRequestError(
            "sampling_params is missing; allowed: a map of them", parameter="sampling_params"
        )
    for name in _NEEDS_A_MODEL:
        if getattr(params, name) is not None:
            raise InvalidRequestError(
                f"{name} is set, which a scripted engine cannot honour; allowed: none",
                parameter=name,
            )
    length = len(prompt or [])
    if not 1 <= length < script.max_model_len:
        raise InvalidRequestError(
            f"prompt_token_ids has {length} tokens; allowed: 1 to {script.max_model_len - 1} "
            "(max_model_len - 1)",
            parameter="prompt_token_ids",
        )
    room = script.max_model_len - length
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    blocks = script.blocks_for(length + limit)
    if blocks > script.blocks:
        raise InvalidRequestError(
            f"max_tokens may need {blocks} blocks; allowed: {script.blocks}, all that there are",
            parameter="max_tokens",
        )
    return ScriptedRequest(
        number=number,
        request_id=request.request_id,
        client_index=request.client_index,
        prompt_length=length,
        params=params,
        limit=limit,
        blocks=blocks,
        steps=_play(script),
        finish=FinishReason[script.finish.upper()],
        prefill_left=script.prefill_chunks,
        arrived_at=now,
    )


def _play(script: Script) -> Iterator[tuple[list[int], bool]]:
    if script.steps:
        last = len(script.steps) - 1
        return zip(script.steps, (number == last for number in itertools.count()), strict=False)
    ids = itertools.cycle(script.token_ids)
    batches = iter(lambda: list(itertools.islice(ids, script.tokens_per_step)), [])
    return zip(batches, itertools.repeat(False), strict=False)
