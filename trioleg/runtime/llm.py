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
from ..lora import LoRARequest, check_lora_id, check_lora_request
from ..output.submission import (
    default_sampling_params,
    make_submission,
)
from ..outputs import Ending, EndingKind, PoolingRequestOutput, RequestOutput
from ..prompts import TokenizeParams
from ..sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from ..timeouts import Timeouts
from ..tokenizer import Tokenizer
from .adapters import Adapters
from .arrival import PoolingOptions, RequestOptions
from .burst import Burst
from .engine_link import EngineLink, EngineLinkStatistics
from .engines import Engine, OpenEngine
from .entrance import Entrance
from .grammars import GrammarChecker
from .health import Health, LLMState
from .observers import Observers
from .pooling import Pooling, Prompts, prompts_of
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
    """A model that is being served: made by ``open_llm``, usable until its block is left. ``adapters``: its LoRA
    adapters, by name."""

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
        # Where a reader that has lent an outlet (``RequestStream.serving``) has its outputs written.
        self.burst = Burst()
        self.adapters = Adapters(config.lora_modules, lambda: self._supervisor.ready_link())
        self._supervisor = Supervisor(
            open_engine, self._make_link, config, restore=self.adapters.restore
        )
        self._entrance = Entrance(self._supervisor, config)
        prompts = PromptReader(tokenizer, run_sync)
        grammars = GrammarChecker(tokenizer.model_dir, tokenizer.vocab_size)
        self._requests = Requests(
            self._entrance, prompts, grammars, self._unread, self.adapters, config, clock
        )
        self._pooling = Pooling(self._requests, tokenizer.pooling, config)
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
            burst=self.burst,
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
        lora_request: LoRARequest | None = None,
        timeouts: Timeouts | None = None,
        arrived_at: float | None = None,
        external_req_id: str | None = None,
    ) -> AbstractAsyncContextManager[RequestStream]:
        """Send a request; the block reads its outputs. Leaving the block is the cancel.

        ``prompt``: text, token ids, or chat messages. ``params`` None: the model's defaults. ``priority``: the
        smallest is served first; other than 0 only if ``EngineConfig.scheduling_policy`` is "priority".
        ``cache_salt``: of the engine's prefix cache, this request shares only what requests with the same salt have
        left there.
        ``lora_request``: the adapter to use, which is loaded if it has not been (see ``add_lora``). ``timeouts``:
        where they are None, those of ``LLMConfig``; they run from ``arrived_at``, a ``trio.current_time()``, None:
        now. ``external_req_id``: the caller's own name for the request, for the log and nothing else.
        Raises, and nothing was sent: ``InvalidRequestError``, ``EngineUnavailableError`` while no engine is ready,
        ``EngineDeadError`` when none will be, ``OverloadedError``, ``DeadlineExceeded``, and ``ServerShutdown``
        once the LLM takes no more requests. Cancel-safe at every point.
        """
        checked = self._params(params)
        check_lora_request(lora_request, optional=True)
        self._refuse_unless_supported("generate", "prompt")
        self._refuse_what_harms_others(checked)
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
            lora_request=lora_request,
            arrival=self._requests.arrival(timeouts, arrived_at, external_req_id),
        )

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        **more: Unpack[PoolingOptions],
    ) -> PoolingRequestOutput:
        """What a pooling model makes of ``prompt``: an embedding, by default.

        ``more``: see ``open_stream``. Raises as ``open_stream`` and ``RequestStream.receive`` do. Cancel-safe:
        leaving is the abort.
        """
        params = self._pooling.completed(params)
        self._refuse_unless_supported(params.task, "task")
        tokenize = self._pooling.tokenize_params(None)
        (output,) = await self._pooling.run([(prompt, tokenize)], "prompt", params, **more)
        return output

    async def embed(
        self,
        prompts: Prompts,
        params: PoolingParams | None = None,
        *,
        tokenize: TokenizeParams | None = None,
        **more: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput]:
        """The embedding of each prompt, in order; also of one that stands without a list.

        They run at once, each of them counts as a request in flight, and either all are taken or none; the first
        that fails ends the others, and it is what is raised. ``tokenize``: how they are read, None: a prompt that
        is too long is refused. ``more``, raises: see ``encode``. Cancel-safe: leaving aborts them all.
        """
        params = self._pooling.completed(params)
        if params.task != "embed":
            raise InvalidRequestError(
                f"params.task is {params.task!r}; allowed: 'embed' (see encode)", parameter="params"
            )
        if params.task not in self.supported_tasks:
            raise InvalidRequestError(
                f"{self.model} makes no embeddings; what it does: {', '.join(sorted(self.supported_tasks))}",
                parameter="model",
            )
        tokenize = self._pooling.tokenize_params(tokenize)
        each = prompts_of(prompts, tokenize)
        return await self._pooling.run(each, tokenize.parameter, params, **more)

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

    def _refuse_what_harms_others(self, params: SamplingParams) -> None:
        """In a step with such a request, vLLM's sampler (0.32) gives everybody the logprobs of its tokens alone."""
        link = self._supervisor.link
        if params.logprob_token_ids and link is not None and not link.ready.validates_requests:
            raise InvalidRequestError(
                f"logprob_token_ids is {list(params.logprob_token_ids)!r:.60}; allowed: [], since an engine of "
                "vLLM's would spoil the logprobs of other requests",
                parameter="logprob_token_ids",
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

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; True, also if it is loaded already. The next engine gets it as well.

        Raises ``InvalidRequestError`` with the engine's own words if it refuses (``LoRAAdapterNotFoundError`` where
        there is nothing under the path), and as ``call_utility``. ``adapters`` has loading by name alone.
        """
        check_lora_request(lora_request)
        return await self.adapters.add(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; False: there is no such. Requests that use it go on, and until they are over the
        engine keeps it; new ones are refused until it is added again. Raises as ``call_utility``."""
        check_lora_id("lora_id", lora_id)
        return await self.adapters.remove(lora_id)

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
