"""Requests to pooling models: one prompt, one tensor, no tokens.

Pure. They go through the same loop as all others, on a branch of their own: nothing is streamed, no text is
made, and there is one output, at the end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from ..errors import OutputError
from ..messages import EngineCoreOutput
from ..outputs import PoolingOutput, PoolingRequestOutput
from .arrays import Frames, read_array
from .request_state import OutputSink
from .stats import RequestTimes

__all__ = ["PoolingState"]


class PoolingState:
    """One request to a pooling model; the reader's and the engine's are the same here.

    ``sink`` None: its output is returned by ``OutputProcessor.process``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sink: OutputSink | None = None,
        *,
        arrival: float | None = None,
    ) -> None:
        self.request_id = self.engine_request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.sink = sink
        self.times = RequestTimes(arrival)
        self.has_failed = False
        self.request = self
        self.choices = (self,)
        # Never any: the first token that is waited for is the end.
        self.num_output_tokens = 0

    def make_request_output(
        self, output: EngineCoreOutput, frames: Frames, now: float
    ) -> PoolingRequestOutput:
        """The one output, of the engine's last one. Raises ``OutputError``."""
        if output.pooling_output is None:
            raise OutputError("the engine finished a pooling request without a pooling_output")
        shape, data = read_array(output.pooling_output, frames, "pooling_output")
        numbers = [float(one) for one in data]
        # As float32, which they are sent as.
        if not all(map(math.isfinite, array("f", numbers))):
            # JSON has no such numbers, and a distance to such a vector is none.
            raise OutputError("the engine's pooling_output holds a NaN or an infinity")
        prefill = output.prefill_stats
        return PoolingRequestOutput(
            self.request_id,
            self.prompt_token_ids,
            PoolingOutput(numbers, shape),
            num_cached_tokens=None if prefill is None else prefill.num_cached_tokens,
            metrics=self.times.metrics(0, now),
        )

    def release(self) -> None:
        """Nothing is ever held back."""
