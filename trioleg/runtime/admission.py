"""``Admission``: whether there is room for one more request, and how long it would wait.

A queue that has no bound answers everybody too late. So a request that cannot be served soon is turned away before
it has cost anything: when too many are in flight, when too many tokens of prompts wait, or when the wait is longer
than its own deadline. What was admitted gives its slot back when it ends, however it ends.

The wait is a guess from what the engine says of itself and from what has been seen of it. Only when requests wait
in the engine for others to end is there a wait at all. Then a place in its batch becomes free every T / R seconds:
R requests are running, and T is how long one stays, the mean of those that have ended lately, or, if it is more,
the mean age of those that run. (Little's law; prompts of very different lengths make it rough.)
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from ..errors import InvalidRequestError, OverloadedError
from ..timeouts import Timeouts

__all__ = ["Admission", "Slot"]

_log = logging.getLogger("trioleg.requests")

# How much one more request that has ended counts in the mean of their times.
_WEIGHT = 0.3
# An overload is one for every request that comes.
_LOG_INTERVAL_S = 60.0
# A guess for a queue of which nothing is known.
_RETRY_AFTER_S = 1.0


class Slot:
    """One request's place, for ``num_choices`` of them. All methods are synchronous and idempotent.

    ``is_one_of_many``: it was admitted with others, and is not turned away without them.
    """

    __slots__ = (
        "_admission",
        "_is_held",
        "_is_one_of_many",
        "_is_queued",
        "_num_choices",
        "_num_tokens",
        "_started_at",
    )

    def __init__(
        self,
        admission: Admission,
        num_choices: int,
        num_tokens: int,
        *,
        is_one_of_many: bool = False,
    ) -> None:
        self._admission = admission
        self._num_choices = num_choices
        self._num_tokens = num_tokens * num_choices
        self._is_one_of_many = is_one_of_many
        self._is_queued = self._is_held = True
        self._started_at: float | None = None
        admission.num_inflight += num_choices
        admission.num_queued += num_choices
        admission.num_queued_tokens += self._num_tokens

    def take_prompt(self, num_tokens: int) -> None:
        """The prompt's length is known. Raises ``OverloadedError``; the slot is held all the same."""
        self._admission.num_queued_tokens -= self._num_tokens
        self._num_tokens = 0
        num_tokens *= self._num_choices
        if not self._is_one_of_many:
            self._admission.check_tokens(num_tokens)
        self._num_tokens = num_tokens
        self._admission.num_queued_tokens += num_tokens

    def start(self) -> None:
        """The first token came: it waits no more."""
        if self._is_queued:
            self._leave_queue()
            self._started_at = trio.current_time()
            self._admission.note_start(self._started_at, self._num_choices)

    def release(self) -> None:
        """The request has ended."""
        if not self._is_held:
            return
        self._is_held = False
        if self._is_queued:
            self._leave_queue()
        self._admission.note_end(self._started_at, self._num_choices)

    def _leave_queue(self) -> None:
        self._is_queued = False
        self._admission.num_queued -= self._num_choices
        self._admission.num_queued_tokens -= self._num_tokens


