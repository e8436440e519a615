"""Which tokens the next step computes: continuous batching with chunked prefill, and a prefix cache.

Rules of this file: pure Python, no torch, no trio. Requests stand in an order that never changes: as they
came, or by ``priority`` first where the policy says so (a smaller one is served before). The plan, for
each step:

1. Every running request gets its next tokens, in order: one for a decode, a chunk for a prompt. One that
   needs a block and finds none preempts the last running request, which loses its blocks, goes back to
   its place in the queue and computes its tokens anew later. Alone and without a block, a request can
   never go on: it is reported as stuck.
2. What is left of the token budget admits waiting requests in order. A request is admitted with the
   blocks of all its tokens, so a prompt in the middle of its chunks never waits for memory. Of its
   blocks, those are shared that hold the beginning of its tokens already; they are not computed.

No deadlock: the first request is never a victim, so it ends, and its blocks come back.
Starvation: at most ``max_num_batched_tokens`` requests run, and a prompt's chunk leaves one token of the
budget for each that stands behind it, so each running request gets at least one token a step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from ..messages import EngineCoreEvent, PrefixCacheStats
from .kv_cache import BlockPool, extend_block_hashes
from .request import Request

__all__ = ["Chunk", "Schedule", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of one request, from position ``start`` on, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True if the chunk ends with the request's last token, so that a new one comes of it."""
        return self.end == self.request.num_tokens

    @property
    def scores(self) -> range:
        """The positions in this chunk whose logprobs are asked for and not known yet.

        Position i says how probable prompt token i + 1 was. Positions become known in order, so after
        a preemption only those that were never reached are left.
        """
        known = self.request.prompt_logprobs
        if known is None:
            return range(0)
        return range(max(self.start, len(known)), min(self.end, self.request.num_prompt_tokens - 1))


@dataclass(slots=True)
class Schedule:
    """One step's work. ``new_blocks`` hold the remains of earlier owners; the runner clears them.

    ``stuck`` requests need more blocks than there are; they are still running, and the caller ends them.
    """

    chunks: list[Chunk]
    new_blocks: list[int]
    stuck: list[Request]


