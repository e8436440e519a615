"""``open_llm`` and ``LLM``: the tree of nurseries, and the way in for requests.

``open_llm`` owns everything below it, each box by the one above: the engine's process, the sockets to
it, and the link's tasks. Leaving takes them down in the opposite order of their building: live
streams end (with their ABORTs), tasks stop, sockets deliver what is queued and close, and only then
is the engine asked to leave.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio

from .. import model_store
from ..config import LLMConfig
from ..errors import (
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    RequestEnded,
    ServerShutdown,
    WireError,
)
from ..output.request_state import OutputSink
from ..output.submission import (
    Submission,
    default_sampling_params,
    make_pooling_submission,
    make_submission,
)
from ..outputs import Ending, EndingKind, PoolingRequestOutput, RequestOutput
from ..sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from ..structured_outputs import StructuredOutputsParams
from ..tokenizer import Tokenizer
from .engine_link import EngineLink, EngineLinkStatistics
from .engines import Engine, attach_engine, start_engine
from .grammars import GrammarChecker
from .mailbox import Mailbox
from .prompts import Prompt, PromptReader, RunSync
from .request_stream import RequestStream
from .stats_logger import StatsLogger
from .tracer import Tracer
from .unwrap import unwrapped
from .utilities import EngineUtilities

__all__ = ["LLM", "LLMStatistics", "open_llm"]

_log = logging.getLogger("trioleg.requests")

_MakeSubmission: TypeAlias = Callable[..., Submission]


@dataclass(frozen=True, slots=True)
class LLMStatistics:
    """``open_streams``: blocks of ``open_stream`` not left yet; ``endings``: requests ended, by kind."""

    open_streams: int
    endings: Mapping[EndingKind, int]
    engines: tuple[EngineLinkStatistics, ...]


class LLM(EngineUtilities):
    """A model that is being served: made by ``open_llm``, usable until its block is left.

    ``link.run`` is the task that ``open_llm`` runs for it.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        engine: Engine,
        config: LLMConfig,
        *,
        run_sync: RunSync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = engine.ready.max_model_len
        # What check_tasks has been told; until then what nearly every engine does.
        self.supported_tasks = frozenset({"generate"})
        self._config = config
        self._clock = clock
        # Begins every request id: an id with another beginning is another front end's.
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._prompts = PromptReader(tokenizer, self.max_model_len, run_sync)
        self._grammars = GrammarChecker()
        self._open_streams: dict[str, RequestStream] = {}
        self._endings: Counter[EndingKind] = Counter()
        self._refusal: str | None = None
        self.link = EngineLink(
            engine.rank,
            engine.ready,
            engine.transport,
            own_prefix=self._id_prefix,
            output_chunk_size=config.output_chunk_size,
            watch=engine.watch,
            clock=clock,
        )

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
    ) -> AbstractAsyncContextManager[RequestStream]:
        """Send a request; the block reads its outputs. Leaving the block is the cancel.

        ``prompt``: text, token ids, or chat messages. ``params`` None: the model's defaults.
        ``priority``: the smallest is served first; other than 0 only if ``EngineConfig.scheduling_policy``
        is "priority". ``cache_salt``: of the engine's prefix cache, this request shares only what requests
        with the same salt have left there.
        Raises ``InvalidRequestError`` (nothing was sent), ``EngineDeadError``, and
        ``ServerShutdown`` once the LLM takes no more requests. Cancel-safe at every point.
        """
        checked = self._params(params)
        self._refuse_unless_supported("generate", "prompt")
        is_delta = checked.output_kind is RequestOutputKind.DELTA
        submission = partial(self._submission, checked, priority=priority, cache_salt=cache_salt)
        return self._open(
            prompt, submission, aggregate=is_delta, constraint=checked.structured_outputs
        )

    async def encode(
        self, prompt: Prompt, params: PoolingParams | None = None
    ) -> PoolingRequestOutput:
        """What a pooling model makes of ``prompt``: an embedding, by default.

        Raises as ``open_stream`` and ``RequestStream.receive`` do. Cancel-safe: leaving is the abort.
        """
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"params is {params!r}; allowed: PoolingParams or None", parameter="params"
            )
        self._refuse_unless_supported(params.task, "task")
        submission = partial(self._pooling_submission, params)
        async with self._open(prompt, submission, aggregate=False) as stream:
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
        constraint: StructuredOutputsParams | None = None,
    ) -> AsyncIterator[RequestStream]:
        arrival = self._clock()
        self._refuse_if_closing()
        prompt_token_ids = await self._prompts.read(prompt)
        if constraint is not None:
            await self._grammars.check(constraint)
        # From here to `yield` nothing waits: registering and sending are one step.
        self._refuse_if_closing()
        mailbox = Mailbox(aggregate=aggregate, max_bytes=self._config.mailbox_max_bytes)
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        submission = make_submission(request_id, prompt_token_ids, sink=mailbox, arrival=arrival)
        stream = RequestStream(request_id, prompt_token_ids, mailbox, on_end=self._stream_ended)
        self.link.submit(stream, submission)
        self._open_streams[request_id] = stream
        try:
            yield stream
        finally:
            stream.close()
            del self._open_streams[request_id]

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The whole answer at once. Takes and raises what ``open_stream`` does, raises also as
        ``RequestStream.receive``; a ``RequestEnded`` carries what had been generated in ``partial``."""
        params = self._params(params).with_output_kind(RequestOutputKind.FINAL_ONLY)
        output: RequestOutput | None = None
        opening = self.open_stream(prompt, params, priority=priority, cache_salt=cache_salt)
        async with opening as stream:
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

    def _submission(
        self,
        params: SamplingParams,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        sink: OutputSink,
        arrival: float,
        priority: int,
        cache_salt: str | None,
    ) -> Submission:
        return make_submission(
            request_id,
            prompt_token_ids,
            params,
            self.tokenizer,
            max_model_len=self.max_model_len,
            max_logprobs=self._config.engine.max_logprobs,
            sink=sink,
            detokenizer=self._config.detokenizer,
            stream_interval=self._config.stream_interval,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            scheduling_policy=self._config.engine.scheduling_policy,
        )

    def _pooling_submission(
        self,
        params: PoolingParams,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        sink: OutputSink,
        arrival: float,
    ) -> Submission:
        return make_pooling_submission(
            request_id, prompt_token_ids, params, sink=sink, arrival=arrival
        )

    def _stream_ended(self, stream: RequestStream, ending: Ending) -> None:
        self.link.stream_ended(stream)
        self._endings[ending.kind] += 1
        cause = f" ({ending.cause})" if ending.cause else ""
        _log.info("request %s ended: %s%s", stream.request_id, ending.kind, cause)

    def _refuse_unless_supported(self, task: str, parameter: str) -> None:
        if task not in self.supported_tasks:
            allowed = ", ".join(sorted(self.supported_tasks))
            raise InvalidRequestError(
                f"{parameter} asks for {task!r}, which this engine's model does not do; "
                f"allowed: {allowed}",
                parameter=parameter,
            )

    def _refuse_if_closing(self) -> None:
        if self._refusal is not None:
            raise ServerShutdown(self._refusal)
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)

    # ------------------------------------------------------------------ state

    @property
    def cause_of_death(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self.link.cause_of_death

    async def wait_dead(self) -> str:
        """Wait until the engine is gone and every stream has been told; returns the cause."""
        await self.link.dead.wait()
        return self.link.cause_of_death or ""

    def shut_down(self, cause: str) -> None:
        """Refuse new requests and end the live ones with ``SHUTDOWN``. Synchronous, idempotent."""
        self._refusal = self._refusal or cause
        self.link.end_all(Ending(EndingKind.SHUTDOWN, cause))

    def statistics(self) -> LLMStatistics:
        return LLMStatistics(
            len(self._open_streams), dict(self._endings), (self.link.statistics(),)
        )

    @property
    def tracer(self) -> Tracer | None:
        """Who sees every hop (``runtime/tracer.py``); None but in a program that shows the way."""
        return self.link.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self.link.tracer = tracer

    async def check_tasks(self) -> None:
        """Ask the engine what its model can do. Raises ``EngineStartError`` for an answer that is none."""
        try:
            self.supported_tasks = frozenset(await self.get_supported_tasks())
        except WireError as error:
            raise EngineStartError(str(error)) from error

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See ``EngineUtilities``."""
        return await self.link.call_utility(method, *args)

    @property
    def stats_logger(self) -> StatsLogger | None:
        """Who is told what each step brought; may be set at any time, to None as well."""
        return self.link.stats_logger

    @stats_logger.setter
    def stats_logger(self, logger: StatsLogger | None) -> None:
        self.link.stats_logger = logger

    def close(self) -> None:
        """The block is left: streams that are still open end, and further use of them is refused."""
        self.shut_down("the LLM's block has been left")
        self._grammars.close()
        for stream in self._open_streams.values():
            stream.close()


