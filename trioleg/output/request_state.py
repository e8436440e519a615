"""What the front end remembers of one request while the engine works on it.

Pure. A reader has one request; an engine has one for each of its ``n`` choices. So there are two classes:

- ``ChoiceState``: one request as the engine knows it. It takes each step's tokens in, and makes of them
  the ``CompletionOutput`` that output kind and interval ask for, or none yet;
- ``RequestState``: the reader's request, which owns the choices and puts their outputs into
  ``RequestOutput`` objects. It is finished when all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import OutputError
from ..messages import EngineCoreOutput, FinishReason
from ..outputs import (
    CompletionOutput,
    LogprobsOfToken,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from ..sampling_params import RequestOutputKind, SamplingParams
from ..tokenizer import Tokenizer
from .arrays import Frames
from .detokenizer import make_detokenizer
from .logprobs import read_logprobs, read_prompt_logprobs
from .stats import RequestTimes

__all__ = ["ChoiceState", "OutputSink", "RequestState"]


# Ends at which the engine has done all that it was asked for.
_FINISHED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class OutputSink(Protocol):
    """Where a request's outputs go, if not into the processor's returned list."""

    def put(self, output: RequestOutput | PoolingRequestOutput) -> bool:
        """Take the output over, without waiting. False: the reader is too far behind."""
        ...


class RequestState:
    """One request. ``sink`` None: its outputs are returned by ``OutputProcessor.process``.

    ``max_tokens`` is the number that the engine was told: more is an error of the engine's, and would
    be time taken from every other request. ``detokenizer``: one of ``config.DETOKENIZERS``.
    ``stream_interval``: the least that the server allows. ``arrival``: by our monotonic clock.
    """

    __slots__ = (
        "_finals",
        "_is_delta",
        "_is_final_only",
        "_num_unfinished",
        "_prompt_logprobs",
        "arrival",
        "choices",
        "detokenizer",
        "has_failed",
        "interval",
        "max_tokens",
        "num_cached_tokens",
        "on_prompt_done",
        "params",
        "prompt_token_ids",
        "request_id",
        "sink",
        "tokenizer",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        sink: OutputSink | None = None,
        *,
        max_tokens: int,
        detokenizer: str = "fast",
        stream_interval: int = 1,
        arrival: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.sink = sink
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.detokenizer = detokenizer
        self.interval = max(stream_interval, params.stream_interval or 1)
        self.arrival = arrival
        self.num_cached_tokens: int | None = None
        # Called once, with the first token: the request waits no more.
        self.on_prompt_done: Callable[[], None] = _nothing
        # A bad ending has been reported, and is the only one.
        self.has_failed = False
        self.choices = [ChoiceState(self, index) for index in range(params.n)]
        self._num_unfinished = params.n
        self._prompt_logprobs: list[LogprobsOfToken | None] | None = None
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        # FINAL_ONLY: what is finished waits here for the other choices.
        self._finals: list[CompletionOutput] = []

    @property
    def is_finished(self) -> bool:
        """All choices have come to an end of their own."""
        return self._num_unfinished == 0

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.num_output_tokens for choice in self.choices)

    def take_prompt(self, output: EngineCoreOutput, frames: Frames) -> None:
        """What comes with a request's first token. Raises ``OutputError``."""
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        k = self.params.prompt_logprobs
        if k is not None and output.new_prompt_logprobs_tensors is not None:
            self._prompt_logprobs = read_prompt_logprobs(
                output.new_prompt_logprobs_tensors,
                self.prompt_token_ids,
                k,
                self.tokenizer.pieces,
                frames,
            )

    def note_prompt_done(self) -> None:
        """Called with the first token. Raises ``OutputError``."""
        self.on_prompt_done()
        self.on_prompt_done = _nothing
        asked = self.params.prompt_logprobs is not None and len(self.prompt_token_ids) > 1
        if asked and self._prompt_logprobs is None:
            raise OutputError("prompt_logprobs were asked for; the engine sent none")

    def make_request_output(
        self, completion: CompletionOutput, metrics: RequestMetrics | None = None
    ) -> RequestOutput | None:
        """The output for the reader, or None where FINAL_ONLY waits for the other choices."""
        if completion.finish_reason is not None:
            self._num_unfinished -= 1
        if self._is_final_only:
            self._finals.append(completion)
            return self._made(self._finals, metrics) if self.is_finished else None
        return self._made([completion], metrics)

    def release(self) -> RequestOutput | None:
        """The request ends badly: an output with what was held back, or None if nothing was."""
        unfinished = (choice.release() for choice in self.choices if not choice.is_finished)
        held_back = self._finals + [one for one in unfinished if one is not None]
        return self._made(held_back, None) if held_back else None

    def _made(
        self, completions: list[CompletionOutput], metrics: RequestMetrics | None
    ) -> RequestOutput:
        if len(completions) > 1:
            completions.sort(key=lambda one: one.index)
        finished = self.is_finished
        output = RequestOutput(
            self.request_id,
            self.prompt_token_ids,
            completions,
            finished,
            self.num_cached_tokens,
            self._prompt_logprobs,
            metrics if finished else None,
        )
        if self._is_delta:
            self._prompt_logprobs = None
        return output


