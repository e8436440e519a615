"""The reference of the property tests: the text of an output, told from all of its ids at once.

For ordinary text that is ``tokenizer.decode`` of prompt and output, less what is the prompt's, less an
unfinished character at the end. Tokens need not be text, though: a model may write any bytes. For
byte-level vocabularies ``decode`` is right there, too. A decoder with byte fallback looks at a whole run of
byte tokens: if one of them is no part of a character, each byte of the run becomes U+FFFD, also those of
characters that were complete before. No stream can take back what has been read, so the rule is: a
character stays as it was given out, and each byte that was still waiting becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

from trioleg.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# As long as a detokenizer waits for a character, in tokens; then it gives out what is finished.
LONGEST_WAIT = 16

# One of these continues any unfinished character (UTF-8 allows 80 to 9F, 90 to BF or A0 to BF).
CONTINUATIONS = (0x80, 0x90, 0xA0)


def output_text(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip_special: bool
) -> str:
    """What a reader of ``ids`` behind ``prompt`` must have got in all.

    The prompt's part is its text with U+FFFD for a character that it leaves unfinished, unless the
    output finishes that.
    """
    text_of = _fallback_text if _has_byte_fallback(tokenizer) else _byte_level_text
    text, _ = text_of(tokenizer, [*prompt, *ids], skip_special)
    finished, unfinished = text_of(tokenizer, prompt, skip_special)
    whole = finished + unfinished
    return text[len(whole if text.startswith(whole) else finished) :]


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    return tokenizer.backend.token_to_id("<0x00>") is not None


def _byte_level_text(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool
) -> tuple[str, str]:
    """The text up to the last finished character, and what stands for an unfinished one."""

    def decode(*more: int) -> str:
        return tokenizer.decode([*ids, *more], skip_special_tokens=skip_special)

    text = decode()
    # Another byte of the same character changes its U+FFFD or leaves it, and never adds one.
    is_unfinished = text.endswith(REPLACEMENT) and any(
        len(decode(byte_level_id(tokenizer, byte))) == len(text) for byte in CONTINUATIONS
    )
    return (text[:-1], REPLACEMENT) if is_unfinished else (text, "")


def byte_level_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte that is no printable character (GPT-2's alphabet)."""
    place = byte + 0x100 if byte < 0x21 else byte - 0x7F + 0x121
    found = tokenizer.backend.token_to_id(chr(place))
    assert found is not None
    return found


def _fallback_text(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> tuple[str, str]:
    """The same for byte fallback, one token after the other."""
    reader, hidden = _FallbackReader(), _hidden(tokenizer) if skip_special else frozenset()
    for token_id in ids:
        token = None if token_id in hidden else tokenizer.backend.id_to_token(token_id)
        reader.read(token or "")
    text, unfinished = reader.text + _decoded(reader.finished()), reader.unfinished()
    if _strips(tokenizer):
        text = text.removeprefix(" ")
    return text, REPLACEMENT * len(unfinished)


class _FallbackReader:
    """``text`` is out; ``waiting`` are bytes that may still become a character."""

    def __init__(self) -> None:
        self.text = ""
        self.waiting = b""
        self.num_waiting_tokens = 0

    def read(self, token: str) -> None:
        self.num_waiting_tokens += 1
        if len(token) == 6 and token.startswith("<0x"):
            self.waiting += bytes.fromhex(token[3:5])
            token = ""
        if token or _is_certain(self.waiting):
            self._give_out(_decoded(self.waiting) + token.replace("▁", " "), b"")
        elif self.num_waiting_tokens > LONGEST_WAIT:
            self._give_out(_decoded(self.finished()), self.unfinished())

    def finished(self) -> bytes:
        return self.waiting[: len(self.waiting) - len(self.unfinished())]

    def unfinished(self) -> bytes:
        """The beginning of a character, at the end of what is waiting."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self.waiting)
        return decoder.getstate()[0]

    def _give_out(self, text: str, waiting: bytes) -> None:
        self.text += text
        self.waiting = waiting
        self.num_waiting_tokens = len(waiting)


def _is_certain(data: bytes) -> bool:
    """A U+FFFD at the end looks like an unfinished character, so it waits as one."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and not text.endswith(REPLACEMENT)


def _decoded(data: bytes) -> str:
    """As a decoder with byte fallback reads a run of bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(data)


@functools.cache
def _hidden(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _strips(tokenizer: Tokenizer) -> bool:
    """Whether the decoder takes a space off the beginning of a text."""
    word = tokenizer.backend.token_to_id("▁a")
    return word is not None and tokenizer.decode([word]) == "a"
