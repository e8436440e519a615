"""Two decoders with one contract: token ids go in one by one, text comes out as soon as it is certain.

Pure. A decoder that is given the tokens of a text one after the other gives out the text in pieces, each
character with the token that finishes it. What it has not given out yet is ``pending``; the tokens of the
piece before that are its ``prefix``, which decoders of words and spaces need to see.

- ``FastDecoder`` is ``tokenizers.decoders.DecodeStream``: the loop below, in Rust.
- ``ReadableDecoder`` is that loop in Python. It decodes two stretches of the tokens: from
  ``prefix_offset`` to ``read_offset`` (what is out already) and from ``prefix_offset`` to the end. The
  second without the first is the new piece, unless it ends in U+FFFD: that is how an unfinished character
  decodes, so it may still become another one. Then neither offset moves, and that is all the holding
  back there is.

Neither knows where the tokens come from, and either may raise: what to do about it, about the prompt,
and about what is pending at the end is ``detokenizer.py``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

__all__ = ["Decoder", "FastDecoder", "ReadableDecoder", "make_decoder"]

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """See above. ``step`` may raise, whatever it likes; the decoder is of no use then."""

    def step(self, token_id: int) -> str | None:
        """The text that this token makes certain; None while there is none."""
        ...

    @property
    def pending(self) -> Sequence[int]:
        """The tokens since the last piece."""
        ...

    @property
    def prefix(self) -> Sequence[int]:
        """The tokens of the last piece; empty if there was none yet."""
        ...


class FastDecoder:
    """``DecodeStream``, with a note of what it holds."""

    __slots__ = ("_backend", "_stream", "pending", "prefix")

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.pending: list[int] = []
        self.prefix: list[int] = []

    def step(self, token_id: int) -> str | None:
        self.pending.append(token_id)
        piece: str | None = self._stream.step(self._backend, token_id)
        if piece is not None:
            self.prefix, self.pending = self.pending, []
        return piece


class ReadableDecoder:
    """The loop itself."""

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self.token_ids: list[int] = []
        self.prefix_offset = 0
        self.read_offset = 0

    @property
    def pending(self) -> list[int]:
        return self.token_ids[self.read_offset :]

    @property
    def prefix(self) -> list[int]:
        return self.token_ids[self.prefix_offset : self.read_offset]

    def step(self, token_id: int) -> str | None:
        self.token_ids.append(token_id)
        known = self._decode(self.token_ids[self.prefix_offset : self.read_offset])
        text = self._decode(self.token_ids[self.prefix_offset :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT):
            return None
        if not text.startswith(known):
            raise ValueError(f"{known!r} became {text!r} with token id {token_id}")
        self.prefix_offset, self.read_offset = self.read_offset, len(self.token_ids)
        self._forget()
        return text[len(known) :]

    def _forget(self) -> None:
        """What lies before the prefix is never looked at again; it goes now and then, not each time."""
        if self.prefix_offset >= 1024:
            del self.token_ids[: self.prefix_offset]
            self.read_offset -= self.prefix_offset
            self.prefix_offset = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def make_decoder(kind: str, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> Decoder:
    """``kind``: "fast" or "readable" (``config.DETOKENIZERS``)."""
    if kind == "readable":
        return ReadableDecoder(backend, skip_special_tokens=skip_special_tokens)
    return FastDecoder(backend, skip_special_tokens=skip_special_tokens)
