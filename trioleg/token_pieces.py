"""``TokenPieces``: what each token of a vocabulary stands for by itself, as bytes and as text.

Rules of this file: pure; imports nothing of trioleg. A token may be a part of a character only, so its
bytes are the truth and its text a way to show them. There are three spellings of bytes in vocabularies:

- byte-level (GPT-2 and its kin): each character of a token stands for one byte;
- byte fallback (the SentencePiece families): ``<0xC3>`` is one byte, other tokens are text;
- plain text, with marks for spaces (``▁Paris``, ``##ing``) that only the decoder knows how to read: such
  a token is decoded behind an ordinary one, as in the middle of a text.

Everything is found out when it is first asked for, and remembered for the vocabulary's lifetime.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

import tokenizers

__all__ = ["TokenPieces", "byte_level_alphabet", "num_unfinished_bytes"]


def num_unfinished_bytes(data: bytes) -> int:
    """How many bytes at the end of ``data`` (0 to 3) are the beginning of an unfinished character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data, final=False)
    return len(decoder.getstate()[0])


class TokenPieces:
    """The pieces of one tokenizer. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(backend.decoder)
        self._is_byte_level = "ByteLevel" in kinds
        self.has_byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}
        self._text: dict[int, str] = {}
        self._anchor: list[int] | None = None

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text; none for an id that stands for nothing."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        r"""The same as text; bytes that are no character by themselves are spelled ``\xf0``."""
        found = self._text.get(token_id)
        if found is None:
            found = self._text[token_id] = self.bytes_of(token_id).decode(
                "utf-8", "backslashreplace"
            )
        return found

    def joined_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """The bytes of a few tokens in a row."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.bytes_of(i) for i in token_ids if i not in skipped)

    @property
    def anchor(self) -> list[int]:
        """An ordinary token with a text of its own, in a list; empty if the vocabulary has none.

        What is decoded behind it is decoded as in the middle of a text.
        """
        if self._anchor is None:
            self._anchor = self._find_anchor()
        return self._anchor

    def _find_anchor(self) -> list[int]:
        try:
            candidates = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        except Exception:  # noqa: BLE001 - a model without an unknown token raises the bare type
            candidates = []
        return candidates if self._decode(candidates).strip() == "a" else []

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _find_bytes(self, token_id: int) -> bytes:
        # Ids come from an engine; the library takes no others.
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._is_byte_level:
            if all(character in _BYTE_LEVEL for character in token):
                return bytes(_BYTE_LEVEL[character] for character in token)
            return token.encode()
        if self.has_byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        before, after = self._decode(self.anchor), self._decode([*self.anchor, token_id])
        return (after.removeprefix(before) if after.startswith(before) else token).encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    """The types in a decoder, however deep, as tokenizer.json names them."""
    if decoder is None:
        return set()
    waiting = [json.loads(decoder.__getstate__())]
    kinds = set()
    while waiting:
        one = waiting.pop()
        kinds.add(one.get("type"))
        waiting += one.get("decoders", ())
    return kinds


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's bijection between bytes and printable characters (``bytes_to_unicode`` there)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LEVEL = byte_level_alphabet()
