"""What a client saw of an answer, and how that is said: in a phrase that can be compared from leg to leg.

Pure: bytes in, plain data out. Nothing is taken for granted of whose bytes they are: error events, finish reasons and
the order of fields differ between servers, and half an event may be the last that came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["End", "Seen", "phrase", "phrases", "read_answer", "without_count"]

# How it ended: the answer was whole; FIN or RST came before that; the client left; nothing more came within a bound.
End: TypeAlias = Literal["whole", "cut", "reset", "left", "nothing"]
_ENDS: dict[End, str] = {"cut": "then cut", "reset": "then reset", "left": "then it left"}
_EVENT_END = b"\n\n"
_DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Seen:
    """``chunks``: events with text or tokens of a stream; ``tokens``: ids, if they were asked for; ``finish``: the last
    finish reason, "" without; ``error``: the error's code (or, where it has none, its type), "" without;
    ``within_s``: the bound, where the end is "nothing"."""

    status: int | None
    end: End
    is_stream: bool = False
    chunks: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: str = ""
    error: str = ""
    is_done: bool = False
    within_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether whoever waits for this answer knows that nothing more comes."""
        return self.end != "nothing"


def read_answer(
    status: int | None, body: bytes, end: End, *, within_s: float | None = None
) -> Seen:
    """``body``: all of it that came."""
    if not body.startswith((_DATA, b":")):
        return _read_plain(status, body, end, within_s)
    chunks, text, finish, error, is_done = 0, "", "", "", False
    tokens: list[int] = []
    for event in body.split(_EVENT_END)[:-1]:
        data = event.removeprefix(_DATA)
        is_done = is_done or data == b"[DONE]"
        if event == data or data == b"[DONE]":
            continue  # a comment, or the end
        told = json.loads(data)
        error = _name_of(told.get("error")) or error
        for choice in told.get("choices", ()):
            content, ids = choice["delta"].get("content") or "", choice.get("token_ids") or ()
            chunks += bool(content or ids)
            text += content
            tokens += ids
            finish = choice.get("finish_reason") or finish
    return Seen(status, end, True, chunks, text, tuple(tokens), finish, error, is_done, within_s)


def _read_plain(status: int | None, body: bytes, end: End, within_s: float | None) -> Seen:
    try:
        told = json.loads(body)
    except ValueError:
        return Seen(status, end, within_s=within_s)  # half of it, or nothing
    error = _name_of(told.get("error"))
    text, finish, tokens = "", "", ()
    for choice in told.get("choices", ()):
        text, finish = choice["message"]["content"] or "", choice["finish_reason"] or ""
        tokens = tuple(choice.get("token_ids") or ())
    return Seen(
        status, end, text=text, tokens=tokens, finish=finish, error=error, within_s=within_s
    )


def _name_of(error: Any) -> str:
    if not isinstance(error, dict):
        return "" if error is None else str(error)
    return str(error.get("code") or error.get("type") or "unnamed")


def phrase(seen: Seen) -> str:
    """As "200, 3 chunks, then cut", "200, 3 chunks, error event (engine_dead), [DONE]", "503", "nothing within 10 s"."""
    said = [] if seen.status is None else [str(seen.status)]
    if seen.is_stream:
        said.append("1 chunk" if seen.chunks == 1 else f"{seen.chunks} chunks")
    if seen.finish:
        said.append(f"finish ({seen.finish})")
    if seen.error and seen.is_stream:
        said.append(f"error event ({seen.error})")
    if seen.is_done:
        said.append("[DONE]")
    if seen.end == "nothing":
        said.append(f"nothing{' more' if said else ''} within {seen.within_s or 0:g} s")
    elif seen.end in _ENDS:
        said.append(_ENDS[seen.end] if said else _ENDS[seen.end].removeprefix("then "))
    elif seen.is_stream and not seen.is_done:
        said.append("no [DONE]")
    return ", ".join(said)


def without_count(said: str, seen: Seen) -> str:
    """Where the number of chunks is a matter of chance."""
    return said.replace(f"{seen.chunks} chunks", "chunks") if seen.chunks > 1 else said


def phrases(seen: Sequence[Seen], *, counts: bool = True) -> str:
    """Of several clients: what all saw, or what each group of them did, with its number. Without ``counts``: see
    ``without_count``."""
    said = [phrase(one) if counts else without_count(phrase(one), one) for one in seen]
    kinds = list(dict.fromkeys(said))
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(f"{said.count(kind)} × {kind}" for kind in kinds)
