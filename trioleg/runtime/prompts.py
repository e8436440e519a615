"""``PromptReader``: prompts become token ids beside the loop.

What a prompt may be, and the work itself, are in the pure ``trioleg/prompts.py``. That work can take
seconds for a long text, so here it runs in a thread. Long texts wait for each other, short ones never for a
long one: in a queue of their own, where the prompts of a whole second are gone in one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import trio

from ..prompts import Prompt, TokenizeParams, Tokenizing, prepare_prompt
from ..tokenizer import Tokenizer

__all__ = ["Prompt", "PromptReader", "RunSync", "guessed_length"]

RunSync: TypeAlias = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]

# Characters. A text of that length takes about 50 ms, which is what a short prompt can wait for another.
_LONG = 100_000
# Of English text, by most vocabularies.
_CHARACTERS_PER_TOKEN = 4
# Tokenizing is pure computation: more threads than cores only add switching. The tokenizer has as many workers of its
# own as there are cores, whoever calls it: a second long text would take the last one of two.
_SHORT_AT_ONCE = 2
_LONG_AT_ONCE = 1


def guessed_length(prompt: object, depth: int = 4) -> int:
    """How many tokens a prompt may have, of which nothing has been checked yet: cheap, and often half wrong."""
    if isinstance(prompt, str):
        return len(prompt) // _CHARACTERS_PER_TOKEN
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt, Mapping):
        prompt = list(prompt.values())
    if isinstance(prompt, list | tuple) and depth:
        return sum(guessed_length(one, depth - 1) for one in prompt)
    return 0


class PromptReader:
    """Reads prompts for one model. ``run_sync`` runs the tokenizing; None: in a thread."""

    def __init__(self, tokenizer: Tokenizer, run_sync: RunSync | None = None) -> None:
        self._tokenizer = tokenizer
        self._run_sync = run_sync
        self._short = trio.CapacityLimiter(_SHORT_AT_ONCE)
        self._long = trio.CapacityLimiter(_LONG_AT_ONCE)

    async def read(
        self, prompt: Prompt, max_model_len: int, how: TokenizeParams | None = None
    ) -> list[int]:
        """The prompt's token ids: at least one, at most max_model_len - 1 (or what ``how`` leaves room for), all in
        the vocabulary.

        Raises ``InvalidRequestError``. A checkpoint wherever it returns. Cancel-safe: a client that leaves waits
        for nothing; a thread that had begun goes on to its end, keeps its place until then, and its ids are
        dropped.
        """
        prepared = prepare_prompt(prompt, self._tokenizer, max_model_len, how)
        if isinstance(prepared, Tokenizing):
            return await self._tokenized(prepared)
        await trio.lowlevel.checkpoint()
        return prepared

    async def _tokenized(self, work: Tokenizing) -> list[int]:
        if self._run_sync is not None:
            return await self._run_sync(work.run)
        limiter = self._long if work.length > _LONG else self._short
        return await trio.to_thread.run_sync(work.run, limiter=limiter, abandon_on_cancel=True)