@asynccontextmanager
async def open_llm(
    model: str | Path = model_store.DEFAULT_MODEL,
    config: LLMConfig | None = None,
    *,
    attach: str | None = None,
    script: Path | None = None,
    cancel_on_death: bool = False,
) -> AsyncIterator[LLM]:
    """Start an engine for ``model`` (or let one join) and yield an ``LLM`` when it is ready.

    ``model``: what ``model_store.resolve`` finds: a model or GGUF file that was pulled, or a directory.
    ``attach``: a handshake address (``tcp://127.0.0.1:PORT``) to bind; an engine started by somebody
    else is waited for there. ``script``: the engine is the scripted one, with this file. With either, a directory
    needs no weights.

    Raises ``ModelStoreError`` and ``EngineStartError``. If the engine dies, live streams end with
    ``EngineDeadError`` and the body goes on (see ``LLM.wait_dead``), or, with ``cancel_on_death``, is
    cancelled; after a body that left without an error, ``EngineDeadError`` is raised with the cause.
    What the body raises leaves as itself. Everything that was started is ended on the way out.
    """
    config = config or LLMConfig()
    is_ours = attach is None and script is None
    resolve = partial(model_store.resolve, str(model), weights=is_ours)
    directory = await trio.to_thread.run_sync(resolve)
    tokenizer = await trio.to_thread.run_sync(Tokenizer.from_directory, directory)
    opening = (
        start_engine(directory, config, script=script)
        if attach is None
        else attach_engine(attach, config)
    )
    with unwrapped() as body:
        async with opening as engine, trio.open_nursery() as nursery:
            llm = LLM(str(model), tokenizer, engine, config)
            await nursery.start(llm.link.run, name="engine link")
            if cancel_on_death:
                nursery.start_soon(_cancel_on_death, llm, nursery.cancel_scope)
            await llm.check_tasks()
            try:
                yield llm
            except BaseException as error:
                body.error = error
                raise
            finally:
                llm.close()
                nursery.cancel_scope.cancel(reason="the LLM's block has been left")
    if llm.cause_of_death is not None:
        raise EngineDeadError(llm.cause_of_death)


async def _cancel_on_death(llm: LLM, scope: trio.CancelScope) -> None:
    scope.cancel(reason=await llm.wait_dead())
