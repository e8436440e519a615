"""``EngineLink``: everything between the front end and one engine.

Three tasks in one nursery: one reads the engine's outputs and hands them to the mailboxes, one watches
the engine's process and one the sockets to it. Whichever finds the engine gone ends all three. Then the link reads what
had already been sent, marks the engine dead, ends its streams with the cause, and returns. It does
not raise: that would cancel the server before it could tell anybody.

Sends are synchronous: a request is registered and its ADD sent without a point in between where a
cancel could strike, and an ABORT can leave from any task, a dying one too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from ..errors import EngineDeadError, WireError
from ..ipc.codec import (
    decode_outputs,
    encode_abort,
    encode_request,
    encode_utility,
    is_engine_dead,
)
from ..ipc.transport import Transport
from ..messages import (
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineReadyResponse,
    SchedulerStats,
    UtilityOutput,
)
from ..output.processor import OutputProcessor, ProcessedOutputs, ProcessorStatistics
from ..output.stats import IterationStats
from ..output.submission import Submission
from ..outputs import Ending, EndingKind
from .request_stream import RequestStream
from .stats_logger import StatsLogger
from .tracer import Tracer

__all__ = ["EngineLink", "EngineLinkStatistics", "EngineWatch"]

_log = logging.getLogger("trioleg.engine_link")

# How long a dead engine's last messages, exit status and error line may take to arrive.
_LAST_WORDS = 0.2

# Ids of another front end that have had their ABORT. Forgetting them costs one more ABORT each.
_MAX_STRANGERS = 10_000


class EngineWatch:
    """What a link can learn of an engine's process; this one knows nothing (someone else's engine)."""

    async def wait(self) -> str:
        """Returns how the process ended, as a clause ("it exited with status 1")."""
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    @property
    def last_error(self) -> str:
        """The process's own last error line, or ""."""
        return ""


@dataclass(frozen=True, slots=True)
class EngineLinkStatistics:
    """``scheduler`` is the engine's last word about itself; ``messages``: received so far;
    ``stale_outputs``: for requests that had just ended; ``failed_sends``: could not leave.
    ``prefix_cache_queries``: tokens looked for in the engine's prefix cache, ``_hits``: found there."""

    engine: int
    dead: str | None
    num_gpu_blocks: int
    scheduler: SchedulerStats
    processor: ProcessorStatistics
    messages: int
    stale_outputs: int
    failed_sends: int
    prefix_cache_queries: int
    prefix_cache_hits: int

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the key/value cache, from the engine's usage figure."""
        # What the engine says is not ours to trust: NaN counts as nothing used.
        usage = min(1.0, max(0.0, self.scheduler.kv_cache_usage))
        return round((1 - usage) * self.num_gpu_blocks)


