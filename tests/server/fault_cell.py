"""One cell of the fault matrix, played in virtual time: a request beside a neighbour, struck in a phase."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import trio
from fault_matrix import MODES, PHASES, Fault
from scripted_app import MESSAGES, Answer, ScriptedApp, open_app
from tiny_tokenizers import ids

from trioleg.errors import RequestEnded, TriolegError
from trioleg.messages import EngineCoreRequestType
from trioleg.outputs import EndingKind, RequestOutput
from trioleg.runtime.llm import LLM
from trioleg.runtime.request_stream import RequestStream
from trioleg.sampling_params import RequestOutputKind, SamplingParams
from trioleg.testing import Script, ScriptedTransport
from trioleg.timeouts import Timeouts

__all__ = ["NEIGHBOUR_TOKENS", "Cell", "play_cell"]

# A token every 0.1 s, the first of them a second behind the request's admission.
SCRIPT = Script(
    token_ids=ids("a", "b", "c"), step_interval_s=0.1, first_token_delay_s=1.0, max_num_seqs=4
)
# Before the request comes, the neighbour runs; between the two beats of that, nothing is in doubt.
HEAD_START_S = 2.03
NEIGHBOUR_TOKENS = 60
# In the phase "answer not read yet" a reader takes so long for each piece, and the answer has so few tokens
# that it is whole before the second.
PAUSE_S = 1.0
SHORT = 3
# By then the engine has been given up, or is there again, and no deadline is left.
AFTERWARDS_S = 120.0
# Neither neighbour nor successor is to meet the deadline under test.
NO_HURRY = Timeouts(first_token=100.0, total=100.0)


@dataclass
class Cell:
    """A request that is struck, and all that was seen of it. Times are seconds of Trio's clock."""

    fault: Fault
    phase: str
    mode: str
    n: int
    app: ScriptedApp
    answer: Answer = field(default_factory=Answer)
    stream: RequestStream | None = None
    # What a caller inside the program got.
    error: Exception | None = None
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finishes: dict[int, str | None] = field(default_factory=dict)
    has_partial: bool = False
    neighbour: RequestOutput | TriolegError | None = None
    successor: RequestOutput | TriolegError | None = None
    # Characters that a client had when it struck.
    read_before: int = 0
    endings: dict[EndingKind, int] = field(default_factory=dict)
    turned_away: int = 0
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _reads: trio.Event = field(default_factory=trio.Event)

    @property
    def llm(self) -> LLM:
        return self.app.llm

    @property
    def transport(self) -> ScriptedTransport:
        return self.app.transport

    @property
    def asked(self) -> dict[str, Any]:
        """The request's parameters, as both API and ``SamplingParams`` know them."""
        held = {"stop": ["cabd"]} if self.phase == "text held back" else {}
        own = self.fault.asked.get(self.phase, {})
        tokens = SHORT if self.is_slow else self.fault.max_tokens
        return {"n": self.n, "max_tokens": tokens, **held, **own}

    @property
    def is_slow(self) -> bool:
        """The answer is whole before its reader has taken the first piece in."""
        return self.phase == "answer not read yet"

    def leave(self) -> None:
        self.answer.leave.set()
        self._scope.cancel(reason="the caller has lost interest")

    def aborted(self) -> list[list[str]]:
        """The ids of this request in each ABORT that the engine got."""
        bodies = [b for kind, b in self.transport.sent if kind is EngineCoreRequestType.ABORT]
        frames = [msgspec.msgpack.decode(body, type=list[str]) for body in bodies]
        known = set(self.engine_ids)
        return [own for frame in frames if (own := [one for one in frame if one in known])]

    @property
    def engine_ids(self) -> list[str]:
        if self.stream is None:
            return []
        return self.stream.submission.engine_request_ids

    # ------------------------------------------------------------------ the players

    async def run_neighbour(self) -> None:
        """Beside a queued request it has the engine to itself."""
        self.neighbour = await self._generate(4 if self.phase == "queued" else 1, NEIGHBOUR_TOKENS)

    async def run_successor(self) -> None:
        self.successor = await self._generate(1, 4)

    async def _generate(self, n: int, tokens: int) -> RequestOutput | TriolegError:
        params = SamplingParams(n=n, max_tokens=tokens, temperature=0.0)
        try:
            return await self.llm.generate(MESSAGES, params, timeouts=NO_HURRY)
        except TriolegError as error:
            return error

    async def run_request(self) -> None:
        with self._scope:
            if self.mode in ("stream", "plain"):
                await self._run_client()
            else:
                await self._run_caller()

    async def _run_client(self) -> None:
        self.answer.pause = PAUSE_S if self.is_slow else 0.0
        self.answer.reads = self._reads if self.fault.reader_stops else None
        await self.app.ask(self.answer, stream=self.mode == "stream", **self.asked)

    async def _run_caller(self) -> None:
        params = self.llm.default_sampling_params(**self.asked, output_kind=RequestOutputKind.DELTA)
        run = self._receive if self.mode == "receive" else self._run_generate
        try:
            await run(params)
        except TriolegError as error:
            self.error = error

    async def _receive(self, params: SamplingParams) -> None:
        async with self.llm.open_stream(MESSAGES, params) as stream:
            while True:
                try:
                    self._take(await stream.receive())
                except trio.EndOfChannel as end:
                    self.error = end
                    return
                await trio.sleep(PAUSE_S if self.is_slow else 0.0)
                if self.fault.reader_stops:
                    await self._reads.wait()

    async def _run_generate(self, params: SamplingParams) -> None:
        try:
            self._take(await self.llm.generate(MESSAGES, params))
        except RequestEnded as error:
            self.has_partial = error.partial is not None
            if error.partial is not None:
                self._take(error.partial)
            raise

    def _take(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self.texts[one.index] += one.text
            self.finishes[one.index] = one.finish_reason

    def note_what_was_read(self) -> None:
        frames = re.findall(rb'"content":"([abc]*)"', self.answer.body)
        self.read_before = len(b"".join(frames) + "".join(self.texts.values()).encode())

    async def until_ended(self) -> None:
        """Returns when the request has ended; a reader that has stopped goes on then."""
        # No event: only its reader is woken by an ending.
        while self.stream is not None and self.stream.ending is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        self._reads.set()


def _tokenize_slowly(llm: LLM) -> None:
    async def run_sync(tokenize: Callable[[], list[int]]) -> list[int]:
        await trio.sleep(1.0)
        return tokenize()

    llm._requests._prompts._run_sync = run_sync


async def play_cell(fault: Fault, phase: str, mode: str, n: int) -> Cell:
    """Play it to the end, the next request included, and some time more. ``autojump_clock`` is needed."""
    assert mode in MODES
    at = PHASES[phase]
    async with open_app(SCRIPT, llm_config=fault.config(at)) as app:
        app.vary_choices()
        cell = Cell(fault, phase, mode, n, app)
        with trio.fail_after(600):
            await _strike(cell, at)
            await trio.sleep(AFTERWARDS_S)
            statistics = app.llm.statistics()
            cell.endings = dict(statistics.endings)
            cell.turned_away = sum(statistics.turned_away.values())
            await cell.run_successor()
            await trio.sleep(AFTERWARDS_S)
            check_nothing_is_left(cell)
    return cell


async def _strike(cell: Cell, at: float) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cell.run_neighbour)
        await trio.sleep(HEAD_START_S)
        if cell.phase == "tokenizing":
            _tokenize_slowly(cell.llm)
        nursery.start_soon(cell.run_request)
        # A deadline of the same moment must not end the request before it has been looked at.
        await trio.sleep(at - 0.01)
        # The neighbour's is the first.
        cell.stream = dict(enumerate(cell.llm._requests.streams.values())).get(1)
        cell.note_what_was_read()
        await trio.sleep(0.01)
        cell.fault.strike(cell)
        if cell.fault.later is not None:
            nursery.start_soon(partial(_strike_again, cell, *cell.fault.later))
        await cell.until_ended()


async def _strike_again(cell: Cell, seconds: float, strike: Callable[[Cell], None]) -> None:
    await trio.sleep(seconds)
    strike(cell)


def check_nothing_is_left(cell: Cell) -> None:
    """All is as it was: ours, and, where it lives, the engine's."""
    llm, link = cell.llm, cell.llm._supervisor.link
    assert link is not None
    statistics = link.statistics()
    assert (llm.statistics().open_streams, len(llm._requests.deadlines)) == (0, 0)
    # Whatever ended it, its slot is there for another.
    admission = llm._entrance.admission
    assert (admission.num_inflight, admission.num_queued, admission.num_queued_tokens) == (0, 0, 0)
    assert (statistics.processor.requests, link._streams) == (0, {})
    if cell.stream is not None:
        assert not link._outbox.holds(cell.stream)
        if cell.fault.kind is not EndingKind.LEFT:
            # Who left may have left something unread.
            assert cell.stream.statistics().num_bytes == 0
    if statistics.dead is None:
        scheduler = statistics.scheduler
        assert (scheduler.num_running_reqs, scheduler.num_waiting_reqs) == (0, 0)
        assert statistics.num_free_blocks == statistics.num_gpu_blocks
