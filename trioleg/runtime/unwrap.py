"""What leaves ``open_llm`` when several things went wrong at once: one error, as itself.

Nurseries wrap what they raise in exception groups. For a caller, ``open_llm`` is a block like ``open``
is: an error of the body must come out as the error that it is. The rule, in order:

1. what the body raised (also if that is a group of the body's own making);
2. ``KeyboardInterrupt`` or ``SystemExit``;
3. the first error of our own tasks.

Cancelling loses against any of them. The errors that do not win are logged with their tracebacks, but for those that
say what the winner says: one cause may reach us by two tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["BodyError", "errors_in", "unwrapped", "winner_of"]

_log = logging.getLogger("trioleg.runtime")


class BodyError:
    """Where the owner of the block writes down what its body raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None


@contextmanager
def unwrapped() -> Iterator[BodyError]:
    """Let at most one plain exception out of the block. A group of nothing but cancels passes."""
    body = BodyError()
    try:
        yield body
    except BaseExceptionGroup as group:
        errors = errors_in(group)
        if not errors:
            raise
        of_body = [] if body.error is None else errors_in(body.error)
        winner = body.error if of_body and body.error is not None else winner_of(errors)
        for other in errors:
            if other not in of_body and not _say_the_same(other, winner):
                _log.error("this error gave way to another one", exc_info=other)
        context = winner.__context__
        try:
            raise winner
        finally:
            # Raising in an except block chains the group to it, which is only our wrapping.
            winner.__context__ = context


def _say_the_same(one: BaseException, other: BaseException) -> bool:
    return one is other or (type(one) is type(other) and str(one) == str(other))


def errors_in(error: BaseException) -> list[BaseException]:
    """What is in a group, however deep, or the error itself, without the cancels.

    Not the groups themselves: a nursery that filters cancels out makes new ones of the same content.
    """
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in errors_in(inner)]
    return [] if isinstance(error, trio.Cancelled) else [error]


def winner_of(errors: list[BaseException]) -> BaseException:
    """By the rule above, but for a body's own: ``errors``, at least one, are of our tasks."""
    return next((error for error in errors if not isinstance(error, Exception)), errors[0])
