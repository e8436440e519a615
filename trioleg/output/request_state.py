"""``RequestState``: what the front end remembers of one request while the engine works on it.

Pure. It turns what a step made into the ``RequestOutput`` that the request's output kind asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..errors import OutputError
from ..messages import EngineCoreOutput, FinishReason
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..tokenizer import Tokenizer
from .detokenizer import IncrementalDetokenizer

__all__ = ["OutputSink", "RequestState"]


class OutputSink(Protocol):
    """Where a request's outputs go, if not into the processor's returned list."""

    def put(self, output: RequestOutput) -> bool:
        """Take the output over, without waiting. False: the reader is too far behind."""
        ...


class RequestState:
    """One request. ``sink`` None: its outputs are returned by ``OutputProcessor.process``.

    ``max_tokens`` is the number that the engine was told: more is an error of the engine's, and would
    be time taken from every other request.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        sink: OutputSink | None = None,
        *,
        max_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.sink = sink
        self._prompt_token_ids = list(prompt_token_ids)
        self._kind = params.output_kind
        self._max_tokens = max_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
        self._num_cached_tokens: int | None = None
        # Everything so far; kept for the output kinds that hand it over.
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return self._detokenizer.num_output_tokens

    def update(self, output: EngineCoreOutput) -> str | None:
        """Take one step's tokens in; returns the stop string that they complete, if any.

        Raises ``OutputError``. Tokens behind a completed stop string are cut off ``output``.
        """
        if output.prefill_stats is not None:
            self._num_cached_tokens = output.prefill_stats.num_cached_tokens
        if self.num_output_tokens + len(output.new_token_ids) > self._max_tokens:
            raise OutputError(
                f"the engine sent {self.num_output_tokens + len(output.new_token_ids)} tokens; this "
                f"request may have {self._max_tokens} (max_tokens)"
            )
        stop_terminated = output.finish_reason is FinishReason.STOP
        return self._detokenizer.update(output.new_token_ids, stop_terminated)

    def make_request_output(
        self,
        new_token_ids: list[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        *,
        matched: bool = False,
    ) -> RequestOutput | None:
        """The output for the reader, or None where the output kind wants none yet.

        ``matched``: a stop string ended the text, so nothing that was pending comes after it.
        """
        finished = finish_reason is not None
        if finished and not matched:
            self._detokenizer.flush()
        return self._make(new_token_ids, finish_reason, stop_reason, everything=finished)

    def release(self) -> RequestOutput | None:
        """The request ends badly: an output with what was held back, or None if nothing was."""
        self._detokenizer.flush()
        output = self._make([], None, None, everything=True)
        return output if output and any(o.text or o.token_ids for o in output.outputs) else None

    def _make(
        self,
        new_token_ids: list[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
        *,
        everything: bool,
    ) -> RequestOutput | None:
        text = self._detokenizer.take(everything=everything)
        if self._kind is not RequestOutputKind.DELTA:
            self._texts.append(text)
            self._token_ids += new_token_ids
            if self._kind is RequestOutputKind.FINAL_ONLY and not everything:
                return None
            text, new_token_ids = "".join(self._texts), list(self._token_ids)
        completion = CompletionOutput(0, text, new_token_ids, finish_reason, stop_reason)
        return RequestOutput(
            self.request_id,
            self._prompt_token_ids,
            [completion],
            finish_reason is not None,
            self._num_cached_tokens,
        )
