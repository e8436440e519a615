"""``EngineLink``: everything between the front end and one engine.

Its tasks are in one nursery: one reads the engine's outputs and hands them to the mailboxes, the others watch
the engine's process, the connections to it, and its steps (``contact.py``). Whichever finds the engine gone
ends all. Then the link reads what had already been sent, marks the engine dead, ends its streams with the
cause, and returns. It does not raise: that would cancel the server before it could tell anybody. An error of its own
(a bug of ours) is logged, and is such a cause, too.

Sends are synchronous: a request is registered and its ADD sent without a point in between where a
cancel could strike, and an ABORT can leave from any task, a dying one too. What cannot leave while the engine
is out of contact is kept, and leaves when it is back.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio

from ..config import LLMConfig
from ..errors import EngineDeadError, EngineUnavailableError, WireError
from ..ipc.codec import is_engine_dead, make_output_decoder
from ..ipc.transport import Transport
from ..ipc.versions import lora_array
from ..lora import LoRARequest
from ..messages import (
    EngineCoreOutputs,
    EngineReadyResponse,
    SchedulerStats,
    UtilityOutput,
)
from ..output.processor import OutputProcessor, ProcessedOutputs, ProcessorStatistics
from ..output.stats import IterationStats
from ..outputs import Ending, EndingKind
from .burst import Burst
from .contact import Contact, ContactEvents
from .endings import one_line
from .engine_watch import EngineWatch
from .observers import Observers
from .outbox import DOUBT_S, Outbox
from .request_stream import RequestStream
from .unread import Unread
from .utilities import EngineUtilities

__all__ = ["EngineLink", "EngineLinkStatistics"]

_log = logging.getLogger("trioleg.engine_link")

# How long a dead engine's last messages, exit status and error line may take to arrive, all in all; how long nothing
# has to come for there to be no more; and when to look whether its connection is gone, behind which nothing can come.
_LAST_WORDS = 0.2
_NOTHING_MORE = 0.05
_LOOK_AGAIN = 0.005

# Of what an engine says of a call that failed: it goes to whoever asked.
_WORDS_SHOWN = 2000

# When to ask again for an engine that does not answer.
_RETRY_AFTER_S = 1.0

# The question to an engine that is silent, which every kind of engine answers.
_QUESTION = "get_supported_tasks"

# A cache that is filled so far has no room for one more prompt.
_FULL = 0.9

# Ids of another front end that have had their ABORT. Forgetting them costs one more ABORT each.
_MAX_STRANGERS = 10_000


@dataclass(frozen=True, slots=True)
class EngineLinkStatistics:
    """``scheduler`` is the engine's last word about itself; ``messages``: received so far;
    ``stale_outputs``: for requests that had just ended; ``failed_sends``: could not leave at once;
    ``lost``: why the engine is out of contact, None if it is not.
    ``prefix_cache_queries``: tokens looked for in the engine's prefix cache, ``_hits``: found there."""

    engine: int
    dead: str | None
    lost: str | None
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


