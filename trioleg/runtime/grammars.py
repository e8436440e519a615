"""``GrammarChecker``: whether a constraint can be enforced, asked beside the loop.

What is asked is in the synchronous ``grammar_gate``, which needs a child process; here it is waited for in a thread,
with a limit of its own: good ones then wait for hostile ones, some seconds at most for each, and prompts do not.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import trio

from ..grammar_gate import GrammarGate
from ..structured_outputs import StructuredOutputsParams

__all__ = ["GrammarChecker"]

_MAX_THREADS = 2


class GrammarChecker:
    """Checks constraints before anything is sent: a wrong one is the head's to refuse. ``close`` it.

    ``model_dir``, ``vocab_size``: where the model's tokenizer is, for engines that do not try a constraint themselves.
    """

    def __init__(self, model_dir: Path | None = None, vocab_size: int = 0) -> None:
        self._limiter = trio.CapacityLimiter(_MAX_THREADS)
        self._quick = _Gates()
        self._whole = _Gates(model_dir, vocab_size)

    async def check(self, params: StructuredOutputsParams, *, engine_tries: bool = True) -> None:
        """Raises ``InvalidRequestError`` with the reason. ``engine_tries``: the engine finds out by itself what only
        shows with the model's vocabulary, without harm to others, as ours does. Cancel-safe; a thread that nobody
        waits for any more counts against the limit until it is done, which takes some seconds at most. What has passed
        lately waits for nobody."""
        gates = self._quick if engine_tries else self._whole
        if gates.has_passed(params):
            await trio.lowlevel.checkpoint()
            return
        await trio.to_thread.run_sync(
            gates.check, params, limiter=self._limiter, abandon_on_cancel=True
        )

    def close(self) -> None:
        """End the child processes. Synchronous, idempotent."""
        self._quick.close()
        self._whole.close()


class _Gates:
    """A gate lets one pass at a time, so there are as many as threads; each has its child when it is needed."""

    def __init__(self, model_dir: Path | None = None, vocab_size: int = 0) -> None:
        passed: OrderedDict[str, None] = OrderedDict()
        self._gates = [
            GrammarGate(model_dir, vocab_size, passed=passed) for _ in range(_MAX_THREADS)
        ]
        self._free = list(self._gates)

    def has_passed(self, params: StructuredOutputsParams) -> bool:
        return self._gates[0].has_passed(params)

    def check(self, params: StructuredOutputsParams) -> None:
        # At most so many are here at once, so one of the gates is free.
        gate = self._free.pop()
        try:
            gate.check(params)
            # Kept for when it is sent, so that nobody waits for it on the loop.
            params.for_engine()
        finally:
            self._free.append(gate)

    def close(self) -> None:
        for gate in self._gates:
            gate.close()
