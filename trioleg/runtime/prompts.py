"""``PromptReader``: a prompt in any of its forms, checked and turned into token ids.

Tokenizing can take seconds for a long text, so it runs in a thread, with its own limit on how many
at once; a text that cannot fit is refused by its length, before anything is tokenized.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import trio

from ..errors import InvalidRequestError
from ..tokenizer import Tokenizer

__all__ = ["Prompt", "PromptReader", "RunSync"]

# Text, token ids, or chat messages ({"role": …, "content": …}).
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
RunSync: TypeAlias = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]

# Sequences of integers, but never meant as token ids.
_BYTES = (bytes, bytearray, memoryview)

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

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, run_sync: RunSync | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._run_sync = run_sync or _thread_runner()

    async def read(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids: at least one, at most max_model_len - 1, all in the vocabulary.

        Raises ``InvalidRequestError``. Always a checkpoint.
        """
        if isinstance(prompt, str):
            ids = await self._tokenize("prompt", prompt, lambda: prompt, special=True)
            return self._checked("prompt", ids)
        if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt, _BYTES):
            raise InvalidRequestError(
                f"prompt is {prompt!r}; allowed: a string, a non-empty list of token ids, or a "
                "non-empty list of chat messages",
                parameter="prompt",
            )
        if isinstance(prompt[0], Mapping):
            messages: Any = prompt
            _check_messages(messages)
            text = "".join(one["content"] for one in messages)
            render = self._tokenizer.apply_chat_template
            ids = await self._tokenize("messages", text, lambda: render(messages), special=False)
            return self._checked("messages", ids)
        await trio.lowlevel.checkpoint()
        return self._checked("prompt", list(prompt))  # type: ignore[arg-type]

    async def _tokenize(
        self, parameter: str, text: str, render: Callable[[], str], *, special: bool
    ) -> list[int]:
        """``text`` is what counts for the length, ``render`` makes what is really tokenized."""
        longest = self._max_model_len * self._tokenizer.max_chars_per_token
        if len(text) > longest:
            raise InvalidRequestError(
                f"{parameter} has {len(text)} characters, more than {self._max_model_len} tokens "
                f"(max_model_len) can spell; allowed: at most {longest}",
                parameter=parameter,
            )
        encode = self._tokenizer.encode
        return await self._run_sync(lambda: encode(render(), add_special_tokens=special))

    def _checked(self, parameter: str, ids: list[int]) -> list[int]:
        if not 1 <= len(ids) < self._max_model_len:
            raise InvalidRequestError(
                f"{parameter} has {len(ids)} tokens; allowed: 1 to {self._max_model_len - 1}, so "
                f"that at least one fits behind them (max_model_len is {self._max_model_len})",
                parameter=parameter,
            )
        vocab_size = self._tokenizer.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{parameter} holds token id {token_id!r}; allowed: 0 to {vocab_size - 1}",
                    parameter=parameter,
                )
        return ids


def _check_messages(messages: Sequence[Any]) -> None:
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            shown = (
                f"has {sorted(map(str, message))}"
                if isinstance(message, Mapping)
                else "is no mapping"
            )
            raise InvalidRequestError(
                f"messages[{place}] {shown}; allowed: a mapping with role and content",
                parameter=f"messages[{place}]",
            )
        for name in ("role", "content"):
            if not isinstance(message[name], str):
                raise InvalidRequestError(
                    f"messages[{place}].{name} is {message[name]!r}; allowed: a string",
                    parameter=f"messages[{place}].{name}",
                )
