"""The scripted engine: a ``Core`` that plays a script instead of running a model.

Rules of this file: pure and without torch; the clock and what a fault does can be handed in, so the same core runs
in an engine process and inside a test. For tests and benchmarks: it looks like a real engine from outside
(queueing, prefill, blocks, statistics, endings), and its tokens are the script's (``script.py`` says what that may
hold). It refuses what would need a model.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import InvalidRequestError
from ..messages import (
    WIRE_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReadyResponse,
    FinishReason,
    SchedulerStats,
)
from .script import Fault, FaultKind, Script, load_script
from .scripted_loras import ScriptedLoras
from .scripted_pause import ScriptedPause
from .scripted_request import ScriptedRequest, accept_request

__all__ = [
    "Fault",
    "FaultKind",
    "Script",
    "ScriptedCore",
    "end_process",
    "load_script",
    "start_scripted_core",
]

# Faults that strike in the request's own step.
_OF_ONE_REQUEST = ("bad_token_id", "error")


def end_process(how: FaultKind) -> None:
    """What a fault does in an engine process."""
    if how == "exit":
        os._exit(3)
    elif how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        threading.Event().wait()
    raise RuntimeError("the script says that this step fails")


def start_scripted_core(script: Script) -> ScriptedCore:
    """A core that took ``load_s`` to make, or RuntimeError with ``load_error``: a ``make_core``."""
    time.sleep(script.load_s)
    if script.load_error is not None:
        raise RuntimeError(script.load_error)
    return ScriptedCore(script)


class ScriptedCore:
    """Plays ``script``. See ``Core`` for the methods.

    ``clock`` gives seconds; ``on_fault`` gets every fault but those of one request ("bad_token_id", "error"), in
    the middle of a step, whose outputs are lost if it does not return.

    A subclass may give each request a script of its own (``script_for``) and hold requests back
    (``is_due``). What these scripts say of the engine as a whole does not count; their faults strike
    when the request itself has had ``after_steps`` steps.
    """

    def __init__(
        self,
        script: Script,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[FaultKind], None] = end_process,
    ) -> None:
        self.ready = _ready_response(script)
        self._script = script
        tasks = ["generate", "embed"] if script.pooling else ["generate"]
        self._loras = ScriptedLoras(script)
        self._pause = ScriptedPause(self.finish_all)
        self._utilities: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: tasks,
            # There is no cache, so it is always empty.
            "reset_prefix_cache": lambda _running=False, _connector=False: True,
            "reset_mm_cache": lambda: None,
            **self._pause.utilities,
            **self._loras.utilities,
        }
        self._clock = clock
        self._on_fault = on_fault
        self._waiting: deque[ScriptedRequest] = deque()
        self._running: dict[str, ScriptedRequest] = {}
        self._arrivals = itertools.count()
        self._faults = sorted(script.faults, key=lambda fault: fault.after_steps)
        self._free_blocks = script.blocks
        self._steps = 0
        self._next_step_at = 0.0
        # Reported by the next step, whatever else it does.
        self._reports: list[tuple[int, EngineCoreOutput]] = []
        self._stats_are_due = False

    def add_request(self, request: EngineCoreRequest) -> None:
        live = self._find(request.request_id)
        if live is not None:
            # An id names one request on this wire, so an answer to one of the two ends both.
            self._drop(live)
            raise InvalidRequestError(
                "request_id is that of a request in progress, which ends too; allowed: a fresh one",
                parameter="request_id",
            )
        number, script = next(self._arrivals), self.script_for(request)
        token_ids = self._adapted(request)
        if token_ids is not None:
            script = msgspec.structs.replace(script, token_ids=token_ids, steps=[])
        accepted = accept_request(request, script, number=number, now=self._clock())
        if script is not self._script and request.lora_request is None:
            accepted.faults = sorted(script.faults, key=lambda fault: fault.after_steps)
        self._waiting.append(accepted)

    def _adapted(self, request: EngineCoreRequest) -> list[int] | None:
        """What its adapter makes of the request. As with vLLM, one that cannot be read is the engine's end."""
        try:
            return self._loras.token_ids_for(request.lora_request)
        except InvalidRequestError:
            if self.ready.supports_lora:
                self._on_fault("raise")
            raise

    def script_for(self, request: EngineCoreRequest) -> Script:  # noqa: ARG002 - a subclass looks
        """What ``request`` is answered with. May raise ``InvalidRequestError``, which refuses it."""
        return self._script

    def is_due(self, request: ScriptedRequest, now: float) -> bool:
        """Whether the request has a part in a step at ``now``."""
        return request.ready_at <= now

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self._find(request_id)
            if request is not None:
                self._drop(request)

    def abort_client(self, client_index: int) -> None:
        for request in self._live():
            if request.client_index == client_index:
                self._drop(request)

    def finish_all(self, stop_reason: str | None = None) -> None:
        for request in self._live():
            self._drop(request)
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.ABORT,
                stop_reason=stop_reason,
            )
            self._reports.append((request.client_index, output))

    def _live(self) -> list[ScriptedRequest]:
        return [*self._running.values(), *self._waiting]

    def _find(self, request_id: str) -> ScriptedRequest | None:
        running = self._running.get(request_id)
        waiting = (live for live in self._waiting if live.request_id == request_id)
        return running or next(waiting, None)

    def _drop(self, request: ScriptedRequest) -> None:
        """Takes a request out, wherever it is, and its blocks back."""
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)
        else:
            self._free_blocks += request.blocks
        self._stats_are_due = True

    def _admit(self) -> None:
        """First come, first served: the first that does not fit holds up those behind it."""
        if self._pause.is_on:
            return
        now = self._clock()
        while self._waiting and len(self._running) < self._script.max_num_seqs:
            if self._waiting[0].blocks > self._free_blocks:
                return
            request = self._waiting.popleft()
            self._free_blocks -= request.blocks
            request.admitted_at = now
            request.ready_at = now + request.script.first_token_delay_s
            self._running[request.request_id] = request

    def wait_s(self) -> float | None:
        if self._reports or self._stats_are_due:
            return 0.0
        self._admit()
        if not self._running or self._pause.is_on:
            return None
        due = max(self._next_step_at, min(live.ready_at for live in self._running.values()))
        return max(0.0, due - self._clock())

    def step(self) -> dict[int, EngineCoreOutputs]:
        by_client: dict[int, EngineCoreOutputs] = {}
        for client_index, output in self._reports:
            _outputs_of(by_client, client_index).outputs.append(output)
        self._reports = []
        self._admit()
        if self._clock() >= self._next_step_at and not self._pause.is_on:
            self._run_batch(by_client)
        self._stats_are_due = False
        # Once a step, to one client: the first that has outputs, else client 0.
        first = next(iter(by_client.values()), None) or _outputs_of(by_client, 0)
        first.scheduler_stats = self._stats()
        for outputs in by_client.values():
            outputs.timestamp = self._clock()
        return by_client

    def _run_batch(self, by_client: dict[int, EngineCoreOutputs]) -> None:
        now = self._clock()
        batch = [request for request in self._running.values() if self.is_due(request, now)]
        if not batch:
            return
        interval = self._script.step_interval_s
        # On the beat, unless we were idle or fell behind: then the beat starts anew.
        on_the_beat = now - self._next_step_at < interval
        self._next_step_at = (self._next_step_at if on_the_beat else now) + interval
        self._work_off_faults()
        for request in batch:
            if request.prefill_left:
                request.prefill_left -= 1
                continue
            self._work_off_faults_of(request)
            output = request.advance(now)
            _outputs_of(by_client, request.client_index).outputs.append(output)
            if output.finish_reason is not None:
                self._drop(request)
        self._steps += 1

    def _work_off_faults(self) -> None:
        while self._faults and self._faults[0].after_steps <= self._steps:
            fault = self._faults.pop(0)
            if fault.how not in _OF_ONE_REQUEST:
                self._on_fault(fault.how)
                continue
            for request in self._running.values():
                if request.number == fault.request:
                    request.fault = fault

    def _work_off_faults_of(self, request: ScriptedRequest) -> None:
        while request.faults and request.faults[0].after_steps <= request.num_steps:
            fault = request.faults.pop(0)
            if fault.how in _OF_ONE_REQUEST:
                request.fault = fault
            else:
                self._on_fault(fault.how)

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            step_counter=self._steps,
            kv_cache_usage=1 - self._free_blocks / self._script.blocks,
        )

    def call_utility(self, method: str, args: Sequence[Any]) -> Any:
        if method not in self._utilities:
            raise InvalidRequestError(
                f"there is no such utility; allowed: {', '.join(self._utilities)}",
                parameter="method",
            )
        function = self._utilities[method]
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise InvalidRequestError(
                f"args is {list(args)}, which {method} does not take: {error}", parameter="args"
            ) from None
        return function(*args)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()


def _ready_response(script: Script) -> EngineReadyResponse:
    tokens = script.blocks * script.block_size
    return EngineReadyResponse(
        max_model_len=script.max_model_len,
        num_gpu_blocks=script.blocks,
        block_size=script.block_size,
        effective_attention_block_size=script.block_size,
        vllm_version=WIRE_VERSION,
        validates_requests=True,
        max_num_seqs=script.max_num_seqs,
        max_num_batched_tokens=script.max_num_seqs * script.tokens_per_step,
        instance_id="scripted",
        supports_lora=bool(script.loras),
        max_loras=script.max_loras if script.loras else 0,
        kv_cache_size_tokens=tokens,
        kv_cache_max_concurrency=tokens / script.max_model_len,
    )


def _outputs_of(by_client: dict[int, EngineCoreOutputs], client_index: int) -> EngineCoreOutputs:
    # A list of its own: the struct's default is shared only until it is written to.
    return by_client.setdefault(client_index, EngineCoreOutputs(outputs=[]))
