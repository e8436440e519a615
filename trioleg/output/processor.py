"""``OutputProcessor``: the one loop over the outputs of a step.

Pure. For each output: find the request, take its tokens in, make what its reader gets, and hand that
to the request's sink, or, for a request without one, into the returned list. What the loop finds out
about endings it only reports; ending a request is the runtime's business.

A fault in one request's output (a bad id, a decoder's fault, a bug of ours) ends that request and no
other. Every per-request job belongs into this loop: a second pass over the batch would cost as much
again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import OutputError
from ..messages import (
    ENGINE_SHUTTING_DOWN,
    EngineCoreOutput,
    FinishReason,
    RequestError,
    read_refusal,
)
from ..outputs import Ending, EndingKind, PoolingRequestOutput, RequestMetrics, RequestOutput
from ..sampling_params import SamplingParams
from .arrays import Frames
from .pooling import PoolingState
from .request_state import ChoiceState, RequestState
from .stats import FinishedRequest, IterationStats

__all__ = ["OutputProcessor", "ProcessedOutputs", "ProcessorStatistics"]

_log = logging.getLogger("trioleg.output")

_FINISHED = {
    FinishReason.STOP: EndingKind.STOP,
    FinishReason.LENGTH: EndingKind.LENGTH,
    FinishReason.REPETITION: EndingKind.REPETITION,
}

_Output: TypeAlias = RequestOutput | PoolingRequestOutput


@dataclass(slots=True)
class ProcessedOutputs:
    """What one call of ``process`` found.

    ``request_outputs``: outputs of the requests without a sink. ``endings``: request ids with why they
    ended. ``aborts``: ids, as the engine knows them, that it works on in vain: a stop string ended
    them here. ``unknown``: ids of outputs that belong to no request (any more).
    """

    request_outputs: list[_Output] = field(default_factory=list)
    endings: list[tuple[str, Ending]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProcessorStatistics:
    """``requests``: live now. ``outputs``, ``tokens``: taken in since the start."""

    requests: int
    outputs: int
    tokens: int


@dataclass(slots=True)
class _Step:
    """What one call of ``process`` was given, and what it found."""

    frames: Frames
    timestamp: float
    now: float
    stats: IterationStats | None
    processed: ProcessedOutputs


class OutputProcessor:
    """Owns the states of all live requests of one engine link."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestState | PoolingState] = {}
        # By the ids that the engine knows: what it may still send outputs for.
        self._choices: dict[str, ChoiceState | PoolingState] = {}
        self._outputs = 0
        self._tokens = 0

    def statistics(self) -> ProcessorStatistics:
        return ProcessorStatistics(len(self._requests), self._outputs, self._tokens)

    def find(self, engine_request_id: str) -> ChoiceState | PoolingState | None:
        """The choice that the engine works on under this id, for those who want to look at it."""
        return self._choices.get(engine_request_id)

    def add_request(self, state: RequestState | PoolingState) -> None:
        """Know the request from now on. To be called before its ADD leaves."""
        if state.request_id in self._requests:
            raise ValueError(f"request id {state.request_id!r} is live already")
        self._requests[state.request_id] = state
        for choice in state.choices:
            self._choices[choice.engine_request_id] = choice

    def end_request(self, request_id: str) -> list[str]:
        """Forget the request (unknown ids are fine), giving its reader what was held back.

        Returns the ids under which the engine may still be at it: they need an ABORT.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        live = [i.engine_request_id for i in state.choices if i.engine_request_id in self._choices]
        for engine_request_id in live:
            del self._choices[engine_request_id]
        if state.sink is not None:
            held_back = state.release()
            if held_back is not None:
                state.sink.put(held_back)
        return live

    def process(
        self,
        outputs: Iterable[EngineCoreOutput],
        *,
        frames: Frames = (),
        timestamp: float = 0.0,
        now: float = 0.0,
        stats: IterationStats | None = None,
    ) -> ProcessedOutputs:
        """Take in outputs of one step. Never raises for what an output holds.

        ``frames``: those of the message, for outputs with arrays. ``timestamp``: the engine's clock at
        this step; ``now``: ours, when it was received. ``stats`` is added to.
        """
        processed = ProcessedOutputs()
        step = _Step(frames, timestamp, now, stats, processed)
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                processed.unknown.append(output.request_id)
                continue
            if choice.request.has_failed:
                # Another choice's fault has ended this one, too; it is only not known yet outside.
                continue
            try:
                if isinstance(choice, PoolingState):
                    ending = self._process_pooling(choice, output, step)
                else:
                    ending = self._process_one(choice, output, step)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's alone
                ending = Ending(EndingKind.OUTPUT_ERROR, str(error) or repr(error))
                # What an engine got wrong is a sentence; what we got wrong needs its traceback.
                trace = None if isinstance(error, OutputError) else error
                _log.warning("request %s: %s", choice.request.request_id, error, exc_info=trace)
            if ending is not None:
                choice.request.has_failed = ending.error() is not None
                processed.endings.append((choice.request.request_id, ending))
        return processed

    # ------------------------------------------------------------------ one output

    def _process_one(
        self, choice: ChoiceState, output: EngineCoreOutput, step: _Step
    ) -> Ending | None:
        finish = output.finish_reason
        self._outputs += 1
        self._tokens += len(output.new_token_ids)
        if finish is not None:
            del self._choices[output.request_id]
            if finish is FinishReason.ERROR:
                return _engine_error(output, choice.request.params)
        _note_times(choice, output, step)
        stop = choice.update(output, step.frames)
        if finish is FinishReason.ABORT:
            return _engine_abort(output.stop_reason)
        if finish is not None or stop is not None:
            return self._finish_one(choice, output, stop, step)
        completion = choice.make_output()
        if completion is None:
            return None
        request = choice.request
        has_room = _hand_on(request, request.make_request_output(completion), step)
        return None if has_room else _READER_TOO_SLOW

    def _finish_one(
        self, choice: ChoiceState, output: EngineCoreOutput, stop: str | None, step: _Step
    ) -> Ending | None:
        finish, stop_reason = output.finish_reason, output.stop_reason
        kind = EndingKind.STOP_STRING if finish is None else _FINISHED[finish]
        stop = choice.flush() if stop is None else stop
        if stop is not None:
            # The engine may have reached an end of its own with the same step.
            if self._choices.pop(output.request_id, None) is not None:
                step.processed.aborts.append(output.request_id)
            finish, stop_reason, kind = FinishReason.STOP, stop, EndingKind.STOP_STRING
        completion = choice.make_last_output(str(finish), stop_reason)
        metrics = choice.times.metrics(choice.num_output_tokens, step.now)
        request = choice.request
        has_room = _hand_on(request, request.make_request_output(completion, metrics), step)
        if not request.is_finished:
            return None if has_room else _READER_TOO_SLOW
        del self._requests[request.request_id]
        _note_finished(request, kind, metrics, step)
        return Ending(kind, stop or "")

    def _process_pooling(
        self, state: PoolingState, output: EngineCoreOutput, step: _Step
    ) -> Ending | None:
        self._outputs += 1
        if output.events:
            state.times.note_events(output.events)
        if output.finish_reason is None:
            return None
        del self._choices[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            return _engine_error(output)
        if output.finish_reason is FinishReason.ABORT:
            return _engine_abort(output.stop_reason)
        _hand_on(state, state.make_request_output(output, step.frames, step.now), step)
        del self._requests[state.request_id]
        return Ending(_FINISHED[output.finish_reason])


_READER_TOO_SLOW = Ending(
    EndingKind.READER_TOO_SLOW,
    "the reader has fallen too far behind: its unread output has reached the bound",
)


def _engine_abort(reason: int | str | None) -> Ending:
    if reason == ENGINE_SHUTTING_DOWN:
        return Ending(EndingKind.ENGINE_DEAD, ENGINE_SHUTTING_DOWN)
    return Ending(EndingKind.ABORTED, "the engine aborted the request")


_NO_REASON = "the engine reports an error for this request"


def _engine_error(output: EngineCoreOutput, params: SamplingParams | None = None) -> Ending:
    if output.error is not None and output.error.code == RequestError.VALIDATION_ERROR:
        return Ending(EndingKind.REFUSED, output.error.message or _NO_REASON)
    refusal = read_refusal(output.stop_reason)
    if refusal is not None:
        parameter, sentence = refusal
        constraint = None if params is None else params.structured_outputs
        if constraint is not None and (parameter or "").startswith("structured_outputs"):
            # Its caller may know it by another name, which the engine has never heard.
            parameter = constraint.parameter
        return Ending(EndingKind.REFUSED, sentence, parameter=parameter)
    said = None if output.error is None else output.error.message
    return Ending(EndingKind.OUTPUT_ERROR, said or str(output.stop_reason or _NO_REASON))


def _hand_on(request: RequestState | PoolingState, made: _Output | None, step: _Step) -> bool:
    """False: the reader is too far behind."""
    if made is None:
        return True
    if request.sink is not None:
        return request.sink.put(made)
    step.processed.request_outputs.append(made)
    return True


def _note_times(choice: ChoiceState, output: EngineCoreOutput, step: _Step) -> None:
    times, stats = choice.times, step.stats
    if output.events:
        times.note_events(output.events)
    since_last = times.note_tokens(step.timestamp, step.now) if output.new_token_ids else None
    if stats is None:
        return
    stats.batch_size += 1
    stats.num_generation_tokens += len(output.new_token_ids)
    if since_last is not None:
        stats.inter_token_latencies.append(since_last)
    elif output.new_token_ids:
        if choice.index == 0:
            stats.num_prompt_tokens += len(choice.request.prompt_token_ids)
        if times.time_to_first_token is not None:
            stats.times_to_first_token.append(times.time_to_first_token)


def _note_finished(
    request: RequestState, kind: EndingKind, metrics: RequestMetrics, step: _Step
) -> None:
    if step.stats is not None:
        finished = FinishedRequest(
            request.request_id,
            kind,
            len(request.prompt_token_ids),
            request.num_output_tokens,
            metrics,
        )
        step.stats.finished_requests.append(finished)
