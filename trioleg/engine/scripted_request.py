"""A request as the scripted engine has it: what it gets step by step, and where it ends.

Rules of this file: pure; one request at a time (queue, blocks and steps are ``scripted.py``'s).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import InvalidRequestError
from ..messages import (
    ArrayData,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EnginePoolingParams,
    EngineSamplingParams,
    FinishReason,
    NdArray,
    PrefillStats,
)
from .script import Fault, Script
from .scripted_logprobs import score

__all__ = ["ScriptedRequest", "accept_request"]

_FAILURE = "the script says that this request fails"
_NEEDS_A_MODEL = ("logprob_token_ids", "structured_outputs")
_CONSTRAINT = "structured_outputs"
# As the torch engine's: vLLM's default for max_logprobs.
_MAX_LOGPROBS = 20


# Compared by identity: two requests may well be alike.
@dataclass(slots=True, eq=False)
class ScriptedRequest:
    """``limit`` is how many tokens max_tokens and the context leave room for, ``blocks`` what these
    and the prompt take, ``number`` counts arrivals from 0. Times are the core's clock. ``pooling`` is
    the whole answer of a pooling request, which has no steps and only the default ``params``.
    ``faults`` are those that wait for the request's own ``num_steps``, ``fault`` the one that strikes in the next."""

    number: int
    request_id: str
    client_index: int
    prompt: list[int]
    params: EngineSamplingParams
    script: Script
    limit: int
    blocks: int
    # The ids of each step, and whether it is the script's last.
    steps: Iterator[tuple[list[int], bool]]
    pooling: list[float]
    prefill_left: int
    arrived_at: float
    admitted_at: float = 0.0
    ready_at: float = 0.0
    made: int = 0
    num_steps: int = 0
    faults: list[Fault] = field(default_factory=list)
    fault: Fault | None = None

    def advance(self, now: float) -> EngineCoreOutput:
        """The next step's output; the last one has a finish_reason. ``now`` is the core's clock."""
        self.num_steps += 1
        self.ready_at = now + self.script.delays_s.get(self.num_steps, 0.0)
        fault, self.fault = self.fault, None
        if fault is not None and fault.how == "error":
            return EngineCoreOutput(
                self.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=_FAILURE
            )
        if self.pooling:
            return self._pool()
        ids, is_last = next(self.steps)
        if fault is not None:
            ids = [fault.token_id, *ids[1:]]
        ids, reason, stop_id = self._end_in(ids)
        if reason is None and is_last:
            reason = FinishReason[self.script.finish.upper()]
        output = EngineCoreOutput(self.request_id, ids, finish_reason=reason, stop_reason=stop_id)
        if ids:
            self._add_logprobs(output)
        if self.made == 0:
            self._add_first_figures(output)
        self.made += len(ids)
        return output

    def _pool(self) -> EngineCoreOutput:
        data = ArrayData(memoryview(array("f", self.pooling)))
        vector = NdArray("float32", [len(self.pooling)], data)
        output = EngineCoreOutput(
            self.request_id, [], pooling_output=vector, finish_reason=FinishReason.STOP
        )
        self._add_first_figures(output)
        return output

    def _add_logprobs(self, output: EngineCoreOutput) -> None:
        k, prompt_k = self.params.logprobs, self.params.prompt_logprobs
        if k is not None:
            output.new_logprobs = score(output.new_token_ids, k, self.script.odd_logprobs).lists()
        if prompt_k is not None and self.made == 0:
            rows = score(self.prompt[1:], prompt_k, self.script.odd_logprobs)
            output.new_prompt_logprobs_tensors = rows.tensors()

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
            num_prompt_tokens=len(self.prompt), num_computed_tokens=len(self.prompt)
        )


def accept_request(
    request: EngineCoreRequest, script: Script, *, number: int, now: float
) -> ScriptedRequest:
    """The request as ``script`` serves it. Raises ``InvalidRequestError`` if it cannot be served."""
    params, prompt = _params(request, script), request.prompt_token_ids or []
    pooling = _pooling(request.pooling_params, script)
    # A pooling request needs no room for a token of its own.
    longest = script.max_model_len - (0 if pooling else 1)
    if not 1 <= len(prompt) <= longest:
        value = f"{len(prompt)} tokens long"
        raise _refusal("prompt_token_ids", value, f"1 to {longest} tokens, by max_model_len")
    room = 0 if pooling else script.max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    blocks = script.blocks_for(len(prompt) + limit)
    if blocks > script.blocks:
        value = f"{params.max_tokens}, which may need {blocks} blocks"
        raise _refusal("max_tokens", value, f"{script.blocks} blocks, all that there are")
    return ScriptedRequest(
        number=number,
        request_id=request.request_id,
        client_index=request.client_index,
        prompt=prompt,
        params=params,
        script=script,
        limit=limit,
        blocks=blocks,
        steps=_play(script),
        pooling=pooling,
        prefill_left=script.prefill_chunks,
        arrived_at=now,
    )


def _params(request: EngineCoreRequest, script: Script) -> EngineSamplingParams:
    if (request.sampling_params is None) == (request.pooling_params is None):
        value = "not there" if request.sampling_params is None else "there with pooling_params"
        raise _refusal("sampling_params", value, "one of sampling_params and pooling_params")
    params = request.sampling_params or EngineSamplingParams()
    for name in _NEEDS_A_MODEL:
        is_taken = script.takes_constraints and name == _CONSTRAINT
        if getattr(params, name) is not None and not is_taken:
            raise _refusal(name, getattr(params, name), "None, since this engine has no model")
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and not 0 <= k <= _MAX_LOGPROBS:
            raise _refusal(name, k, f"0 to {_MAX_LOGPROBS}, or None")
    return params


def _pooling(params: EnginePoolingParams | None, script: Script) -> list[float]:
    """What answers a pooling request; empty for one that samples."""
    if params is None:
        return []
    if not script.pooling:
        raise _refusal("pooling_params", params, "None, since the script has no pooling")
    if params.task != "embed":
        raise _refusal("task", params.task, "embed")
    most = len(script.pooling)
    if params.dimensions is not None and not 1 <= params.dimensions <= most:
        raise _refusal("dimensions", params.dimensions, f"1 to {most}, or None")
    return script.pooling[: params.dimensions]


def _refusal(name: str, value: object, allowed: str) -> InvalidRequestError:
    shown = value if isinstance(value, str) else repr(value)
    return InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", parameter=name)


def _play(script: Script) -> Iterator[tuple[list[int], bool]]:
    if script.steps:
        last = len(script.steps) - 1
        return zip(script.steps, (number == last for number in itertools.count()), strict=False)
    ids = itertools.cycle(script.token_ids)
    batches = iter(lambda: list(itertools.islice(ids, script.tokens_per_step)), [])
    return zip(batches, itertools.repeat(False), strict=False)
