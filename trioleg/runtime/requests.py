"""``Requests``: every request of an ``LLM``, from its arrival to its ending.

It is prepared (tokenized, its constraint tried) under its deadline, then registered and sent in one step; from then
on its stream's ``end`` is the one way that it ends, and every ending is counted and logged here. It holds a place
(``admission.py``) from before the preparation until it has ended.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeAlias

import trio

from ..config import LLMConfig
from ..errors import DeadlineExceeded, InvalidRequestError, ServerShutdown
from ..lora import LoRARequest
from ..messages import EngineReadyResponse
from ..output.request_state import RequestState
from ..output.submission import Submission
from ..outputs import Ending, EndingKind
from ..prompts import TokenizeParams
from ..structured_outputs import StructuredOutputsParams
from ..timeouts import Timeouts, check_timeouts
from .adapters import Adapters
from .admission import Slot
from .arrival import Arrival
from .deadlines import Deadlines, until
from .endings import Endings
from .engine_link import EngineLink
from .entrance import Entrance
from .grammars import GrammarChecker
from .mailbox import Mailbox
from .prompts import Prompt, PromptReader, guessed_length
from .request_stream import RequestStream
from .unread import Unread

__all__ = ["MakeSubmission", "Requests"]

MakeSubmission: TypeAlias = Callable[..., Submission]


class Requests:
    """``streams``: of blocks that have not been left, by request id. ``id_prefix`` begins every request id: an id
    with another beginning is another front end's. ``deadlines`` has a task to be run."""

    def __init__(
        self,
        entrance: Entrance,
        prompts: PromptReader,
        grammars: GrammarChecker,
        unread: Unread,
        adapters: Adapters,
        config: LLMConfig,
        clock: Callable[[], float],
    ) -> None:
        self.id_prefix = f"{secrets.token_hex(6)}-"
        self.streams: dict[str, RequestStream] = {}
        self.endings = Endings()
        self.deadlines = Deadlines()
        # Of those that are being prepared.
        self._preparing: set[trio.CancelScope] = set()
        self._numbers = itertools.count()
        self._entrance = entrance
        self._prompts = prompts
        self._grammars = grammars
        self._unread = unread
        self._adapters = adapters
        self._config = config
        self._clock = clock

    def live(self) -> tuple[RequestStream, ...]:
        """Those that have not ended, oldest first."""
        return tuple(one for one in self.streams.values() if one.ending is None)

    def arrival(
        self,
        timeouts: Timeouts | None,
        at: float | None = None,
        external_req_id: str | None = None,
    ) -> Arrival:
        """Of a request. ``at`` None: it comes now. Raises ``InvalidRequestError``."""
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

    def admit_all(self, prompts: Sequence[Prompt], parameter: str, arrival: Arrival) -> list[Slot]:
        """Places for prompts that come together, or for none of them: see ``Admission.admit_all``."""
        self._entrance.link()
        return self._entrance.admission.admit_all(
            [guessed_length(one) for one in prompts], parameter, arrival.timeouts, arrival.at
        )

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        make_submission: MakeSubmission,
        *,
        aggregate: bool,
        arrival: Arrival,
        num_choices: int = 1,
        constraint: StructuredOutputsParams | None = None,
        tokenize: TokenizeParams | None = None,
        slot: Slot | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestStream]:
        """See ``LLM.open_stream``. ``slot``: its own, if it was admitted with others (``admit_all``)."""
        request_id = self._next_id()
        ready = self._entrance.link().ready
        slot = slot or self._entrance.admission.admit(
            num_choices, guessed_length(prompt), arrival.timeouts, arrival.at
        )
        self._adapters.hold(lora_request)
        try:
            with self._entrance.turning_away():
                prompt_token_ids = await self._prepare(
                    request_id, prompt, constraint, lora_request, arrival, ready, tokenize
                )
            slot.take_prompt(len(prompt_token_ids))
            # From here to `yield` nothing waits: registering and sending are one step.
            with self._entrance.turning_away():
                if lora_request is not None:
                    adapter = self._adapters.current(lora_request)
                    make_submission = partial(make_submission, lora_request=adapter)
                stream = self._submit(
                    request_id, prompt_token_ids, make_submission, slot, arrival, aggregate
                )
            # All that it needs it has, and it may be long.
            del prompt, prompt_token_ids, make_submission, constraint, tokenize
            self.deadlines.add(stream, arrival.timeouts, arrival.at)
            self.streams[request_id] = stream
            try:
                yield stream
            finally:
                stream.close()
                del self.streams[request_id]
        finally:
            # Before this, at the request's end, unless it never began.
            slot.release()
            self._adapters.release(lora_request)

    def _submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        make_submission: MakeSubmission,
        slot: Slot,
        arrival: Arrival,
        aggregate: bool,
    ) -> RequestStream:
        link = self._entrance.link_of_the_admitted()
        mailbox = Mailbox(
            aggregate=aggregate, max_bytes=self._config.mailbox_max_bytes, tally=self._unread
        )
        submission = make_submission(
            request_id,
            prompt_token_ids,
            max_model_len=link.ready.max_model_len,
            sink=mailbox,
            arrival=arrival.by_clock,
        )
        if isinstance(submission.state, RequestState):
            submission.state.on_prompt_done = slot.start
        stream = RequestStream(
            submission,
            mailbox,
            on_end=partial(self._stream_ended, link, arrival, slot),
            external_req_id=arrival.external_req_id,
        )
        link.submit(stream)
        return stream

    async def _prepare(
        self,
        request_id: str,
        prompt: Prompt,
        constraint: StructuredOutputsParams | None,
        lora_request: LoRARequest | None,
        arrival: Arrival,
        ready: EngineReadyResponse,
        tokenize: TokenizeParams | None,
    ) -> list[int]:
        """What has to be waited for before a request can be sent: its ids, its constraint's trial, its adapter.

        To leave here is an ending, too: of a request that no engine has heard of.
        """
        deadline, overdue = until(arrival.timeouts, arrival.at)
        ending: Ending | None = Ending(EndingKind.LEFT)
        try:
            with self._stoppable(deadline):
                prompt_token_ids = await self._prompts.read(prompt, ready.max_model_len, tokenize)
                if constraint is not None:
                    await self._grammars.check(constraint, engine_tries=ready.validates_requests)
                await self._adapters.make_sure(lora_request)
                ending = None
                return prompt_token_ids
            ending = None
            if self._entrance.closed is None:
                ending = Ending(EndingKind.DEADLINE, overdue)
        except Exception as error:
            # Refused: a request that never began.
            ending = None
            if self._entrance.closed is not None and not isinstance(error, InvalidRequestError):
                # What prepares requests is being taken down, too.
                raise ServerShutdown(self._entrance.closed) from error
            raise
        finally:
            if ending is not None:
                self.endings.note(request_id, ending, arrival)
        if self._entrance.closed is not None:
            raise ServerShutdown(self._entrance.closed)
        raise DeadlineExceeded(overdue)

    @contextmanager
    def _stoppable(self, deadline: float) -> Iterator[None]:
        """A block that is left when the deadline comes, or the LLM is shut down."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._preparing.add(scope)
            try:
                yield
            finally:
                self._preparing.remove(scope)

    def _stream_ended(
        self,
        link: EngineLink,
        arrival: Arrival,
        slot: Slot,
        stream: RequestStream,
        ending: Ending,
    ) -> None:
        slot.release()
        try:
            link.stream_ended(stream)
        finally:
            self.endings.note(stream.request_id, ending, arrival, stream.num_output_tokens)

    def note_unsent(self, ending: Ending, arrival: Arrival) -> None:
        """Count and log the end of a request that ended before it was whole."""
        self.endings.note(self._next_id(), ending, arrival)

    def abort(self, request_id: str) -> bool:
        """See ``LLM.abort``."""
        stream = self.streams.get(request_id)
        if stream is None or stream.ending is not None:
            return False
        stream.end(Ending(EndingKind.ABORTED, "the request was aborted by its id"))
        return True

    def end_all(self, ending: Ending) -> None:
        """Those that live, with ``ending``; those that are being prepared are refused. Synchronous."""
        for stream in self.live():
            stream.end(ending)
        for scope in self._preparing:
            scope.cancel(reason=ending.cause)

    def close(self) -> None:
        """The LLM's block is left: further use of streams is refused. Synchronous."""
        self._grammars.close()
        for stream in self.streams.values():
            stream.close()

    def _next_id(self) -> str:
        return f"{self.id_prefix}{next(self._numbers)}"
