"""How many tokens a second still come one by one: a search over the rate of the engine's steps.

A burst of steps is sent at a rate, and waited for to its end. It went through if no more than one token in a thousand
came merged with another; what it was worth is its tokens by the time until the last of them had come, which counts
what a server that never merges still had to do behind it.
"""

from __future__ import annotations

from .leg_streams import Burst, Run

__all__ = ["find_saturation"]

_SHARE_ALONE = 0.999
# So long is a burst: many times what a queue in between may hide.
_BURST_S = 1.5
# The search ends at that much between what went through and what did not, or after so many bursts.
_CLOSE_ENOUGH = 1.05
_MOST_BURSTS = 12
# A server that is done so much later than the engine has reached what it can do: more steps only queue longer.
_BEHIND = 1.25


async def find_saturation(run: Run, rate: float) -> float:
    """Tokens a second, the most that was seen to go through; 0 if not even ``rate`` steps a second did.

    The streams of ``run`` are open, and stay so. The rate is doubled until it is too much, and then closed in on.
    """
    best, through, too_much = 0.0, 0.0, 0.0
    for _ in range(_MOST_BURSTS):
        steps = max(1, round(rate * _BURST_S))
        burst = await run.burst(rate, steps)
        if _went_through(burst):
            best = max(best, burst.tokens / burst.seconds)
        if _went_through(burst) and burst.seconds < _BEHIND * steps / rate:
            through = rate
        else:
            too_much = rate
        if too_much and too_much / max(through, 1e-9) < _CLOSE_ENOUGH:
            break
        if not too_much:
            rate *= 2
        else:
            rate = (through * too_much) ** 0.5 if through else rate / 2
    return best


def _went_through(burst: Burst) -> bool:
    return burst.frames >= _SHARE_ALONE * burst.tokens
