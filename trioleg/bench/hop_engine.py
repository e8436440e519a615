"""An engine's end of the leg, in a thread with a Trio run of its own: it says a step when it is told to.

It is the engine's real sender (``engine/output_sender.py``) behind a real handshake; what is missing is the model.
In a thread, and not in a process, so that whoever measures can read its processor time beside the front end's, and
decide when a step is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from ..engine.output_sender import OutputSender
from ..ipc.codec import decode_request, decode_utility
from ..ipc.joining import join_head
from ..ipc.sockets import ZmqSocket
from ..messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    SchedulerStats,
    UtilityOutput,
)
from .played_engine import load_nothing

__all__ = ["EngineEnd", "step_message"]

# Nobody waits for what is unsent when the bench is over.
_NO_LINGER = 0.0


def step_message(request_ids: Sequence[str], token_ids: Sequence[int]) -> EngineCoreOutputs:
    """What a step says that made one token for each of ``request_ids``."""
    pairs = zip(request_ids, token_ids, strict=True)
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(one, [token_id]) for one, token_id in pairs],
        scheduler_stats=SchedulerStats(num_running_reqs=len(request_ids)),
        timestamp=time.monotonic(),
    )


class EngineEnd:
    """``run`` is a thread's; everything else may be called from any. ``request_ids``: of all requests so far."""

    def __init__(self, handshake_address: str) -> None:
        self.request_ids: list[str] = []
        self.cpu_clock = 0
        self.address = handshake_address
        self._is_stopped = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._sender: OutputSender | None = None

    def run(self) -> None:
        """Join the head and serve it until ``stop``. Raises ``EngineStartError``."""
        trio.run(self._run)

    def stop(self) -> None:
        """``run`` returns soon, or at once when it begins. Idempotent, never blocks."""
        self._is_stopped = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._cancel)

    def _cancel(self) -> None:
        self._scope.cancel(reason="the bench is over")

    def step(self, message: EngineCoreOutputs) -> None:
        """Hand a step on, as the loop of an engine does. Never blocks."""
        assert self._sender is not None, "a front end that has a request has an engine"
        self._sender.hand_on(0, message)

    async def _run(self) -> None:
        self.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._token = trio.lowlevel.current_trio_token()
        if self._is_stopped:
            self._cancel()
        with self._scope:
            sockets = await join_head(self.address, load_nothing, engine_index=0)
            sockets.linger = _NO_LINGER
            try:
                sender = self._sender = OutputSender(
                    sockets.outputs, on_client_behind=_let_be, max_bytes_in_flight=2**30
                )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sender.run)
                    nursery.start_soon(self._read, sockets.inputs[0], sender.hand_on)
            finally:
                await sockets.aclose()

    async def _read(
        self, requests: ZmqSocket, hand_on: Callable[[int, EngineCoreOutputs], None]
    ) -> None:
        while True:
            kind, body = await requests.recv_multipart()
            if kind == EngineCoreRequestType.ADD.value:
                self.request_ids.append(decode_request(body).request_id)
            elif kind == EngineCoreRequestType.UTILITY.value:
                # The one question that a front end of ours asks: what the model can do.
                answer = UtilityOutput(decode_utility(body).call_id, result=[None, ["generate"]])
                hand_on(0, EngineCoreOutputs(utility_output=answer, timestamp=time.monotonic()))


def _let_be(_client_index: int) -> None:
    """A front end that falls behind is what a bench may well see."""
