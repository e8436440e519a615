"""``open_llm``, ``LLM`` and ``open_stream``: blocks, as in ``runtime/``.

The group of ``open_llm`` owns the link's task. A group wraps whatever leaves it, so what the body raises is taken out of
it again: for a caller this is a block like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ...config import LLMConfig
from ...errors import EngineDeadError, OverloadedError, ServerShutdown
from ...outputs import Ending, EndingKind
from ...prompts import Prompt
from ...sampling_params import RequestOutputKind, SamplingParams
from ...timeouts import Timeouts
from ...tokenizer import Tokenizer
from ..asyncio_common.answers import submission_of
from ..asyncio_common.engine_process import STOP_S, Engine, start_engine
from ..asyncio_common.prompts import PromptReader
from .engine_link import EngineLink
from .mailbox import Mailbox
from .request_stream import RequestStream
from .unwrap import reraise

__all__ = ["LLM", "open_llm"]

# A guess: nothing is known of how long requests take here.
_RETRY_AFTER_S = 1.0


class LLM:
    """A model that is being served. Made by ``open_llm``."""

    def __init__(self, tokenizer: Tokenizer, link: EngineLink, config: LLMConfig) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = link.ready.max_model_len
        self.is_draining = False
        self.prompts = PromptReader(tokenizer)
        self._link = link
        self._config = config
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._num_inflight = 0
        self._none_inflight = asyncio.Event()
        self._none_inflight.set()

    @property
    def num_requests(self) -> int:
        """Live ones that the front end remembers."""
        return self._link.num_requests

    @property
    def cause_of_death(self) -> str | None:
        """Of the engine; None while it lives."""
        return self._link.cause_of_death

    async def wait_dead(self) -> None:
        """Until the engine is."""
        await self._link.dead.wait()

    async def wait_idle(self) -> None:
        """Until no stream is open."""
        await self._none_inflight.wait()

    def end_all(self, ending: Ending) -> None:
        """End every live request."""
        self._link.end_all(ending)

    @asynccontextmanager
    async def open_stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        timeouts: Timeouts | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestStream]:
        """A request, for the length of the block: leaving it, however, aborts what has not ended. Deadlines count
        from now. Raises ``InvalidRequestError``, ``OverloadedError``, ``EngineDeadError``, ``ServerShutdown``."""
        since = asyncio.get_running_loop().time()
        timeouts = (timeouts or Timeouts()).or_else(self._config.timeouts)
        self._admit(params.n)
        try:
            stream = await self._open(prompt, params, timeouts, since, priority, cache_salt)
            try:
                yield stream
            finally:
                stream.close()
        finally:
            self._num_inflight -= params.n
            if not self._num_inflight:
                self._none_inflight.set()

    def _admit(self, num_choices: int) -> None:
        if self.is_draining:
            raise ServerShutdown("the server is shutting down")
        most = self._config.max_inflight_requests
        if self._num_inflight + num_choices > most:
            raise OverloadedError(
                f"{self._num_inflight} requests are in flight; allowed: {most}",
                code="too_many_requests",
                retry_after=_RETRY_AFTER_S,
            )
        self._num_inflight += num_choices
        self._none_inflight.clear()

    async def _open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        timeouts: Timeouts,
        since: float,
        priority: int,
        cache_salt: str | None,
    ) -> RequestStream:
        mailbox = Mailbox(
            aggregate=params.output_kind is RequestOutputKind.DELTA,
            max_bytes=self._config.mailbox_max_bytes,
        )
        submission = submission_of(
            f"{self._id_prefix}{next(self._numbers)}",
            await self.prompts.read(prompt, self.max_model_len),
            params,
            self.tokenizer,
            self.max_model_len,
            sink=mailbox,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = RequestStream(submission, mailbox, self._link.stream_ended)
        # No wait from here to the caller's block: a cancel that came in between would leave it to nobody.
        self._link.submit(stream)
        stream.set_deadlines(timeouts, since)
        return stream


@asynccontextmanager
async def open_llm(
    directory: Path, command: Sequence[str], config: LLMConfig | None = None
) -> AsyncIterator[LLM]:
    """Start ``command``, the engine, and serve the model of ``directory`` while the block runs. Its end ends every
    request, then the engine. Raises ``EngineStartError``; what the body raises; else ``EngineDeadError``."""
    config = config or LLMConfig()
    tokenizer = await asyncio.to_thread(Tokenizer.from_directory, directory)
    engine = await start_engine(command)
    try:
        link = EngineLink(engine, chunk_size=config.output_chunk_size)
        llm = LLM(tokenizer, link, config)
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(link.run(), name="engine link")
                try:
                    yield llm
                finally:
                    link.end_all(Ending(EndingKind.SHUTDOWN, "the LLM's block has been left"))
                    running.cancel("the LLM's block has been left")
        except ExceptionGroup as errors:
            # The body's is the last, if it raised; each was somebody's own before the group wrapped it.
            reraise(errors.exceptions[-1])
        finally:
            llm.prompts.close()
        if link.cause_of_death is not None:
            raise EngineDeadError(link.cause_of_death)
    finally:
        await _stop(engine)


async def _stop(engine: Engine) -> None:
    """Ask, wait, kill. A second cancel cuts the wait short, and not the kill: no level of cancelling holds it off."""
    engine.process.ask()
    try:
        async with asyncio.timeout(STOP_S):
            await engine.process.wait()
    except TimeoutError:
        pass  # it is killed
    finally:
        engine.process.kill()
        engine.process.wait_in_thread()
        engine.sockets.close()
