"""What one request's parameters do to its logits, as plain numbers: ids to forbid, to prefer, to penalise.

Rules of this file: pure Python, no torch, no trio. ``TokenRules`` belongs to one request and is kept up to
date with every token, so that a step never goes over the request's whole text again; the ids stand in
arrays that torch reads in place (``logit_adjustments.py``).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

from ..messages import EngineSamplingParams

__all__ = ["TokenCounts", "TokenRules"]


class TokenCounts:
    """The distinct tokens that penalties look at, in the order of their first appearance.

    ``token_ids`` int64, ``counts`` float32: how often each was generated; 0 for one that only the prompt has.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids = array("q", dict.fromkeys(prompt))
        self.counts = array("f", bytes(4 * len(self.token_ids)))
        self._places = {token_id: place for place, token_id in enumerate(self.token_ids)}

    def add(self, token_id: int) -> None:
        """A token was generated."""
        place = self._places.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0.0)
        self.counts[place] += 1.0


class TokenRules:
    """The rules of parameters that ``check_request`` has passed; ids are int64.

    ``allowed_token_ids`` None: all are. ``counts`` is None without penalties. The repetition penalty is
    the only one that looks at the prompt's tokens, as in vLLM.
    """

    def __init__(self, params: EngineSamplingParams, prompt: Sequence[int]) -> None:
        self.allowed_token_ids = (
            None if params.allowed_token_ids is None else array("q", params.allowed_token_ids)
        )
        bias = params.logit_bias or {}
        self.bias_token_ids, self.biases = array("q", bias), array("f", bias.values())
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self.counts = TokenCounts(prompt)
        elif params.presence_penalty or params.frequency_penalty:
            self.counts = TokenCounts(())
        self._bad_words = _BadWords(params.bad_words_token_ids or ())

    @classmethod
    def of(cls, params: EngineSamplingParams, prompt: Sequence[int]) -> TokenRules | None:
        """None where the parameters ask for nothing of the kind, so that it costs nothing."""
        rules = cls(params, prompt)
        is_empty = rules.allowed_token_ids is None and rules.counts is None
        return None if is_empty and not (rules.biases or rules._bad_words) else rules

    def add(self, token_id: int) -> None:
        """A token was generated."""
        if self.counts is not None:
            self.counts.add(token_id)

    def bad_token_ids(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        """The tokens that would complete a bad word behind ``token_ids``, of which the last
        ``num_output_tokens`` were generated."""
        return self._bad_words.endings(token_ids, num_output_tokens)


class _BadWords:
    """Sequences of token ids, found by the token before their last one: a step looks at few of them."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._behind: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *beginning, last in words:
            if beginning:
                self._behind[beginning[-1]].append((beginning, last))

    def __bool__(self) -> bool:
        return bool(self._always or self._behind)

    def endings(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        # Not by [], which would add what it does not find.
        candidates = self._behind.get(token_ids[-1], ())
        return self._always + [
            last
            for beginning, last in candidates
            if len(beginning) <= num_output_tokens and token_ids[-len(beginning) :] == beginning
        ]
