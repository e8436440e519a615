"""Logprobs: from an engine's arrays to one entry for each token, chosen one first.

Pure. An entry is made from one row of the arrays: the sampled token, then the most probable ones, or those
that ``logprob_token_ids`` names. An engine computes a whole batch alike, so rows may be wider than this
request asked for; what is too much is left out. An entry goes out with its token, whatever becomes of the
token's text.

-inf is a fact (a token that was ruled out). NaN and +inf are none: they end the request, since what the model
says after it means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import OutputError
from ..messages import LogprobsLists, LogprobsTensors
from ..outputs import Logprob, LogprobsOfToken
from ..token_pieces import TokenPieces
from .arrays import Frames, read_array

__all__ = ["Wanted", "read_logprobs", "read_prompt_logprobs"]

# What stands beside the token itself: so many of the most probable ones (-1: all), or these.
Wanted = int | Sequence[int]


def read_logprobs(
    wire: Any, token_ids: Sequence[int], wanted: Wanted, pieces: TokenPieces, frames: Frames
) -> list[LogprobsOfToken]:
    """An entry for each of ``token_ids``, from ``EngineCoreOutput.new_logprobs``.

    ``wanted``: what was asked for. Raises ``OutputError`` for arrays that are missing, malformed or about
    other tokens.
    """
    return _read("new_logprobs", wire, token_ids, wanted, pieces, frames)


def read_prompt_logprobs(
    wire: Any, prompt_token_ids: Sequence[int], k: int, pieces: TokenPieces, frames: Frames
) -> list[LogprobsOfToken | None]:
    """An entry for each token of the prompt, None for the first. Raises as ``read_logprobs``."""
    what = "new_prompt_logprobs_tensors"
    return [None, *_read(what, wire, prompt_token_ids[1:], k, pieces, frames)]


def _read(
    what: str,
    wire: Any,
    token_ids: Sequence[int],
    wanted: Wanted,
    pieces: TokenPieces,
    frames: Frames,
) -> list[LogprobsOfToken]:
    ids_array, logprobs_array, ranks_array = _three(what, wire)
    shape, ids = read_array(ids_array, frames, f"{what}: token ids")
    same_shape, logprobs = read_array(logprobs_array, frames, f"{what}: logprobs")
    rank_shape, ranks = read_array(ranks_array, frames, f"{what}: ranks")
    if _is_any(float, ids, ranks) or _is_any(int, logprobs):
        raise OutputError(f"{what} from the engine: ids and ranks are integers, logprobs are not")
    if len(shape) != 2 or same_shape != shape or rank_shape != shape[:1]:
        raise OutputError(f"{what} from the engine: {shape}, {same_shape} and {rank_shape} differ")
    rows, width = shape
    listed = () if isinstance(wanted, int) else wanted
    k = wanted if isinstance(wanted, int) else len(wanted)
    if k == -1:
        k = max(width - 1, 0)
    if rows < len(token_ids) or width < k + 1:
        raise OutputError(
            f"{what} from the engine: {rows} rows of {width}; allowed: at least {len(token_ids)} rows "
            f"(one for each token) of {k + 1}"
        )
    if ids[: len(token_ids) * width : width] != list(token_ids):
        raise OutputError(f"{what} from the engine: the rows are about other tokens than were sent")
    entries = []
    for row in range(len(token_ids)):
        first = row * width
        end = first + k + 1
        if listed and ids[first + 1 : end] != list(listed):
            raise OutputError(f"{what} from the engine: not those of logprob_token_ids")
        row_of_ids, row_of_logprobs = ids[first:end], logprobs[first:end]
        entries.append(
            _entry(what, row_of_ids, row_of_logprobs, ranks[row], pieces, ranked=not listed)
        )
    return entries


def _is_any(kind: type, *arrays: list[Any]) -> bool:
    """An array is of one kind, so its first element tells."""
    return any(type(array[0]) is kind for array in arrays if array)


def _three(what: str, wire: Any) -> tuple[Any, Any, Any]:
    if isinstance(wire, LogprobsLists | LogprobsTensors):
        return wire.token_ids, wire.logprobs, wire.ranks
    if isinstance(wire, list) and len(wire) >= 3:
        return wire[0], wire[1], wire[2]
    found = "nothing" if wire is None else type(wire).__name__
    raise OutputError(f"{what} from the engine: {found}; allowed: three arrays, as was asked for")


def _entry(
    what: str,
    ids: list[int],
    logprobs: list[float],
    rank: int,
    pieces: TokenPieces,
    *,
    ranked: bool,
) -> LogprobsOfToken:
    """``ranked``: the others are the most probable ones in order, so that their places are their ranks."""
    for logprob in logprobs:
        if math.isnan(logprob) or logprob == math.inf:
            shown = "NaN" if math.isnan(logprob) else "infinity"
            raise OutputError(f"{what} from the engine: {shown} for token id {ids[0]}")
    entry: LogprobsOfToken = {}
    for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        # If the sampled token is among the most probable ones, its place there is its rank.
        known = (place or rank) if ranked else rank if token_id == ids[0] else None
        text, data = pieces.text_of(token_id), pieces.bytes_of(token_id)
        entry[token_id] = Logprob(logprob, known, text, data)
    return entry
