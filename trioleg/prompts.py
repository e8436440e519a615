"""A prompt in any of its forms, checked and turned into token ids.

Rules of this file: pure and synchronous; imports only ``errors`` and ``tokenizer``. What can take long
(a template, a tokenizer over a long text) is handed back as a function, so that a caller with an event
loop can run it in a thread (``runtime/prompts.py``) and one without can just call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import InvalidRequestError
from .tokenizer import Tokenizer

__all__ = ["Prompt", "Tokenizing", "prepare_prompt", "read_prompt"]

# Text, token ids, or chat messages ({"role": …, "content": …}).
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Sequences of integers, but never meant as token ids.
_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Work that is still to be done: ``run`` makes the ids, in any thread, of ``length`` characters."""

    length: int
    run: Callable[[], list[int]]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """The prompt's token ids: at least one, at most max_model_len - 1, all in the vocabulary.

    Takes about half a second for 1 MB of text. Raises ``InvalidRequestError``.
    """
    prepared = prepare_prompt(prompt, tokenizer, max_model_len)
    return prepared if isinstance(prepared, list) else prepared.run()


def prepare_prompt(
    prompt: Prompt, tokenizer: Tokenizer, max_model_len: int
) -> list[int] | Tokenizing:
    """The token ids, if they are the prompt; else what makes them.

    A text that cannot fit is refused by its length, before anything is tokenized. Both this and
    ``Tokenizing.run`` raise ``InvalidRequestError``.
    """

    def tokenize(parameter: str, text: str, *, add_special_tokens: bool) -> list[int]:
        encoding = tokenizer.tokenize(text, add_special_tokens=add_special_tokens)
        # Before there is a list of perhaps a million numbers.
        _check_count(parameter, len(encoding), max_model_len)
        ids = encoding.ids
        _check_ids(parameter, ids, tokenizer.vocab_size)
        return ids

    longest = max_model_len * tokenizer.max_chars_per_token
    if isinstance(prompt, str):
        _check_length("prompt", len(prompt), longest, max_model_len)
        return Tokenizing(len(prompt), lambda: tokenize("prompt", prompt, add_special_tokens=True))
    if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt, _BYTES):
        raise InvalidRequestError(
            f"prompt is {prompt!r}; allowed: a string, a non-empty list of token ids, or a "
            "non-empty list of chat messages",
            parameter="prompt",
        )
    if not isinstance(prompt[0], Mapping):
        _check_count("prompt", len(prompt), max_model_len)
        ids: list[int] = list(prompt)  # type: ignore[arg-type]
        _check_ids("prompt", ids, tokenizer.vocab_size)
        return ids

    messages: Any = prompt
    _check_messages(messages)
    length = sum(len(one["content"]) for one in messages)
    _check_length("messages", length, longest, max_model_len)

    def render_and_tokenize() -> list[int]:
        text = tokenizer.apply_chat_template(messages)
        return tokenize("messages", text, add_special_tokens=False)

    return Tokenizing(length, render_and_tokenize)


def _check_length(parameter: str, length: int, longest: int, max_model_len: int) -> None:
    if length > longest:
        raise InvalidRequestError(
            f"{parameter} has {length} characters, more than {max_model_len} tokens "
            f"(max_model_len) can spell; allowed: at most {longest}",
            parameter=parameter,
        )


def _check_count(parameter: str, count: int, max_model_len: int) -> None:
    if not 1 <= count < max_model_len:
        raise InvalidRequestError(
            f"{parameter} has {count} tokens; allowed: 1 to {max_model_len - 1}, so "
            f"that at least one fits behind them (max_model_len is {max_model_len})",
            parameter=parameter,
        )


def _check_ids(parameter: str, ids: list[int], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{parameter} holds token id {token_id!r}; allowed: 0 to {vocab_size - 1}",
                parameter=parameter,
            )


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
