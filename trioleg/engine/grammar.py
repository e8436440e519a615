"""``Grammar``: one request's constraint, and which tokens it allows next.

Rules of this file: llguidance and numpy, no torch, no trio. A grammar belongs to the tokens of its request, not
to the cache: a preempted request keeps it.
"""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from ..errors import InvalidRequestError
from ..structured_outputs import StructuredOutputsParams, parser_limits, reason_of

__all__ = ["Grammar"]

_WORD_BITS = 32

# A mask of a common grammar takes 0.02 to 0.1 ms, but an ambiguous one 0.1 s after 200 tokens, and then more for
# each, while every other request waits. So a request may compute this long for a token, and be this far behind.
_STEP_S = 0.01
_PATIENCE_S = 1.0


class Grammar:
    """One request's constraint, as far as its tokens have come.

    ``forces_end`` is true while the grammar allows nothing but tokens that ``min_tokens`` forbids: an answer
    that may not go on ends, however short it is.
    """

    def __init__(self, params: StructuredOutputsParams, tokenizer: LLTokenizer) -> None:
        """Compiles; takes seconds at worst. Raises ``InvalidRequestError`` with the library's reason."""
        self._matcher = LLMatcher(
            tokenizer, params.to_grammar(), log_level=0, limits=parser_limits()
        )
        self.num_words = -(-tokenizer.vocab_size // _WORD_BITS)
        self.forces_end = False
        # Seconds of computing beyond what its tokens entitle it to.
        self._behind_s = 0.0
        # For its effect on the lexer.
        self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise params.refusal(self._matcher.get_error())

    @property
    def error(self) -> str | None:
        """Why it cannot be enforced any further."""
        if self._matcher.is_error():
            return reason_of(self._matcher.get_error())
        if self._behind_s > _PATIENCE_S:
            return "the grammar takes too long: it leaves too many ways to read the text so far"
        return None

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes one bit for each token into ``mask`` [num_words]: 1 for what may come next."""
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._behind_s = max(0.0, self._behind_s + time.thread_time() - start - _STEP_S)

    def accept(self, token_id: int) -> bool:
        """Takes a sampled token; True if it is the end token behind a complete answer.

        A complete answer that cannot be longer gets one, too: heads leave the text of the last token out where
        the engine says that it stopped. Raises ``InvalidRequestError`` if the token does not fit, or the
        grammar has become too much for its limits.
        """
        is_complete = self._matcher.is_stopped()
        # After an error over the mask the token is any token, and would only hide what went wrong.
        if self.error is None and not is_complete:
            self._matcher.consume_token(token_id)
        if self.error is not None:
            raise InvalidRequestError(
                f"structured_outputs cannot be enforced any further: {self.error}",
                parameter="structured_outputs",
            )
        return is_complete or self._matcher.stop_reason() == "EndOfSentence"
