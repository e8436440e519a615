"""``PromptReader``: prompts become token ids beside the loop, in threads of an executor.

The work is ``trioleg/prompts.py``'s, as in ``runtime/prompts.py``.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...prompts import Prompt, Tokenizing, prepare_prompt
from ...tokenizer import Tokenizer

__all__ = ["PromptReader"]

# Tokenizing is pure computation: more threads than cores only add switching.
_THREADS = 2


class PromptReader:
    """Reads prompts for one model. Whoever makes it calls ``close``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")

    async def read(self, prompt: Prompt, max_model_len: int) -> list[int]:
        """The prompt's token ids, checked. Raises ``InvalidRequestError``. After a cancel a thread that had begun goes
        on to its end, for nobody."""
        prepared = prepare_prompt(prompt, self._tokenizer, max_model_len)
        if not isinstance(prepared, Tokenizing):
            return prepared
        return await asyncio.get_running_loop().run_in_executor(self._executor, prepared.run)

    def close(self) -> None:
        """Begins no more; waits for nothing. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
