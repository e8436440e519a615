"""Which tokens the next step computes: continuous batching with chunked prefill, first come first served.

Rules of this file: pure Python, no torch, no trio. The plan, for each step:

1. Every running request gets its next tokens, oldest first: one for a decode, a chunk for a prompt.
   A decode that needs a block and finds none preempts the youngest running request, which loses its
   blocks, goes back to the head of the queue and computes its tokens anew later. Alone and without a
   block, a request can never go on: it is reported as stuck.
2. What is left of the token budget admits waiting requests in order. A request is admitted with the
   blocks of all its tokens, so a prompt in the middle of its chunks never waits for memory.

No deadlock: the oldest request is never a victim, so it ends, and its blocks come back.
Starvation: at most ``max_num_batched_tokens`` requests run, so each gets at least one token a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..messages import EngineCoreEvent
from .kv_cache import BlockPool
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
    """The queue, the running batch, and the block pool. Not thread-safe, like the whole engine."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Queues a request; its id must not be live."""
        self.requests[request.request_id] = request
        self.waiting.append(request)
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

    def _schedule_running(self, schedule: Schedule, budget: int) -> int:
        # Preemption shortens the list from its end while we walk it from its start.
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            if self._grow(request, schedule):
                budget -= self._take(request, schedule, budget)
                index += 1
            else:
                break
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
            elif self._preempt_youngest() is request:
                return False
        return True

    def _take(self, request: Request, schedule: Schedule, budget: int) -> int:
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, budget)
        schedule.chunks.append(Chunk(request, start, count))
        return count

    def _preempt_youngest(self) -> Request:
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.record(EngineCoreEvent.PREEMPTED)
        self.waiting.appendleft(request)
        return request

    def _admit(self, schedule: Schedule, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self._max_running:
            request = self.waiting[0]
            needed = self.pool.blocks_for(request.num_tokens)
            # A block in reserve for each running request: without it the one admitted now could be
            # preempted in the very next step, and be computed again and again.
            if needed + len(self.running) > self.pool.num_free:
                break
            blocks = self.pool.allocate(needed)
            assert blocks is not None
            request.block_ids = blocks
            schedule.new_blocks += blocks
            self.running.append(self.waiting.popleft())
            request.record(EngineCoreEvent.SCHEDULED)
            budget -= self._take(request, schedule, budget)

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
