"""A program: an engine that does what it is told, when it is told to, and notes when it hears of an end.

    python -m trioleg.compare.puppet_engine CONTROL IDS --handshake ADDRESS [--die loading|ready]
            [--local] [--on-term abort|drain]

IDS: token ids with commas, which a request gets one after the other, over and over. CONTROL takes, as
``bench/leg_control.py`` has it, and answers each with ``state``'s figures:

    state                                       what there is
    say    requests, tokens, finish, steps      tokens for some requests (by their number, in order of arrival from 0;
                                                null: all that live), by IDS or as given; "length" or "stop" finishes
    pace   rate, limit                          so many steps a second for all that live (0: none), at most ``limit``
    await  arrived, aborted, adds, seconds      as soon as so many have, or when the time is over
    fail   how                                  "raise": say that it is dead, and leave with 1; "exit": leave with 3
    garble                                      send a message that nobody can read

``--die``: the process leaves with 3 before it says that it is ready, or as soon as it has. ``--local``: it says that the
front end has started it. ``--on-term``: as vLLM's own engine takes SIGTERM: it tells of each live request that it was
aborted, or works until none is left, and leaves with 0; without it the signal ends it.

Rules of this file: one thread, no framework. Its clock is CLOCK_MONOTONIC, which all processes of a machine share, so
its times can be compared with the scenario's own.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import zmq

from ..bench.lean_joining import Socket, shake_hands
from ..bench.leg_control import answer, listen, receive
from ..engine.scripted_logprobs import score
from ..ipc.codec import OutputEncoder, decode_abort, decode_request, decode_utility
from ..messages import (
    ENGINE_CORE_DEAD,
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

__all__ = ["main"]

_FINISH = {"length": FinishReason.LENGTH, "stop": FinishReason.STOP}
_ON_TERM = ("abort", "drain")
_ANSWERS: dict[str, Any] = {"get_supported_tasks": ["generate"], "is_sleeping": False}
_BLOCK_SIZE = 16
_EXIT_RAISED, _EXIT_LEFT = 1, 3
# For the word of its death to leave.
_LAST_LINGER_MS = 2000


@dataclass(slots=True)
class _Request:
    """One that has come. ``aborted_at``, ``arrived_at``: by the monotonic clock. ``logprobs``: as it asks for them."""

    request_id: str
    prompt_len: int
    arrived_at: float
    num_tokens: int = 0
    is_live: bool = True
    aborted_at: float | None = None
    logprobs: int | None = None


@dataclass(slots=True)
class _Wait:
    arrived: int
    aborted: int
    until: float


class _Term:
    """SIGTERM as a readable end. ``word``: of ``_ON_TERM``."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.wakes, self._woken = socket.socketpair()
        self.wakes.setblocking(False)
        self._woken.setblocking(False)
        self._came = False
        signal.set_wakeup_fd(self._woken.fileno())
        signal.signal(signal.SIGTERM, self._note)

    def has_come(self) -> bool:
        with suppress(BlockingIOError):
            self.wakes.recv(1)
        return self._came

    def _note(self, *_: object) -> None:
        self._came = True