class Admission:
    """``num_inflight``: choices of requests that have begun and not ended; ``num_queued``: of those, without a
    first token; ``num_queued_tokens``: of their prompts, a guess until they are tokenized. ``refused``: requests
    turned away, by the error's code.

    ``engine_load``: how many requests run and wait in the engine, by its own last word.
    """

    def __init__(
        self,
        max_inflight_requests: int,
        max_queued_prompt_tokens: int,
        engine_load: Callable[[], tuple[int, int]],
    ) -> None:
        self.num_inflight = 0
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.refused: Counter[str] = Counter()
        self._logged_at = -math.inf
        self._none_inflight = trio.lowlevel.ParkingLot()
        self._max_inflight = max_inflight_requests
        self._max_tokens = max_queued_prompt_tokens
        self._engine_load = engine_load
        # How long requests have run that have ended lately.
        self._mean_stay: float | None = None
        # Of those that run: how many, and the sum of the times at which they began.
        self._num_running = 0
        self._sum_started_at = 0.0

    async def wait_none(self) -> None:
        """Wait until no request is in flight. Cancel-safe."""
        while self.num_inflight:
            await self._none_inflight.park()
        await trio.lowlevel.checkpoint()

    def check_room(self) -> None:
        """Raises ``OverloadedError`` if there is no room for any request."""
        self._check_inflight(1)
        self.check_tokens(1)

    def admit(
        self, num_choices: int, num_tokens: int, timeouts: Timeouts, arrived_at: float
    ) -> Slot:
        """A place for a request; whoever gets it has to see that it is released. ``num_tokens``: what its prompt is
        guessed to have, which counts until that is known, but does not turn the request itself away.

        Raises ``InvalidRequestError`` for what will never have room, and ``OverloadedError``.
        """
        self._check("n is", "n", num_choices, timeouts, arrived_at)
        self.check_tokens(1)
        return Slot(self, num_choices, num_tokens)

    def admit_all(
        self,
        nums_tokens: Sequence[int],
        parameter: str,
        timeouts: Timeouts,
        arrived_at: float,
    ) -> list[Slot]:
        """Places for prompts of one call, called ``parameter``, or for none of them: see ``admit``. Here the
        guesses count together, since they are all that is known before any of the prompts has cost something."""
        self._check(f"{parameter} has", parameter, len(nums_tokens), timeouts, arrived_at)
        self.check_tokens(max(1, sum(nums_tokens)))
        return [Slot(self, 1, one, is_one_of_many=True) for one in nums_tokens]

    def _check(
        self, what: str, parameter: str, num: int, timeouts: Timeouts, arrived_at: float
    ) -> None:
        if num > self._max_inflight:
            raise InvalidRequestError(
                f"{what} {num}; allowed: 1 to {self._max_inflight}, which is max_inflight_requests",
                parameter=parameter,
            )
        self._check_inflight(num)
        self._check_deadline(timeouts, arrived_at)

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ``OverloadedError`` if so many do not fit. Alone, any prompt fits that the model takes."""
        if self.num_queued_tokens and self.num_queued_tokens + num_tokens > self._max_tokens:
            self._refuse(
                f"{self.num_queued_tokens} tokens of prompts are queued, and this request brings {num_tokens} or more; "
                f"allowed: {self._max_tokens} (max_queued_prompt_tokens)",
                "too_many_queued_tokens",
                self._wait(1),
            )

    def note_start(self, at: float, num_choices: int) -> None:
        """For ``Slot``."""
        self._num_running += num_choices
        self._sum_started_at += num_choices * at

    def note_end(self, started_at: float | None, num_choices: int) -> None:
        """For ``Slot``. ``started_at`` None: it never had a token."""
        self.num_inflight -= num_choices
        if not self.num_inflight:
            self._none_inflight.unpark_all()
        if started_at is None:
            return
        self._num_running -= num_choices
        self._sum_started_at -= num_choices * started_at
        stay = trio.current_time() - started_at
        mean = stay if self._mean_stay is None else self._mean_stay
        self._mean_stay = mean + _WEIGHT * (stay - mean)

    def _check_inflight(self, num_choices: int) -> None:
        if self.num_inflight + num_choices > self._max_inflight:
            self._refuse(
                f"{self.num_inflight} requests are in flight, and this one counts {num_choices}; allowed: "
                f"{self._max_inflight} (max_inflight_requests)",
                "too_many_requests",
                # The first of those that run to end makes room, whether others wait or not.
                self._stay() / max(1, self._num_running),
            )

    def _check_deadline(self, timeouts: Timeouts, arrived_at: float) -> None:
        named = [one for one in (timeouts.first_token, timeouts.total) if one is not None]
        if not named or not self.num_queued:
            return
        left = arrived_at + min(named) - trio.current_time()
        wait = self._wait(self.num_queued)
        if wait > left:
            self._refuse(
                f"the request's first token is expected in {wait:.1f} s, behind {self.num_queued} others, and its "
                f"deadline is in {max(left, 0.0):.1f} s",
                "deadline_too_short",
                wait - left,
            )

    def _wait(self, num_places: int) -> float:
        """Seconds until so many places become free; 0 where nobody waits or nothing is known."""
        num_running, num_waiting = self._engine_load()
        if not (num_running and num_waiting):
            return 0.0
        return num_places * self._stay() / num_running

    def _stay(self) -> float:
        """How long a request runs, in seconds; 0 if nothing is known."""
        stays = [] if self._mean_stay is None else [self._mean_stay]
        if self._num_running:
            stays.append(trio.current_time() - self._sum_started_at / self._num_running)
        return max(stays, default=0.0)

    def _refuse(self, message: str, code: str, retry_after: float) -> None:
        self.refused[code] += 1
        if trio.current_time() >= self._logged_at + _LOG_INTERVAL_S:
            self._logged_at = trio.current_time()
            _log.warning("requests are turned away: %s (%d so far)", message, self.refused.total())
        raise OverloadedError(message, code=code, retry_after=max(retry_after, _RETRY_AFTER_S))