class ChoiceState:
    """One of the request's answers, as the engine has it under ``engine_request_id``."""

    __slots__ = (
        "_all_logprobs",
        "_all_token_ids",
        "_cumulative_logprob",
        "_detokenizer",
        "_has_sent_tokens",
        "_interval",
        "_is_delta",
        "_is_final_only",
        "_logprobs",
        "_texts",
        "_token_ids",
        "_wanted_logprobs",
        "engine_request_id",
        "index",
        "is_finished",
        "request",
        "times",
    )

    def __init__(self, request: RequestState, index: int) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.engine_request_id = (
            request.request_id if params.n == 1 else f"{request.request_id}-{index}"
        )
        self.is_finished = False
        self.times = RequestTimes(request.arrival)
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._interval = request.interval
        self._detokenizer = make_detokenizer(
            request.detokenizer, request.tokenizer, request.prompt_token_ids, params
        )
        self._wanted_logprobs = params.logprob_token_ids or params.logprobs
        self._cumulative_logprob = 0.0
        # What the reader has not been given yet: tokens, an entry of logprobs for each of them, and text
        # (of output kinds that hand it over again: all of it).
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsOfToken] = []
        self._has_sent_tokens = False
        # Everything before that; kept for the output kinds that hand it over again.
        self._all_token_ids: list[int] = []
        self._all_logprobs: list[LogprobsOfToken] = []

    @property
    def num_output_tokens(self) -> int:
        return self._detokenizer.num_output_tokens

    @property
    def num_unsent_tokens(self) -> int:
        """Tokens that wait for the stream interval."""
        return len(self._token_ids)

    @property
    def pending(self) -> Sequence[int]:
        """Tokens whose text waits for a character to be finished."""
        return self._detokenizer.pending()

    @property
    def held_back(self) -> str:
        """Text that waits because a stop string may begin there."""
        return self._detokenizer.held_back()

    def update(self, output: EngineCoreOutput, frames: Frames = ()) -> str | None:
        """Take one step's tokens in; returns the stop string that they complete, if any.

        Raises ``OutputError``; the tokens before the one at fault are taken in all the same. Tokens
        behind a completed stop string or a stop token are cut off ``output``.
        """
        token_ids = output.new_token_ids
        if output.prefill_stats is not None or output.new_prompt_logprobs_tensors is not None:
            self.request.take_prompt(output, frames)
        if not token_ids:
            if output.finish_reason in _FINISHED and not self.num_output_tokens and not self.index:
                self.request.note_prompt_done()
            return None
        before = self._detokenizer.num_output_tokens
        if before + len(token_ids) > self.request.max_tokens:
            raise OutputError(
                f"the engine sent {before + len(token_ids)} tokens; this request may have "
                f"{self.request.max_tokens} (max_tokens)"
            )
        if before == 0 and self.index == 0:
            self.request.note_prompt_done()
        stop_terminated = output.finish_reason is FinishReason.STOP
        if stop_terminated and type(output.stop_reason) is int:
            _cut_behind(token_ids, output.stop_reason)
        # Before the text: a token whose figures cannot be read must not leave its text behind.
        entries = self._read_logprobs(output, frames)
        try:
            stop = self._detokenizer.update(token_ids, stop_terminated)
        except OutputError:
            # The detokenizer has counted the one at fault, too.
            del token_ids[self.num_output_tokens - before - 1 :]
            self._take_tokens(token_ids, entries)
            raise
        self._take_tokens(token_ids, entries)
        return stop

    def _read_logprobs(self, output: EngineCoreOutput, frames: Frames) -> list[LogprobsOfToken]:
        wanted = self._wanted_logprobs
        if wanted is None:
            return []
        pieces = self.request.tokenizer.pieces
        return read_logprobs(output.new_logprobs, output.new_token_ids, wanted, pieces, frames)

    def _take_tokens(self, token_ids: list[int], entries: list[LogprobsOfToken]) -> None:
        """``entries`` may go on behind a stop string, where the tokens do not."""
        if entries:
            taken = entries[: len(token_ids)]
            self._logprobs += taken
            chosen = zip(taken, token_ids, strict=True)
            self._cumulative_logprob += sum(entry[i].logprob for entry, i in chosen)
        if self._token_ids:
            self._token_ids += token_ids
        else:
            self._token_ids = token_ids

    def make_output(self) -> CompletionOutput | None:
        """The output for the reader, or None where output kind or interval want none yet."""
        # vLLM's rule: the first tokens at once, then at least ``stream_interval`` of them.
        must_wait = self._has_sent_tokens and len(self._token_ids) < self._interval
        if not (self._is_final_only or must_wait):
            return self._make(None, None)
        # Taken all the same: looking for a stop string is cheap only in what has not been taken.
        self._texts.append(self._detokenizer.take(everything=False))
        return None

    def flush(self) -> str | None:
        """There are no more tokens: what was pending becomes text. Returns as ``update`` does."""
        return self._detokenizer.flush()

    def make_last_output(
        self, finish_reason: str, stop_reason: int | str | None
    ) -> CompletionOutput:
        """The choice is finished, by a stop string or after ``flush``."""
        self.is_finished = True
        return self._make(finish_reason, stop_reason)

    def release(self) -> CompletionOutput | None:
        """The request ends badly: an output with what was held back, or None if nothing was."""
        self.is_finished = True
        # Nobody says that a stop string ended it, so none may cut it.
        self._detokenizer.flush(may_stop=False)
        output = self._make(None, None)
        return output if output.text or output.token_ids else None

    def _make(self, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        # A bad ending, too, hands over all that there is.
        text = self._detokenizer.take(everything=self.is_finished)
        token_ids, self._token_ids = self._token_ids, []
        if token_ids:
            self._has_sent_tokens = True
        if self._texts or not self._is_delta:
            self._texts.append(text)
            text = "".join(self._texts)
        if self._is_delta:
            self._texts = []
        else:
            self._all_token_ids += token_ids
            token_ids = list(self._all_token_ids)
        output = CompletionOutput(self.index, text, token_ids, finish_reason, stop_reason)
        if self._wanted_logprobs is not None:
            entries, self._logprobs = self._logprobs, []
            if not self._is_delta:
                self._all_logprobs += entries
                entries = list(self._all_logprobs)
            output.logprobs, output.cumulative_logprob = entries, self._cumulative_logprob
        return output


def _nothing() -> None:
    pass


def _cut_behind(token_ids: list[int], stop_token_id: int) -> None:
    """A stop token is the last one, also in an engine that makes several tokens a step."""
    if stop_token_id in token_ids:
        del token_ids[token_ids.index(stop_token_id) + 1 :]
