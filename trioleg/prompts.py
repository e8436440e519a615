"""A prompt in any of its forms, checked and turned into token ids.

Rules of this file: pure and synchronous; imports only ``errors``, ``param_checks`` and ``tokenizer``. What can take
long (a template, a tokenizer over a long text) is handed back as a function, so that a caller with an event loop
can run it in a thread (``runtime/prompts.py``) and one without can just call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .errors import InvalidRequestError
from .param_checks import check_int, refusal
from .tokenizer import Tokenizer

__all__ = ["Prompt", "TokenizeParams", "Tokenizing", "prepare_prompt", "read_prompt"]

# Text, token ids, or chat messages ({"role": …, "content": …}).
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Sequences of integers, but never meant as token ids.
_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeParams:
    """How a prompt becomes token ids; names and meanings are vLLM's. Raises ``InvalidRequestError``.

    truncate_prompt_tokens: a longer prompt is cut to so many tokens, -1: to as many as the model takes, None: it is
    refused. truncation_side: the end that goes, "left" or "right", None: the tokenizer's own. add_special_tokens:
    those that the tokenizer puts round a text. do_lower_case: a text is turned into small letters before.
    room: how many tokens have to fit behind the prompt. parameter: what an error calls the prompt.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool = True
    do_lower_case: bool = False
    room: int = 1
    parameter: str = "prompt"

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            allowed = "-1 (as many as the model takes), at least 1, or null"
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, allowed, -1)
            if not self.truncate_prompt_tokens:
                raise refusal("truncate_prompt_tokens", 0, allowed)
        if self.truncation_side not in (None, "left", "right"):
            raise refusal("truncation_side", self.truncation_side, "left, right or null")
        if not isinstance(self.add_special_tokens, bool):
            raise refusal("add_special_tokens", self.add_special_tokens, "true or false")

    def num_kept(self, max_model_len: int) -> int | None:
        """To how many tokens a prompt is cut; None: not at all. Raises ``InvalidRequestError``."""
        most = max_model_len - self.room
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens > most:
            raise refusal(
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens,
                f"-1, or 1 to {most}, or null",
            )
        return most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


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
    prompt: Prompt,
    tokenizer: Tokenizer,
    max_model_len: int,
    how: TokenizeParams | None = None,
) -> list[int] | Tokenizing:
    """The token ids, if they are the prompt; else what makes them.

    A text that cannot fit is refused by its length, before anything is tokenized. Both this and
    ``Tokenizing.run`` raise ``InvalidRequestError``.
    """
    how = how or TokenizeParams()
    keep = how.num_kept(max_model_len)

    def tokenize(parameter: str, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.lower() if how.do_lower_case else text
        encoding = (
            tokenizer.tokenize(text, add_special_tokens=add_special_tokens)
            if keep is None
            else tokenizer.tokenize_beginning(
                text, keep, side=how.truncation_side, add_special_tokens=add_special_tokens
            )
        )
        # Before there is a list of perhaps a million numbers.
        _check_count(parameter, len(encoding), max_model_len, how.room)
        ids = encoding.ids
        _check_ids(parameter, ids, tokenizer.vocab_size)
        return ids

    longest = max_model_len * tokenizer.max_chars_per_token
    if isinstance(prompt, str):
        if keep is None:
            _check_length(how.parameter, len(prompt), longest, max_model_len)
        return Tokenizing(
            len(prompt),
            lambda: tokenize(how.parameter, prompt, add_special_tokens=how.add_special_tokens),
        )
    if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt, _BYTES):
        raise InvalidRequestError(
            f"{how.parameter} is {prompt!r:.300}; allowed: a string, a non-empty list of token ids, or a "
            "non-empty list of chat messages",
            parameter=how.parameter,
        )
    if not isinstance(prompt[0], Mapping):
        kept: Sequence[Any] = prompt if keep is None else _shortened(prompt, keep, tokenizer, how)
        _check_count(how.parameter, len(kept), max_model_len, how.room)
        ids: list[int] = list(kept)
        _check_ids(how.parameter, ids, tokenizer.vocab_size)
        return ids

    messages: Any = prompt
    _check_messages(messages)
    length = sum(len(one["content"]) for one in messages)
    if keep is None:
        _check_length("messages", length, longest, max_model_len)

    def render_and_tokenize() -> list[int]:
        text = tokenizer.apply_chat_template(messages)
        return tokenize("messages", text, add_special_tokens=False)

    return Tokenizing(length, render_and_tokenize)


def _shortened(
    ids: Sequence[Any], keep: int, tokenizer: Tokenizer, how: TokenizeParams
) -> Sequence[Any]:
    side = how.truncation_side or tokenizer.truncation_side
    return ids[-keep:] if side == "left" else ids[:keep]


def _check_length(parameter: str, length: int, longest: int, max_model_len: int) -> None:
    if length > longest:
        raise InvalidRequestError(
            f"{parameter} has {length} characters, more than {max_model_len} tokens "
            f"(max_model_len) can spell; allowed: at most {longest}",
            parameter=parameter,
        )


def _check_count(parameter: str, count: int, max_model_len: int, room: int) -> None:
    if 1 <= count <= max_model_len - room:
        return
    allowed = f"1 to {max_model_len - room}, "
    if room:
        allowed += f"so that at least one fits behind them (max_model_len is {max_model_len})"
    else:
        allowed += "which is max_model_len"
    raise InvalidRequestError(
        f"{parameter} has {count} tokens; allowed: {allowed}", parameter=parameter
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