class EngineLink:
    """One engine's link. ``run`` is its task; everything else is synchronous but the utility calls.

    ``own_prefix`` begins every request id of this front end: an output with another one belongs to a
    front end that was here before us.
    """

    def __init__(
        self,
        rank: int,
        ready: EngineReadyResponse,
        transport: Transport,
        *,
        own_prefix: str,
        output_chunk_size: int,
        watch: EngineWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.ready = ready
        self.dead = trio.Event()
        self.cause_of_death: str | None = None
        self.stats_logger: StatsLogger | None = None
        self.tracer: Tracer | None = None
        self._transport = transport
        self._watch = watch or EngineWatch()
        self._clock = clock
        self._own_prefix = own_prefix
        self._chunk_size = output_chunk_size
        self._processor = OutputProcessor()
        self._streams: dict[str, RequestStream] = {}
        self._scheduler_stats = SchedulerStats()
        self._utilities: dict[int, _UtilityCall] = {}
        self._counts: Counter[str] = Counter()
        self._strangers: set[str] = set()

    # ------------------------------------------------------------------ towards the engine

    def submit(self, stream: RequestStream, submission: Submission) -> None:
        """Register the request, then send it. Raises ``EngineDeadError``; registers nothing then."""
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)
        self._processor.add_request(submission.state)
        self._streams[stream.request_id] = stream
        for request in submission.engine_requests:
            if not self._send(EngineCoreRequestType.ADD, encode_request(request)):
                cause = f"engine {self.rank} cannot be reached"
                stream.end(Ending(EndingKind.ENGINE_DEAD, cause, self.rank))
                return

    def stream_ended(self, stream: RequestStream) -> None:
        """Forget the request; tell the engine if it may still be at it. Called by ``stream.end``."""
        if self._streams.pop(stream.request_id, None) is not None:
            self._abort(self._processor.end_request(stream.request_id))

    def _abort(self, engine_request_ids: list[str]) -> None:
        """One ABORT for all of them; none is needed for no ids, or by a dead engine."""
        if engine_request_ids and self.cause_of_death is None:
            self._send(EngineCoreRequestType.ABORT, encode_abort(engine_request_ids))

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Ask the engine (between two of its steps) and wait for the answer.

        Raises ``WireError`` with the engine's message if it refuses, ``EngineDeadError`` if it dies.
        Cancel-safe: a late answer is dropped.
        """
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)
        call = _UtilityCall()
        self._counts["utilities"] += 1
        call_id = self._counts["utilities"]
        self._utilities[call_id] = call
        try:
            body = encode_utility(0, call_id, method, args)
            self._send(EngineCoreRequestType.UTILITY, body)
            await call.done.wait()
        finally:
            del self._utilities[call_id]
        if call.answer is None:
            raise EngineDeadError(self.cause_of_death or "the engine is gone")
        if call.answer.failure_message is not None:
            raise WireError(f"engine {self.rank}: {method}: {call.answer.failure_message}")
        return None if call.answer.result is None else call.answer.result[1]

    def end_all(self, ending: Ending) -> None:
        """End every live stream of this engine."""
        for stream in list(self._streams.values()):
            stream.end(ending)

    def _send(self, kind: EngineCoreRequestType, body: bytes) -> bool:
        sent = self._transport.send(kind, body)
        if not sent:
            self._counts["failed_sends"] += 1
        return sent

    # ------------------------------------------------------------------ from the engine

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and watch until the engine is gone; returns when its streams have been told."""
        causes: list[str] = []

        async def until_gone(find_cause: Callable[[], Awaitable[str]]) -> None:
            cause = await find_cause()
            causes.append(cause)
            nursery.cancel_scope.cancel(reason=cause)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_gone, self._read_outputs, name="read_outputs")
            nursery.start_soon(until_gone, self._watch.wait, name="watch process")
            nursery.start_soon(until_gone, self._transport.wait_unreachable, name="watch sockets")
            task_status.started()
        await self._die(causes[0])

    @trio.lowlevel.enable_ki_protection
    async def _read_outputs(self) -> str:
        while True:
            frames = await self._transport.receive()
            if is_engine_dead(frames):
                return "it reported its own death"
            await self._take(frames)

    async def _take(self, frames: Sequence[bytes | memoryview]) -> None:
        received = self._clock()
        self._counts["messages"] += 1
        try:
            message = decode_outputs(frames)
        except WireError as error:
            # Whose tokens were in it cannot be known, so no stream of this engine is whole any more.
            _log.error("engine %d: %s", self.rank, error)
            self.end_all(Ending(EndingKind.OUTPUT_ERROR, str(error), self.rank))
            return
        if message.scheduler_stats is not None:
            self._note_stats(message.scheduler_stats)
        if message.utility_output is not None:
            self._answer(message.utility_output)
        await self._process(message, frames, received)
        if self.tracer is not None:
            self.tracer.on_message(message, received, self._processor.find)

    def _note_stats(self, stats: SchedulerStats) -> None:
        self._scheduler_stats = stats
        if stats.prefix_cache_stats is not None:
            self._counts["prefix_cache_queries"] += stats.prefix_cache_stats.queries
            self._counts["prefix_cache_hits"] += stats.prefix_cache_stats.hits

    async def _process(
        self,
        message: EngineCoreOutputs,
        frames: Sequence[bytes | memoryview],
        received: float,
    ) -> None:
        outputs = message.outputs
        stats = None if self.stats_logger is None else IterationStats()
        for start in range(0, len(outputs), self._chunk_size):
            end = start + self._chunk_size
            processed = self._processor.process(
                outputs[start:end],
                frames=frames,
                timestamp=message.timestamp,
                now=received,
                stats=stats,
            )
            # Every request here has a mailbox; the returned list is for batch use.
            assert not processed.request_outputs
            self._settle(processed)
            if end < len(outputs):
                # Others run between slices; a cancel waits, or the later slices would be lost.
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
        if stats is not None:
            self._log_stats(message.scheduler_stats, stats)

    def _log_stats(self, scheduler: SchedulerStats | None, stats: IterationStats) -> None:
        try:
            if self.stats_logger is not None:
                self.stats_logger.record(self.rank, scheduler, stats)
        except Exception:  # noqa: BLE001 - whatever a logger does, the tokens go on
            _log.exception("engine %d: the stats logger failed and is dropped", self.rank)
            self.stats_logger = None

    def _settle(self, processed: ProcessedOutputs) -> None:
        self._abort(processed.aborts)
        for request_id, ending in processed.endings:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.end(ending)
        for request_id in processed.unknown:
            self._meet_stranger(request_id)

    def _meet_stranger(self, request_id: str) -> None:
        """An output for no live request: ours and just ended, or left over from an earlier head."""
        if request_id.startswith(self._own_prefix):
            self._counts["stale_outputs"] += 1
        elif request_id not in self._strangers:
            if len(self._strangers) >= _MAX_STRANGERS:
                self._strangers.clear()
            self._strangers.add(request_id)
            _log.info("engine %d: aborting request %s of another front end", self.rank, request_id)
            self._send(EngineCoreRequestType.ABORT, encode_abort([request_id]))

    def _answer(self, output: UtilityOutput) -> None:
        call = self._utilities.get(output.call_id)
        if call is not None:
            call.answer = output
            call.done.set()

    # ------------------------------------------------------------------ the end

    async def _die(self, cause: str) -> None:
        """Last messages, last words, then the truth to everyone."""
        exit_status: list[str] = []

        async def wait_for_exit() -> None:
            exit_status.append(await self._watch.wait())

        with trio.move_on_after(_LAST_WORDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_outputs)
                nursery.start_soon(wait_for_exit)
        words = [f"engine {self.rank} is dead: {cause}"]
        words += [status for status in exit_status if status != cause]
        if self._watch.last_error:
            words.append(f"its last error: {self._watch.last_error}")
        self.cause_of_death = "; ".join(words)
        _log.error("%s", self.cause_of_death)
        self.end_all(Ending(EndingKind.ENGINE_DEAD, self.cause_of_death, self.rank))
        for call in self._utilities.values():
            call.done.set()
        self.dead.set()

    def statistics(self) -> EngineLinkStatistics:
        return EngineLinkStatistics(
            self.rank,
            self.cause_of_death,
            self.ready.num_gpu_blocks,
            self._scheduler_stats,
            self._processor.statistics(),
            self._counts["messages"],
            self._counts["stale_outputs"],
            self._counts["failed_sends"],
            self._counts["prefix_cache_queries"],
            self._counts["prefix_cache_hits"],
        )


class _UtilityCall:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: UtilityOutput | None = None
