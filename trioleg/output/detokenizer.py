"""``IncrementalDetokenizer``: token ids in, text out, exact at every point.

Pure. A decoder (``decoders.py``: there are two) turns tokens into pieces and keeps back an unfinished
character. Round it this class adds

- the end of the prompt: a few of its tokens are stepped through first and their text thrown away, so
  that a metaspace tokenizer keeps the space before the first word, and a character that begins in the
  prompt is finished by the output. No prompt text ever leaves;
- the end of the output: an unfinished character is dropped, everything else that is still pending is
  given out. The rule is about bytes: a complete U+FFFD that the model wrote is text like any other;
- stop strings, checked token by token, so that text, ids and usage all end at the same token;
- containment: a bad id is an ``OutputError`` of this one request, and a decoder that fails is replaced.
  That happens with byte fallback when a byte turns out to be no part of any character: its family of
  decoders then takes back a whole run of bytes, also of characters that are out already. Ours stay, and
  each broken byte becomes one U+FFFD.

What has been handed over is forgotten, but for as much as a stop string can reach back: the cost of
a token does not depend on how many came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ..errors import OutputError
from ..sampling_params import SamplingParams
from ..token_pieces import num_unfinished_bytes
from ..tokenizer import Tokenizer
from .decoders import Decoder, make_decoder
from .stop import StopChecker, StopMatch

__all__ = ["Detokenizer", "IncrementalDetokenizer", "NoDetokenizer", "make_detokenizer"]

# Enough of the prompt for every decoder to know how a word begins.
_PROMPT_CONTEXT = 8
# Of the tokens of one character, those that do not begin it.
_MAX_CONTINUATION = 3

# No character is that many tokens long: what is pending for longer has no text or never becomes a
# character. Decoders look at all that is pending with each token, so it must not grow without bound.
_MAX_PENDING = 16


class Detokenizer(Protocol):
    """The text of one choice. ``update`` takes tokens in, ``take`` gives text out.

    ``num_output_tokens`` counts the tokens that belong to the output: all but those behind a match.
    """

    num_output_tokens: int

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in one step's tokens; returns the stop string that they complete, if any.

        ``stop_terminated`` says that the engine stopped at the last of them: a stop token, which is
        no part of the text (unless asked for). Tokens behind a match are cut off the caller's list.
        Raises ``OutputError`` on an id outside the model's vocabulary.
        """
        ...

    def flush(self, *, may_stop: bool = True) -> str | None:
        """The output is over: what was pending becomes text, but for an unfinished character.

        Returns the stop string that this completes, if any; none is looked for unless ``may_stop``.
        """
        ...

    def take(self, *, everything: bool) -> str:
        """The text to hand over now: all of it at an ending, else what no stop string can claim."""
        ...

    def pending(self) -> Sequence[int]:
        """The tokens whose text waits for a character to be finished."""
        ...

    def held_back(self) -> str:
        """The text that ``take`` would keep back now because a stop string may begin there."""
        ...


def make_detokenizer(
    kind: str, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """``kind``: one of ``config.DETOKENIZERS``, where the request wants text at all."""
    if not params.detokenize:
        return NoDetokenizer(tokenizer.vocab_size)
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params, kind=kind)


