"""``Work``: what every shape does with a message, and what is counted of it.

Rules of this file: nothing here waits, and nothing knows an event loop. A shape calls ``posted`` when it asks for the
next message, ``decode`` when it has it, and goes through ``process``, where it lets others run between two slices.
Processor time is that of the loop's own thread, so ZeroMQ's threads and the feeding process are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

from ...config import LLMConfig
from ...ipc.codec import make_output_decoder
from ...messages import WIRE_VERSION, EngineCoreOutputs
from ...output.processor import OutputProcessor
from ...output.request_state import OutputSink
from ...output.submission import make_submission
from ...sampling_params import RequestOutputKind, SamplingParams
from ...tokenizer import Tokenizer
from .feed import request_ids

__all__ = ["Load", "Measured", "Work"]

CHUNK_SIZE = LLMConfig().output_chunk_size
_PARAMS = SamplingParams(max_tokens=2**20, output_kind=RequestOutputKind.DELTA)
_MAX_MODEL_LEN = 2**21
_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """``messages`` of ``batch`` outputs each, a ``period`` of seconds apart (0: as fast as they are taken), after
    ``warm_up`` others that do not count."""

    batch: int
    messages: int
    period: float = 0.0
    warm_up: int = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement says. ``cpu_us``: processor time a token, of the loop's thread. ``messages_s``: a second.
    ``p50_ms``, ``p99_ms``: from a message's send until its last output was put. ``posted``: the share of messages
    during whose processing another receive was waiting; ``overlapped``: the share during whose processing another
    message was received and decoded. ``longest_queue``: messages between the two tasks, at most."""

    cpu_us: float
    messages_s: float
    p50_ms: float
    p99_ms: float
    posted: float
    overlapped: float
    longest_queue: int


class Work:
    """Of one measurement. ``make_sink`` makes the mailbox of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        load: Load,
        make_sink: Callable[[], OutputSink],
    ) -> None:
        self._load = load
        self._decode = make_output_decoder(WIRE_VERSION)
        self._processor = OutputProcessor()
        for request_id in request_ids(load.batch):
            submission = make_submission(
                request_id,
                list(token_ids[:_PROMPT_TOKENS]),
                _PARAMS,
                tokenizer,
                max_model_len=_MAX_MODEL_LEN,
                max_logprobs=0,
                sink=make_sink(),
            )
            self._processor.add_request(submission.state)
        self._is_posted = False
        self._num_decoded = self._num_done = self._num_posted = self._num_overlapped = 0
        self._longest_queue = 0
        self._delays: list[float] = []
        self._cpu = self._wall = 0.0
        self._start()

    @property
    def is_done(self) -> bool:
        """All messages have been processed."""
        return self._num_done >= self._load.warm_up + self._load.messages

    def posted(self) -> None:
        """From now on a receive is waiting."""
        self._is_posted = True

    def decode(self, frames: Sequence[bytes | memoryview]) -> EngineCoreOutputs:
        """It has come."""
        self._is_posted = False
        self._num_decoded += 1
        return self._decode(frames)

    def queued(self, length: int) -> None:
        """So many messages are between the two tasks."""
        self._longest_queue = max(self._longest_queue, length)

    def process(self, message: EngineCoreOutputs) -> Iterator[bool]:
        """A slice at a time; True after the last one. Between two of them others are to run."""
        outputs, decoded = message.outputs, self._num_decoded
        was_posted = self._is_posted
        for start in range(0, len(outputs), CHUNK_SIZE):
            processed = self._processor.process(
                outputs[start : start + CHUNK_SIZE],
                timestamp=message.timestamp,
                now=message.timestamp,
            )
            assert not processed.endings, processed.endings
            assert not processed.unknown, processed.unknown
            is_last = start + CHUNK_SIZE >= len(outputs)
            if is_last:
                self._note(message.timestamp, was_posted, self._num_decoded > decoded)
            yield is_last

    def _note(self, sent_at: float, was_posted: bool, was_overlapped: bool) -> None:
        self._num_done += 1
        if self._num_done == self._load.warm_up:
            self._start()
        elif self._num_done > self._load.warm_up and not self.is_stopped:
            self._delays.append(time.monotonic() - sent_at)
            self._num_posted += was_posted
            self._num_overlapped += was_overlapped
            if self.is_stopped:
                self._cpu = time.thread_time() - self._cpu
                self._wall = time.monotonic() - self._wall

    @property
    def is_stopped(self) -> bool:
        """As many have been counted as are to be; a queue may hold more."""
        return len(self._delays) >= self._load.messages

    def _start(self) -> None:
        self._cpu, self._wall = time.thread_time(), time.monotonic()

    def measured(self) -> Measured:
        """When ``is_done``."""
        count = len(self._delays)
        percentiles = quantiles(self._delays, n=100, method="inclusive")
        return Measured(
            cpu_us=self._cpu * 1e6 / (count * self._load.batch),
            messages_s=count / self._wall,
            p50_ms=percentiles[49] * 1000,
            p99_ms=percentiles[98] * 1000,
            posted=self._num_posted / count,
            overlapped=self._num_overlapped / count,
            longest_queue=self._longest_queue,
        )
