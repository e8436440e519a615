"""``GrammarChecker``: whether a constraint can be enforced, asked beside the loop.

What is asked is in the synchronous ``grammar_gate``, which needs a child process; here it is waited for in a thread,
with a limit of its own: good ones then wait for hostile ones, some seconds at most for each, and prompts do not.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from ..grammar_gate import GrammarGate
from ..structured_outputs import StructuredOutputsParams

__all__ = ["GrammarChecker"]

_MAX_THREADS = 2


class GrammarChecker:
    """Checks constraints before anything is sent: a wrong one is the head's to refuse. ``close`` it."""

    def __init__(self) -> None:
        # The gate lets one pass at a time, so there are as many as threads.
        passed: OrderedDict[str, None] = OrderedDict()
        self._gates = [GrammarGate(passed=passed) for _ in range(_MAX_THREADS)]
        self._free = list(self._gates)
        self._limiter = trio.CapacityLimiter(_MAX_THREADS)

    async def check(self, params: StructuredOutputsParams) -> None:
        """Raises ``InvalidRequestError`` with the reason. Cancel-safe; a thread that nobody waits for any
        more counts against the limit until it is done, which takes some seconds at most. What has passed lately
        waits for nobody."""
        if self._gates[0].has_passed(params):
            await trio.lowlevel.checkpoint()
            return
        await trio.to_thread.run_sync(
            self._check, params, limiter=self._limiter, abandon_on_cancel=True
        )

    def close(self) -> None:
        """End the child processes. Synchronous, idempotent."""
        for gate in self._gates:
            gate.close()

    def _check(self, params: StructuredOutputsParams) -> None:
        # At most so many are here at once, so one of the gates is free.
        gate = self._free.pop()
        try:
            gate.check(params)
        finally:
            self._free.append(gate)
