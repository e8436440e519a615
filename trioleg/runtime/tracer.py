"""``Tracer``: somebody who wants to see every hop of the way, with the time on the clock.

``llm.tracer`` is None but in a program that shows the way (``trioleg trace``); then every hop pays one
comparison for a message or a frame, and nothing for a token. All times are ``time.monotonic()``, which on
one machine is also the engine's clock. A tracer must not block and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..messages import EngineCoreOutputs
from ..output.pooling import PoolingState
from ..output.request_state import ChoiceState
from ..outputs import RequestOutput

__all__ = ["FindChoice", "Tracer"]

# From the id that the engine knows to what the front end remembers of it; None for what is over.
FindChoice = Callable[[str], ChoiceState | PoolingState | None]


class Tracer(Protocol):
    """Told of one thing after the other, in the order in which they happen."""

    def on_message(self, message: EngineCoreOutputs, received: float, find: FindChoice) -> None:
        """A message was processed: its outputs are in their mailboxes, and those tokens that a stop
        string cut off are no longer in it. ``received``: when its frames came off the socket."""
        ...

    def on_frames(self, output: RequestOutput | None, frames: bytes) -> None:
        """``frames`` were made (of ``output``; None: the last ones), and are about to be written."""
        ...

    def on_written(self) -> None:
        """The write of those frames has returned."""
        ...
