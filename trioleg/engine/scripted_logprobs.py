"""The scripted engine's logprobs: made up, from the token ids alone, so that a test can say them.

Rules of this file: pure Python. At every place the token of rank r has the logprob −r (which leaves the
probabilities' sum below 1). A token's own rank is 1, 2 or 3: 1 + its id modulo 3. The other ranks go to
the ids below it, the nearest first, then to those above it, so every id is one of the vocabulary. Token 7
with two alternatives is 7 (rank 2, −2), then 6 (−1) and 7 (−2); a third would be 5 (−3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, count, islice

from .logprob_rows import LogprobRows

__all__ = ["score"]

# Arrays of ids are int32, also for a token id that a script's fault has made absurd.
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def score(token_ids: Iterable[int], k: int, odd: Mapping[int, str]) -> LogprobRows:
    """A row of ``k`` alternatives for each token. ``odd``: logprobs that some tokens always have."""
    rows = LogprobRows(k)
    for token_id in token_ids:
        chosen = max(_INT32_MIN, min(token_id, _INT32_MAX))
        rank = 1 + chosen % 3
        ranked = list(islice(_others(chosen), max(k, rank)))
        ranked.insert(rank - 1, chosen)
        logprobs = [float(odd.get(one, -place)) for place, one in enumerate(ranked, start=1)]
        rows.append([chosen, *ranked[:k]], [logprobs[rank - 1], *logprobs[:k]], rank)
    return rows


def _others(token_id: int) -> Iterable[int]:
    return chain(range(token_id - 1, -1, -1), count(max(token_id + 1, 0)))
