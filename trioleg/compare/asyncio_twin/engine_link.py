"""``EngineLink``: the client of one engine, and ``Resources``, what has to be let go when nobody uses it any more.

The socket task puts what it decodes into a queue, and there the handler task of ``llm.py`` takes it. It has copies of
what it needs and never the link itself: tasks are kept by their loop, so one that held the link would keep it alive,
and its finalizer, which ends the task, would never run.

An engine's death has no one place. The socket task hears the engine's own word, a thread waits for the process; both
set ``Resources.engine_dead``, which everybody else looks at before a send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import EngineDeadError
from ...ipc.codec import encode_abort, encode_request, is_engine_dead, make_output_decoder
from ...messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from ..asyncio_common.engine_process import STOP_S, Engine, EngineProcess
from ..asyncio_common.sockets import EngineSockets

__all__ = ["EngineLink", "Received"]

_log = logging.getLogger("trioleg.compare.asyncio_twin")
_DEAD = "the engine is dead; its log says why"


@dataclass(frozen=True, slots=True)
class Received:
    """A message of outputs, with the frames that it came in: arrays are in them."""

    outputs: EngineCoreOutputs
    frames: Sequence[memoryview]


_Queue: TypeAlias = "asyncio.Queue[Received | Exception]"


@dataclass
class Resources:
    """Called by ``shutdown``, or by the finalizer of a link that nobody has any more. Blocks until the process has
    ended."""

    process: EngineProcess
    sockets: EngineSockets
    output_queue_task: asyncio.Task[None] | None = None
    # Here, where the tasks can see it without the link.
    engine_dead: bool = False

    def __call__(self) -> None:
        self.engine_dead = True
        self.process.stop()
        task = self.output_queue_task
        loop = None if task is None else task.get_loop()
        if loop is None or loop.is_closed():
            self.sockets.close()
        elif loop is _running_loop():
            self._close_in_loop()
        else:
            loop.call_soon_threadsafe(self._close_in_loop)

    def _close_in_loop(self) -> None:
        self.sockets.close()
        if self.output_queue_task is not None:
            self.output_queue_task.cancel()

    def validate_alive(self, frames: Sequence[memoryview]) -> None:
        """Raises ``EngineDeadError`` if that is the engine's last word."""
        if is_engine_dead(frames):
            self.engine_dead = True
            raise EngineDeadError(_DEAD)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


class EngineLink:
    """Owns ``engine``, as far as there is an owner: see ``Resources``. Where a loop runs, the socket task is started
    at once, so that a death is heard of before the first request; else by the first that needs it."""

    def __init__(self, engine: Engine) -> None:
        self.resources = Resources(engine.process, engine.sockets)
        self._finalizer = weakref.finalize(self, self.resources)
        self.ready = engine.ready
        self._decode = make_output_decoder(engine.ready.vllm_version)
        self._outputs: _Queue = asyncio.Queue()
        if _running_loop() is not None:
            self._ensure_output_queue_task()
        self._start_monitor()

    def shutdown(self, timeout: float = STOP_S) -> None:
        """End the engine and let everything go; blocks meanwhile. From any thread; idempotent."""
        if self._finalizer.detach() is not None:
            self.resources.process.stop(timeout)
            self.resources()

    # ------------------------------------------------------------------ from the engine

    def _ensure_output_queue_task(self) -> None:
        resources = self.resources
        if resources.output_queue_task is None:
            resources.output_queue_task = asyncio.create_task(
                _process_outputs_socket(resources, self._decode, self._outputs),
                name="process_outputs_socket",
            )

    async def get_output(self) -> Received:
        """The next message. Raises what the socket task met; after a death that is ``EngineDeadError``, whatever it
        was."""
        self._ensure_output_queue_task()
        received = await self._outputs.get()
        if isinstance(received, Exception):
            if self.resources.engine_dead:
                raise EngineDeadError(_DEAD) from None
            raise received
        return received

    def _start_monitor(self) -> None:
        process, to_self = self.resources.process, weakref.ref(self)

        def monitor_engine() -> None:
            process.wait_in_thread()
            link = to_self()
            if link is None or not link._finalizer.alive or link.resources.engine_dead:
                return
            link.resources.engine_dead = True
            _log.error("the engine has ended unexpectedly: shutting down")
            link.shutdown()

        threading.Thread(target=monitor_engine, name="monitor_engine", daemon=True).start()

    # ------------------------------------------------------------------ to the engine

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Raises ``EngineDeadError``."""
        await self._send(EngineCoreRequestType.ADD, encode_request(request))
        self._ensure_output_queue_task()

    async def abort_requests(self, engine_request_ids: Sequence[str]) -> None:
        """Nothing, of an engine that is dead."""
        if engine_request_ids and not self.resources.engine_dead:
            await self._send(EngineCoreRequestType.ABORT, encode_abort(engine_request_ids))

    def _send(self, message_type: EngineCoreRequestType, body: bytes) -> Awaitable[Any]:
        if self.resources.engine_dead:
            raise EngineDeadError(_DEAD)
        return self.resources.sockets.send(message_type, body)


async def _process_outputs_socket(
    resources: Resources,
    decode: Callable[[Sequence[memoryview]], EngineCoreOutputs],
    queue: _Queue,
) -> None:
    """The socket task: I/O and decoding beside the handler's work on the message before."""
    try:
        while True:
            frames = await resources.sockets.receive()
            resources.validate_alive(frames)
            outputs = decode(frames)
            if outputs.outputs or outputs.scheduler_stats:
                queue.put_nowait(Received(outputs, frames))
    except Exception as error:  # it is raised where the queue is read
        queue.put_nowait(error)
    except asyncio.CancelledError:
        # Not raised: what cancels this task is a shutdown, and nobody waits for the task.
        queue.put_nowait(EngineDeadError(_DEAD))
