"""Logprobs as the API spells them: OpenAI's form for the answer's tokens, vLLM's for the prompt's.

Pure. A ruled-out token's -inf is written as -9999.0, as OpenAI and vLLM do: JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..outputs import Logprob, LogprobsOfToken
from ..sampling_params import SamplingParams

__all__ = ["choice_logprobs", "listed_logprobs", "prompt_logprobs_json"]

_RULED_OUT = -9999.0


def listed_logprobs(params: SamplingParams) -> int | None:
    """The ``top_logprobs`` of ``choice_logprobs`` for a request."""
    return None if params.logprob_token_ids else params.logprobs or 0


def choice_logprobs(
    logprobs: Sequence[LogprobsOfToken] | None, top_logprobs: int | None
) -> dict[str, Any] | None:
    """``choices[].logprobs``: one entry for each token. None if there is none, as in OpenAI's chunks.

    ``top_logprobs`` of an entry are the so many most probable tokens (-1: all), the likeliest first; the
    chosen token is among them only if it is one of them. None: the chosen token and all others that
    the engine sent, in its order (vLLM's rule for ``logprob_token_ids``).
    """
    if not logprobs:
        return None
    content = [_entry_of(of_token, top_logprobs) for of_token in logprobs]
    return {"content": content, "refusal": None}


def _entry_of(of_token: LogprobsOfToken, top_logprobs: int | None) -> dict[str, Any]:
    chosen, *others = of_token.values()
    listed = others[:top_logprobs]
    if top_logprobs is None:
        listed = [chosen, *others]
    elif top_logprobs == -1 or len(others) < top_logprobs:
        # The chosen token is one of the most probable: the engine names each token once.
        listed = sorted([chosen, *others], key=lambda one: -one.logprob)
    entry = _token(chosen)
    entry["top_logprobs"] = [_token(one) for one in listed]
    return entry


def _token(one: Logprob) -> dict[str, Any]:
    return {
        "token": one.decoded_token,
        "logprob": _finite(one.logprob),
        "bytes": list(one.token_bytes),
    }


def prompt_logprobs_json(
    prompt_logprobs: Sequence[LogprobsOfToken | None],
) -> list[dict[int, dict[str, Any]] | None]:
    """``prompt_logprobs``: by token id, for each token of the prompt but the first, which has None."""
    return [
        None
        if of_token is None
        else {
            token_id: {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in of_token.items()
        }
        for of_token in prompt_logprobs
    ]


def _finite(logprob: float) -> float:
    # This way round a NaN, for which every comparison is false, is written as ruled out, too.
    return logprob if logprob > _RULED_OUT else _RULED_OUT
