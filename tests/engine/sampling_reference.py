"""What sampling has to do, said once more for one row, slowly and in plain Python; and the chi-square test.

Written from the parameters' definitions in vLLM's documentation, not from the sampler: one list of scores, one
step after the other, no torch but for the chi-square.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def probabilities(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], **params: Any
) -> list[float] | None:
    """How probable each token is as the next one; a single 1 if greedy, None if there is none.

    ``params`` are the wire's, with its defaults.
    """
    scores = adjusted(logits, prompt, output, **params)
    best = max(scores)
    if best == -math.inf:
        return None
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        winner = scores.index(best)
        return [float(i == winner) for i in range(len(scores))]
    probs = normed([math.exp((score - best) / temperature) for score in scores])
    least = max(probs) * params.get("min_p", 0.0)
    probs = normed([p if p >= least else 0.0 for p in probs])
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    for i in order[params.get("top_k", 0) or len(order) :]:
        probs[i] = 0.0
    probs = normed(probs)
    before = 0.0
    for i in order:
        before, probs[i] = before + probs[i], probs[i] if before < params.get("top_p", 1.0) else 0.0
    return normed(probs)


def normed(probs: Sequence[float]) -> list[float]:
    return [p / sum(probs) for p in probs]


def adjusted(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], **params: Any
) -> list[float]:
    """The logits after all that can change which one is the largest."""
    scores = list(logits)
    allowed = params.get("allowed_token_ids")
    for i in range(len(scores)):
        if allowed is not None and i not in allowed:
            scores[i] = -math.inf
    for *beginning, last in params.get("bad_words_token_ids") or ():
        if [*output][len(output) - len(beginning) :] == beginning or not beginning:
            scores[last] = -math.inf
    if len(output) < params.get("min_tokens", 0):
        for i in params.get("stop_token_ids", ()):
            scores[i] = -math.inf
    for i, bias in (params.get("logit_bias") or {}).items():
        scores[i] += bias
    times = Counter(output)
    for i in set(prompt) | set(output):
        factor = params.get("repetition_penalty", 1.0)
        scores[i] = scores[i] / factor if scores[i] > 0 else scores[i] * factor
    for i, count in times.items():
        scores[i] -= params.get("frequency_penalty", 0.0) * count
        scores[i] -= params.get("presence_penalty", 0.0)
    return scores


def random_params(
    chance: random.Random, vocab: int, output: Sequence[int], *, temperature: float | None = None
) -> dict[str, Any]:
    """Some of all parameters, each as often there as not. Always some token is left."""
    some = [chance.randrange(vocab) for _ in range(6)]
    # Some bad words are about to be completed, some are not.
    ends = [[*output[-n:], some[n]] for n in range(1, 4) if len(output) >= n]
    possible: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.5, 1.0, 2.0]),
        "top_k": chance.choice([1, 3, 10, 1000]),
        "top_p": chance.choice([0.3, 0.8, 0.99]),
        "min_p": chance.choice([0.01, 0.1, 0.5]),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
        "repetition_penalty": chance.choice([0.5, 1.3, 3.0]),
        "logit_bias": {i: chance.uniform(-4, 4) for i in some},
        "allowed_token_ids": sorted(chance.sample(range(vocab), vocab // 2)),
        "bad_words_token_ids": [*ends, [some[4]], [some[5], some[0]]],
    }
    asked = {name: value for name, value in possible.items() if chance.random() < 0.5}
    if chance.random() < 0.5:
        asked |= {"min_tokens": chance.choice([1, 20]), "stop_token_ids": some[:3]}
    return asked if temperature is None else {**asked, "temperature": temperature}


def chi_square_is_plausible(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    """True below the 99.99% quantile (Wilson and Hilferty's approximation); rare tokens are pooled."""
    expected = probs * counts.sum()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    return statistic < quantile