class _Engine:
    def __init__(
        self, ids: list[int], requests: Socket, outputs: Socket, term: _Term | None
    ) -> None:
        self._ids = ids
        self._term = term
        self._requests, self._outputs = requests, outputs
        self._encoder = OutputEncoder()
        self._all: list[_Request] = []
        self._live: dict[str, _Request] = {}
        self._num_aborts = self._num_steps = 0
        self._period, self._due, self._steps_left = 0.0, 0.0, 0
        self._wait: _Wait | None = None

    def run(self, listener: socket.socket) -> None:
        """Until whoever has come to ``listener`` has gone, or SIGTERM; the front end may ask before anybody comes."""
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(listener, zmq.POLLIN)
        if self._term is not None:
            poller.register(self._term.wakes, zmq.POLLIN)
        control: socket.socket | None = None
        while not self._is_over():
            ready = dict(poller.poll(self._wait_ms()))
            if self._requests in ready:
                self._take_requests()
            if control is None:
                if listener.fileno() in ready:
                    control = listener.accept()[0]
                    poller.unregister(listener)
                    poller.register(control, zmq.POLLIN)
                continue
            if control.fileno() in ready:
                self._obey(control)
            self._step_if_due()
            self._answer_wait(control)
        self._leave(0)

    def _wait_ms(self) -> int | None:
        now, ends = time.monotonic(), []
        if self._wait is not None:
            ends.append(self._wait.until)
        if self._steps_left and self._live:
            ends.append(self._due)
        return max(0, math.ceil((min(ends) - now) * 1000)) if ends else None

    def _is_over(self) -> bool:
        """After SIGTERM, with ``--on-term``."""
        term = self._term
        if term is None or not term.has_come():
            return False
        if term.word == "abort" and self._live:
            self._step(list(self._live.values()), [], FinishReason.ABORT)
        return not self._live

    # ------------------------------------------------------------------ what it says

    def _step_if_due(self) -> None:
        now = time.monotonic()
        if not (self._steps_left and self._live) or now < self._due:
            return
        self._step(list(self._live.values()), None, None)
        self._steps_left -= 1
        self._due = max(self._due + self._period, now)

    def _step(
        self, requests: list[_Request], tokens: list[int] | None, finish: FinishReason | None
    ) -> None:
        outputs = [self._output(one, tokens, finish) for one in requests if one.is_live]
        if finish is not None:
            for one in requests:
                self._drop(one)
        self._num_steps += 1
        stats = SchedulerStats(num_running_reqs=len(self._live))
        self._send(
            EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic())
        )

    def _send(self, message: EngineCoreOutputs) -> None:
        self._outputs.send_multipart(self._encoder.encode_into(message, bytearray()))

    def _output(
        self, request: _Request, tokens: list[int] | None, finish: FinishReason | None
    ) -> EngineCoreOutput:
        is_first = not request.num_tokens
        token_ids = [self._ids[request.num_tokens % len(self._ids)]] if tokens is None else tokens
        request.num_tokens += len(token_ids)
        output = EngineCoreOutput(request.request_id, token_ids, finish_reason=finish)
        if request.logprobs is not None:
            output.new_logprobs = score(token_ids, request.logprobs, {}).lists()
        if is_first:
            now, length = time.monotonic(), request.prompt_len
            output.events = [EngineCoreEvent(1, now), EngineCoreEvent(2, now)]
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=length, num_computed_tokens=length
            )
        return output

    # ------------------------------------------------------------------ what it hears

    def _take_requests(self) -> None:
        while int(self._requests.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message_type, body, *_ = self._requests.recv_multipart()
            match EngineCoreRequestType(message_type):
                case EngineCoreRequestType.ADD:
                    self._add(decode_request(body))
                case EngineCoreRequestType.ABORT:
                    self._abort(decode_abort(body))
                case EngineCoreRequestType.UTILITY:
                    call = decode_utility(body)
                    result = [None, _ANSWERS.get(call.method)]
                    utility = UtilityOutput(call.call_id, result=result)
                    self._send(
                        EngineCoreOutputs(utility_output=utility, timestamp=time.monotonic())
                    )

    def _add(self, request: EngineCoreRequest) -> None:
        length = len(request.prompt_token_ids or ())
        params = request.sampling_params
        k = None if params is None else params.logprobs
        one = _Request(request.request_id, length, time.monotonic(), logprobs=k)
        self._all.append(one)
        self._live[one.request_id] = one

    def _abort(self, request_ids: list[str]) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            one = self._live.get(request_id)
            if one is not None:
                one.aborted_at = now
                self._num_aborts += 1
                self._drop(one)

    def _drop(self, request: _Request) -> None:
        request.is_live = False
        self._live.pop(request.request_id, None)

    # ------------------------------------------------------------------ what it is told

    def _obey(self, control: socket.socket) -> None:
        command = receive(control)
        match command.pop("do"):
            case "say":
                self._say(**command)
            case "pace":
                self._set_pace(**command)
            case "await":
                self._wait = _Wait(
                    command["arrived"], command["aborted"], time.monotonic() + command["seconds"]
                )
                return
            case "garble":
                self._outputs.send(b"\xc1")
            case "fail":
                answer(control, **self._state())
                self._fail(command["how"])
        answer(control, **self._state())

    def _say(
        self,
        requests: list[int] | None = None,
        tokens: list[int] | None = None,
        finish: str | None = None,
        steps: int = 1,
    ) -> None:
        for left in range(steps - 1, -1, -1):
            chosen = [self._all[i] for i in requests] if requests is not None else None
            reason = _FINISH[finish] if finish is not None and not left else None
            self._step(list(self._live.values()) if chosen is None else chosen, tokens, reason)

    def _set_pace(self, rate: float, limit: int | None = None) -> None:
        self._period = 1 / rate if rate else 0.0
        self._steps_left = 0 if not rate else -1 if limit is None else limit
        self._due = time.monotonic()

    def _fail(self, how: str) -> None:
        if how == "raise":
            self._outputs.send(ENGINE_CORE_DEAD)
            self._leave(_EXIT_RAISED)
        os._exit(_EXIT_LEFT)

    def _leave(self, code: int) -> NoReturn:
        """With what was said last delivered."""
        self._outputs.setsockopt(zmq.LINGER, _LAST_LINGER_MS)
        self._outputs.close()
        self._requests.close(0)
        zmq.Context.instance().term()
        os._exit(code)

    def _answer_wait(self, control: socket.socket) -> None:
        wait = self._wait
        if wait is None:
            return
        has_come = len(self._all) >= wait.arrived and self._num_aborts >= wait.aborted
        if has_come or time.monotonic() >= wait.until:
            self._wait = None
            answer(control, **self._state())

    def _state(self) -> dict[str, Any]:
        aborts = [one.aborted_at for one in self._all if one.aborted_at is not None]
        blocks = sum(
            math.ceil((one.prompt_len + one.num_tokens) / _BLOCK_SIZE)
            for one in self._live.values()
        )
        return {
            "pid": os.getpid(),
            "arrived": len(self._all),
            "aborted": len(aborts),
            "live": len(self._live),
            "blocks": blocks,
            "steps": self._num_steps,
            "tokens": sum(one.num_tokens for one in self._all),
            "last_arrival": self._all[-1].arrived_at if self._all else None,
            "first_abort": min(aborts, default=None),
            "last_abort": max(aborts, default=None),
        }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="An engine that does what it is told.")
    parser.add_argument("control", type=Path)
    parser.add_argument("ids", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--handshake", required=True)
    parser.add_argument("--die", choices=("loading", "ready"))
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--on-term", choices=_ON_TERM)
    options = parser.parse_args()
    listener = listen(options.control)
    if options.die == "loading":
        os._exit(_EXIT_LEFT)
    term = None if options.on_term is None else _Term(options.on_term)
    legs = shake_hands(options.handshake, is_local=options.local)
    if options.die == "ready":
        os._exit(_EXIT_LEFT)
    _Engine(options.ids, *legs, term).run(listener)


if __name__ == "__main__":
    main()
