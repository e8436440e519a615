"""The busy loop: the one thread that touches the core.

Rules of this file: no Trio; it runs in a worker thread. Everything that comes in goes through the
inbox, everything that goes out through ``hand_on``, which must not block. Cancelling does not reach a
thread: stopping it is a call, ``stop``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..errors import InvalidRequestError, WireError
from ..ipc.codec import UtilityCall
from ..messages import (
    ENGINE_SHUTTING_DOWN,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
    refusal_reason,
)
from .interface import Core

__all__ = ["BusyLoop"]

logger = logging.getLogger(__name__)


class BusyLoop:
    """Steps ``core`` while there is work. ``hand_on(client_index, outputs)`` takes what it makes; ``pause_s`` is for
    how many seconds it would rather not have more.

    ``run`` (or ``advance``) is the thread's; every other method may be called from any thread, never blocks, and
    takes effect between two steps, in the order of the calls.
    """

    def __init__(
        self,
        core: Core,
        hand_on: Callable[[int, EngineCoreOutputs], None],
        *,
        engine_index: int,
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._core = core
        self._pause_s = pause_s
        self._hand_on = hand_on
        self._engine_index = engine_index
        self._inbox: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._stopping = False

    def add(self, request: EngineCoreRequest) -> None:
        self._post(partial(self._add, request))

    def refuse(self, request_id: str, client_index: int, message: str) -> None:
        """Answers a request that never reached the core: ERROR, ``message`` as its stop_reason."""
        self._post(partial(self._refuse, request_id, client_index, message))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._post(partial(self._core.abort_requests, request_ids))

    def abort_client(self, client_index: int) -> None:
        self._post(partial(self._core.abort_client, client_index))

    def call_utility(self, call: UtilityCall) -> None:
        self._post(partial(self._call_utility, call))

    def stop(self) -> None:
        """``run`` finishes every request with ABORT and returns, after the step that it is in."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def _post(self, act: Callable[[], None]) -> None:
        with self._news:
            self._inbox.append(act)
            self._news.notify()

    def run(self) -> None:
        """Until ``stop``; then the core is closed. Raises what the core raises."""
        try:
            while not self._stopping:
                wait = self.advance()
                if wait == 0:
                    wait = self._pause_s()
                if wait != 0:
                    self._sleep(wait)
            self._work_off_inbox()
            self._core.finish_all(ENGINE_SHUTTING_DOWN)
            self._step()
        finally:
            self._core.close()

    def advance(self) -> float | None:
        """Works off the inbox, and makes a step if one is due: a round of ``run``.

        Returns the seconds until the next step is due, 0 for now, None for not before the next call.
        """
        self._work_off_inbox()
        wait = self._core.wait_s()
        if wait is None or wait > 0:
            return wait
        self._step()
        return 0.0

    def _work_off_inbox(self) -> None:
        # Only what is there now: a client that floods the inbox must not hold up the steps.
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()

    def _sleep(self, timeout: float | None) -> None:
        with self._news:
            self._news.wait_for(lambda: self._inbox or self._stopping, timeout)

    def _step(self) -> None:
        for client_index, outputs in self._core.step().items():
            self._deliver(client_index, outputs)

    def _deliver(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = self._engine_index
        self._hand_on(client_index, outputs)

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add_request(request)
        except InvalidRequestError as error:
            reason = refusal_reason(error.parameter, str(error))
            self._refuse(request.request_id, request.client_index, reason)

    def _refuse(self, request_id: str, client_index: int, message: str) -> None:
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=message
        )
        outputs = EngineCoreOutputs(
            outputs=[output], timestamp=time.monotonic(), finished_requests=[request_id]
        )
        self._deliver(client_index, outputs)

    def _call_utility(self, call: UtilityCall) -> None:
        try:
            result = self._core.call_utility(call.method, call.args)
        except WireError as error:
            logger.warning("utility call refused: %s", error)
            self._answer_failure(call, error)
        except Exception as error:
            logger.exception("utility call %.80s failed", call.method)
            self._answer_failure(call, error)
        else:
            if isinstance(result, Future):
                # A later step completes it, in this thread.
                result.add_done_callback(partial(self._answer_later, call))
            else:
                self._answer(call, result)

    def _answer_later(self, call: UtilityCall, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._answer(call, future.result())
        else:
            self._answer_failure(call, error)

    def _answer(self, call: UtilityCall, result: Any) -> None:
        # The pair's first half would name a Python type; only plain values travel here.
        self._deliver_answer(call, UtilityOutput(call.call_id, result=[None, result]))

    def _answer_failure(self, call: UtilityCall, error: BaseException) -> None:
        self._deliver_answer(call, UtilityOutput(call.call_id, str(error) or repr(error)))

    def _deliver_answer(self, call: UtilityCall, answer: UtilityOutput) -> None:
        outputs = EngineCoreOutputs(timestamp=time.monotonic(), utility_output=answer)
        self._deliver(call.client_index, outputs)