class Scheduler:
    """The queue, the running batch, and the block pool. Not thread-safe, like the whole engine.

    ``by_priority``: a request's ``priority`` comes before its time. ``prefix_caching``: full blocks are
    kept and found again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        by_priority: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._by_priority = by_priority
        self._prefix_caching = prefix_caching
        self._arrivals = 0
        self._prefix_stats = PrefixCacheStats()
        # While paused nobody begins; who has begun goes on.
        self.paused = False
        # Both in order.
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}

    @property
    def has_started(self) -> bool:
        """True while a request is there that has run."""
        return bool(self.running) or any(one.num_preemptions for one in self.waiting)

    @property
    def has_work(self) -> bool:
        """True if a step would compute something."""
        return self.has_started if self.paused else bool(self.requests)

    def add(self, request: Request) -> None:
        """Queues a request; its id must not be live."""
        self._arrivals += 1
        request.place = (request.priority if self._by_priority else 0, self._arrivals)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_place)
        request.record(EngineCoreEvent.QUEUED)

    def remove(self, request_ids: Iterable[str]) -> list[Request]:
        """Forgets requests, running or waiting; their blocks are free at once. Unknown ids are fine."""
        removed = []
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                (self.running if request.block_ids else self.waiting).remove(request)
                self._release(request)
                removed.append(request)
        return removed

    def schedule(self) -> Schedule:
        """The next step's work; empty if there is none."""
        schedule = Schedule([], [], [])
        budget = self._schedule_running(schedule, self.max_num_batched_tokens)
        if not schedule.stuck:
            self._admit(schedule, budget)
        return schedule

    def preempt_all(self) -> None:
        """Every running request goes back to the queue, without its blocks."""
        while self.running:
            self._preempt_last()

    def reset_prefix_cache(self) -> bool:
        """Forgets all that is kept. False, and nothing done, while blocks are in use."""
        done = self.pool.forget_names()
        if done:
            self._prefix_stats.reset = True
        return done

    def take_prefix_stats(self) -> PrefixCacheStats:
        """What the prefix cache was asked since the last call, and what it had."""
        stats, self._prefix_stats = self._prefix_stats, PrefixCacheStats()
        return stats

    # ------------------------------------------------------------------ those that run

    def _schedule_running(self, schedule: Schedule, budget: int) -> int:
        # Preemption shortens the list from its end while we walk it from its start.
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            if not self._grow(request, schedule):
                break
            index += 1
            behind = len(self.running) - index
            budget -= self._take(request, schedule, budget - behind)
        return budget

    def _grow(self, request: Request, schedule: Schedule) -> bool:
        """Room for all the request's tokens. False: it has lost its place, or is stuck."""
        while len(request.block_ids) < self.pool.blocks_for(request.num_tokens):
            blocks = self.pool.allocate(1)
            if blocks is not None:
                request.block_ids += blocks
                schedule.new_blocks += blocks
            elif len(self.running) == 1:
                schedule.stuck.append(request)
                return False
            elif self._preempt_last() is request:
                return False
        return True

    def _take(self, request: Request, schedule: Schedule, budget: int) -> int:
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, budget)
        chunk = Chunk(request, start, count)
        schedule.chunks.append(chunk)
        if self._prefix_caching:
            self._name_full_blocks(request, chunk)
        return count

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.record(EngineCoreEvent.PREEMPTED)
        insort(self.waiting, request, key=_place)
        return request

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []

    # ------------------------------------------------------------------ those that wait

    def _admit(self, schedule: Schedule, budget: int) -> None:
        while budget and len(self.running) < self._max_running:
            request = self._next_waiting()
            if request is None or not self._give_blocks(request, schedule):
                break
            self.waiting.remove(request)
            insort(self.running, request, key=_place)
            request.record(EngineCoreEvent.SCHEDULED)
            budget -= self._take(request, schedule, budget)

    def _next_waiting(self) -> Request | None:
        if not self.paused:
            return self.waiting[0] if self.waiting else None
        return next((one for one in self.waiting if one.num_preemptions), None)

    def _give_blocks(self, request: Request, schedule: Schedule) -> bool:
        """Blocks for all the request's tokens, shared ones first; False, and nothing taken, for want of
        free ones."""
        shared = self._find_prefix(request)
        needed = self.pool.blocks_for(request.num_tokens) - len(shared)
        # A block in reserve for each running request: without it the one admitted now could be
        # preempted in the very next step, and be computed again and again.
        free = self.pool.num_free - self.pool.num_unused(shared)
        if needed + len(self.running) > free:
            return False
        # Shared before any other is taken, since that could be one of them.
        self.pool.share(shared)
        own = self.pool.allocate(needed)
        assert own is not None
        request.block_ids = shared + own
        request.num_computed_tokens = len(shared) * self.pool.block_size
        schedule.new_blocks += own
        self._note_prefix(request)
        return True

    def _find_prefix(self, request: Request) -> list[int]:
        if not self._prefix_caching or request.skips_prefix_cache:
            return []
        # The last token is computed in any case: the next one is sampled from what comes of it.
        count = (request.num_tokens - 1) // self.pool.block_size
        self._extend_hashes(request, count)
        return self.pool.find(request.block_hashes[:count])

    def _note_prefix(self, request: Request) -> None:
        hits = request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hits
        if not self._prefix_caching or request.skips_prefix_cache:
            return
        stats = self._prefix_stats
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += request.num_tokens
            stats.preempted_hits += hits
        else:
            stats.requests += 1
            stats.queries += request.num_tokens
            stats.hits += hits

    def _name_full_blocks(self, request: Request, chunk: Chunk) -> None:
        # Before they are computed: the model writes the keys and values of a whole step, layer by layer,
        # before it reads them, so a prompt that begins alike can share them within the same step.
        first, end = chunk.start // self.pool.block_size, chunk.end // self.pool.block_size
        if first < end:
            self._extend_hashes(request, end)
            for index in range(first, end):
                self.pool.name(request.block_ids[index], request.block_hashes[index])

    def _extend_hashes(self, request: Request, count: int) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.root_hash,
            request.token_ids,
            count,
            self.pool.block_size,
        )


def _place(request: Request) -> tuple[int, int]:
    return request.place
