"""``IncrementalDetokenizer``: token ids in, text out, exact at every point.

Pure. The decoding itself is ``tokenizers.decoders.DecodeStream``, which keeps back the bytes of an
unfinished character and gives them out with the token that finishes it. Round it this class adds

- the end of the prompt: a few of its tokens are stepped through first and their text thrown away, so
  that a metaspace tokenizer keeps the space before the first word, and a character that begins in the
  prompt is finished by the output. No prompt text ever leaves;
- the end of the output: an unfinished character is dropped, everything else that is still pending is
  given out. The rule is about bytes: a complete U+FFFD that the model wrote is text like any other;
- stop strings, checked token by token, so that text, ids and usage all end at the same token;
- containment: a bad id or a decoder's fault is an ``OutputError`` of this one request.

What has been handed over is forgotten, but for as much as a stop string can reach back: the cost of
a token does not depend on how many came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from ..errors import OutputError
from ..sampling_params import SamplingParams
from ..tokenizer import Tokenizer
from .stop import StopChecker

__all__ = ["IncrementalDetokenizer"]

# A UTF-8 character has at most four bytes, so at most four byte tokens: from eight tokens back there
# is a character boundary in any prompt that is text, and enough context for every decoder.
_PROMPT_CONTEXT = 8


class IncrementalDetokenizer:
    """The text of one request. ``update`` takes tokens in, ``take`` gives text out.

    ``num_output_tokens`` counts the tokens that belong to the output: all but those behind a match.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stop = StopChecker(params.stop, params.stop_hold_back) if params.stop else None
        self._unsent = ""
        # What was handed over last, as far back as a stop string that is kept in the text can reach.
        self._context = ""
        self.num_output_tokens = 0
        self._reset(prompt_token_ids[-_PROMPT_CONTEXT:])

    def _reset(self, context: Sequence[int]) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        self._pending: list[int] = []
        # Of the characters that are pending here, the finished ones are the prompt's.
        self._prompt_text = ""
        for token_id in context:
            self._step(token_id)
        self._prompt_text = self._finished_characters(self._pending)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in one step's tokens; returns the stop string that they complete, if any.

        ``stop_terminated`` says that the engine stopped at the last of them: a stop token, which is
        no part of the text (unless asked for). Tokens behind a match are cut off the caller's list.
        Raises ``OutputError`` on an id outside the model's vocabulary.
        """
        last = len(new_token_ids) - 1
        hidden = last if stop_terminated and not self._include_stop else -1
        pieces: list[str] = []
        try:
            for position, token_id in enumerate(new_token_ids):
                self.num_output_tokens += 1
                if position == hidden:
                    break
                piece = self._decode(token_id)
                if self._stop is None:
                    pieces.append(piece)
                elif (stop := self._add(piece, self._stop)) is not None:
                    del new_token_ids[position + 1 :]
                    return stop
        finally:
            # Joined once, and also if a later token of the step is bad.
            self._unsent += "".join(pieces)
        return None

    def _add(self, piece: str, checker: StopChecker) -> str | None:
        self._unsent += piece
        if piece and self.num_output_tokens > self._min_tokens:
            return self._cut_at_stop(checker, len(piece))
        return None

    def flush(self) -> None:
        """The output is over: what was pending becomes text, but for an unfinished character."""
        if self._pending:
            text = self._finished_characters(self._pending)
            self._unsent += text.removeprefix(self._prompt_text)
            self._pending = []

    def take(self, *, everything: bool) -> str:
        """The text to hand over now: all of it at an ending, else what no stop string can claim."""
        text = self._unsent
        if everything or self._stop is None or self._include_stop:
            self._unsent = ""
        else:
            kept = len(text) - self._stop.held_back(text)
            text, self._unsent = text[:kept], text[kept:]
        if self._stop is not None and self._include_stop:
            reach = self._stop.reach
            self._context = (self._context + text)[-reach:] if reach else ""
        return text

    def _cut_at_stop(self, checker: StopChecker, new: int) -> str | None:
        window = self._context + self._unsent
        match = checker.find(window, new)
        if match is None:
            return None
        end = match.end if self._include_stop else match.start
        self._unsent = window[len(self._context) : end]
        self._pending = []
        return match.stop

    def _decode(self, token_id: int) -> str:
        vocab_size = self._tokenizer.vocab_size
        if not 0 <= token_id < vocab_size:
            raise OutputError(
                f"the engine sent token id {token_id}; this model's ids are 0 to {vocab_size - 1}"
            )
        try:
            return self._step(token_id)
        except Exception:  # noqa: BLE001 - DecodeStream raises bare Exceptions; their text is no API
            # A decoder that has lost its prefix cannot go on; a fresh one can, from this token.
            self._reset(())
            return self._step_afresh(token_id)

    def _step_afresh(self, token_id: int) -> str:
        try:
            return self._step(token_id)
        except Exception as error:
            raise OutputError(f"token id {token_id} cannot be decoded: {error}") from error

    def _step(self, token_id: int) -> str:
        piece: str | None = self._stream.step(self._tokenizer.backend, token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        if self._pending:
            self._pending = []
            piece = piece.removeprefix(self._prompt_text)
            self._prompt_text = ""
        return piece

    def _finished_characters(self, token_ids: Sequence[int]) -> str:
        data = b"".join(self._bytes_of(token_id) for token_id in token_ids)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=False)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer.is_added_token(token_id):
            # One that is shown has been given out when it came; what is pending here is hidden.
            return b""
        return _token_bytes(self._tokenizer.backend.id_to_token(token_id) or "")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's bijection between bytes and printable characters (``bytes_to_unicode`` there)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _token_bytes(token: str) -> bytes:
    """The bytes that a pending token stands for: byte fallback (``<0x0A>``) or byte-level spelling.

    Any other token is pending only because it adds nothing to the text (a leading metaspace).
    """
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    if all(character in _BYTE_LEVEL for character in token):
        return bytes(_BYTE_LEVEL[character] for character in token)
    return b""