class NoDetokenizer:
    """For ``detokenize=False``: counts and checks the ids; there is no text."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_output_tokens = 0

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:  # noqa: ARG002
        for token_id in new_token_ids:
            self.num_output_tokens += 1
            if not 0 <= token_id < self._vocab_size:
                raise _bad_id(token_id, self._vocab_size)
        return None

    def flush(self, *, may_stop: bool = True) -> str | None:  # noqa: ARG002
        return None

    def take(self, *, everything: bool) -> str:  # noqa: ARG002
        return ""

    def pending(self) -> Sequence[int]:
        return ()

    def held_back(self) -> str:
        return ""


class IncrementalDetokenizer:
    """See ``Detokenizer``."""

    __slots__ = (
        "_backend",
        "_context",
        "_decoder",
        "_foreign_finished",
        "_foreign_whole",
        "_include_stop",
        "_joins_added",
        "_kind",
        "_last_was_added",
        "_min_tokens",
        "_pieces",
        "_skip_special",
        "_stop",
        "_unsent",
        "_vocab_size",
        "num_output_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        kind: str = "fast",
    ) -> None:
        self._kind = kind
        self._backend = tokenizer.backend
        self._pieces = tokenizer.pieces
        self._vocab_size = tokenizer.vocab_size
        self._skip_special = params.skip_special_tokens
        self._joins_added = not (params.spaces_between_special_tokens or self._skip_special)
        self._last_was_added = False
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stop = StopChecker(params.stop, params.stop_hold_back) if params.stop else None
        self._unsent = ""
        # What was handed over last, as far back as a stop string that is kept in the text can reach.
        self._context = ""
        self.num_output_tokens = 0
        self._reset(self._end_of(prompt_token_ids))

    def _end_of(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """The prompt's last tokens, from the beginning of a character on.

        By byte fallback a run of bytes that begins inside a character has no character at all, and a
        prompt in a script that the vocabulary leaves out is one such run to its end.
        """
        start = max(0, len(prompt_token_ids) - _PROMPT_CONTEXT)
        for earlier in range(start, max(-1, start - 1 - _MAX_CONTINUATION), -1):
            first = self._pieces.bytes_of(prompt_token_ids[earlier])[:1]
            if not b"\x80" <= first <= b"\xbf":
                return prompt_token_ids[earlier:]
        return prompt_token_ids[start:]

    def _reset(self, context: Sequence[int], *, is_foreign: bool = True) -> None:
        """A new decoder that has seen ``context``, whose text has no place in what we give out.

        ``is_foreign``: not even U+FFFD for a character that it leaves unfinished, if nothing of ours
        finishes it.
        """
        self._decoder = self._new_decoder()
        for token_id in context:
            try:
                self._decoder.step(token_id)
            except Exception:  # noqa: BLE001 - as in _step; and what is lost here is not ours anyway
                self._decoder = self._new_decoder()
                for one in (*self._pieces.anchor, token_id):
                    with suppress(Exception):
                        self._decoder.step(one)
        self._foreign_finished = self._foreign_whole = ""
        if self._decoder.pending:
            self._foreign_finished = self._finished_text()
            pending = self._decode(self._decoder.pending)
            self._foreign_whole = pending if is_foreign else self._foreign_finished

    def _new_decoder(self) -> Decoder:
        return make_decoder(self._kind, self._backend, skip_special_tokens=self._skip_special)

    # ------------------------------------------------------------------ in

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """See ``Detokenizer.update``."""
        last = len(new_token_ids) - 1
        hidden = last if stop_terminated and not self._include_stop else -1
        # A local name, so that CPython appends in place: many tokens a step cost what they add.
        text = self._unsent
        try:
            for position, token_id in enumerate(new_token_ids):
                self.num_output_tokens += 1
                if not 0 <= token_id < self._vocab_size:
                    raise _bad_id(token_id, self._vocab_size)
                if position == hidden:
                    break
                piece = self._step(token_id)
                text += piece
                if piece and self._stop is not None:
                    match = self._find_stop(text, len(piece))
                    if match is not None:
                        text = self._cut(text, match)
                        del new_token_ids[position + 1 :]
                        self._reset(())
                        return match.stop
        finally:
            self._unsent = text
        return None

    def _find_stop(self, text: str, new: int) -> StopMatch | None:
        """Offsets of the match count in ``text``; one that begins before it begins at 0."""
        if self._stop is None or self.num_output_tokens <= self._min_tokens:
            return None
        match = self._stop.find(self._context + text, new)
        if match is None or not self._context:
            return match
        shift = len(self._context)
        return StopMatch(match.stop, max(0, match.start - shift), match.end - shift)

    def _cut(self, text: str, match: StopMatch) -> str:
        return text[: match.end if self._include_stop else match.start]

    def _step(self, token_id: int) -> str:
        try:
            piece = self._decoder.step(token_id)
        except Exception:  # noqa: BLE001 - DecodeStream raises bare Exceptions; their text is no API
            piece = self._recover(token_id)
        if piece is None:
            return self._bounded() if len(self._decoder.pending) > _MAX_PENDING else ""
        if self._foreign_whole:
            piece = self._without_foreign(piece)
        return self._joined(token_id, piece) if self._joins_added else piece

    def _recover(self, token_id: int) -> str:
        """A new decoder takes the token; what the failed one held comes out as well as it can."""
        broken = list(self._decoder.pending)
        if broken and broken[-1] == token_id:
            broken.pop()
        text = self._decode(broken) if broken else ""
        if self._foreign_whole:
            text = self._without_foreign(text)
        self._reset(self._pieces.anchor if self._decoder.prefix else ())
        try:
            return text + (self._decoder.step(token_id) or "")
        except Exception as error:
            raise OutputError(f"token id {token_id} cannot be decoded: {error}") from error

    def _bounded(self) -> str:
        """Nothing has come of too many tokens: what is finished comes out."""
        pending = self._decoder.pending
        text = self._without_foreign(self._finished_text())
        unfinished = num_unfinished_bytes(self._bytes_of(pending))
        spelling = [token_id for token_id in pending if self._bytes_of((token_id,))]
        # An unfinished character's bytes are in the last tokens that have any; they go on waiting.
        tail = spelling[len(spelling) - unfinished :]
        anchor = self._pieces.anchor if self._decoder.prefix or text else []
        self._reset([*anchor, *tail], is_foreign=False)
        return text

    def _joined(self, token_id: int, piece: str) -> str:
        """``piece`` without the space that a decoder writes between two added tokens."""
        is_added = token_id in self._pieces.added_token_ids
        follows_added, self._last_was_added = self._last_was_added, is_added
        content = self._backend.id_to_token(token_id) or ""
        return content if is_added and follows_added and piece == f" {content}" else piece

    # ------------------------------------------------------------------ out

    def flush(self, *, may_stop: bool = True) -> str | None:
        """See ``Detokenizer.flush``."""
        if not self._decoder.pending:
            return None
        piece = self._without_foreign(self._finished_text())
        self._reset(())
        self._unsent += piece
        match = self._find_stop(self._unsent, len(piece)) if piece and may_stop else None
        if match is None:
            return None
        self._unsent = self._cut(self._unsent, match)
        return match.stop

    def take(self, *, everything: bool) -> str:
        """See ``Detokenizer.take``."""
        text, self._unsent = self._unsent, ""
        if self._stop is None:
            return text
        if not everything and not self._include_stop:
            kept = len(text) - self._stop.held_back(text)
            text, self._unsent = text[:kept], text[kept:]
        if self._include_stop:
            reach = self._stop.reach
            self._context = (self._context + text)[-reach:] if reach else ""
        return text

    def pending(self) -> Sequence[int]:
        """See ``Detokenizer.pending``."""
        return self._decoder.pending

    def held_back(self) -> str:
        """See ``Detokenizer.held_back``."""
        if self._stop is None or self._include_stop:
            return ""
        return self._unsent[len(self._unsent) - self._stop.held_back(self._unsent) :]

    # ------------------------------------------------------------------ what is pending

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special)

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return self._pieces.joined_bytes(token_ids, skip_special_tokens=self._skip_special)

    def _finished_text(self) -> str:
        """What is pending, as text, without an unfinished character at its end."""
        prefix, pending = self._decoder.prefix, self._decoder.pending
        known, text = self._decode(prefix), self._decode([*prefix, *pending])
        text = text[len(known) :] if text.startswith(known) else self._decode(pending)
        return text[: len(text) - self._num_replacements_at_the_end(pending, text)]

    def _num_replacements_at_the_end(self, pending: Sequence[int], text: str) -> int:
        """How many U+FFFD stand for an unfinished character: one, or, by byte fallback, one a byte."""
        unfinished = num_unfinished_bytes(self._bytes_of(pending))
        if not unfinished:
            return 0
        at_the_end = len(text) - len(text.rstrip("\ufffd"))
        return min(at_the_end, unfinished if self._pieces.has_byte_fallback else 1)

    def _without_foreign(self, text: str) -> str:
        """``text`` begins with what the context left unfinished: cut off what is not ours."""
        whole, finished = self._foreign_whole, self._foreign_finished
        self._foreign_whole = self._foreign_finished = ""
        return text.removeprefix(whole if text.startswith(whole) else finished)


def _bad_id(token_id: int, vocab_size: int) -> OutputError:
    return OutputError(
        f"the engine sent token id {token_id}; this model's ids are 0 to {vocab_size - 1}"
    )
