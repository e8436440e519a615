"""``PromptReader``: prompts become token ids beside the loop.

What a prompt may be, and the work itself, are in the pure ``trioleg/prompts.py``. That work can take
seconds for a long text, so here it runs in a thread, with its own limit on how many at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from ..prompts import Prompt, prepare_prompt
from ..tokenizer import Tokenizer

__all__ = ["Prompt", "PromptReader", "RunSync"]

RunSync: TypeAlias = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]

# Tokenizing is pure computation: more threads than cores only add switching.
_MAX_THREADS = 2


def _thread_runner() -> RunSync:
    limiter = trio.CapacityLimiter(_MAX_THREADS)

    async def run(tokenize: Callable[[], list[int]]) -> list[int]:
        # Abandoned on cancel: a client that leaves does not wait for its tokens.
        return await trio.to_thread.run_sync(tokenize, limiter=limiter, abandon_on_cancel=True)

    return run


class PromptReader:
    """Reads prompts for one model. ``run_sync`` runs the tokenizing; None: in a thread."""

    def __init__(self, tokenizer: Tokenizer, run_sync: RunSync | None = None) -> None:
        self._tokenizer = tokenizer
        self._run_sync = run_sync or _thread_runner()

    async def read(self, prompt: Prompt, max_model_len: int) -> list[int]:
        """The prompt's token ids: at least one, at most max_model_len - 1, all in the vocabulary.

        Raises ``InvalidRequestError``. A checkpoint wherever it returns.
        """
        prepared = prepare_prompt(prompt, self._tokenizer, max_model_len)
        if not isinstance(prepared, list):
            return await self._run_sync(prepared)
        await trio.lowlevel.checkpoint()
        return prepared
