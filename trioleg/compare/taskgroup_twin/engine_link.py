"""``EngineLink``: everything between the front end and one engine.

As ``runtime/engine_link.py``: a task that reads, decodes and processes, beside one that watches the engine's process;
the first that finds the engine gone ends both. Then the link reads what had already been sent, marks the engine dead,
ends its streams with the cause, and returns. Sends are synchronous.

Not pretty: a ``TaskGroup`` has no way to be told that it is over, so whoever finds that out raises ``_EngineGone``, and
the group's own error is taken apart again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import EngineDeadError, WireError
from ...ipc.codec import encode, encode_abort, is_engine_dead, make_output_decoder
from ...messages import EngineCoreOutputs, EngineCoreRequestType
from ...output.processor import OutputProcessor, ProcessedOutputs
from ...outputs import Ending, EndingKind
from ..asyncio_common.engine_process import Engine
from .request_stream import RequestStream
from .unwrap import reraise

__all__ = ["EngineLink"]

_log = logging.getLogger("trioleg.compare.taskgroup_twin")

# How long a dead engine's last messages may take to arrive, all in all; and how long nothing has to come for there to
# be no more.
_LAST_WORDS_S = 0.2
_NOTHING_MORE_S = 0.05


class _EngineGone(Exception):
    """Ends the group of the link's tasks; its message is the cause."""


class EngineLink:
    """One engine's link. ``run`` is its task; everything else is synchronous."""

    def __init__(self, engine: Engine, *, chunk_size: int) -> None:
        self.ready = engine.ready
        self.dead = asyncio.Event()
        self.cause_of_death: str | None = None
        self._process, self._sockets = engine.process, engine.sockets
        self._decode = make_output_decoder(engine.ready.vllm_version)
        self._processor = OutputProcessor()
        self._streams: dict[str, RequestStream] = {}
        self._chunk_size = chunk_size

    @property
    def num_requests(self) -> int:
        """That the front end remembers."""
        return self._processor.statistics().requests

    # ------------------------------------------------------------------ towards the engine

    def submit(self, stream: RequestStream) -> None:
        """Register the request and send it. Raises ``EngineDeadError``."""
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)
        self._processor.add_request(stream.submission.state)
        self._streams[stream.request_id] = stream
        bodies = [encode(request) for request in stream.submission.engine_requests]
        if not all(self._send(EngineCoreRequestType.ADD, body) for body in bodies):
            stream.end(Ending(EndingKind.ENGINE_DEAD, "the engine cannot be reached", 0))

    def stream_ended(self, stream: RequestStream) -> None:
        """Forget the request; tell the engine if it may still be at it. Called by ``stream.end``."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._abort(self._processor.end_request(stream.request_id))

    def end_all(self, ending: Ending) -> None:
        """End every live stream."""
        for stream in list(self._streams.values()):
            stream.end(ending)

    def _abort(self, engine_request_ids: Sequence[str]) -> None:
        if engine_request_ids and self.cause_of_death is None:
            self._send(EngineCoreRequestType.ABORT, encode_abort(engine_request_ids))

    def _send(self, message_type: EngineCoreRequestType, body: bytes) -> bool:
        """At once: without a high-water mark there is nothing to wait for. False: it could not leave."""
        sent: Any = self._sockets.send(message_type, body)
        error = sent.exception()
        if error is not None:
            _log.warning("%s could not be sent: %s", message_type.name, error)
        return error is None

    # ------------------------------------------------------------------ from the engine

    async def run(self) -> None:
        """Read and watch until the engine is gone; returns when its streams have been told. A bug of ours in one of
        the tasks is told to them, too, and raised as it is."""
        causes: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_outputs(), name="read_outputs")
                tasks.create_task(self._watch_process(), name="watch process")
        except ExceptionGroup as group:
            # ``except*`` would wrap what is raised in it once more.
            gone, failures = group.split(_EngineGone)
            if failures is not None:
                self._die([f"its link failed: {failures.exceptions[0]!r}"])
                reraise(failures.exceptions[0])
            assert gone is not None
            causes = [str(one) for one in gone.exceptions]
        await self._read_the_rest(causes)
        self._die(causes)

    async def _watch_process(self) -> None:
        raise _EngineGone(f"its process ended with exit code {await self._process.wait()}")

    async def _read_outputs(self) -> None:
        while True:
            frames = await self._sockets.receive()
            if is_engine_dead(frames):
                raise _EngineGone("it reported its own death")
            await self._take(frames)
            # A socket that always has more would come back at once, for ever, and nobody else would run.
            await asyncio.sleep(0)

    async def _take(self, frames: Sequence[memoryview]) -> None:
        received = time.monotonic()
        try:
            message = self._decode(frames)
        except WireError as error:
            # Whose tokens were in it cannot be known, so no stream is whole any more.
            _log.error("%s", error)
            self.end_all(Ending(EndingKind.OUTPUT_ERROR, str(error), 0))
            return
        starts = iter(range(0, len(message.outputs), self._chunk_size))
        try:
            for start in starts:
                self._process_slice(message, frames, start, received)
                if start + self._chunk_size < len(message.outputs):
                    await asyncio.sleep(0)
        finally:
            # A cancel between two slices, which cannot be put off here, must not lose the later ones.
            for start in starts:
                self._process_slice(message, frames, start, received)

    def _process_slice(
        self, message: EngineCoreOutputs, frames: Sequence[memoryview], start: int, received: float
    ) -> None:
        processed = self._processor.process(
            message.outputs[start : start + self._chunk_size],
            frames=frames,
            timestamp=message.timestamp,
            now=received,
        )
        # Every request here has a mailbox; the returned list is for batch use.
        assert not processed.request_outputs
        self._settle(processed)

    def _settle(self, processed: ProcessedOutputs) -> None:
        self._abort(processed.aborts)
        for request_id, ending in processed.endings:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.end(replace(ending, engine=0))

    # ------------------------------------------------------------------ the end

    async def _read_the_rest(self, causes: list[str]) -> None:
        """What the engine had sent before its end, and its exit code. A message that had just been received when the
        group cancelled the reader is lost: asyncio drops a result that meets a cancel."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                while True:
                    async with asyncio.timeout(_NOTHING_MORE_S):
                        frames = await self._sockets.receive()
                    if not is_engine_dead(frames):
                        await self._take(frames)
        except TimeoutError:
            pass  # of either: there is no more
        if self._process.exit_code is not None and len(causes) == 1:
            status = f"its process ended with exit code {self._process.exit_code}"
            causes += [status] if status not in causes else []

    def _die(self, causes: list[str]) -> None:
        self.cause_of_death = "; ".join([f"engine 0 is dead: {causes[0]}", *causes[1:]])
        _log.error("%s", self.cause_of_death)
        self.end_all(Ending(EndingKind.ENGINE_DEAD, self.cause_of_death, 0))
        self.dead.set()
