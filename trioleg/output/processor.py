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

from ..messages import EngineCoreOutput, FinishReason
from ..outputs import Ending, EndingKind, RequestOutput
from .request_state import RequestState

__all__ = ["OutputProcessor", "ProcessedOutputs", "ProcessorStatistics"]

_log = logging.getLogger("trioleg.output")

_FINISHED = {
    FinishReason.STOP: EndingKind.STOP,
    FinishReason.LENGTH: EndingKind.LENGTH,
    FinishReason.REPETITION: EndingKind.REPETITION,
}


@dataclass(slots=True)
class ProcessedOutputs:
    """What one call of ``process`` found.

    ``request_outputs``: outputs of the requests without a sink. ``endings``: request ids with why they
    ended. ``unknown``: ids of outputs that belong to no request (any more).
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    endings: list[tuple[str, Ending]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProcessorStatistics:
    """``requests``: live now. ``outputs``, ``tokens``: taken in since the start."""

    requests: int
    outputs: int
    tokens: int


class OutputProcessor:
    """Owns the states of all live requests of one engine link."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._outputs = 0
        self._tokens = 0

    def statistics(self) -> ProcessorStatistics:
        return ProcessorStatistics(len(self._states), self._outputs, self._tokens)

    def add_request(self, state: RequestState) -> None:
        """Know the request from now on. To be called before its ADD leaves."""
        if state.request_id in self._states:
            raise ValueError(f"request id {state.request_id!r} is live already")
        self._states[state.request_id] = state

    def end_request(self, request_id: str) -> None:
        """Forget the request (unknown ids are fine), giving its reader what was held back.

        A request whose end ``process`` has reported is forgotten already.
        """
        state = self._states.pop(request_id, None)
        if state is not None and state.sink is not None:
            held_back = state.release()
            if held_back is not None:
                state.sink.put(held_back)

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Take in outputs of one step. Never raises for what an output holds."""
        processed = ProcessedOutputs()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                processed.unknown.append(output.request_id)
                continue
            try:
                ending = self._process_one(state, output, processed)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's alone
                ending = Ending(EndingKind.OUTPUT_ERROR, str(error) or repr(error))
                _log.warning("request %s: %s", state.request_id, ending.cause, exc_info=error)
            if ending is not None:
                processed.endings.append((state.request_id, ending))
        return processed

    def _process_one(
        self, state: RequestState, output: EngineCoreOutput, processed: ProcessedOutputs
    ) -> Ending | None:
        self._outputs += 1
        self._tokens += len(output.new_token_ids)
        finish, stop_reason = output.finish_reason, output.stop_reason
        if finish is FinishReason.ERROR:
            cause = str(stop_reason or "the engine reports an error for this request")
            return Ending(EndingKind.OUTPUT_ERROR, cause, engine_finished=True)

        stop = state.update(output)
        if finish is FinishReason.ABORT:
            if output.new_token_ids:
                self._hand_on(state, state.make_request_output(output.new_token_ids), processed)
            cause = "the engine aborted the request"
            return Ending(EndingKind.ABORTED, cause, engine_finished=True)

        ending = None
        if stop is not None:
            # The engine may have reached an end of its own with the same step.
            ending = Ending(EndingKind.STOP_STRING, stop, engine_finished=finish is not None)
            finish, stop_reason = FinishReason.STOP, stop
        elif finish is not None:
            ending = Ending(_FINISHED[finish], engine_finished=True)
        if ending is not None:
            del self._states[state.request_id]
        reason = None if finish is None else str(finish)
        made = state.make_request_output(
            output.new_token_ids, reason, stop_reason, matched=stop is not None
        )
        if not self._hand_on(state, made, processed) and ending is None:
            cause = "the reader has fallen too far behind: its unread output has reached the bound"
            ending = Ending(EndingKind.READER_TOO_SLOW, cause)
        return ending

    def _hand_on(
        self, state: RequestState, made: RequestOutput | None, processed: ProcessedOutputs
    ) -> bool:
        if made is None:
            return True
        if state.sink is not None:
            return state.sink.put(made)
        processed.request_outputs.append(made)
        return True
