"""``LLM``: the way in for requests, whichever engine is behind it at the moment.

Two tasks run for it: the ``Supervisor``, below which the engine, its sockets and its link's tasks are, and the
timer of the requests' deadlines. Whether a request may come in is ``entrance.py``, its life is ``requests.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import trio

from ..config import LLMConfig
from ..errors import (
    EngineUnavailableError,
    InvalidRequestError,
    RequestEnded,
)
from ..output.submission import (
    default_sampling_params,
    make_pooling_submission,
    make_submission,
)
from ..outputs import Ending, EndingKind, PoolingRequestOutput, RequestOutput
from ..sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from ..timeouts import Timeouts
from ..tokenizer import Tokenizer
from .arrival import RequestOptions
from .engine_link import EngineLink, EngineLinkStatistics
from .engines import Engine, OpenEngine
from .entrance import Entrance
from .health import Health, LLMState
from .observers import Observers
from .prompts import Prompt, PromptReader, RunSync
from .request_stream import RequestStream
from .requests import Requests
from .stats_logger import StatsLogger
from .supervisor import Supervisor
from .tracer import Tracer
from .unread import Unread
from .utilities import EngineUtilities

__all__ = ["LLM", "LLMStatistics"]


@dataclass(frozen=True, slots=True)
class LLMStatistics:
    """``open_streams``: blocks of ``open_stream`` not left yet; ``endings``: requests ended, by kind;
    ``turned_away``: requests that never began, since no engine took them, by the LLM's state; ``engines``: the
    figures of the engine of the moment, none before the first is ready. ``overloaded``: requests that never began,
    since there was no room, by ``OverloadedError.code``; ``num_inflight_requests`` and ``num_queued_prompt_tokens``
    are what its limits are about. ``num_unread_requests``: those with output that waits for its reader;
    ``num_unread_bytes``: of all that output, estimated."""

    open_streams: int
    endings: Mapping[EndingKind, int]
    turned_away: Mapping[LLMState, int]
    engines: tuple[EngineLinkStatistics, ...]
    engine_restarts: int
    overloaded: Mapping[str, int]
    num_inflight_requests: int
    num_queued_prompt_tokens: int
    num_unread_requests: int
    num_unread_bytes: int


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
        self._unread = Unread(config.unread_max_bytes)
        self._supervisor = Supervisor(open_engine, self._make_link, config)
        self._entrance = Entrance(self._supervisor, config)
        prompts = PromptReader(tokenizer, run_sync)
        self._requests = Requests(self._entrance, prompts, self._unread, config, clock)
        self._is_closed = False

    def _make_link(self, engine: Engine) -> EngineLink:
        return EngineLink(
            engine.rank,
            engine.ready,
            engine.transport,
            own_prefix=self._requests.id_prefix,
            config=self._config,
            observers=self._observers,
            unread=self._unread,
            watch=engine.watch,
            clock=self._clock,
        )

    async def run(self) -> None:
        """The engine, its successors, and the requests' deadlines, until cancelled: ``open_llm`` runs this.

        Raises what the first start raises. The engine's death ends nothing here.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._requests.deadlines.run, name="deadlines")
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
        ready, ``EngineDeadError`` when none will be, ``OverloadedError``, ``DeadlineExceeded``, and
        ``ServerShutdown`` once the LLM takes no more requests. Cancel-safe at every point.
        """
        checked = self._params(params)
        self._refuse_unless_supported("generate", "prompt")
        is_delta = checked.output_kind is RequestOutputKind.DELTA
        return self._requests.open(
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
            num_choices=checked.n,
            aggregate=is_delta,
            constraint=checked.structured_outputs,
            arrival=self._requests.arrival(timeouts, arrived_at, external_req_id),
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
        arrival = self._requests.arrival(timeouts)
        async with self._requests.open(
            prompt, submission, aggregate=False, arrival=arrival
        ) as stream:
            output: object = await stream.receive()
        assert isinstance(output, PoolingRequestOutput), "a pooling request has no other output"
        return output

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

    def note_unsent(
        self, ending: Ending, *, arrived_at: float, external_req_id: str | None = None
    ) -> None:
        """Count and log the end of a request that ended before it was whole: its body was too slow, say."""
        self._requests.note_unsent(
            ending, self._requests.arrival(None, arrived_at, external_req_id)
        )

    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is: its reader gets ``RequestAborted``. ``request_id``: exactly
        ``RequestStream.request_id``. False: there is no such request, or it has ended. Synchronous."""
        return self._requests.abort(request_id)

    def live_requests(self) -> tuple[RequestStream, ...]:
        """Those that have not ended, oldest first."""
        return self._requests.live()

    def check_room(self) -> None:
        """For a server, before it reads a request's body: whether there is any use in that. Synchronous.

        Raises ``ServerShutdown`` and ``OverloadedError``.
        """
        self._entrance.check_room()

    def until_drain(self) -> AbstractContextManager[None]:
        """For a server, while it reads a request's body: a drain ends the block with ``ServerShutdown``."""
        return self._entrance.until_drain()

    def _refuse_unless_supported(self, task: str, parameter: str) -> None:
        if task not in self.supported_tasks:
            allowed = ", ".join(sorted(self.supported_tasks))
            raise InvalidRequestError(
                f"{parameter} asks for {task!r}, which this engine's model does not do; "
                f"allowed: {allowed}",
                parameter=parameter,
            )

    # ------------------------------------------------------------------ state

    def health(self) -> Health:
        """Whether requests are taken at this moment, and why not. Synchronous, costs nothing."""
        return self._entrance.health

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
                self._entrance.link()  # raises
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

    def drain(self, cause: str) -> None:
        """Refuse new requests with ``ServerShutdown``, for good; those that have begun go on: see ``wait_idle``.
        Synchronous, idempotent."""
        self._entrance.drain(cause)

    async def wait_idle(self) -> None:
        """Wait until no request is in flight, whoever asked for it: each has ended, or been refused. Cancel-safe."""
        await self._entrance.admission.wait_none()

    def shut_down(self, cause: str) -> None:
        """Refuse new requests and end the live ones with ``SHUTDOWN``. Synchronous, idempotent."""
        self._entrance.shut(cause)
        self._requests.end_all(Ending(EndingKind.SHUTDOWN, cause))
        self._supervisor.start_no_more()
        self._supervisor.note_change()

    def statistics(self) -> LLMStatistics:
        """Figures of this moment. Synchronous."""
        link = self._supervisor.link
        unread = [one.mailbox.num_bytes for one in self._requests.streams.values()]
        return LLMStatistics(
            len(self._requests.streams),
            dict(self._requests.endings.counts),
            dict(self._entrance.turned_away),
            () if link is None else (link.statistics(),),
            self._supervisor.num_restarts,
            dict(self._entrance.admission.refused),
            self._entrance.admission.num_inflight,
            self._entrance.admission.num_queued_tokens,
            sum(map(bool, unread)),
            sum(unread),
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
        self._requests.close()