class EngineLink(EngineUtilities):
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
        config: LLMConfig,
        observers: Observers,
        unread: Unread,
        burst: Burst,
        watch: EngineWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.ready = ready
        self.dead = trio.Event()
        self.cause_of_death: str | None = None
        # Called when the engine is back in contact.
        self.on_change: Callable[[], None] = lambda: None
        # What its tasks have found, of which the first counts.
        self._causes: list[str] = []
        # What the engine's model can do; until it has been asked, what nearly every one does.
        self.supported_tasks = frozenset({"generate"})
        self._observers = observers
        self._unread = unread
        self._burst = burst
        self._transport = transport
        self._decode = make_output_decoder(ready.vllm_version)
        self._watch = watch or EngineWatch()
        self._clock = clock
        self._own_prefix = own_prefix
        self._chunk_size = config.output_chunk_size
        self._processor = OutputProcessor()
        self._streams: dict[str, RequestStream] = {}
        self._scheduler_stats = SchedulerStats()
        self._utilities: dict[int, _UtilityCall] = {}
        self._counts: Counter[str] = Counter()
        self._strangers: set[str] = set()
        self._is_closed = False
        self._heard = trio.Event()
        self._last_message = self._idle_until = -math.inf
        self.contact = Contact(
            transport,
            config,
            ContactEvents(
                on_lost=self._on_lost,
                on_frozen=self._on_frozen,
                on_back=self._on_back,
                ask=self._ask,
                silent_since=self._silent_since,
            ),
        )
        self._outbox = Outbox(transport, lambda: self.contact.lost is None)

    # ------------------------------------------------------------------ towards the engine

    def submit(self, stream: RequestStream) -> None:
        """Register the request and send it; while the engine is out of contact, keep it until it is back.

        Raises ``EngineDeadError`` and, when that has lasted, ``EngineUnavailableError``; registers nothing then.
        """
        self._refuse_if_gone()
        self._note_work()
        for request in stream.submission.engine_requests:
            if request.lora_request is not None:
                request.lora_request = self._lora_array(request.lora_request)
        self._processor.add_request(stream.submission.state)
        self._streams[stream.request_id] = stream
        if not self._outbox.add(stream):
            self._end_doubtful([stream])

    def stream_ended(self, stream: RequestStream) -> None:
        """Forget the request; tell the engine if it may still be at it. Called by ``stream.end``."""
        if self._streams.pop(stream.request_id, None) is not None:
            live = self._processor.end_request(stream.request_id)
            if not self._outbox.withdraw(stream):
                self._abort(live)

    def _abort(self, engine_request_ids: list[str]) -> None:
        if self.cause_of_death is not None:
            return
        try:
            self._outbox.abort(engine_request_ids)
        except Exception:  # noqa: BLE001 - the engine works in vain; whoever ends a request goes on
            _log.exception("engine %d: no ABORT for %s", self.rank, engine_request_ids)

    def _refuse_if_gone(self) -> None:
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)
        if self.contact.frozen is not None:
            cause = f"engine {self.rank} does not answer: {self.contact.frozen}"
            raise EngineUnavailableError(cause, retry_after=_RETRY_AFTER_S)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Ask the engine (between two of its steps) and wait for the answer.

        Raises ``WireError`` with the engine's message if it refuses, ``EngineDeadError`` if it dies, and
        ``EngineUnavailableError`` if it goes out of contact, whether it did what it was asked or not, and
        ``trio.ClosedResourceError`` when the LLM's block is left. Cancel-safe: a late answer is dropped.
        """
        self._refuse_if_gone()
        self._note_work()
        call = _UtilityCall()
        call_id = self._outbox.call(method, args)
        if call_id is not None:
            self._utilities[call_id] = call
            try:
                await call.done.wait()
            finally:
                del self._utilities[call_id]
        await trio.lowlevel.checkpoint()
        if call.answer is None and self._is_closed:
            raise trio.ClosedResourceError("the LLM's block has been left")
        if call.answer is None:
            self._refuse_if_gone()
            done = "could not be asked" if call_id is None else "may or may not have been done"
            cause = f"engine {self.rank} is out of contact: {method} {done}"
            raise EngineUnavailableError(cause, retry_after=_RETRY_AFTER_S)
        if call.answer.failure_message is not None:
            words = call.answer.failure_message[:_WORDS_SHOWN]
            raise WireError(f"engine {self.rank}: {method}: {words}")
        match call.answer.result:
            case None:
                return None
            case [_type_info, value]:
                return value
        raise WireError(
            f"engine {self.rank}: {method}: the answer is {call.answer.result!r:.60}; allowed: a pair or nil"
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self._call(bool, "add_lora", self._lora_array(lora_request))

    def _lora_array(self, lora_request: LoRARequest) -> list[Any]:
        return lora_array(lora_request, self.ready.vllm_version)

    def tell(self, method: str, *args: Any) -> None:
        """As ``call_utility``, for an answer that nobody waits for. Synchronous, raises nothing."""
        if self.cause_of_death is None:
            self._outbox.call(method, args)

    def end_all(self, ending: Ending) -> None:
        """End every live stream of this engine."""
        for stream in list(self._streams.values()):
            stream.end(ending)

    def hurry(self) -> None:
        """The engine is not to be waited for any more when it is ended. Synchronous."""
        self._watch.hurry()

    def close(self) -> None:
        """The LLM's block is left: whoever waits for an answer hears of it. Synchronous, idempotent."""
        self._is_closed = True
        self._release_calls()

    # ------------------------------------------------------------------ from the engine

    @trio.lowlevel.enable_ki_protection
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and watch until the engine is gone; returns when its streams have been told."""

        async def until_gone(find_cause: Callable[[], Awaitable[str]]) -> None:
            try:
                cause = await find_cause()
            except Exception as error:  # noqa: BLE001 - it would cancel the server before that could tell anybody
                cause = self._note_failure(error)
            self._causes.append(cause)
            nursery.cancel_scope.cancel(reason=cause)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_gone, self._read_outputs, name="read_outputs")
            nursery.start_soon(until_gone, self._watch.wait, name="watch process")
            nursery.start_soon(until_gone, self.contact.watch_connection, name="watch connection")
            nursery.start_soon(until_gone, self.contact.watch_steps, name="watch steps")
            task_status.started()
        await self._die(self._causes[0])

    def _note_failure(self, error: Exception) -> str:
        """A bug of ours. What was in hand is lost, so no stream is whole any more, whatever is read behind it."""
        _log.error("engine %d: its link has failed", self.rank, exc_info=error)
        cause = f"its link has failed: {type(error).__name__}: {error}"
        self.end_all(Ending(EndingKind.ENGINE_DEAD, f"engine {self.rank}: {cause}", self.rank))
        return cause

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
        self._last_message = trio.current_time()
        self._heard.set()
        try:
            message = self._decode(frames)
        except WireError as error:
            # Whose tokens were in it cannot be known, so no stream of this engine is whole any more.
            _log.error("engine %d: %s", self.rank, one_line(str(error)))
            self.end_all(Ending(EndingKind.OUTPUT_ERROR, str(error), self.rank))
            return
        if message.scheduler_stats is not None:
            self._note_stats(message.scheduler_stats)
        if message.utility_output is not None:
            self._answer(message.utility_output)
        await self._process(message, frames, received)
        self._trace(message, received)

    def _trace(self, message: EngineCoreOutputs, received: float) -> None:
        try:
            if self._observers.tracer is not None:
                self._observers.tracer.on_message(message, received, self._processor.find)
        except Exception:  # noqa: BLE001 - whatever a tracer does, the tokens go on
            _log.exception("engine %d: the tracer failed and is dropped", self.rank)
            self._observers.tracer = None

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
        stats = None if self._observers.stats_logger is None else IterationStats()
        for start in range(0, len(outputs), self._chunk_size):
            end = start + self._chunk_size
            self._burst.open()
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
            self._burst.flush()
            if end < len(outputs):
                # Others run between slices; a cancel waits, or the later slices would be lost.
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
        if stats is not None:
            self._log_stats(message.scheduler_stats, stats)

    def _log_stats(self, scheduler: SchedulerStats | None, stats: IterationStats) -> None:
        try:
            if self._observers.stats_logger is not None:
                self._observers.stats_logger.record(self.rank, scheduler, stats)
        except Exception:  # noqa: BLE001 - whatever a logger does, the tokens go on
            _log.exception("engine %d: the stats logger failed and is dropped", self.rank)
            self._observers.stats_logger = None

    def _settle(self, processed: ProcessedOutputs) -> None:
        self._abort(processed.aborts)
        for request_id, ending in processed.endings:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.end(replace(ending, engine=self.rank))
        for request_id in processed.unknown:
            self._meet_stranger(request_id)
        self._unread.relieve(self._streams.values())

    def _meet_stranger(self, request_id: str) -> None:
        """An output for no live request: ours and just ended, or left over from an earlier head."""
        if request_id.startswith(self._own_prefix):
            self._counts["stale_outputs"] += 1
        elif request_id not in self._strangers:
            if len(self._strangers) >= _MAX_STRANGERS:
                self._strangers.clear()
            self._strangers.add(request_id)
            _log.info("engine %d: aborting request %r of another front end", self.rank, request_id)
            self._abort([request_id])

    def _answer(self, output: UtilityOutput) -> None:
        call = self._utilities.get(output.call_id)
        if call is not None:
            call.answer = output
            call.done.set()

    # ------------------------------------------------------------------ contact

    def _note_work(self) -> None:
        """Called before there is more to do: a silence before that was none."""
        if not self._streams and not self._utilities:
            self._idle_until = trio.current_time()

    def _silent_since(self) -> float | None:
        """Since when it has been silent with work to do; None without work."""
        has_work = self._streams or self._utilities
        return max(self._last_message, self._idle_until) if has_work else None

    async def _ask(self) -> None:
        """Returns when a message has come; asks for one."""
        self._heard = trio.Event()
        self._outbox.call(_QUESTION, ())
        await self._heard.wait()

    def _on_lost(self, cause: str) -> None:
        _log.warning("engine %d is out of contact: %s", self.rank, cause)

    def _on_frozen(self, cause: str) -> None:
        self._watch.note_stuck(is_stuck=True)
        cause = f"engine {self.rank} does not answer: {cause}"
        _log.error("%s", cause)
        self.end_all(Ending(EndingKind.ENGINE_DEAD, cause, self.rank))
        self._release_calls()

    def _on_back(self, lost_at: float, outputs_broke: bool) -> None:
        """The engine is back: what was kept leaves, and whoever may have lost something is told."""
        _log.warning("engine %d is in contact again", self.rank)
        self._watch.note_stuck(is_stuck=False)
        self.on_change()
        doubtful_since = lost_at - DOUBT_S
        doubtful = [
            stream
            for stream in self._streams.values()
            if not self._outbox.holds(stream)
            and (
                outputs_broke
                or (stream.submitted_at > doubtful_since and not stream.num_output_tokens)
            )
        ]
        doubtful += self._outbox.catch_up(doubtful_since)
        self._release_calls()
        self._end_doubtful(doubtful)

    def _end_doubtful(self, streams: list[RequestStream]) -> None:
        cause = f"the connection to engine {self.rank} broke, and a part of the request may be lost"
        for stream in streams:
            stream.end(Ending(EndingKind.ENGINE_DEAD, cause, self.rank))

    def _release_calls(self) -> None:
        for call in self._utilities.values():
            call.done.set()

    # ------------------------------------------------------------------ the end

    async def _die(self, cause: str) -> None:
        """Last messages, last words, then the truth to everyone."""
        exit_status: list[str] = []

        async def wait_for_exit() -> None:
            exit_status.append(await self._watch.wait())

        async def read_the_rest() -> None:
            try:
                await self._read_the_rest()
            except Exception:  # noqa: BLE001 - the streams are told without it
                _log.exception("engine %d: its last messages could not be read", self.rank)

        with trio.move_on_after(_LAST_WORDS):
            async with trio.open_nursery() as nursery:
                if self._watch.sees_exit:
                    nursery.start_soon(wait_for_exit)
                nursery.start_soon(read_the_rest)
        self._note_death([cause, *(status for status in exit_status if status != cause)])

    @trio.lowlevel.enable_ki_protection
    async def _read_the_rest(self) -> None:
        """What the engine had sent before its end."""
        silent_since = trio.current_time()
        while trio.current_time() - silent_since < _NOTHING_MORE:
            with trio.move_on_after(_LOOK_AGAIN) as looking:
                frames = await self._transport.receive()
            if not looking.cancelled_caught:
                silent_since = trio.current_time()
                if not is_engine_dead(frames):
                    await self._take(frames)
            elif self._transport.is_output_lost:
                # Nobody is there who could send, and what had been sent is read.
                return

    def note_unseen_death(self) -> None:
        """For the owner, when the link and an engine's process of ours are gone: the death may have come so
        shortly before the link was cancelled that nobody had time to tell of it."""
        causes = [*self._causes[:1], *filter(None, [self._watch.death])]
        if self.cause_of_death is None and causes:
            self._note_death(list(dict.fromkeys(causes)))

    def _note_death(self, causes: list[str]) -> None:
        words = [f"engine {self.rank} is dead: {causes[0]}", *causes[1:]]
        if self._watch.last_error:
            words.append(f"its last words: {self._watch.last_error}")
        self.cause_of_death = "; ".join(words)
        _log.error("%s", one_line(self.cause_of_death))
        self.end_all(Ending(EndingKind.ENGINE_DEAD, self.cause_of_death, self.rank))
        self._release_calls()
        self.dead.set()

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run in the engine and wait for one of them to end, by its last word; of a dead one
        none. Those that only wait for their turn in a step are not among them."""
        stats = self._scheduler_stats
        if self.cause_of_death is not None:
            return 0, 0
        # An engine that does not say how many it has is taken to have enough: else whoever waits for a turn counts.
        seats = self.ready.max_num_seqs or math.inf
        has_seats = stats.num_running_reqs < seats
        has_room = has_seats and stats.kv_cache_usage < _FULL
        return stats.num_running_reqs, 0 if has_room else stats.num_waiting_reqs

    def statistics(self) -> EngineLinkStatistics:
        return EngineLinkStatistics(
            self.rank,
            self.cause_of_death,
            self.contact.lost,
            self.ready.num_gpu_blocks,
            self._scheduler_stats,
            self._processor.statistics(),
            self._counts["messages"],
            self._counts["stale_outputs"],
            self._outbox.failed_sends,
            self._counts["prefix_cache_queries"],
            self._counts["prefix_cache_hits"],
        )


class _UtilityCall:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: UtilityOutput | None = None
