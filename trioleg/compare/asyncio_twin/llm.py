"""``LLM``: the way in for requests, and the handler task that brings their outputs.

A request is ``generate``, an async generator. Its caller ends it by cancelling the task that iterates it, by ``aclose``,
or by dropping it, and whichever it was arrives here as an exception: the ``except`` clauses are the whole of the
abort. An error that the handler meets ends the handler; it is put into every mailbox, and from then on ``errored`` is
true.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from ...config import LLMConfig
from ...errors import EngineDeadError, InvalidRequestError, RequestEnded
from ...output.processor import OutputProcessor, ProcessedOutputs
from ...output.submission import Submission
from ...outputs import RequestOutput
from ...prompts import Prompt
from ...sampling_params import SamplingParams
from ...tokenizer import Tokenizer
from ..asyncio_common.answers import submission_of
from ..asyncio_common.engine_process import STOP_S, Engine
from ..asyncio_common.prompts import PromptReader
from .engine_link import EngineLink
from .mailbox import Mailbox

__all__ = ["LLM", "EngineGenerateError"]

_log = logging.getLogger("trioleg.compare.asyncio_twin")


# Of outputs, processed at a stretch: trioleg's own, and vLLM's.
_CHUNK_SIZE = LLMConfig().output_chunk_size


class EngineGenerateError(Exception):
    """A request failed by an error that nobody expected, which is its cause. The engine may be well."""


class LLM:
    """A model that is being served by ``engine``, which belongs to it. Whoever makes it calls ``shutdown``; if nobody
    has it any more, that happens by itself. ``chunk_size``: outputs that are processed at a stretch."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine,
        *,
        chunk_size: int = _CHUNK_SIZE,
    ) -> None:
        self.tokenizer = tokenizer
        self._prompts = PromptReader(tokenizer)
        self._processor = OutputProcessor()
        self._mailboxes: dict[str, Mailbox] = {}
        self._chunk_size = chunk_size
        self._handler: asyncio.Task[None] | None = None
        self._id_prefix = f"{secrets.token_hex(6)}-"
        self._numbers = itertools.count()
        self._link = EngineLink(engine)
        # Where a loop runs, at once: who waits for the first request does not notice that the engine is gone.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self._run_output_handler()

    def __del__(self) -> None:
        # The constructor may have failed before there was anything to shut down.
        if hasattr(self, "_link"):
            self.shutdown()

    def shutdown(self, timeout: float = STOP_S) -> None:
        """End the engine, and with it every request; blocks meanwhile, so not in the loop's thread while it serves.
        Idempotent."""
        self._prompts.close()
        # The socket task's last word ends the handler, which passes it on to every request.
        self._link.shutdown(timeout)

    # ------------------------------------------------------------------ state

    @property
    def max_model_len(self) -> int:
        """The longest a prompt and its answer may be together, in tokens."""
        return self._link.ready.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """That the front end remembers."""
        return self._processor.statistics().requests

    @property
    def is_running(self) -> bool:
        """The handler is at work, or has not been started yet."""
        return self._handler is None or not self._handler.done()

    @property
    def errored(self) -> bool:
        """No request can be served any more."""
        return self._link.resources.engine_dead or not self.is_running

    def check_health(self) -> None:
        """Raises ``EngineDeadError``."""
        if self.errored:
            raise EngineDeadError("the engine is dead, or its outputs are not read any more")

    # ------------------------------------------------------------------ requests

    def next_request_id(self) -> str:
        """Unique among all front ends."""
        return f"{self._id_prefix}{next(self._numbers)}"

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **more: Any
    ) -> Submission:
        """Tokenize and check: what a server does before it answers. Raises ``InvalidRequestError``."""
        token_ids = await self._prompts.read(prompt, self.max_model_len)
        return submission_of(
            request_id, token_ids, params, self.tokenizer, self.max_model_len, **more
        )

    async def add_request(
        self, prompt: Prompt | Submission, params: SamplingParams, request_id: str
    ) -> Mailbox:
        """Begin a request, which is known from then on: whoever fails here calls ``abort``. Raises
        ``InvalidRequestError``, ``EngineDeadError``."""
        self.check_health()
        if not isinstance(prompt, Submission):
            prompt = await self.prepare(prompt, params, request_id)
        self._run_output_handler()
        mailbox = Mailbox(params.output_kind, request_id)
        prompt.state.sink = mailbox
        # Before the first await from here, so that every task finds the request.
        self._processor.add_request(prompt.state)
        self._mailboxes[request_id] = mailbox
        for request in prompt.engine_requests:
            await self._link.add_request(request)
        return mailbox

    async def generate(
        self, prompt: Prompt | Submission, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs. ``prompt``: text, token ids, chat messages, or what ``prepare`` made of one.

        Raises ``InvalidRequestError``, the errors of ``RequestEnded``, and ``EngineGenerateError`` for any other. To
        leave it aborts the request; a caller that does not exhaust it closes it, or the collector does.
        """
        try:
            mailbox = await self.add_request(prompt, params, request_id)
            finished = False
            while not finished:
                # What is there is taken without a task switch; there is nothing behind it.
                output = mailbox.get_nowait() or await mailbox.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            # The caller was cancelled, has closed the generator, or has dropped it.
            await self.abort(request_id)
            raise
        except EngineDeadError:
            # There is nobody to tell, but the state must not stay.
            self._processor.end_request(request_id)
            raise
        except (InvalidRequestError, RequestEnded):
            # Refused, or ended by the handler, which has forgotten it and told the engine.
            raise
        except Exception as error:
            await self.abort(request_id)
            _log.info("request %s failed: %r", request_id, error)
            raise EngineGenerateError(f"request {request_id} failed") from error
        finally:
            self._mailboxes.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """Forget a request, and tell the engine if it is still at it."""
        await self._link.abort_requests(self._processor.end_request(request_id))

    def _run_output_handler(self) -> None:
        """By the first request at the latest: an ``LLM`` can be made before there is a loop."""
        if self._handler is None:
            self._handler = asyncio.create_task(
                _handle_outputs(self._link, self._processor, self._mailboxes, self._chunk_size),
                name="output_handler",
            )


async def _handle_outputs(
    link: EngineLink, processor: OutputProcessor, mailboxes: dict[str, Mailbox], chunk_size: int
) -> None:
    """The handler task, for all requests. It has no ``LLM``, which could never be collected otherwise."""
    try:
        while True:
            received = await link.get_output()
            now = time.monotonic()
            outputs = received.outputs.outputs
            for start in range(0, len(outputs), chunk_size):
                end = start + chunk_size
                processed = processor.process(
                    outputs[start:end],
                    frames=received.frames,
                    timestamp=received.outputs.timestamp,
                    now=now,
                )
                # Every request here has a mailbox; the returned list is for batch use.
                assert not processed.request_outputs
                if end < len(outputs):
                    await asyncio.sleep(0)
                await link.abort_requests(_settle(processed, processor, mailboxes))
    except Exception as error:
        _log.exception("the output handler failed")
        for mailbox in mailboxes.values():
            mailbox.put(error)


def _settle(
    processed: ProcessedOutputs, processor: OutputProcessor, mailboxes: dict[str, Mailbox]
) -> list[str]:
    """Give those that ended badly their errors. Returns what the engine works on in vain."""
    in_vain = list(processed.aborts)
    for request_id, ending in processed.endings:
        mailbox = mailboxes.pop(request_id, None)
        error = ending.error()
        if mailbox is not None and error is not None:
            in_vain += processor.end_request(request_id)
            mailbox.put(error)
    return in_vain
