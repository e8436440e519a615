"""``Timeouts``: how long a request may take.

Rules of this file: plain, frozen values; imports only ``errors``. Who enforces them is
``runtime/deadlines.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError

__all__ = ["Timeouts", "check_timeout", "check_timeouts"]

# Thirty years: what is longer is a mistake, or no number that a clock can add.
_LONGEST_S = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds from a request's arrival, waiting of every kind included; None: no bound.

    ``first_token``: until the first token of any choice; ``total``: until the last one of all. A request
    that goes over ends with ``DeadlineExceeded``. Raises ``InvalidRequestError`` (``timeouts.total``,
    say) for anything but a number above 0, at most 10⁹.
    """

    first_token: float | None = None
    total: float | None = None

    def __post_init__(self) -> None:
        check_timeout("timeouts.first_token", self.first_token)
        check_timeout("timeouts.total", self.total)

    def or_else(self, defaults: Timeouts) -> Timeouts:
        """These, and where there is none, the one of ``defaults``."""
        return Timeouts(
            first_token=defaults.first_token if self.first_token is None else self.first_token,
            total=defaults.total if self.total is None else self.total,
        )


def check_timeout(
    name: str, value: Any, *, optional: bool = True, may_be_zero: bool = False
) -> None:
    """Raises ``InvalidRequestError`` unless ``value`` is a duration, or None where it is ``optional``."""
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value <= _LONGEST_S or (may_be_zero and value == 0)):
        least = "seconds from 0" if may_be_zero else "seconds above 0"
        raise InvalidRequestError(
            f"{name} is {value!r:.60}; allowed: {least}, at most {_LONGEST_S}",
            parameter=name,
        )


def check_timeouts(value: Any) -> None:
    """Raises ``InvalidRequestError`` unless ``value`` is a ``Timeouts`` or None."""
    if value is not None and not isinstance(value, Timeouts):
        raise InvalidRequestError(
            f"timeouts is {value!r:.60}; allowed: trioleg.Timeouts(first_token=…, total=…), or None",
            parameter="timeouts",
        )
