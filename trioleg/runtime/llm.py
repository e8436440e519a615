"""``LLM``: the way in for requests, whichever engine is behind it at the moment.

Two tasks run for it: the ``Supervisor``, below which the engine, its sockets and its link's tasks are, and the
timer of the requests' deadlines. A request is prepared (tokenized, its constraint tried), then registered
and sent in one step; from then on its stream's ``end`` is the one way that it ends, and every ending
is counted and logged here.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, Unpack

import trio

from ..config import LLMConfig
from ..errors import (
    DeadlineExceeded,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestEnded,
    ServerShutdown,
)
from ..output.submission import (
    Submission,
    default_sampling_params,
    make_pooling_submission,
    make_submission,
)
from ..outputs import Ending, EndingKind, PoolingRequestOutput, RequestOutput
from ..sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from ..structured_outputs import StructuredOutputsParams
from ..timeouts import Timeouts, check_timeouts
from ..tokenizer import Tokenizer
from .arrival import Arrival, RequestOptions
from .deadlines import Deadlines, until
from .endings import Endings
from .engine_link import EngineLink, EngineLinkStatistics
from .engines import Engine, OpenEngine
from .grammars import GrammarChecker
from .health import Health, LLMState
from .mailbox import Mailbox
from .observers import Observers
from .prompts import Prompt, PromptReader, RunSync
from .request_stream import RequestStream
from .stats_logger import StatsLogger
from .supervisor import Supervisor
from .tracer import Tracer
from .utilities import EngineUtilities

__all__ = ["LLM", "LLMStatistics"]

_MakeSubmission: TypeAlias = Callable[..., Submission]


@dataclass(frozen=True, slots=True)
class LLMStatistics:
    """``open_streams``: blocks of ``open_stream`` not left yet; ``endings``: requests ended, by kind;
    ``turned_away``: requests that never began, since no engine took them, by the LLM's state; ``engines``: the
    figures of the engine of the moment, none before the first is ready."""

    open_streams: int
    endings: Mapping[EndingKind, int]
    turned_away: Mapping[LLMState, int]
    engines: tuple[EngineLinkStatistics, ...]
    engine_restarts: int = 0


class LLM(EngineUtilities):
    """A model that is being served: made by ``open_llm``, usable until its block is left."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        open_engine: OpenEngine,
        config: LLMConfig,
        *,
        run_sync: RunSync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._config = config
        self._observers = Observers()
        self._clock = clock
        # Begins every request id: an id with another beginning is another front end's.
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._prompts = PromptReader(tokenizer, run_sync)
        self._grammars = GrammarChecker()
        self._deadlines = Deadlines()
        self._open_streams: dict[str, RequestStream] = {}
        self._endings = Endings()
        self._refusal: str | None = None
        self._is_closed = False
        self._supervisor = Supervisor(open_engine, self._make_link, config)

    def _make_link(self, engine: Engine) -> EngineLink:
        return EngineLink(
            engine.rank,
            engine.ready,
            engine.transport,
            own_prefix=self._id_prefix,
            config=self._config,
            observers=self._observers,
            watch=engine.watch,
            clock=self._clock,
        )

    async def run(self) -> None:
        """The engine, its successors, and the requests' deadlines, until cancelled: ``open_llm`` runs this.

        Raises what the first start raises. The engine's death ends nothing here.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deadlines.run, name="deadlines")
            nursery.start_soon(self._supervisor.run, name="supervisor")

    # ------------------------------------------------------------------ requests

    def default_sampling_params(self, **asked: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json), overridden by what is asked for.

        Raises ``InvalidRequestError``.
        """
        return default_sampling_params(self.tokenizer, **asked)

    def open_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeouts: Timeouts | None = None,
        arrived_at: float | None = None,
        external_req_id: str | None = None,
    ) -> AbstractAsyncContextManager[RequestStream]:
        """Send a request; the block reads its outputs. Leaving the block is the cancel.

        ``prompt``: text, token ids, or chat messages. ``params`` None: the model's defaults.
        ``priority``: the smallest is served first; other than 0 only if ``EngineConfig.scheduling_policy``
        is "priority". ``cache_salt``: of the engine's prefix cache, this request shares only what requests
        with the same salt have left there. ``timeouts``: where they are None, those of ``LLMConfig``; they run
        from ``arrived_at``, a ``trio.current_time()``, None: now. ``external_req_id``: the caller's own
        name for the request, for the log and nothing else.
        Raises, and nothing was sent: ``InvalidRequestError``, ``EngineUnavailableError`` while no engine is
        ready, ``EngineDeadError`` when none will be, ``DeadlineExceeded``, and ``ServerShutdown`` once
        the LLM takes no more requests. Cancel-safe at every point.
        """
        checked = self._params(params)
        self._refuse_unless_supported("generate", "prompt")
        is_delta = checked.output_kind is RequestOutputKind.DELTA
        return self._open(
            prompt,
            partial(
                make_submission,
                params=checked,
                tokenizer=self.tokenizer,
                max_logprobs=self._config.engine.max_logprobs,
                detokenizer=self._config.detokenizer,
                stream_interval=self._config.stream_interval,
                priority=priority,
                cache_salt=cache_salt,
                scheduling_policy=self._config.engine.scheduling_policy,
            ),
            aggregate=is_delta,
            constraint=checked.structured_outputs,
            arrival=self._arrival(timeouts, arrived_at, external_req_id),
        )

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        timeouts: Timeouts | None = None,
    ) -> PoolingRequestOutput:
        """What a pooling model makes of ``prompt``: an embedding, by default.

        ``timeouts``: see ``open_stream``. Raises as ``open_stream`` and ``RequestStream.receive`` do. Cancel-safe:
        leaving is the abort.
        """
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"params is {params!r}; allowed: PoolingParams or None", parameter="params"
            )
        self._refuse_unless_supported(params.task, "task")
        submission = partial(make_pooling_submission, params=params)
        arrival = self._arrival(timeouts)
        async with self._open(prompt, submission, aggregate=False, arrival=arrival) as stream:
            output: object = await stream.receive()
        assert isinstance(output, PoolingRequestOutput), "a pooling request has no other output"
        return output

    @asynccontextmanager
    async def _open(
        self,
        prompt: Prompt,
        make_submission: _MakeSubmission,
        *,
        aggregate: bool,
        arrival: Arrival,
        constraint: StructuredOutputsParams | None = None,
    ) -> AsyncIterator[RequestStream]:
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        prompt_token_ids = await self._prepare(request_id, prompt, constraint, arrival)
        # From here to `yield` nothing waits: registering and sending are one step.
        link = self._admitting_link()
        mailbox = Mailbox(aggregate=aggregate, max_bytes=self._config.mailbox_max_bytes)
        submission = make_submission(
            request_id,
            prompt_token_ids,
            max_model_len=link.ready.max_model_len,
            sink=mailbox,
            arrival=arrival.by_clock,
        )
        on_end = partial(self._stream_ended, link, arrival)
        stream = RequestStream(
            submission, mailbox, on_end=on_end, external_req_id=arrival.external_req_id
        )
        with self._turning_away():
            link.submit(stream)
        self._deadlines.add(stream, arrival.timeouts, arrival.at)
        self._open_streams[request_id] = stream
        try:
            yield stream
        finally:
            stream.close()
            del self._open_streams[request_id]

    async def _prepare(
        self,
        request_id: str,
        prompt: Prompt,
        constraint: StructuredOutputsParams | None,
        arrival: Arrival,
    ) -> list[int]:
        """What has to be waited for before a request can be sent: its ids, its constraint's trial.

        To leave here is an ending, too: of a request that no engine has heard of.
        """
        max_model_len = self._admitting_link().ready.max_model_len
        deadline, overdue = until(arrival.timeouts, arrival.at)
        ending: Ending | None = Ending(EndingKind.LEFT)
        try:
            with trio.move_on_at(deadline):
                prompt_token_ids = await self._prompts.read(prompt, max_model_len)
                if constraint is not None:
                    await self._grammars.check(constraint)
                ending = None
                return prompt_token_ids
            ending = Ending(EndingKind.DEADLINE, overdue)
        except Exception as error:
            # Refused: a request that never began.
            ending = None
            if self._refusal is not None and not isinstance(error, InvalidRequestError):
                # What prepares requests is being taken down, too.
                raise ServerShutdown(self._refusal) from error
            raise
        finally:
            if ending is not None:
                self._endings.note(request_id, ending, arrival)
        raise DeadlineExceeded(overdue)

    def _arrival(
        self,
        timeouts: Timeouts | None,
        at: float | None = None,
        external_req_id: str | None = None,
    ) -> Arrival:
        check_timeouts(timeouts)
        now = trio.current_time()
        if at is not None and not (isinstance(at, int | float) and math.isfinite(at)):
            raise InvalidRequestError(
                f"arrived_at is {at!r:.60}; allowed: a trio.current_time(), or None",
                parameter="arrived_at",
            )
        return Arrival(
            now if at is None else at,
            self._clock() - (0.0 if at is None else now - at),
            (timeouts or Timeouts()).or_else(self._config.timeouts),
            external_req_id,
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **more: Unpack[RequestOptions],
    ) -> RequestOutput:
        """The whole answer at once. Takes and raises what ``open_stream`` does, raises also as
        ``RequestStream.receive``; a ``RequestEnded`` carries what had been generated in ``partial``."""
        params = self._params(params).with_output_kind(RequestOutputKind.FINAL_ONLY)
        output: RequestOutput | None = None
        async with self.open_stream(prompt, params, **more) as stream:
            try:
                async for one in stream:
                    output = one
            except RequestEnded as error:
                error.partial = output
                raise
        assert output is not None, "a stream that ends well has had its final output"
        return output

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return self.default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params is {params!r}; allowed: SamplingParams or None", parameter="params"
            )
        return params

    def _stream_ended(
        self, link: EngineLink, arrival: Arrival, stream: RequestStream, ending: Ending
    ) -> None:
        try:
            link.stream_ended(stream)
        finally:
            self._endings.note(stream.request_id, ending, arrival, stream.num_output_tokens)

    def note_unsent(
        self, ending: Ending, *, arrived_at: float, external_req_id: str | None = None
    ) -> None:
        """Count and log the end of a request that ended before it was whole: its body was too slow, say."""
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        self._endings.note(request_id, ending, self._arrival(None, arrived_at, external_req_id))

    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is: its reader gets ``RequestAborted``. ``request_id``: exactly
        ``RequestStream.request_id``. False: there is no such request, or it has ended. Synchronous."""
        stream = self._open_streams.get(request_id)
        if stream is None or stream.ending is not None:
            return False
        stream.end(Ending(EndingKind.ABORTED, "the request was aborted by its id"))
        return True

    def live_requests(self) -> tuple[RequestStream, ...]:
        """Those that have not ended, oldest first."""
        return tuple(one for one in self._open_streams.values() if one.ending is None)

    def _refuse_unless_supported(self, task: str, parameter: str) -> None:
        if task not in self.supported_tasks:
            allowed = ", ".join(sorted(self.supported_tasks))
            raise InvalidRequestError(
                f"{parameter} asks for {task!r}, which this engine's model does not do; "
                f"allowed: {allowed}",
                parameter=parameter,
            )

    @contextmanager
    def _turning_away(self) -> Iterator[None]:
        """Count a request that no engine takes at the moment."""
        try:
            yield
        except (EngineUnavailableError, EngineDeadError, ServerShutdown):
            self._endings.turned_away[self.health().state] += 1
            raise

    def _admitting_link(self) -> EngineLink:
        with self._turning_away():
            return self._ready_link()

    def _ready_link(self) -> EngineLink:
        """Raises ``ServerShutdown``, ``EngineDeadError``, ``EngineUnavailableError``."""
        if self._refusal is not None:
            raise ServerShutdown(self._refusal)
        return self._supervisor.ready_link()

    # ------------------------------------------------------------------ state

    def health(self) -> Health:
        """Whether requests are taken at this moment, and why not. Synchronous, costs nothing."""
        if self._refusal is not None and self.cause_of_death is None:
            return Health(LLMState.DRAINING, self._refusal)
        return self._supervisor.health

    @property
    def timeouts(self) -> Timeouts:
        """Of requests that name none of their own."""
        return self._config.timeouts

    @property
    def max_model_len(self) -> int:
        """The longest a prompt and its answer may be together, in tokens, as the engine of the moment has it.
        Raises ``EngineUnavailableError`` before the first one is ready."""
        link = self._supervisor.link
        if link is None:
            health = self.health()
            raise EngineUnavailableError(health.cause, retry_after=health.retry_after or 1.0)
        return link.ready.max_model_len

    @property
    def supported_tasks(self) -> frozenset[str]:
        """What the engine's model can do: "generate", "embed"."""
        link = self._supervisor.link
        return frozenset({"generate"}) if link is None else link.supported_tasks

    @property
    def cause_of_death(self) -> str | None:
        """Why the engine is gone, with no other to come; None while there is one, or will be."""
        return self._supervisor.cause_of_death

    async def wait_ready(self) -> None:
        """Wait until requests are taken: the engine is ready, the first or another one, and in contact.

        Raises ``EngineDeadError`` and ``ServerShutdown`` when that will never be. Cancel-safe.
        """
        while True:
            health = self.health()
            if health.state is LLMState.READY:
                await trio.lowlevel.checkpoint()
                return
            if health.retry_after is None:
                self._ready_link()  # raises
            await self._supervisor.wait_change()

    async def wait_dead(self) -> str:
        """Wait until the engine is gone for good and every stream has been told; returns the cause.

        Raises ``trio.ClosedResourceError`` when the LLM's block is left. Cancel-safe.
        """
        while self.cause_of_death is None:
            if self._is_closed:
                raise trio.ClosedResourceError("the LLM's block has been left")
            await self._supervisor.wait_change()
        await trio.lowlevel.checkpoint()
        return self.cause_of_death

    def shut_down(self, cause: str) -> None:
        """Refuse new requests and end the live ones with ``SHUTDOWN``. Synchronous, idempotent."""
        self._refusal = self._refusal or cause
        for stream in self.live_requests():
            stream.end(Ending(EndingKind.SHUTDOWN, cause))
        self._supervisor.start_no_more()
        self._supervisor.note_change()

    def statistics(self) -> LLMStatistics:
        """Figures of this moment. Synchronous."""
        link = self._supervisor.link
        return LLMStatistics(
            len(self._open_streams),
            dict(self._endings.counts),
            dict(self._endings.turned_away),
            () if link is None else (link.statistics(),),
            self._supervisor.num_restarts,
        )

    @property
    def tracer(self) -> Tracer | None:
        """Who sees every hop (``runtime/tracer.py``); None but in a program that shows the way."""
        return self._observers.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self._observers.tracer = tracer

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See ``EngineUtilities``. Raises also ``EngineUnavailableError``: no engine is ready, or it went out of
        contact, and whether it did what it was asked is not known."""
        if self._is_closed:
            raise trio.ClosedResourceError("the LLM's block has been left")
        return await self._supervisor.ready_link().call_utility(method, *args)

    @property
    def stats_logger(self) -> StatsLogger | None:
        """Who is told what each step brought; may be set at any time, to None as well."""
        return self._observers.stats_logger

    @stats_logger.setter
    def stats_logger(self, logger: StatsLogger | None) -> None:
        self._observers.stats_logger = logger

    def hurry(self) -> None:
        """An engine of ours is not to be waited for when it is ended, but killed. Synchronous, idempotent."""
        if self._supervisor.link is not None:
            self._supervisor.link.hurry()

    def close(self) -> None:
        """The block is left: streams that are still open end, and further use of them is refused."""
        self.shut_down("the LLM's block has been left")
        self._is_closed = True
        if self._supervisor.link is not None:
            self._supervisor.link.close()
        self._supervisor.note_change()
        self._grammars.close()
        for stream in self._open_streams.values():
            stream.close()
