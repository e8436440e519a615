"""One client of the churn: what it is going to do, and how its request has ended."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from .client import Exchange

__all__ = ["ENDS", "Plan", "judge"]

# No answer takes so long; one that does is counted as hung.
_HUNG_AFTER_S = 60.0
# A client that hears 503 asks again after what Retry-After says, but not later than this: there is work to do.
_LONGEST_RETRY_S = 0.5

_COMPLETE_STREAM = "stream complete"
_COMPLETE_ANSWER = "answer complete"
_LEFT_EARLY = "left before the first token"
_LEFT_STREAM = "left in mid-stream"
_LEFT_PLAIN = "left a plain request"
_RESET = "reset"
_DEAD_STREAM = "stream ended with the engine's death"
_UNAVAILABLE = "503: the engine is dead or restarting"
# The ways that a request may end in; any other is a fault.
ENDS = (
    _COMPLETE_STREAM,
    _COMPLETE_ANSWER,
    _LEFT_EARLY,
    _LEFT_STREAM,
    _LEFT_PLAIN,
    _RESET,
    _DEAD_STREAM,
    _UNAVAILABLE,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client is going to do."""

    stream: bool
    max_tokens: int
    leaves: bool = False
    leave_after: float = _HUNG_AFTER_S
    leave_at_token: int | None = None
    reset: bool = False

    async def read(self, exchange: Exchange) -> bool:
        """True when the answer is whole, False when it is time to leave. Raises as ``receive``."""
        # A token is a piece; before the first one come the head and the piece with the role.
        left = math.inf if self.leave_at_token is None else 2 + self.leave_at_token
        while left > 0:
            left -= 1
            if not await exchange.receive():
                return True
        return False

    def left(self, exchange: Exchange) -> str:
        """What leaving was, by what had come until then."""
        if not self.leaves:
            return f"no whole answer within {_HUNG_AFTER_S:g} s"
        if self.reset:
            return _RESET
        if not self.stream:
            return _LEFT_PLAIN
        return _LEFT_STREAM if exchange.body else _LEFT_EARLY


def judge(exchange: Exchange, plan: Plan) -> tuple[str, float]:
    """How a request whose answer is whole has ended, and how long to wait before the next."""
    body = bytes(exchange.body)
    if exchange.status == 503:
        asked_for = float(exchange.headers.get(b"retry-after", _LONGEST_RETRY_S))
        return _UNAVAILABLE, min(asked_for, _LONGEST_RETRY_S)
    if exchange.status != 200:
        return f"status {exchange.status}: {body[:200]!r}", 0.0
    return (_judge_stream(body) if plan.stream else _judge_answer(body, plan)), 0.0


def _judge_stream(body: bytes) -> str:
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    finishes = sum(b'"finish_reason":"length"' in event for event in events)
    errors = sum(event.startswith(b'data: {"error"') for event in events)
    if done == b"data: [DONE]" and (finishes, errors) == (1, 0):
        return _COMPLETE_STREAM
    if done == b"data: [DONE]" and (finishes, errors) == (0, 1) and b"is dead" in events[-1]:
        return _DEAD_STREAM
    return f"a stream that ends with {body[-200:]!r}"


def _judge_answer(body: bytes, plan: Plan) -> str:
    tokens = json.loads(body)["usage"]["completion_tokens"]
    if tokens == plan.max_tokens:
        return _COMPLETE_ANSWER
    return f"an answer of {tokens} tokens, not {plan.max_tokens}"
