"""A program: an engine as lean as one can be, that says what it is told at the pace that it is told.

    python -m trioleg.bench.leg_engine CONTROL IDS (--handshake ADDRESS [--local] | --input ADDRESS --output ADDRESS)
            [--on-term abort]

IDS: token ids with commas, which every request gets one after the other, over and over. A request gets its first
token as soon as it is here; then it waits until the engine is told to step. CONTROL takes, as ``leg_control`` has it:

    pace    rate, limit: so many steps a second from now on (0: none), and perhaps no more than so many of them
    count   what was sent since the last finish
    finish  one more token for each request, its last; what was sent until then

``--local``: as vLLM's head expects of an engine that it has started. ``--on-term``: SIGTERM ends it, as without.

Rules of this file: one thread, no framework; what a step costs here is taken from who shares the machine with it.
Steps are due at fixed times. One that is late delays none of those behind it, unless by more than a step: the engine
does not catch up, since that would be a burst that nobody asked for; it says how many steps were late.
"""

from __future__ import annotations

import argparse
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import zmq

from ..ipc.codec import decode_abort, decode_request, decode_utility
from ..messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    PrefillStats,
    SchedulerStats,
    UtilityOutput,
)
from .lean_joining import MAX_MODEL_LEN, Socket, join, shake_hands
from .leg_control import answer, listen, receive

__all__ = ["MAX_MODEL_LEN", "UP", "main"]

UP = "the engine is up"
# From so much on a step is late: the clock of the poll is as coarse.
_LATE_S = 0.001
# Of the questions that front ends ask when they start, those with an answer that is not nil.
_ANSWERS: dict[str, Any] = {"get_supported_tasks": ["generate"], "is_sleeping": False}


@dataclass(slots=True)
class _Counted:
    tokens: int = 0
    steps: int = 0
    late: int = 0
    worst_late_s: float = 0.0


@dataclass(slots=True)
class _Live:
    """A request: its output, used again and again, and how many tokens it has had."""

    output: EngineCoreOutput
    num_tokens: int = 0


class _Engine:
    def __init__(self, ids: list[int], requests: Socket, outputs: Socket) -> None:
        self._requests, self._outputs = requests, outputs
        # A list of one each, made once.
        self._tokens = [[token_id] for token_id in ids]
        self._live: dict[str, _Live] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._counted = _Counted()
        self._period = self._due = 0.0
        self._steps_left = 0

    def run(self, control: socket.socket) -> None:
        """For ever, or until whoever is at the other end of ``control`` has gone."""
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(control, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._wait_ms()))
            if self._requests in ready:
                self._take_requests()
            if control.fileno() in ready:
                self._obey(control)
            self._step_if_due()

    def _wait_ms(self) -> int | None:
        if not self._is_stepping():
            return None
        left = self._due - time.monotonic()
        if 0 < left < _LATE_S:
            time.sleep(left)
        return max(0, int(left * 1000))

    def _is_stepping(self) -> bool:
        return bool(self._steps_left and self._live)

    def _step_if_due(self) -> None:
        now = time.monotonic()
        if not self._is_stepping() or now < self._due:
            return
        self._note_lateness(now - self._due)
        self._step(list(self._live.values()))
        self._steps_left -= 1
        self._counted.steps += 1
        self._due += self._period
        if self._due < now:
            self._due = now

    def _note_lateness(self, late: float) -> None:
        if late > _LATE_S:
            self._counted.late += 1
            self._counted.worst_late_s = max(self._counted.worst_late_s, late)

    # ------------------------------------------------------------------ what it says

    def _step(self, requests: list[_Live], reason: FinishReason | None = None) -> None:
        tokens, count = self._tokens, len(self._tokens)
        for live in requests:
            live.output.new_token_ids = tokens[live.num_tokens % count]
            live.output.finish_reason = reason
            live.num_tokens += 1
        self._send([live.output for live in requests])

    def _send(self, outputs: list[EngineCoreOutput]) -> None:
        stats = SchedulerStats(num_running_reqs=len(self._live))
        message = EngineCoreOutputs(
            outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic()
        )
        self._outputs.send(self._encode(message))
        self._counted.tokens += len(outputs)

    def _welcome(self, requests: list[EngineCoreRequest]) -> None:
        """The first tokens, with what comes beside them."""
        now = time.monotonic()
        events = [EngineCoreEvent(1, now), EngineCoreEvent(2, now)]
        outputs = []
        for request in requests:
            live = self._live[request.request_id]
            length = len(request.prompt_token_ids or ())
            prefill = PrefillStats(num_prompt_tokens=length, num_computed_tokens=length)
            outputs.append(
                EngineCoreOutput(
                    request.request_id, self._tokens[0], events=events, prefill_stats=prefill
                )
            )
            live.num_tokens = 1
        self._send(outputs)

    # ------------------------------------------------------------------ what it hears

    def _take_requests(self) -> None:
        new = []
        while int(self._requests.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message_type, body, *_ = self._requests.recv_multipart()
            match EngineCoreRequestType(message_type):
                case EngineCoreRequestType.ADD:
                    new.append(decode_request(body))
                    request_id = new[-1].request_id
                    self._live[request_id] = _Live(EngineCoreOutput(request_id, []))
                case EngineCoreRequestType.ABORT:
                    for request_id in decode_abort(body):
                        self._live.pop(request_id, None)
                case EngineCoreRequestType.UTILITY:
                    self._answer(decode_utility(body))
        if new := [request for request in new if request.request_id in self._live]:
            self._welcome(new)

    def _answer(self, call: Any) -> None:
        utility = UtilityOutput(call.call_id, result=[None, _ANSWERS.get(call.method)])
        message = EngineCoreOutputs(utility_output=utility, timestamp=time.monotonic())
        self._outputs.send(self._encode(message))

    def _obey(self, control: socket.socket) -> None:
        command = receive(control)
        match command.pop("do"):
            case "pace":
                self._set_pace(**command)
            case "finish":
                self._steps_left = 0
                self._step(list(self._live.values()), FinishReason.LENGTH)
                self._live.clear()
        answer(control, **asdict(self._counted), live=len(self._live))
        if not self._live:
            self._counted = _Counted()

    def _set_pace(self, rate: float, limit: int | None = None) -> None:
        self._period = 1 / rate if rate else 0.0
        self._steps_left = 0 if not rate else -1 if limit is None else limit
        self._due = time.monotonic()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="An engine that says what it is told.")
    parser.add_argument("control", type=Path)
    parser.add_argument("ids", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--handshake")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--input")
    parser.add_argument("--output")
    parser.add_argument("--on-term", choices=("abort",))
    options = parser.parse_args()
    listener = listen(options.control)
    click.echo(UP)
    if options.handshake:
        legs = shake_hands(options.handshake, is_local=options.local)
    else:
        legs = join(options.input, options.output)
    _Engine(options.ids, *legs).run(listener.accept()[0])


if __name__ == "__main__":
    main()
