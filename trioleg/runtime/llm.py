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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from .. import model_store
from ..config import LLMConfig
from ..errors import (
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    RequestEnded,
    ServerShutdown,
)
from ..messages import EngineCoreRequest
from ..output.request_state import RequestState
from ..outputs import Ending, EndingKind, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..tokenizer import Tokenizer
from .engine_link import EngineLink, EngineLinkStatistics
from .engines import Engine, attach_engine, start_engine
from .prompts import Prompt, PromptReader, RunSync
from .request_stream import RequestStream
from .unwrap import unwrapped

__all__ = ["LLM", "LLMStatistics", "open_llm"]

_log = logging.getLogger("trioleg.requests")


@dataclass(frozen=True, slots=True)
class LLMStatistics:
    """``open_streams``: blocks of ``open_stream`` not left yet; ``endings``: requests ended, by kind."""

    open_streams: int
    endings: Mapping[EndingKind, int]
    engines: tuple[EngineLinkStatistics, ...]


class LLM:
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
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = engine.ready.max_model_len
        self._config = config
        # Begins every request id: an id with another beginning is another front end's.
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._prompts = PromptReader(tokenizer, self.max_model_len, run_sync)
        self._open: dict[str, RequestStream] = {}
        self._endings: Counter[EndingKind] = Counter()
        self._refusal: str | None = None
        self.link = EngineLink(
            engine.rank,
            engine.ready,
            engine.transport,
            own_prefix=self._id_prefix,
            output_chunk_size=config.output_chunk_size,
            watch=engine.watch,
        )

    # ------------------------------------------------------------------ requests

    def default_sampling_params(self, **asked: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json), overridden by what is asked for.

        Raises ``InvalidRequestError``.
        """
        known = {"temperature", "top_p", "top_k"}
        defaults = {k: v for k, v in self.tokenizer.generation_defaults.items() if k in known}
        return SamplingParams(**(defaults | asked))

    @asynccontextmanager
    async def open_stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestStream]:
        """Send a request; the block reads its outputs. Leaving the block is the cancel.

        ``prompt``: text, token ids, or chat messages. ``params`` None: the model's defaults.
        Raises ``InvalidRequestError`` (nothing was sent), ``EngineDeadError``, and
        ``ServerShutdown`` once the LLM takes no more requests. Cancel-safe at every point.
        """
        params = self._params(params)
        self._refuse_if_closing()
        prompt_token_ids = await self._prompts.read(prompt)
        max_tokens = self._max_tokens(params, len(prompt_token_ids))
        # From here to `yield` nothing waits: registering and sending are one step.
        self._refuse_if_closing()
        stream = self._submit(prompt_token_ids, params, max_tokens)
        try:
            yield stream
        finally:
            stream.close()
            del self._open[stream.request_id]

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The whole answer at once. Raises as ``open_stream`` and ``RequestStream.receive`` do; a
        ``RequestEnded`` carries what had been generated in ``partial``."""
        params = self._params(params).with_output_kind(RequestOutputKind.FINAL_ONLY)
        output: RequestOutput | None = None
        async with self.open_stream(prompt, params) as stream:
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

    def _submit(
        self, prompt_token_ids: list[int], params: SamplingParams, max_tokens: int
    ) -> RequestStream:
        request_id = f"{self._id_prefix}{next(self._numbers)}"
        stream = RequestStream(
            request_id,
            prompt_token_ids,
            params,
            max_bytes=self._config.mailbox_max_bytes,
            on_end=self._stream_ended,
        )
        state = RequestState(
            request_id,
            prompt_token_ids,
            params,
            self.tokenizer,
            stream.mailbox,
            max_tokens=max_tokens,
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=params.for_engine(
                max_tokens=max_tokens,
                eos_token_id=self.tokenizer.eos_token_id,
                other_eos_token_ids=self.tokenizer.other_eos_token_ids,
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.link.submit(stream, state, request)
        self._open[request_id] = stream
        return stream

    def _max_tokens(self, params: SamplingParams, prompt_len: int) -> int:
        """What max_tokens comes to beside this prompt; checks what only the model can tell."""
        left = self.max_model_len - prompt_len
        for name in ("max_tokens", "min_tokens"):
            value = getattr(params, name)
            if value is not None and value > left:
                raise InvalidRequestError(
                    f"{name} is {value}; allowed: at most {left}, which is max_model_len "
                    f"({self.max_model_len}) less the prompt's {prompt_len} tokens",
                    parameter=name,
                )
        vocab_size = self.tokenizer.vocab_size
        for token_id in params.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}; allowed: 0 to {vocab_size - 1}",
                    parameter="stop_token_ids",
                )
        return left if params.max_tokens is None else params.max_tokens

    def _stream_ended(self, stream: RequestStream, ending: Ending) -> None:
        self.link.stream_ended(stream, ending)
        self._endings[ending.kind] += 1
        cause = f" ({ending.cause})" if ending.cause else ""
        _log.info("request %s ended: %s%s", stream.request_id, ending.kind, cause)

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
        return LLMStatistics(len(self._open), dict(self._endings), (self.link.statistics(),))

    async def check_tasks(self) -> None:
        """Ask the engine whether it generates text. Raises ``EngineStartError`` if it does not."""
        tasks = await self.link.call_utility("get_supported_tasks")
        if "generate" not in (tasks or ()):
            raise EngineStartError(
                f"the engine's model supports {tasks!r}; allowed: one that supports 'generate'"
            )

    def close(self) -> None:
        """The block is left: streams that are still open end, and further use of them is refused."""
        self.shut_down("the LLM's block has been left")
        for stream in self._open.values():
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

    ``model``: a name known to the model store that has been pulled, or a Hugging Face directory.
    ``attach``: a handshake address (``tcp://127.0.0.1:PORT``) to bind; an engine started by somebody
    else is waited for there. ``script``: the engine is the scripted one, with this file.

    Raises ``ModelStoreError`` and ``EngineStartError``. If the engine dies, live streams end with
    ``EngineDeadError`` and the body goes on (see ``LLM.wait_dead``), or, with ``cancel_on_death``, is
    cancelled; after a body that left without an error, ``EngineDeadError`` is raised with the cause.
    What the body raises leaves as itself. Everything that was started is ended on the way out.
    """
    config = config or LLMConfig()
    directory = await trio.to_thread.run_sync(model_store.resolve, str(model))
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
